// Runs on documents with a mask: the loss is the mean over the targets that count, whatever micro
// batches they are in.
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/train/test_runs.h"

namespace smartinf::train {
namespace {

using ::testing::HasSubstr;

class Documents : public ::testing::Test {
 protected:
  Job job(const std::string& run, const std::string& data, uint32_t micro_batch,
          uint32_t accumulation) const {
    Job job = runs_.job(run, kSteps, 2, 1);
    job.options.data.paths = {data};
    job.options.model.vocabulary = TestRuns::kDocumentsVocabulary;
    job.options.data.sequence = 32;
    job.options.data.validation_share = 0;
    job.options.train.micro_batch = micro_batch;
    job.options.train.accumulation = accumulation;
    job.options.train.precision = Precision::kF32;
    job.updater.gradient_type = base::DataType::kF32;
    return job;
  }
  void expect_close(const std::vector<double>& a, const std::vector<double>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 2e-5 * a[i]) << "step " << i + 1;
  }

  static constexpr uint64_t kSteps = 8;
  const TestRuns runs_;
};

TEST_F(Documents, TheLossIsTheMeanOverTheTargetsOfAllMicroBatches) {
  const std::string data = runs_.write_documents();
  const Outcome together = runs_.train(job("together", data, 6, 1));
  const Outcome apart = runs_.train(job("apart", data, 1, 6));
  ASSERT_EQ(together.losses.size(), kSteps);
  expect_close(together.losses, apart.losses);
  expect_close(together.norms, apart.norms);
  EXPECT_GT(together.losses.front(), together.losses.back());
}

TEST_F(Documents, AMaskThatCountsEverythingChangesNoBit) {
  const std::vector<uint64_t> lengths(300, 33);  // as long as a sequence and its last target
  TestTokenFile file = TestTokenFile::documents(lengths, 200, /*masked=*/false);
  const std::filesystem::path path = runs_.folder() / "all.safetensors";
  file.write(path);
  const Outcome without = runs_.train(job("without", path.string(), 2, 2));
  file.add("loss_mask", "U8", std::vector<uint8_t>(300 * 33, 1)).write(path);
  const Outcome with = runs_.train(job("with", path.string(), 2, 2));
  ASSERT_EQ(without.losses.size(), kSteps);
  EXPECT_EQ(with.losses, without.losses);
  EXPECT_TRUE(same_bits(with.state, without.state));
}

class StreamWithAMask : public Documents {
 protected:
  /// Every so many windows of 32 tokens have a target each.
  std::string write_stream(uint64_t every) const {
    std::vector<uint16_t> tokens;
    std::vector<uint8_t> mask;
    for (uint64_t i = 0; i < 32 * 64 + 1; ++i) {
      tokens.push_back(static_cast<uint16_t>(i * i % 200));
      mask.push_back(i % (32 * every) == 5 ? 1 : 0);
    }
    TestTokenFile file;
    file.metadata["vocabulary"] = "200";
    file.add("tokens", "U16", tokens).add("loss_mask", "U8", mask);
    const std::filesystem::path path = runs_.folder() / "stream.safetensors";
    file.write(path);
    return path.string();
  }
};

TEST_F(StreamWithAMask, AMicroBatchWithoutATargetAddsNothing) {
  const std::string data = write_stream(4);
  const Outcome together = runs_.train(job("together", data, 16, 1));
  const Outcome apart = runs_.train(job("apart", data, 1, 16));
  ASSERT_EQ(apart.losses.size(), kSteps);
  expect_close(together.losses, apart.losses);
}

TEST_F(StreamWithAMask, AStepWithoutATargetIsPassedOver) {
  Job made = job("a", write_stream(4), 1, 1);
  made.options.train.skips_max = 60;
  made.options.train.steps = 100;
  auto trainer = Trainer::open(made);
  ASSERT_TRUE(trainer.ok()) << trainer.status().to_string();
  uint64_t skipped = 0;
  for (uint64_t i = 0; i < 64; ++i) {  // an epoch: 16 windows of 64 have a target
    const base::StepNumber before = (*trainer)->step();
    const auto report = (*trainer)->train_step({});
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    EXPECT_TRUE(std::isfinite(report->loss));
    EXPECT_EQ(report->targets, report->skipped.empty() ? 1u : 0u);
    EXPECT_EQ((*trainer)->step(), before + report->targets);
    skipped += report->skipped.empty() ? 0 : 1;
  }
  EXPECT_EQ(skipped, 48u);
}

TEST_F(StreamWithAMask, TooManyStepsWithoutATargetEndTheRun) {
  Job made = job("a", write_stream(64), 1, 1);
  made.options.train.skips_max = 1;
  auto trainer = Trainer::open(made);
  ASSERT_TRUE(trainer.ok()) << trainer.status().to_string();
  base::Status status;
  for (uint64_t i = 0; i < 6 && status.ok(); ++i) status = (*trainer)->train_step({}).status();
  EXPECT_EQ(status.code(), base::ErrorCode::kFailedPrecondition);
  EXPECT_THAT(status.to_string(), HasSubstr("no token of its batches counts as a target"));
}

TEST_F(Documents, EpochsSayHowManyStepsThereAre) {
  Job made = job("a", runs_.write_documents(), 2, 3);
  made.options.train.steps = 0;
  made.options.train.epochs = 1.5;
  auto trainer = Trainer::open(made);
  ASSERT_TRUE(trainer.ok()) << trainer.status().to_string();
  // 13,203 tokens, in windows of 32 that are almost full.
  EXPECT_GE((*trainer)->options().train.steps, 104u);
  EXPECT_LE((*trainer)->options().train.steps, 107u);
}

}  // namespace
}  // namespace smartinf::train
