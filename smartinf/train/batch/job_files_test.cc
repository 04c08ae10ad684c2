#include "smartinf/train/batch/job_files.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"

namespace smartinf::train {
namespace {

namespace fs = std::filesystem;
using base::ErrorCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class JobFilesTest : public ::testing::Test {
 protected:
  base::Result<std::unique_ptr<JobFiles>> try_open() {
    auto files = JobFiles::lock(answers_, fresh_);
    if (!files.ok()) return files;
    const base::Status started = (*files)->start(identity_, 4, notes_);
    if (!started.ok()) return started;
    return files;
  }
  std::unique_ptr<JobFiles> open() {
    auto files = try_open();
    EXPECT_TRUE(files.ok()) << files.status().to_string();
    return files.ok() ? std::move(*files) : nullptr;
  }
  void add(JobFiles& files, uint64_t line, int64_t token) {
    const JobFiles::NewToken one{line, token};
    EXPECT_TRUE(files.add_tokens({&one, 1}).ok());
  }
  std::string text(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void put(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }

  base::Scratch scratch_;
  std::string answers_ = scratch_ / "answers";
  JobIdentity identity_{{"weights", "1"}, {"--seed", "2"}};
  JobIdentity notes_;
  bool fresh_ = false;
  std::string journal_ = scratch_ / "answers.journal";
};

TEST_F(JobFilesTest, TokensAndAnswersAreThereAgain) {
  {
    auto files = open();
    add(*files, 1, 10);
    add(*files, 2, 20);
    add(*files, 1, 11);
    ASSERT_TRUE(files->add_answer(2, "two\n").ok());
  }
  auto files = open();
  EXPECT_TRUE(files->answered(2));
  EXPECT_FALSE(files->answered(1));
  EXPECT_EQ(files->answers(), 1u);
  EXPECT_EQ(files->begun(), 1u);
  EXPECT_THAT(files->take_tokens(1), ElementsAre(10, 11));
  EXPECT_THAT(files->take_tokens(3), ElementsAre());
  EXPECT_TRUE(files->notices().empty());
  ASSERT_TRUE(files->finish(/*keep=*/false).ok());
  EXPECT_EQ(text(answers_), "two\n");
  EXPECT_FALSE(fs::exists(journal_));
}

TEST_F(JobFilesTest, NotesAreKeptAndTheJobGoesOnWithOthers) {
  const uint64_t job = open()->job();
  fresh_ = true;
  notes_ = {{"--cache", "/a"}};
  {
    auto files = open();
    EXPECT_EQ(files->job(), job);
    EXPECT_EQ(files->found("--cache"), "/a");
    EXPECT_EQ(files->found("none"), std::nullopt);
    add(*files, 1, 10);
  }
  fresh_ = false;
  {
    auto files = JobFiles::lock(answers_, fresh_);
    ASSERT_TRUE(files.ok());
    EXPECT_EQ((*files)->found("--cache"), "/a");
    notes_.front().second = "/b";
    ASSERT_TRUE((*files)->start(identity_, 4, notes_).ok());
    EXPECT_EQ((*files)->found("--cache"), "/a");
    EXPECT_EQ((*files)->job(), job);
    (*files)->forget();  // what this start has not begun stays
  }
  notes_.clear();
  EXPECT_THAT(try_open().status().what(), HasSubstr("--cache is not known and was"));
  notes_ = {{"--cache", ""}, {"another", "note"}};
  auto files = open();
  EXPECT_THAT(files->take_tokens(1), ElementsAre(10));
  files.reset();
  fresh_ = true;
  open()->forget();
  EXPECT_FALSE(fs::exists(journal_));
}

TEST_F(JobFilesTest, AnotherJobIsRefusedWithWhatDiffers) {
  add(*open(), 1, 10);
  identity_ = {{"weights", "1"}, {"--seed", "3"}};
  const base::Status refused = try_open().status();
  EXPECT_EQ(refused.code(), ErrorCode::kMismatch);
  EXPECT_THAT(refused.what(), HasSubstr("--seed is 3 and was 2"));
  EXPECT_THAT(refused.what(), ::testing::Not(HasSubstr("weights")));
  identity_ = {{"weights", "1"}};
  EXPECT_THAT(try_open().status().what(), HasSubstr("--seed is not known"));
  fresh_ = true;
  EXPECT_EQ(open()->begun(), 0u);
}

TEST_F(JobFilesTest, TwoAtOnceAreRefused) {
  const auto files = open();
  fresh_ = true;
  EXPECT_EQ(try_open().status().code(), ErrorCode::kBusy);
}

TEST_F(JobFilesTest, FilesThatAreNotOursAreLeftAlone) {
  put(answers_, "mine\n");
  EXPECT_EQ(try_open().status().code(), ErrorCode::kAlreadyExists);
  EXPECT_FALSE(fs::exists(journal_));
  put(journal_, "mine, too\n");
  EXPECT_EQ(try_open().status().code(), ErrorCode::kCorrupt);
  fs::remove(answers_);
  EXPECT_EQ(try_open().status().code(), ErrorCode::kCorrupt);
  EXPECT_EQ(text(journal_), "mine, too\n");
  fresh_ = true;
  open();
  fs::remove(journal_);
  fs::create_directory(journal_);
  EXPECT_EQ(try_open().status().code(), ErrorCode::kInvalidArgument);
}

TEST_F(JobFilesTest, AHeaderThatAPowerCutTookIsWrittenAgain) {
  open();
  const std::string header = text(journal_);
  for (const std::string& torn : {std::string(), std::string(30, '\0')}) {
    put(journal_, torn);
    open();
    EXPECT_EQ(text(journal_), header);
  }
  put(journal_, header.substr(0, 20));
  EXPECT_EQ(try_open().status().code(), ErrorCode::kCorrupt);
  put(answers_, "something\n");
  put(journal_, std::string(30, '\0'));
  EXPECT_EQ(try_open().status().code(), ErrorCode::kCorrupt);
}

// Whatever a crash leaves of both files, what is found is a beginning of what was added, and an
// answer only where its text is whole.
TEST_F(JobFilesTest, EveryBeginningOfTheFilesCanBeGoneOnFrom) {
  size_t header = 0;
  {
    auto files = open();
    header = text(journal_).size();
    add(*files, 1, 10);
    ASSERT_TRUE(files->add_answer(3, "three\n").ok());
    add(*files, 1, 11);
    ASSERT_TRUE(files->add_answer(1, "one\n").ok());
  }
  const std::string journal = text(journal_);
  const std::string answers = text(answers_);
  const size_t record = 8 + 8 + 8;
  const size_t answer = 8 + 32 + 8;
  for (size_t j = header; j <= journal.size(); ++j) {
    for (const size_t a : {size_t{0}, size_t{5}, size_t{6}, answers.size() - 1, answers.size()}) {
      put(journal_, journal.substr(0, j));
      put(answers_, answers.substr(0, a));
      auto files = open();
      const bool three = j >= header + record + answer && a >= 6;
      const bool one = three && j == journal.size() && a == answers.size();
      EXPECT_EQ(files->answered(3), three) << j << " " << a;
      EXPECT_EQ(files->answered(1), one) << j << " " << a;
      const size_t tokens = one                                 ? 0
                            : j >= header + 2 * record + answer ? 2
                            : j >= header + record              ? 1
                                                                : 0;
      EXPECT_EQ(files->take_tokens(1).size(), tokens) << j << " " << a;
      EXPECT_EQ(text(answers_), answers.substr(0, one ? answers.size() : three ? 6 : 0));
      // It goes on, in another order, and is there the next time.
      EXPECT_TRUE(one || files->add_answer(1, "one\n").ok());
      EXPECT_TRUE(three || files->add_answer(3, "three\n").ok());
      files.reset();
      files = open();
      EXPECT_EQ(files->answers(), 2u) << j << " " << a;
      EXPECT_TRUE(files->notices().empty());
    }
  }
}

TEST_F(JobFilesTest, AFlippedBitIsCutOffWithWhatIsBehindIt) {
  size_t header = 0;
  {
    auto files = open();
    header = text(journal_).size();
    for (int i = 0; i < 4; ++i) add(*files, 1, i);
  }
  const std::string journal = text(journal_);
  for (size_t at = 0; at < journal.size(); ++at) {
    std::string flipped = journal;
    flipped[at] = static_cast<char>(flipped[at] ^ 4);
    put(journal_, flipped);
    auto files = try_open();
    ASSERT_EQ(files.ok(), at >= header) << at;
    if (!files.ok()) continue;
    EXPECT_EQ((*files)->take_tokens(1).size(), (at - header) / 24);
    EXPECT_EQ((*files)->notices().size(), 1u);
  }
}

}  // namespace
}  // namespace smartinf::train
