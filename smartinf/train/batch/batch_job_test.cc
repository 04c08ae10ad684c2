#include "smartinf/train/batch/batch_job.h"

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/test_scratch.h"

namespace smartinf::train {
namespace {

namespace fs = std::filesystem;
using base::ErrorCode;
using base::Result;
using base::Status;
using Tokens = std::vector<int64_t>;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kVocabulary = 256;

// The logits behind a sequence are a function of all of it.
class FakeDecoder final : public SequenceDecoder {
 public:
  uint64_t room = 1000;            // tokens
  uint64_t steps_left = 1u << 30;  // before it fails
  uint64_t loses_every = 0;        // so many sequences that it computes; 0: none is lost
  std::vector<size_t> waves;
  std::vector<SequenceInput> inputs;  // as they came; prompts are gone
  std::multiset<SequenceId> prompts;  // each that was computed

  Status admit(std::span<const SequenceInput> sequences) override {
    uint64_t wanted = used_;
    for (const SequenceInput& one : sequences) wanted += one.tokens_max;
    if (wanted > room) return Status(ErrorCode::kNoSpace, "no room", "", {});
    used_ = wanted;
    waves.push_back(sequences.size());
    for (const SequenceInput& one : sequences) {
      inputs.push_back(one);
      Sequence& mine = sequences_.emplace_back(Sequence{one.id, one.tokens_max, {}});
      mine.tokens.assign(one.prompt.begin(), one.prompt.end());
      mine.tokens.insert(mine.tokens.end(), one.made.begin(), one.made.end());
      prompts.insert(one.id);
    }
    return Status();
  }
  Status step(const Choose& choose) override {
    if (steps_left-- == 0) return Status(ErrorCode::kIo, "the device is gone");
    for (Sequence& one : sequences_) {
      SI_CHECK(one.tokens.size() < one.tokens_max, "it should have been released");
      if (loses_every != 0 && ++computed_ % loses_every == 0) {
        lost_.push_back({one.id, Status(ErrorCode::kCorrupt, "a block is damaged", "", {})});
        continue;
      }
      uint64_t bits = base::checksum(std::as_bytes(std::span(one.tokens)));
      std::vector<float> logits(kVocabulary);
      for (float& logit : logits) {
        bits = base::mix_seed(bits, 1);
        logit = static_cast<float>(bits >> 60);
      }
      one.tokens.push_back(choose(one.id, logits));
    }
    for (const LostSequence& one : lost_) release(one.id);
    return Status();
  }
  std::vector<LostSequence> take_lost() override { return std::exchange(lost_, {}); }
  void release(SequenceId id) override {
    const auto found = std::ranges::find(sequences_, id, &Sequence::id);
    used_ -= found->tokens_max;
    sequences_.erase(found);
  }
  Status save() override { return Status(); }

 private:
  struct Sequence {
    SequenceId id;
    uint64_t tokens_max;
    Tokens tokens;
  };
  std::vector<Sequence> sequences_;
  std::vector<LostSequence> lost_;
  uint64_t computed_ = 0;
  uint64_t used_ = 0;
};

// Text is letters.
class FakeCoder final : public TextCoder {
 public:
  Result<Tokens> encode(const PromptLine& line) override {
    const std::string& text = line.text.empty() ? line.messages : line.text;
    if (text.find("refuse") != text.npos) {
      return Status(ErrorCode::kInvalidArgument, "the template refuses it");
    }
    return Tokens(text.begin(), text.end());
  }
  Result<std::string> decode(std::span<const int64_t> tokens) override {
    std::string text;
    for (const int64_t token : tokens) text += static_cast<char>('a' + token % 26);
    return text;
  }
  Result<std::string> continuation(std::span<const int64_t>,
                                   std::span<const int64_t> made) override {
    return decode(made);
  }
};

class BatchJobTest : public ::testing::Test {
 protected:
  void write(const std::vector<std::string>& lines) {
    std::ofstream out(prompts_);
    for (const std::string& line : lines) out << line << "\n";
  }
  Status run() {
    decoder_.waves.clear();
    auto prompts = BatchPrompts::open(prompts_, defaults_);
    if (!prompts.ok()) return prompts.status();
    auto files = JobFiles::lock(answers_, /*fresh=*/false);
    if (!files.ok()) return files.status();
    SI_RETURN_IF_ERROR((*files)->start({{"prompts", "1"}}, prompts->file->lines()));
    FakeCoder coder;
    if (plans_) {
      const auto longest = longest_sequence(*prompts, &coder, options_.positions);
      if (!longest.ok()) return longest.status();
      options_.longest = *longest;
    }
    BatchJob job(*prompts, **files, &coder, decoder_, options_);
    return job.run([&](const BatchProgress& progress) {
      progress_ = progress;
      if (on_progress_) on_progress_();
    });
  }
  std::string text(const std::string& path) const {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  /// Sorted.
  std::vector<std::string> answers() const {
    std::vector<std::string> lines;
    std::ifstream in(answers_);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    std::ranges::sort(lines);
    return lines;
  }
  /// Lines of all kinds, some of them wrong.
  void write_many() {
    std::vector<std::string> lines;
    for (int i = 1; i <= 40; ++i) {
      lines.push_back(R"({"prompt": ")" + std::string(static_cast<size_t>(1 + i % 7), 'x') +
                      R"(", "max_tokens": )" + std::to_string(1 + i * 7 % 23) +
                      (i % 3 == 0 ? R"(, "temperature": 1)" : "") +
                      (i % 5 == 0 ? R"(, "stop": ["q", "ab"])" : "") + "}");
    }
    lines.push_back("");
    lines.push_back("{");
    lines.push_back(R"({"custom_id": "c", "method": "POST", "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "y"}]}})");
    std::ranges::replace(lines.back(), '\n', ' ');
    lines.push_back(R"({"prompt": "refuse"})");
    lines.push_back(R"({"tokens": [1, 2, 3], "id": "t"})");
    write(lines);
  }

  base::Scratch scratch_;
  std::string prompts_ = scratch_ / "prompts";
  std::string answers_ = scratch_ / "answers";
  PromptDefaults defaults_{.tokens = 10, .sampling = {}};
  BatchOptions options_{.vocabulary = kVocabulary,
                        .positions = 40,
                        .longest = 0,
                        .end_tokens = {7},
                        .sequences = 8,
                        .ahead = 64,
                        .save_every_s = 1e9,
                        .keep_journal = false,
                        .stop = {}};
  FakeDecoder decoder_;
  BatchProgress progress_;
  std::function<void()> on_progress_;
  bool plans_ = true;
};

TEST_F(BatchJobTest, EachLineHasOneAnswer) {
  write_many();
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(answers().size(), 44u);
  EXPECT_EQ(progress_.prompts, 44u);
  EXPECT_EQ(progress_.answered, 44u);
  EXPECT_EQ(progress_.refused, 2u);
  EXPECT_FALSE(fs::exists(answers_ + ".journal"));
  EXPECT_EQ(decoder_.prompts.size(), 42u);
}

TEST_F(BatchJobTest, AnswersDoNotDependOnWhatIsComputedBesideThem) {
  write_many();
  ASSERT_TRUE(run().ok());
  const auto first = answers();
  for (const uint64_t sequences : {1, 3, 64}) {
    for (const uint64_t room : {45, 120}) {
      fs::remove(answers_);
      options_.sequences = sequences;
      decoder_.room = room;
      ASSERT_TRUE(run().ok());
      EXPECT_EQ(answers(), first) << sequences << " " << room;
    }
  }
}

TEST_F(BatchJobTest, LostSequencesAreTakenInAgain) {
  write_many();
  ASSERT_TRUE(run().ok());
  const auto whole = answers();
  fs::remove(answers_);
  decoder_ = FakeDecoder();
  decoder_.loses_every = 11;
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(answers(), whole);
  EXPECT_GT(progress_.lost, 10u);
  fs::remove(answers_);
  decoder_ = FakeDecoder();
  decoder_.loses_every = 1;
  EXPECT_EQ(run().code(), ErrorCode::kCorrupt);
}

TEST_F(BatchJobTest, AnInterruptedJobGoesOnInsideItsAnswers) {
  write_many();
  ASSERT_TRUE(run().ok());
  const auto whole = answers();
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    fs::remove(answers_);
    std::mt19937_64 draw(seed);
    Status ran;
    size_t header = 0;
    uint64_t starts = 0;
    do {
      decoder_ = FakeDecoder();
      decoder_.steps_left = draw() % 12;
      ran = run();
      const std::string journal = answers_ + ".journal";
      if (ran.ok()) break;
      ASSERT_EQ(ran.code(), ErrorCode::kIo) << ran.to_string();
      // A power cut takes some of the end of each file.
      if (header == 0) header = 16 + std::string(R"({"prompts":"1"})").size() + 8;
      const auto cut = [&](const std::string& path, uint64_t kept) {
        const uint64_t size = fs::file_size(path);
        fs::resize_file(path, std::max(size - std::min(size, draw() % 60), std::min(kept, size)));
      };
      if (draw() % 2 == 0) cut(journal, header);
      if (draw() % 2 == 0) cut(answers_, 0);
      ASSERT_LT(++starts, 200u);
    } while (true);
    EXPECT_EQ(answers(), whole) << seed;
    EXPECT_GT(starts, 3u);
  }
}

TEST_F(BatchJobTest, TokensThatAreThereAreNotMadeAgain) {
  write({R"({"prompt": "x", "max_tokens": 20, "seed": 1})"});
  decoder_.steps_left = 11;
  EXPECT_EQ(run().code(), ErrorCode::kIo);
  decoder_ = FakeDecoder();
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(progress_.tokens, 9u);
  // What was complete but not yet answered is answered without the model.
  fs::remove(answers_);
  options_.keep_journal = true;
  ASSERT_TRUE(run().ok());
  fs::resize_file(answers_, 3);
  decoder_.prompts.clear();
  ASSERT_TRUE(run().ok());
  EXPECT_TRUE(decoder_.prompts.empty());
  EXPECT_EQ(answers().size(), 1u);
}

TEST_F(BatchJobTest, AFullDiskEndsTheJobWhichGoesOnLater) {
  write_many();
  ASSERT_TRUE(run().ok());
  const auto whole = answers();
  fs::remove(answers_);
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit less{500, limit.rlim_max};  // in the middle of an answer, or of a record
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &less), 0);
  const Status full = run();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, before);
  EXPECT_THAT(full.to_string(), HasSubstr("The same command goes on from here"));
  decoder_ = FakeDecoder();
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(answers(), whole);
}

TEST_F(BatchJobTest, AStopIsSavedAndSaysSo) {
  write_many();
  std::stop_source stop;
  options_.stop = stop.get_token();
  on_progress_ = [&] {
    if (progress_.tokens > 50) stop.request_stop();
  };
  EXPECT_EQ(run().code(), ErrorCode::kCancelled);
  EXPECT_LT(answers().size(), 44u);
  EXPECT_TRUE(fs::exists(answers_ + ".journal"));
  options_.stop = {};
  decoder_ = FakeDecoder();
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(answers().size(), 44u);
}

TEST_F(BatchJobTest, WithoutRoomFewerAreTakenInAndNoneIsLost) {
  std::vector<std::string> lines;
  for (int i = 0; i < 12; ++i) lines.push_back(R"({"tokens": [1], "max_tokens": 9})");
  lines.push_back(R"({"tokens": [1], "max_tokens": 36, "id": "large"})");
  write(lines);
  options_.end_tokens.clear();
  decoder_.room = 35;
  ASSERT_TRUE(run().ok());
  const auto all = answers();
  EXPECT_EQ(all.size(), 13u);
  EXPECT_EQ(std::ranges::count_if(
                all, [](const std::string& line) { return line.find("error") != line.npos; }),
            1);
  EXPECT_THAT(all.front(), HasSubstr(R"({"id":"large","error":"no room)"));
  EXPECT_EQ(decoder_.prompts.size(), 12u);
  EXPECT_EQ(decoder_.waves.front(), 2u);  // of 8, 4, 2
}

TEST_F(BatchJobTest, PromptsThatBeginAlikeAreTakenInTogether) {
  const auto line = [](char document, int question) {
    return R"({"prompt": ")" + std::string(kPromptPart + 10, document) + std::to_string(question) +
           R"(", "max_tokens": )" + std::to_string(2 + question) + "}";
  };
  write({line('a', 1), line('b', 20), line('a', 3), R"({"prompt": "x", "max_tokens": 9})",
         line('b', 4), line('c', 5), line('a', 6)});
  options_.positions = 1000;
  options_.sequences = 2;
  decoder_.room = 10000;
  ASSERT_TRUE(run().ok());
  const auto& inputs = decoder_.inputs;
  ASSERT_EQ(inputs.size(), 7u);
  std::vector<SequenceId> order;
  for (const SequenceInput& one : inputs) {
    order.push_back(one.id);
    const bool shares = one.id != 4 && one.id != 6;
    EXPECT_EQ(one.prefix_tokens, shares ? kPromptPart : 0) << one.id;
    EXPECT_TRUE(!shares || is_prefix(one.prefix)) << one.id;
  }
  EXPECT_THAT(order, ElementsAre(1, 3, 7, 2, 5, 4, 6));
  EXPECT_EQ(inputs[0].prefix, inputs[1].prefix);
  EXPECT_EQ(inputs[0].prefix, inputs[2].prefix) << "it joins later";
  EXPECT_EQ(inputs[3].prefix, inputs[4].prefix);
  EXPECT_NE(inputs[0].prefix, inputs[3].prefix);
}

TEST_F(BatchJobTest, LinesAreRefusedByTheModelsLimits) {
  write({R"({"id": "same", "tokens": [1]})", R"({"id": "same", "tokens": [2]})",
         R"({"tokens": [256]})", R"({"prompt": ")" + std::string(40, 'x') + R"("})",
         R"({"tokens": [1], "id": 6})", R"({"tokens": [1]})"});
  ASSERT_TRUE(run().ok());
  const std::string all = text(answers_);
  EXPECT_THAT(all, HasSubstr(R"({"id":"same","error":"line 1 has the same id"})"));
  EXPECT_THAT(all, HasSubstr(R"({"id":3,"error":"the prompt has token 256)"));
  EXPECT_THAT(all,
              HasSubstr(R"({"id":4,"error":"the prompt has 40 tokens, and the model knows 40)"));
  EXPECT_THAT(all, HasSubstr(R"({"id":6,"error":"line 5 has the same id"})"));
  EXPECT_EQ(answers().size(), 6u);
}

TEST_F(BatchJobTest, MemoryIsPlannedForTheLongest) {
  write({R"({"tokens": [1, 2, 3, 4], "max_tokens": 3})", R"({"prompt": "xxxxx", "max_tokens": 9})",
         R"({"prompt": "refuse it, though it is the longest of them"})"});
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(options_.longest, 31u);  // half of the longest text, and 10
  plans_ = false;
  options_.longest = 13;
  fs::remove(answers_);
  ASSERT_TRUE(run().ok());
  EXPECT_THAT(text(answers_), HasSubstr(R"({"id":2,"error":"it may have 14 tokens)"));
}

TEST_F(BatchJobTest, AStopTextEndsAnAnswerBeforeIt) {
  write({R"({"prompt": "x", "max_tokens": 30, "id": 1})"});
  ASSERT_TRUE(run().ok());
  std::string whole = text(answers_);
  const size_t begin = whole.find(R"("text":")") + 8;
  whole = whole.substr(begin, whole.find('"', begin) - begin);
  ASSERT_GT(whole.size(), 12u);
  fs::remove(answers_);
  const std::string stop = whole.substr(7, 3);
  write({R"({"prompt": "x", "max_tokens": 30, "id": 1, "stop": ")" + stop + R"("})"});
  ASSERT_TRUE(run().ok());
  EXPECT_THAT(text(answers_), HasSubstr(R"("text":")" + whole.substr(0, whole.find(stop)) + '"'));
  EXPECT_THAT(text(answers_), HasSubstr(R"("finish_reason":"stop")"));
}

TEST_F(BatchJobTest, PromptsThatChangeMeanwhileEndTheJob) {
  write_many();
  options_.ahead = 0;
  on_progress_ = [&] {
    if (progress_.tokens == 0) return;
    std::fstream(prompts_, std::ios::in | std::ios::out).seekp(1100) << "zz";
  };
  EXPECT_EQ(run().code(), ErrorCode::kCorrupt);
}

TEST(AdmissionTest, AWaveWaitsForAnEighthOfTheRoom) {
  Admission admission(16);
  EXPECT_EQ(admission.wave(100), 16u);
  admission.taken_in(16);
  EXPECT_EQ(admission.wave(100), 0u);
  admission.left();
  EXPECT_EQ(admission.wave(100), 0u);
  EXPECT_EQ(admission.wave(1), 1u);
  admission.left();
  EXPECT_EQ(admission.wave(100), 2u);
}

TEST(AdmissionTest, ARefusalHalvesTheWaveUntilSomeoneLeaves) {
  Admission admission(16);
  EXPECT_TRUE(admission.refused(16));
  EXPECT_EQ(admission.wave(100), 8u);
  admission.taken_in(8);
  EXPECT_EQ(admission.wave(100), 8u);
  EXPECT_TRUE(admission.refused(8));
  EXPECT_TRUE(admission.refused(4));
  EXPECT_TRUE(admission.refused(2));
  EXPECT_TRUE(admission.refused(1));
  EXPECT_EQ(admission.wave(100), 0u);
  admission.left();
  EXPECT_EQ(admission.wave(100), 2u);  // of shorter ones, perhaps
  admission.taken_in(1);
  for (int i = 0; i < 8; ++i) admission.left();
  EXPECT_FALSE(admission.refused(1));
}

}  // namespace
}  // namespace smartinf::train
