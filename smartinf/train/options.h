// Options of model, data and training that a user can set. The recipe's [model], [data] and [train]
// tables map to these one to one, field by field; optimizer.where is here because it chooses
// between the engine and torch's own optimizer. No torch in this header: the recipe is read on
// machines without.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/model/lora.h"
#include "smartinf/plan/schedule.h"
#include "smartinf/plan/training_memory.h"

namespace smartinf::train {

/// model.init. kRandom: of model.from only config.json and the tokenizer are taken.
enum class ModelInit : uint8_t { kWeights, kRandom };
inline constexpr std::array<std::string_view, 2> kModelInitNames{"weights", "random"};
constexpr base::EnumNames enum_names(ModelInit) { return kModelInitNames; }

/// A decoder-only transformer: that of a folder of Hugging Face's, or one of the Llama family with
/// these sizes.
struct ModelOptions {
  std::string from;  // the folder; empty: the sizes below count
  ModelInit init = ModelInit::kWeights;
  std::vector<std::string> ignored_keys;  // of config.json: they change nothing that is computed

  uint32_t layers = 6;
  uint32_t width = 256;      // of the residual stream
  uint32_t heads = 4;        // of queries; width / heads is the head's width
  uint32_t kv_heads = 0;     // of keys and values; 0: as many as heads
  uint32_t mlp_width = 0;    // 0: 8/3 of width, rounded up to a multiple of 64
  uint32_t vocabulary = 0;   // 0: what the data needs
  double rope_base = 10000;  // of the rotary positions' wavelengths
  double norm_eps = 1e-5;
  double init_std = 0.02;  // of normal initial weights
  bool tied_head = true;   // the output head is the embedding

  uint32_t head_width() const { return heads == 0 ? 0 : width / heads; }
};

/// The word in data.paths that stands for the sources of Python's standard library.
inline constexpr std::string_view kPythonStdlib = "python-stdlib";

struct DataOptions {
  /// Text files, folders of them, kPythonStdlib, or token files (token_file.h).
  std::vector<std::string> paths = {std::string(kPythonStdlib)};
  std::vector<std::string> validation_paths;  // empty: a share of `paths` is held out
  double validation_share = 0.02;
  std::vector<std::string> evaluation;  // "NAME = PATH" each (evaluation_sets)
  std::vector<std::string> suffixes;    // of files taken from folders, e.g. ".py"; empty: all text
  std::string tokenizer;                // tokenizer.json the token files were made with, for export
  uint32_t sequence = 256;              // tokens the model sees at once
  uint64_t seed = 1;                    // of the order in which windows are seen
};

/// Data that a run is evaluated on under a name of its own.
struct EvaluationSet {
  std::string name;
  std::vector<std::string> paths;
};
/// The sets of data.evaluation; a name that comes several times is one set. Errors:
/// kInvalidArgument.
base::Result<std::vector<EvaluationSet>> evaluation_sets(const DataOptions& data);

/// Type of weights and compute. The state is always f32 (or what optimizer.format says).
enum class Precision : uint8_t {
  kBf16,
  kF32,
  kAuto,  // what is faster where the model computes: choose_precision(), before a run begins
};
inline constexpr std::array<std::string_view, 3> kPrecisionNames{"bf16", "f32", "auto"};
constexpr base::EnumNames enum_names(Precision) { return kPrecisionNames; }
/// Type of a precision that was chosen; until then it is taken for bf16.
constexpr base::DataType precision_data_type(Precision precision) {
  return precision == Precision::kF32 ? base::DataType::kF32 : base::DataType::kBf16;
}

/// optimizer.where. "device" and "host" are the engine's; "memory" is torch's own AdamW on f32
/// master weights in this process, which the engine is compared with.
enum class OptimizerWhere : uint8_t { kDevice, kHost, kMemory };
inline constexpr std::array<std::string_view, 3> kOptimizerWhereNames{"device", "host", "memory"};
constexpr base::EnumNames enum_names(OptimizerWhere) { return kOptimizerWhereNames; }

/// optimizer.overlap. kAuto: kLate where the engine updates, kEarly in steps where late was waited
/// for and the norm of the step before is well below the limit.
using plan::Overlap;

/// train.schedule: how the learning rate goes on after the warm-up (lr_schedule.h).
enum class LrSchedule : uint8_t { kCosine, kLinear, kConstant, kWarmupStableDecay };
inline constexpr std::array<std::string_view, 4> kLrScheduleNames{"cosine", "linear", "constant",
                                                                  "warmup-stable-decay"};
constexpr base::EnumNames enum_names(LrSchedule) { return kLrScheduleNames; }

struct TrainOptions {
  std::string run;  // folder of the run: recipe, log, and state unless [[device]] says otherwise
  OptimizerWhere where = OptimizerWhere::kDevice;  // optimizer.where
  Overlap overlap = Overlap::kAuto;                // optimizer.overlap
  Precision precision = Precision::kAuto;

  uint64_t steps = 1000;      // 0: what epochs says
  double epochs = 0;          // times that every window is seen; 0: what steps says
  uint64_t log_every = 1;     // steps between lines on the terminal; the log has all
  uint32_t micro_batch = 8;   // sequences in one forward
  uint32_t accumulation = 1;  // micro batches in one step

  double lr = 1e-3;
  LrSchedule schedule = LrSchedule::kCosine;
  double lr_floor = 0.1;     // share of lr that the schedule ends at
  double decay_share = 0.1;  // share of the steps in which "warmup-stable-decay" decays
  uint64_t warmup_steps = 0;
  double weight_decay = 0.1;  // on matrices only
  /// "PATTERN = NUMBER" each; of the patterns that fit a parameter's name the last one counts.
  std::vector<std::string> lr_factors;
  std::vector<std::string> weight_decays;
  double clip_norm = 1;    // global L2 norm; 0: no clipping
  uint32_t skips_max = 5;  // steps in a row that may be skipped for non-finite gradients

  uint64_t seed = 1;     // of initial weights and the sample
  uint32_t threads = 0;  // of torch's operators; 0: all cores. Losses repeat for equal numbers only
  std::string accelerator = "auto";  // "auto", "cpu", "cuda"

  uint64_t validate_every = 100;  // steps; 0: only at the end
  bool validate_at_start = false;  // before the first step, too
  uint32_t validation_batches = 8;
  bool keep_best = false;     // a checkpoint of the step with the lowest validation loss
  uint64_t save_every = 100;  // optimizer.where = "memory": steps between writes of its state

  std::vector<std::string> sample_prompts;  // continued at each validation
  uint32_t sample_tokens = 64;              // of each
  double sample_temperature = 0.7;

  std::string trace;               // file for a Chrome trace; empty: none
  uint64_t layer_stats_every = 0;  // steps between norms of each layer in the log; 0: none
};

/// memory.activations.
using plan::Activations;

/// table.embedding: the rule of an embedding of which a step updates the rows of its tokens alone,
/// on the devices: kernels::RowRule by the same names. kNone: it is a parameter as any other.
enum class EmbeddingRule : uint8_t { kNone, kSgd, kSparseAdam, kRowAdagrad, kRowAdam, kAdamW };
inline constexpr std::array<std::string_view, 6> kEmbeddingRuleNames{
    "none", "sgd", "sparse_adam", "row_adagrad", "row_adam", "adamw"};
constexpr base::EnumNames enum_names(EmbeddingRule) { return kEmbeddingRuleNames; }

/// Memory that may be used. Bytes; 0: what is free at the start.
struct MemoryOptions {
  uint64_t host_bytes = 0;  // of the whole process
  uint64_t accelerator_bytes = 0;
  Activations activations = Activations::kAuto;
};

/// Copies of the state, made between two steps.
struct CheckpointSchedule {
  uint64_t every = 0;  // steps; 0: none
  uint64_t keep = 2;   // newest ones; 0: all
  std::string folder;  // empty: "checkpoints" in the run's folder
};

/// How the gradients of a step's micro batches are added up.
enum class SumOrder : uint8_t {
  kAuto,   // kFixed with several ranks; one process adds one to the other
  kFixed,  // by the tree of plan/micro_batches.h: the same bits with any number of ranks
};
inline constexpr std::array<std::string_view, 2> kSumOrderNames{"auto", "fixed"};
constexpr base::EnumNames enum_names(SumOrder) { return kSumOrderNames; }

/// Form of the gradients that go back between stages of a pipeline.
enum class GradientForm : uint8_t { kNone, kLowRank, kInt8, kInt4 };
inline constexpr std::array<std::string_view, 4> kGradientFormNames{"none", "lowrank", "int8",
                                                                    "int4"};
constexpr base::EnumNames enum_names(GradientForm) { return kGradientFormNames; }

/// Form of the activations that go forward between stages in training.
enum class ActivationForm : uint8_t { kNone, kInt8 };
inline constexpr std::array<std::string_view, 2> kActivationFormNames{"none", "int8"};
constexpr base::EnumNames enum_names(ActivationForm) { return kActivationFormNames; }

/// Micro batches whose gradients are compressed.
enum class CompressWhen : uint8_t {
  kEpilogue,  // the last ones of a step, for which the stages before wait
  kExposed,   // as few of the last ones as make the step no longer than all of them would
  kAlways,
};
inline constexpr std::array<std::string_view, 3> kCompressWhenNames{"epilogue", "exposed",
                                                                    "always"};
constexpr base::EnumNames enum_names(CompressWhen) { return kCompressWhenNames; }

/// What becomes of the error of a compressed gradient.
enum class ErrorFeedback : uint8_t {
  kStep,  // it is added to the next one of the step
  kNone,
};
inline constexpr std::array<std::string_view, 2> kErrorFeedbackNames{"step", "none"};
constexpr base::EnumNames enum_names(ErrorFeedback) { return kErrorFeedbackNames; }

/// Compression between stages, as Optimus-CC (ASPLOS 2023).
struct StageCompression {
  GradientForm form = GradientForm::kNone;
  uint32_t rank = 16;  // of kLowRank
  CompressWhen when = CompressWhen::kEpilogue;
  ErrorFeedback feedback = ErrorFeedback::kStep;
  ActivationForm forward = ActivationForm::kNone;
  /// Of kExposed: how many of the last ones each stage sends in the short form; of the first none.
  std::vector<uint32_t> exposed = {};

  bool on() const { return form != GradientForm::kNone || forward != ActivationForm::kNone; }
};

/// Values of an integer form that share a scale.
inline constexpr uint64_t kCodedBlock = 128;
/// Bytes of the short form of [rows, width] values.
uint64_t compressed_bytes(const StageCompression& options, uint64_t rows, uint64_t width);

/// Which stage computes a head that is the embedding's matrix.
enum class TiedHeads : uint8_t {
  kAuto,  // whichever has fewer bytes to send
  kSync,  // the last one, which has a copy
  kFold,  // the first one
};
inline constexpr std::array<std::string_view, 3> kTiedHeadNames{"auto", "sync", "fold"};
constexpr base::EnumNames enum_names(TiedHeads) { return kTiedHeadNames; }

/// Several processes that train one model together.
struct RankOptions {
  double timeout_s = 1200;
  SumOrder order = SumOrder::kAuto;
  uint32_t pipeline = 1;  // stages of layers, each computed by equally many ranks; 0: "auto"
  std::string cluster;    // file of boxes and links, for what is chosen by the simulator
  uint32_t chunks = 0;    // of a stage; 1: all its weights stay in memory; 0: as memory allows
  std::string split;      // layers of each stage, "9, 8, 8, 7"; empty: stages of equal computing
  TiedHeads tied = TiedHeads::kAuto;
  uint32_t tensor = 1;  // refused above
  StageCompression compression = {};
};

struct Options {
  ModelOptions model;
  model::LoraOptions lora;
  DataOptions data;
  TrainOptions train;
  EmbeddingRule embedding = EmbeddingRule::kNone;  // table.embedding
  MemoryOptions memory;
  CheckpointSchedule checkpoint;
  RankOptions ranks;
};

/// Puts in what follows from other values: kv_heads, mlp_width.
ModelOptions with_defaults(ModelOptions model);

/// Ok, or the first value that cannot work, by its dotted key, with what to do. Looks at no files.
base::Status validate(const ModelOptions& model);
base::Status validate(const model::LoraOptions& lora);
base::Status validate(const DataOptions& data);
base::Status validate(const TrainOptions& train);
base::Status validate(const CheckpointSchedule& checkpoint);
base::Status validate(const RankOptions& ranks);
base::Status validate(const Options& options);

}  // namespace smartinf::train
