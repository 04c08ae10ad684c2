// Code that the tests of whole runs share: a small model's job, its run step by step, gradients
// that become NaN on request.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/engine/updater.h"
#include "smartinf/train/model_source.h"
#include "smartinf/train/parameter_groups.h"
#include "smartinf/train/test_token_files.h"
#include "smartinf/train/trainer.h"

namespace smartinf::train {

/// Counts matrix products; the result of one of them, by count, becomes NaN.
class Poison {
 public:
  Poison() {
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(nullptr, &Poison::after)
            .needsOutputs(true)
            .scopes({at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::FUNCTION}));
  }
  ~Poison() { at::removeCallback(handle_); }
  Poison(const Poison&) = delete;
  Poison& operator=(const Poison&) = delete;

  /// The call of this number from now on; 0: none. Returns how many there were since the last time.
  static uint64_t next(uint64_t call) {
    poisoned_ = call;
    return std::exchange(calls_, 0);
  }

 private:
  static void after(const at::RecordFunction& function, at::ObserverContext*) {
    const std::string_view name = function.name();
    if (name != "aten::mm" && name != "aten::addmm_") return;  // the latter of linear_in_f32
    if (++calls_ != poisoned_) return;
    for (const c10::IValue& output : function.outputs()) {
      output.toTensor().fill_(std::numeric_limits<double>::quiet_NaN());
    }
  }

  static inline uint64_t calls_ = 0;
  static inline uint64_t poisoned_ = 0;
  at::CallbackHandle handle_;
};

/// Results of a run that must not depend on how it was carried out, and those that show how it was.
struct Outcome {
  std::vector<double> losses;
  std::vector<double> norms;  // of steps that were not skipped
  std::vector<std::string> skipped;
  std::vector<double> validations;
  std::vector<std::vector<int64_t>> samples;
  std::vector<float> state;  // all planes, subgroup by subgroup

  std::multiset<std::string> overlaps;
  uint64_t wrong_guesses = 0;
  uint64_t products = 0;            // of matrices, in a step
  std::vector<uint64_t> offloaded;  // units and micro batches, in each step
  std::vector<std::string> decisions;
  engine::UpdaterTraffic traffic;
  std::string described;
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Which matrix product of a step is poisoned (0: none), and in which steps: the middle one of each
/// so many.
struct Poisoned {
  uint64_t call = 0;
  uint64_t every = 1;
};

/// A folder with a text, and runs on it.
class TestRuns {
 public:
  explicit TestRuns(int words = 6000) {
    std::ofstream corpus(folder_ / "corpus.txt");
    for (int i = 0; i < words; ++i) corpus << (i * i % 7 == 1 ? "value " : "index = ") << i % 13;
  }

  /// Layers of 1.5 subgroups each, on one thread: the same bits every time.
  Job job(const std::string& run, uint64_t steps, uint32_t layers, uint32_t devices) const {
    Job job;
    Options& options = job.options;
    options.model.layers = layers;
    options.model.width = 96;
    options.model.kv_heads = 2;
    options.model.mlp_width = 256;
    options.data.paths = {(folder_ / "corpus.txt").string()};
    options.data.sequence = 16;
    TrainOptions& train = options.train;
    train.run = (folder_ / run).string();
    train.steps = steps;
    train.micro_batch = 1;
    train.lr = 3e-3;
    train.threads = 1;
    train.accelerator = "cpu";
    train.validate_every = 0;
    train.sample_tokens = 0;
    engine::UpdaterOptions& updater = job.updater;
    updater.memory_budget_bytes = uint64_t{48} << 20;
    updater.subgroup_elements = 65536;
    updater.io_bytes = uint64_t{1} << 20;
    updater.io_depth = 4;
    for (uint32_t i = 0; i < devices; ++i) {
      engine::DeviceOptions device;
      device.path = (folder_ / (run + "-device" + std::to_string(i))).string();
      device.bandwidth = 1;
      updater.devices.push_back(device);
    }
    job.recipe = "# of a test\n";
    return job;
  }

  /// A token file of short conversations, so to say: of each document every third token counts.
  std::string write_documents() const {
    std::vector<uint64_t> lengths;
    for (uint64_t i = 0; i < 600; ++i) lengths.push_back(3 + i * i % 41);
    const std::filesystem::path path = folder_ / "documents.safetensors";
    TestTokenFile::documents(lengths, kDocumentsVocabulary, /*masked=*/true).write(path);
    return path.string();
  }
  static constexpr uint32_t kDocumentsVocabulary = 256;

  /// evaluate_every: steps between validations and samples; 0: none.
  Outcome train(const Job& job, const Poisoned& poisoned = {}, uint64_t evaluate_every = 0) const {
    Outcome outcome;
    plan::ParameterSpace space;
    {
      auto trainer = Trainer::open(job);
      EXPECT_TRUE(trainer.ok()) << trainer.status().to_string();
      if (!trainer.ok()) return outcome;
      for (const std::string& line : (*trainer)->describe()) outcome.described += line + "\n";
      Poison poison;
      for (uint64_t i = 1; i <= job.options.train.steps; ++i) {
        Poison::next(i % poisoned.every == poisoned.every / 2 ? poisoned.call : 0);
        const auto report = (*trainer)->train_step({});
        EXPECT_TRUE(report.ok()) << report.status().to_string();
        if (!report.ok()) return outcome;
        outcome.products = Poison::next(0);
        outcome.losses.push_back(report->loss);
        outcome.skipped.push_back(report->skipped);
        if (report->skipped.empty()) {
          outcome.norms.push_back(report->gradient_norm);
          outcome.overlaps.emplace(report->overlap);
          outcome.offloaded.push_back(report->offloaded.value_or(0));
          if (!report->offload_decision.empty()) {
            outcome.decisions.push_back(report->offload_decision);
          }
          outcome.wrong_guesses += report->wrong_guess ? 1 : 0;
          outcome.traffic.host_link += report->traffic.host_link;
          outcome.traffic.store += report->traffic.store;
        }
        if (evaluate_every != 0 && i % evaluate_every == 0) {
          outcome.validations.push_back((*trainer)->validate().value().loss.value());
          const std::vector<std::vector<int64_t>> prompts{{'d', 'e', 'f'}, {' '}};
          auto samples = (*trainer)->sample(prompts, {}).value();
          std::ranges::move(samples, std::back_inserter(outcome.samples));
        }
      }
      EXPECT_TRUE((*trainer)->finish().ok());
      const Options& options = (*trainer)->options();
      space = group_parameters(
                  model::make_parameter_space(architecture_of(options.model, options.data.sequence))
                      .value(),
                  options.train)
                  .value()
                  .space;
    }
    outcome.state = state_of(job, space);
    return outcome;
  }

  /// The state that a run has left, when its trainer is gone; empty after a failure.
  static std::vector<float> state_of(const Job& job, const plan::ParameterSpace& space) {
    std::vector<float> state;
    auto updater = engine::Updater::open(job.updater, space);
    EXPECT_TRUE(updater.ok()) << updater.status().to_string();
    if (!updater.ok()) return state;
    const base::Status read =
        (*updater)->read_state(~0u, [&](uint64_t, std::span<const std::span<const float>> planes) {
          for (const auto& plane : planes) {
            state.insert(state.end(), plane.begin(), plane.end());
          }
          return base::Status();
        });
    EXPECT_TRUE(read.ok()) << read.to_string();
    return state;
  }

  const std::filesystem::path& folder() const { return folder_; }

 private:
  const base::Scratch scratch_;
  const std::filesystem::path folder_ = scratch_.path();
};

}  // namespace smartinf::train
