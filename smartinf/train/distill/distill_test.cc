// Distillation of a small model: a copy of the teacher learns nothing, a pruned one comes nearer,
// and neither the parts that it is made in nor where it was stopped changes a bit.
#include <cmath>
#include <fstream>
#include <iterator>

#include <torch/autograd.h>

#include "smartinf/train/distill/distiller.h"
#include "smartinf/train/distill/losses.h"
#include "smartinf/train/distill/prune.h"
#include "smartinf/train/distill/rounding.h"
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
  struct Kind {
    BlockInputs inputs;
    std::string quantise;
  };
  for (const auto& [inputs, quantise] :
       {Kind{BlockInputs::kTeacher, ""}, Kind{BlockInputs::kStudent, ""},
        Kind{BlockInputs::kTeacher, "int4,group=32"}}) {
    const std::string name = std::string(base::enum_name(inputs)) + quantise;
    const auto of_kind = [&](const std::string& run) {
      DistillJob job = this->job(run + name);
      job.distill.inputs = inputs;
      job.distill.quantise = quantise;
      if (!quantise.empty()) job.distill.prune.clear();
      return job;
    };
    DistillJob whole = of_kind("whole_");
    const DistillSummary at_once = run(whole);
    EXPECT_EQ(at_once.teacher_layers, kLayers * at_once.micro_batches);
    const auto losses = losses_;
    const std::string bits = weights(at_once.folder);
    ASSERT_FALSE(bits.empty());
    if (inputs == BlockInputs::kTeacher) {
      DistillJob parts = of_kind("parts_");
      parts.steps_at_once = 4;
      EXPECT_TRUE(weights(run(parts).folder) == bits);
    }
    DistillJob stopped = of_kind("stopped_");
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

TEST_F(Distilled, RoundedBlocksAreBetterThanRoundedToNearest) {
  DistillJob job = this->job("rounded");
  job.distill.prune.clear();
  job.distill.quantise = "int4,group=32";
  job.distill.top_k = 0;  // the last layer learns its output, too
  job.options.train.steps = 40;
  job.options.train.micro_batch = 4;
  job.options.train.lr = 2e-3;
  run(job);
  std::ifstream file(job.options.data.paths.front());
  const std::string text(std::istreambuf_iterator<char>(file), {});
  std::vector<int64_t> bytes(text.begin(), text.begin() + 64 * 16);
  const Batch batch{torch::tensor(bytes).view({64, 16}), {}, 0, {}};
  const auto open = [&](const std::string& folder) {
    const auto source = read_model_folder(folder, {}, "");
    EXPECT_TRUE(source.ok()) << source.status().to_string();
    auto model =
        LayeredModel::open(folder, source->architecture, base::DataType::kF32, torch::kCPU, 16);
    EXPECT_TRUE(model.ok()) << model.status().to_string();
    return std::move(*model);
  };
  const torch::NoGradGuard no_grad;
  const LayeredModel teacher = open(job.distill.teacher);
  const LayeredModel nearest = open((runs_.folder() / "rounded" / kUntrainedFolder).string());
  const LayeredModel trained = open((runs_.folder() / "rounded" / kStudentFolder).string());
  torch::Tensor x_BTC = teacher.embed(std::span(&batch, 1)).front();
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const torch::Tensor y_BTC = teacher.layer(layer).run(x_BTC, {});
    const auto loss = [&](const LayeredModel& model) {
      return block_loss(BlockLoss::kMse, model.layer(layer).run(x_BTC, {}), y_BTC).item<double>();
    };
    EXPECT_GT(loss(nearest), 0) << layer;
    EXPECT_LT(loss(trained), 0.8 * loss(nearest)) << layer;
    x_BTC = y_BTC;
  }

  // A rate that spoils every block: each keeps the weights that it began with.
  job = this->job("spoilt");
  job.distill.prune.clear();
  job.distill.quantise = "int4,group=32";
  job.options.train.lr = 10;
  const DistillSummary made = run(job);
  EXPECT_TRUE(weights(made.folder) ==
              weights((runs_.folder() / "spoilt" / kUntrainedFolder).string()));
  EXPECT_EQ(made.losses.distilled, made.losses.untrained);
  EXPECT_NE(made.losses.distilled, made.losses.teacher);
}

TEST_F(Distilled, GradientOfRoundingIsAutograds) {
  const std::string folder = (runs_.folder() / "teacher").string();
  const auto source = read_model_folder(folder, {}, "");
  ASSERT_TRUE(source.ok());
  const auto model =
      LayeredModel::open(folder, source->architecture, base::DataType::kF32, torch::kCPU, 16);
  ASSERT_TRUE(model.ok());
  const auto rounding = Rounding::of(*model, 1, 32);
  ASSERT_TRUE(rounding.ok()) << rounding.status().to_string();
  const Rounding::Matrix& matrix = rounding->matrices().back();
  const int64_t groups = matrix.columns / 32;
  const int64_t count = matrix.rows * matrix.columns;
  torch::Tensor trained = torch::zeros({static_cast<int64_t>(rounding->space().count())});
  trained.narrow(0, matrix.offsets, count).uniform_(-0.4, 0.4);
  trained.narrow(0, matrix.cuts, count / 32).uniform_(0.05, 0.6);
  const torch::Tensor by_weight = torch::randn({matrix.rows, matrix.columns});
  const torch::Tensor w = model->weights_of(1)
                              .narrow(0, static_cast<int64_t>(matrix.first), count)
                              .view({matrix.rows, groups, 32});
  const torch::Tensor offset =
      trained.narrow(0, matrix.offsets, count).view(w.sizes()).clone().requires_grad_(true);
  const torch::Tensor cut = trained.narrow(0, matrix.cuts, count / 32)
                                .view({matrix.rows, groups, 1})
                                .clone()
                                .requires_grad_(true);
  const torch::Tensor largest = w.gather(-1, w.abs().argmax(-1, true));
  const torch::Tensor scale = (1 - cut) * largest / -8;
  const torch::Tensor exact = w / scale + offset;
  const torch::Tensor code = exact.round().clamp(-8, 7);
  const torch::Tensor follows = exact - exact.detach();  // 0, with the slope 1
  const torch::Tensor rounded = (code.detach() + follows * (code == exact.round())) * scale;
  const auto wanted = torch::autograd::grad({rounded}, {offset, cut}, {by_weight.view(w.sizes())});
  const Rounding::Gradient made = rounding->gradient(matrix, trained, by_weight);
  EXPECT_TRUE(torch::allclose(made.offsets_RC.flatten(), wanted[0].flatten(), 1e-5, 1e-7));
  EXPECT_TRUE(torch::allclose(made.cuts_RG.flatten(), wanted[1].flatten(), 1e-4, 1e-6));
}

TEST_F(Distilled, WholeStudentLearnsTheLogitsThatAreKept) {
  DistillJob job = this->job("whole_copy");
  job.distill.prune.clear();
  job.distill.student = job.distill.teacher;
  job.distill.whole_steps = 3;
  const DistillSummary copy = run(job);
  EXPECT_EQ(losses_.size(), kLayers * kSteps + 3);
  for (const auto& [block, value] : losses_) EXPECT_EQ(value, 0) << "block " << block;
  EXPECT_TRUE(weights(copy.folder) == weights(job.distill.teacher));

  job = this->job("whole");
  job.distill.whole_steps = 40;
  const DistillSummary made = run(job);
  EXPECT_LT(made.losses.whole, made.losses.distilled);
  EXPECT_LT(losses_.back().second, 0.8 * losses_[kLayers * kSteps].second);

  DistillJob stopped = this->job("whole_stopped");
  stopped.distill.whole_steps = 40;
  std::stop_source stop;
  stopped.stop = stop.get_token();
  stopped.show = [&](const StepReport& report, uint32_t block, uint32_t) {
    if (block == kLayers && report.step == 17) stop.request_stop();
  };
  EXPECT_EQ(distill(stopped).status().code(), base::ErrorCode::kCancelled);
  stopped.stop = {};
  EXPECT_TRUE(weights(run(stopped).folder) == weights(made.folder));
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
