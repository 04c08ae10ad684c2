// Distillation of a small model: a copy of the teacher learns nothing, a pruned one comes nearer,
// and neither the parts that it is made in nor where it was stopped changes a bit.
#include <cmath>
#include <fstream>
#include <iterator>

#include "smartinf/train/distill/distiller.h"
#include "smartinf/train/distill/prune.h"
#include "smartinf/train/export.h"
#include "smartinf/train/test_runs.h"

namespace smartinf::train {
namespace {

class Distilled : public testing::Test {
 protected:
  static constexpr uint32_t kLayers = 3;
  static constexpr uint64_t kSteps = 6;

  void SetUp() override {
    Job job = runs_.job("teacher_run", /*steps=*/60, kLayers, /*devices=*/1);
    job.options.train.precision = Precision::kF32;
    runs_.train(job);
    ExportOptions out;
    out.out = (runs_.folder() / "teacher").string();
    const auto made = export_run(job, out);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
  }

  DistillJob job(const std::string& run) {
    const Job trained = runs_.job(run, kSteps, kLayers, /*devices=*/2);
    DistillJob job{trained.options, {}, trained.updater, trained.recipe, {}, {}, {}, {}};
    job.options.model = {};
    job.options.model.from = job.distill.teacher = (runs_.folder() / "teacher").string();
    job.options.train.precision = Precision::kF32;
    job.options.train.weight_decay = 0;
    job.options.train.accumulation = 2;
    job.distill.prune = "ffn=0.5,heads=0.5";
    job.distill.top_k = 16;
    job.updater.gradient_type = base::DataType::kF32;
    job.note = [](const std::string&) {};
    job.show = [this](const StepReport& report, uint32_t block, uint32_t) {
      losses_.emplace_back(block, report.loss);
    };
    return job;
  }

  DistillSummary run(const DistillJob& job) {
    losses_.clear();
    const auto made = distill(job);
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    return made.ok() ? *made : DistillSummary();
  }

  std::string weights(const std::string& folder) const {
    std::ifstream file(folder + "/model.safetensors", std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  TestRuns runs_;
  std::vector<std::pair<uint32_t, double>> losses_;  // block and loss of each step
};

TEST_F(Distilled, CopyOfTheTeacherHasNoLoss) {
  for (const BlockLoss loss : {BlockLoss::kMse, BlockLoss::kCosine}) {
    DistillJob job = this->job(std::string("copy_") + std::string(base::enum_name(loss)));
    job.distill.prune.clear();
    job.distill.student = job.distill.teacher;
    job.distill.loss = loss;
    const DistillSummary made = run(job);
    ASSERT_EQ(losses_.size(), kLayers * kSteps);
    for (const auto& [block, value] : losses_) EXPECT_EQ(value, 0) << "block " << block;
    EXPECT_TRUE(weights(made.folder) == weights(job.distill.teacher));
    EXPECT_EQ(made.losses.distilled, made.losses.teacher);
  }
}

TEST_F(Distilled, PrunedStudentComesNearer) {
  DistillJob job = this->job("pruned");
  job.options.train.steps = 60;
  const DistillSummary made = run(job);
  EXPECT_EQ(made.micro_batches, 2 * job.options.train.steps);
  EXPECT_EQ(made.teacher_layers, kLayers * made.micro_batches);
  EXPECT_LT(made.losses.teacher, made.losses.untrained);
  EXPECT_LT(made.losses.distilled, made.losses.untrained);
  for (uint32_t block = 0; block < kLayers; ++block) {
    EXPECT_EQ(losses_[block * 60].first, block);
    EXPECT_LT(losses_[block * 60 + 59].second, 0.7 * losses_[block * 60].second);
  }
}

TEST_F(Distilled, SameBitsInPartsAndWhereverItStopped) {
  for (const BlockInputs inputs : {BlockInputs::kTeacher, BlockInputs::kStudent}) {
    const std::string name(base::enum_name(inputs));
    DistillJob whole = job("whole_" + name);
    whole.distill.inputs = inputs;
    const DistillSummary at_once = run(whole);
    EXPECT_EQ(at_once.teacher_layers, kLayers * at_once.micro_batches);
    const auto losses = losses_;
    const std::string bits = weights(at_once.folder);
    ASSERT_FALSE(bits.empty());
    if (inputs == BlockInputs::kTeacher) {
      DistillJob parts = job("parts");
      parts.steps_at_once = 4;
      EXPECT_TRUE(weights(run(parts).folder) == bits);
    }
    DistillJob stopped = job("stopped_" + name);
    stopped.distill.inputs = inputs;
    auto stopped_losses = losses;
    stopped_losses.clear();
    for (uint64_t starts = 0; stopped_losses.size() < losses.size(); ++starts) {
      ASSERT_LT(starts, 8u);
      std::stop_source stop;
      stopped.stop = stop.get_token();
      uint64_t steps = 0;
      stopped.show = [&](const StepReport& report, uint32_t block, uint32_t) {
        stopped_losses.emplace_back(block, report.loss);
        if (++steps == 5) stop.request_stop();
      };
      const auto made = distill(stopped);
      ASSERT_TRUE(made.ok() || made.status().code() == base::ErrorCode::kCancelled)
          << made.status().to_string();
    }
    EXPECT_EQ(stopped_losses, losses);
    EXPECT_TRUE(weights(run(stopped).folder) == bits);
  }
}

TEST_F(Distilled, OtherOptionsAreRefused) {
  DistillJob job = this->job("again");
  run(job);
  job.distill.prune = "ffn=0.25";
  const auto made = distill(job);
  EXPECT_EQ(made.status().code(), base::ErrorCode::kMismatch);
  EXPECT_NE(made.status().what().find("student.prune"), std::string::npos);
}

TEST(Pruning, KeepsRowsAndColumnsOfEveryKindOfMatrix) {
  model::Architecture model;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_width = 1;
  model.width = 2;
  model.mlp_width = 8;
  const Kept kept{{1, 3}, {1}};
  const auto of = [&](model::Part part, const char* name, std::vector<uint64_t> shape) {
    std::vector<float> values(shape[0] * (shape.size() == 2 ? shape[1] : 1));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    return pruned_values(model, {part, name, std::move(shape)}, kept, values);
  };
  using Values = std::vector<float>;
  using model::Part;
  EXPECT_EQ(of(Part::kGateUp, "up_proj", {8, 2}), (Values{2, 3, 6, 7}));
  EXPECT_EQ(of(Part::kDown, "down_proj", {2, 8}), (Values{1, 3, 9, 11}));
  EXPECT_EQ(of(Part::kQkv, "q_proj", {4, 2}), (Values{4, 5, 6, 7}));
  EXPECT_EQ(of(Part::kQkvBias, "k_proj", {2}), (Values{1}));
  EXPECT_EQ(of(Part::kOutput, "o_proj", {2, 4}), (Values{2, 3, 6, 7}));
  model.transposed = true;
  model.kv_heads = 4;  // GPT-2: query, key and value in one matrix of [in, out]
  EXPECT_EQ(of(Part::kQkv, "c_attn", {2, 12}), (Values{1, 5, 9, 13, 17, 21}));
  EXPECT_EQ(of(Part::kDown, "c_proj", {8, 2}), (Values{2, 3, 6, 7}));
  EXPECT_EQ(largest(std::vector<double>{3, 1, 3, 7}, 2), (std::vector<uint32_t>{0, 3}));
}

}  // namespace
}  // namespace smartinf::train
