#include "smartinf/train/distill/distiller.h"

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/base/file.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/found_run.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/model/config_json.h"
#include "smartinf/plan/block_stages.h"
#include "smartinf/plan/micro_batches.h"
#include "smartinf/plan/rank_share.h"
#include "smartinf/plan/stages.h"
#include "smartinf/train/accelerator.h"
#include "smartinf/train/corpus.h"
#include "smartinf/train/distill/block_trainer.h"
#include "smartinf/train/distill/layered_model.h"
#include "smartinf/train/distill/losses.h"
#include "smartinf/train/distill/pruned_folder.h"
#include "smartinf/train/export.h"
#include "smartinf/train/guarded.h"
#include "smartinf/train/memory_plan.h"
#include "smartinf/train/read_batch.h"
#include "smartinf/train/run_folder.h"
#include "smartinf/train/scalar_type.h"
#include "smartinf/train/stage_link.h"
#include "smartinf/train/tensor_memory.h"
#include "smartinf/train/top_logits.h"
#include "smartinf/train/trainer.h"
#include "smartinf/train/window_order.h"

namespace smartinf::train {

namespace fs = std::filesystem;
using base::ErrorCode;
using base::Result;
using base::Status;
using torch::Tensor;

namespace {

constexpr std::string_view kIdentityFile = "distill.json";
constexpr std::string_view kLogitsFile = "teacher_logits.safetensors";
constexpr std::string_view kWholeRun = "whole";  // the run of the student as a whole
constexpr uint64_t kPruneBatches = 8;  // micro batches that channels and heads are chosen by
constexpr uint64_t kShardBytesMax = 5'000'000'000;
constexpr uint64_t kReadAtOnce = uint64_t{1} << 22;  // elements
constexpr uint64_t kRelayed = 16;                    // parts that several ranks relay
constexpr uint64_t kMessagesMax = 256;  // activations that are sent and not received yet

Status cannot_distill(ErrorCode code, std::string what, std::string advice) {
  return Status(code, std::move(what), std::move(advice));
}

/// An error names the key that the model comes from.
template <typename T>
Result<T> of_key(const char* key, Result<T> opened) {
  if (opened.ok()) return opened;
  return std::move(opened).status().with_context(key);
}

/// config.json of a model whose layers' matrices are packed_words().
std::string packed_config(const std::string& config_json, const Quantising& quantising) {
  auto config = nlohmann::ordered_json::parse(config_json);
  config["quantization_config"] = {{"quant_method", "compressed-tensors"},
                                   {"format", "pack-quantized"},
                                   {"quantization_status", "compressed"},
                                   {"ignore", nlohmann::ordered_json::array({"lm_head"})},
                                   {"config_groups",
                                    {{"group_0",
                                      {{"targets", nlohmann::ordered_json::array({"Linear"})},
                                       {"weights",
                                        {{"num_bits", 4},
                                         {"type", "int"},
                                         {"symmetric", true},
                                         {"strategy", "group"},
                                         {"group_size", quantising.group},
                                         {"dynamic", false}}}}}}}};
  return config.dump(2) + "\n";
}

Status check_job(const DistillJob& job) {
  SI_RETURN_IF_ERROR(validate(job.options));
  SI_RETURN_IF_ERROR(validate(job.distill));
  const auto unsupported = [](std::string what, std::string advice) {
    return cannot_distill(ErrorCode::kUnsupported, std::move(what), std::move(advice));
  };
  const TrainOptions& train = job.options.train;
  if (train.where == OptimizerWhere::kMemory) {
    return unsupported("optimizer.where is \"memory\", but each block has a store on the devices",
                       "Set optimizer.where = \"device\"");
  }
  if (job.updater.compress.on()) {
    return unsupported("compress.density: gradients of blocks are not compressed", "Leave it out");
  }
  if (job.options.lora.on()) {
    return unsupported("lora.rank is set, but blocks are trained whole", "Leave it out");
  }
  if (job.options.embedding != EmbeddingRule::kNone || job.options.ranks.pipeline > 1) {
    return unsupported(
        "table.embedding or ranks.pipeline is set, but only layers are trained, and "
        "ranks divide them as they are",
        "Leave them out");
  }
  if (train.epochs > 0) {
    return unsupported("train.epochs is set, but the length is in steps of each block",
                       "Set train.steps");
  }
  if (!job.ranks.alone() && job.distill.inputs == BlockInputs::kStudent) {
    return unsupported("distill.inputs is \"student\", but blocks of several ranks are independent",
                       "Set distill.inputs = \"teacher\", or start one process");
  }
  if (!job.ranks.alone() && job.distill.whole_steps > 0) {
    return unsupported(
        "distill.whole_steps is set, but the whole student is trained by one process",
        "Leave it out, and start one process with it when all layers are trained");
  }
  for (const engine::DeviceOptions& device : job.updater.devices) {
    std::error_code error;
    if (engine::is_remote(device.path) || fs::is_block_file(device.path, error)) {
      return unsupported(
          fmt::format("{} is no folder, in which each block has a store", device.path),
          "Name a folder on the drive as device.N.path");
    }
  }
  return Status();
}

/// A run, from what is committed to the end.
class Distillation {
 public:
  explicit Distillation(const DistillJob& job) : job_(job) {}
  Result<DistillSummary> run();

 private:
  /// What a block learns from in a part of the steps, by micro batch.
  struct Lesson {
    uint32_t block = 0;
    std::vector<Tensor> inputs;
    std::vector<Tensor> targets;
    std::vector<TopLogits> logits;  // instead, of the last block
    double seconds = 0;             // that the teacher's layer took
  };
  const TrainOptions& train() const { return job_.options.train; }
  bool rounds() const { return !job_.distill.quantise.empty(); }
  std::string in_run(std::string_view name) const {
    return (fs::path(train().run) / name).string();
  }
  Status prepare();
  Status make_student();
  Status check_student() const;
  Status write_untrained(const std::string& folder) const;
  Status keep_identity(uint64_t teacher, uint64_t student);
  Status find_progress();
  Result<std::vector<plan::BlockStage>> choose_stages() const;
  Status divide();
  /// Micro batches of a step that a rank of a stage computes.
  plan::MicroBatchRange micro_batches_of(uint32_t place, uint32_t ranks) const {
    return plan::micro_batches_of(train().accumulation, place, ranks);
  }
  plan::MicroBatchRange mine() const { return micro_batches_of(group_.rank(), group_.world()); }
  /// To a rank of the stage before or behind.
  struct Link {
    plan::MicroBatchRange both;  // micro batches of a step that it computes and this rank, too
    std::unique_ptr<StageLink> link;
  };
  std::vector<Link> links(const plan::BlockStage& stage, uint32_t first_rank, bool before) const;
  Result<uint64_t> steps_at_once() const;
  Result<std::vector<Batch>> batches_of(uint64_t first, uint64_t count) const;
  Result<std::vector<Batch>> held_out() const;
  Result<std::unique_ptr<BlockTrainer>> open_block(uint32_t block) const;
  Status run_part(uint64_t first_step, uint64_t end_step);
  std::vector<Tensor> inputs_of(std::span<const Batch> batches, uint64_t steps);
  Result<Lesson> teach(uint32_t block, std::vector<Tensor> inputs, std::span<const Batch> batches);
  Status train_block(Lesson& lesson, uint64_t first_step, uint64_t end_step,
                     std::span<const Batch> batches);
  Status train_all();
  Status end_together(const Status& trained);
  using TakeElements = std::function<Status(std::span<const float>)>;
  Result<std::unique_ptr<engine::Updater>> stored(uint32_t block,
                                                  const plan::ParameterSpace& space) const;
  Result<Tensor> trained_rounding(uint32_t block, const Rounding& rounding) const;
  Result<Rounding> rounding_of(uint32_t block) const {
    return Rounding::of(*teacher_, block, quantising_.group);
  }
  Status read_block(uint32_t block, const TakeElements& take) const;
  Status read_rounded(uint32_t block, bool trained, const TakeElements& take) const;
  Status write_between(const std::string& out, const ModelSource& source, const LayeredModel& like,
                       const std::function<Status(uint32_t, const TakeElements&)>& layer) const;
  Status write_student() const;
  Status write_packed() const;
  Status keep_logits();
  Status train_whole() const;
  Result<DistillLosses> losses() const;

  const DistillJob& job_;
  torch::Device device_ = torch::kCPU;
  base::DataType type_ = base::DataType::kF32;
  std::optional<Corpus> corpus_;
  ModelSource source_;          // of the teacher
  ModelSource student_source_;  // of the student before training
  std::optional<LayeredModel> teacher_;
  std::optional<LayeredModel> student_;
  std::optional<LayeredModel::Head> head_;
  GroupedParameters parameters_;
  Quantising quantising_;  // of a student that is rounded
  uint64_t at_once_ = 0;   // steps whose activations are in memory together
  std::optional<RunFolder> folder_;
  std::string identity_;
  std::vector<base::StepNumber> steps_;  // of each block, when this process began
  uint64_t updates_ = 0;                 // of all blocks, as far as this rank knows
  uint32_t begin_ = 0;                   // blocks [begin, end) are this rank's
  uint32_t end_ = 0;
  Ranks group_;                        // that share these blocks, and the step's micro batches
  std::vector<Link> before_, behind_;  // that micro batches come from and go to, in order
  std::vector<Tensor> own_inputs_;   // of the block in work, where they are the student's own
  std::string lines_;                // of this rank's log, which rank 0 writes at the end
  DistillSummary summary_;
};

Status Distillation::prepare() {
  SI_RETURN_IF_ERROR(check_job(job_));
  give_tensors_their_own_pages();
  const uint32_t cores =
      std::max(1u, std::thread::hardware_concurrency() / job_.ranks.local_world());
  at::set_num_threads(static_cast<int>(train().threads != 0 ? train().threads : cores));
  SI_ASSIGN_OR_RETURN(device_, choose_accelerator("train.accelerator", train().accelerator,
                                                  job_.ranks.local_rank()));
  type_ = precision_data_type(train().precision);
  SI_ASSIGN_OR_RETURN(Corpus corpus, Corpus::open(job_.options.data));
  corpus_.emplace(std::move(corpus));
  SI_ASSIGN_OR_RETURN(source_, of_key("teacher.from", find_model(job_.options)));
  if (source_.architecture.vocabulary < corpus_->vocabulary()) {
    return cannot_distill(ErrorCode::kInvalidArgument,
                          fmt::format("the teacher knows {} tokens, and the text has {}",
                                      source_.architecture.vocabulary, corpus_->vocabulary()),
                          "Tokenize the data with the teacher's own tokenizer");
  }
  if (job_.distill.top_k >= source_.architecture.vocabulary) {
    return cannot_distill(ErrorCode::kInvalidArgument,
                          fmt::format("distill.top_k is {}, and the teacher knows {} tokens",
                                      job_.distill.top_k, source_.architecture.vocabulary),
                          "Choose fewer");
  }
  Result<RunFolder> folder = RunFolder::left_alone(train().run);
  if (job_.ranks.first()) folder = RunFolder::open(train().run);
  SI_RETURN_IF_ERROR(folder.status());
  folder_.emplace(std::move(*folder));
  SI_ASSIGN_OR_RETURN(
      LayeredModel teacher,
      of_key("teacher.from", LayeredModel::open(job_.options.model.from, source_.architecture,
                                                type_, device_, job_.options.data.sequence)));
  teacher_.emplace(std::move(teacher));
  return Status();
}

/// The first rank makes it; then the others find it.
Status Distillation::make_student() {
  std::string folder = job_.distill.student;
  SI_ASSIGN_OR_RETURN(const uint64_t teacher, teacher_->files().digest());
  if (folder.empty()) {
    SI_RETURN_IF_ERROR(keep_identity(teacher, 0));
    folder = in_run(kUntrainedFolder);
    std::error_code error;
    if (rounds()) {
      SI_ASSIGN_OR_RETURN(quantising_, parse_quantising(job_.distill.quantise));
    }
    if (job_.ranks.first() && !fs::exists(folder, error)) {
      SI_RETURN_IF_ERROR(write_untrained(folder));
    }
  }
  const char* const key = rounds()                       ? "student.quantise"
                          : job_.distill.student.empty() ? "student.prune"
                                                         : "student.from";
  SI_ASSIGN_OR_RETURN(student_source_,
                      of_key(key, read_model_folder(folder, job_.options.model.ignored_keys,
                                                    "--model.ignored_keys")));
  SI_RETURN_IF_ERROR(check_student());
  SI_ASSIGN_OR_RETURN(LayeredModel student,
                      of_key(key, LayeredModel::open(folder, student_source_.architecture, type_,
                                                     device_, job_.options.data.sequence)));
  student_.emplace(std::move(student));
  if (!job_.distill.student.empty()) {
    SI_ASSIGN_OR_RETURN(const uint64_t digest, student_->files().digest());
    SI_RETURN_IF_ERROR(keep_identity(teacher, digest));
  }
  SI_ASSIGN_OR_RETURN(parameters_, group_parameters(student_->space(), train()));
  return Status();
}

/// The student before training, which is made of the teacher.
Status Distillation::write_untrained(const std::string& folder) const {
  if (rounds()) {
    return write_between(folder, source_, *teacher_, [this](uint32_t block, const auto& take) {
      return read_rounded(block, /*trained=*/false, take);
    });
  }
  SI_ASSIGN_OR_RETURN(const Pruning pruning, parse_pruning(job_.distill.prune));
  SI_ASSIGN_OR_RETURN(const model::Architecture pruned,
                      pruned_architecture(source_.architecture, pruning));
  SI_ASSIGN_OR_RETURN(TextFiles texts, read_model_files(job_.options.model.from));
  SI_ASSIGN_OR_RETURN(texts.back().second, pruned_config(source_.config_json, pruned));
  const uint64_t batches = std::min<uint64_t>(kPruneBatches, train().steps * train().accumulation);
  SI_ASSIGN_OR_RETURN(const std::vector<Batch> some, batches_of(0, batches));
  const std::vector<Kept> kept = choose_kept(*teacher_, pruned, some, train().seed);
  return write_pruned_folder(*teacher_, pruned, kept, std::move(texts), folder);
}

Status Distillation::check_student() const {
  const model::Architecture& teacher = source_.architecture;
  const model::Architecture& student = student_source_.architecture;
  const auto differs = [](const char* what, uint64_t here, uint64_t there) {
    return cannot_distill(
        ErrorCode::kMismatch,
        fmt::format("student.from: the student has {} {}, the teacher {}", here, what, there),
        "Name a student whose layers begin and end where the teacher's do: as many layers of the "
        "same width, with the same vocabulary");
  };
  if (student.layers != teacher.layers) return differs("layers", student.layers, teacher.layers);
  if (student.width != teacher.width) return differs("of width", student.width, teacher.width);
  if (student.vocabulary != teacher.vocabulary) {
    return differs("tokens", student.vocabulary, teacher.vocabulary);
  }
  if (student.tied_head == teacher.tied_head && student.family == teacher.family) return Status();
  return cannot_distill(ErrorCode::kMismatch,
                        "student.from: the student is of another family, or only one of the two "
                        "has a head that is its embedding",
                        "Name a student of the teacher's family");
}

/// Values that follow from nothing else and change what comes out: other ones would mix two runs.
Status Distillation::keep_identity(uint64_t teacher, uint64_t student) {
  const Options& options = job_.options;
  const nlohmann::ordered_json now{
      {"teacher.from", fmt::format("{:016x}", teacher)},
      {"student.from", fmt::format("{:016x}", student)},
      {"student.prune", job_.distill.prune},
      {"student.quantise", job_.distill.quantise},
      {"distill.loss", base::enum_name(job_.distill.loss)},
      {"distill.inputs", base::enum_name(job_.distill.inputs)},
      {"distill.top_k", job_.distill.top_k},
      {"data.paths", fmt::format("{:016x}", corpus_->digest())},
      {"data.sequence", options.data.sequence},
      {"data.seed", options.data.seed},
      {"train.steps", train().steps},
      {"train.micro_batch", train().micro_batch},
      {"train.accumulation", train().accumulation},
      {"train.precision", base::enum_name(train().precision)},
      {"train.seed", train().seed},
  };
  identity_ = now.dump();
  const std::string path = folder_->file(kIdentityFile);
  std::error_code error;
  if (job_.ranks.first() && !fs::exists(path, error)) {
    return base::write_text_file(path, identity_ + "\n", "cannot write the run's folder");
  }
  constexpr uint64_t kBytesMax = uint64_t{1} << 16;
  SI_ASSIGN_OR_RETURN(const std::string text,
                      base::read_text_file(path, "cannot read the run's folder", kBytesMax));
  const auto before = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  for (const auto& [key, value] : now.items()) {
    if (before.is_object() && before.contains(key) && before[key] == value) continue;
    return cannot_distill(
        ErrorCode::kMismatch,
        fmt::format("{} is not what the run in {} was started with", key, train().run),
        "Use the same value (for a folder: the same files), or choose another train.run");
  }
  return Status();
}

/// What each block has committed. All ranks begin with what the first one finds.
Status Distillation::find_progress() {
  for (uint32_t block = 0; block < student_->layers(); ++block) {
    const auto found =
        engine::find_run(engine::local_sources(options_of_block(job_.updater, block)));
    steps_.push_back(found ? found->step : 0);
  }
  SI_ASSIGN_OR_RETURN(const auto all, job_.ranks.all<base::StepNumber>(steps_));
  steps_.assign(all.begin(), all.begin() + student_->layers());
  for (const base::StepNumber step : steps_) updates_ += step;
  if (!job_.ranks.first()) return Status();
  SI_RETURN_IF_ERROR(folder_->keep_recipe(job_.recipe));
  SI_RETURN_IF_ERROR(folder_->keep_log_until(updates_).status());
  if (updates_ > 0) {
    job_.note(fmt::format("resuming after {} of {} updates", updates_,
                          train().steps * student_->layers()));
  }
  return Status();
}

/// As the recipe says. Else each rank has blocks of its own, so that the slowest one is as fast as
/// can be by the products that a token takes; the last block has the logits of both models besides.
Result<std::vector<plan::BlockStage>> Distillation::choose_stages() const {
  const uint32_t world = job_.ranks.world();
  const uint32_t layers = student_->layers();
  const std::string& wanted = job_.distill.stages;
  const std::vector<plan::BlockStage> all{{0, layers}};
  if (!wanted.empty()) {
    if (auto stages = parse_stages(wanted)) return world == 1 ? all : std::move(*stages);
    SI_ASSIGN_OR_RETURN(const MeasuredBlocks measured, measured_blocks(wanted));
    if (world == 1) return all;
    return plan::divide_blocks(measured.blocks,
                               {.ranks = world, .micro_batches = train().accumulation});
  }
  if (world == 1) return all;
  if (layers < world) {
    return cannot_distill(
        ErrorCode::kInvalidArgument,
        fmt::format("there are {} ranks, and {} layers", world, layers),
        fmt::format("Start as many ranks as layers at most, or let several share layers: "
                    "distill.stages = \"{}x{}\"",
                    layers, world));
  }
  const auto elements = [](const LayeredModel& model) {
    return static_cast<double>(model.layer_span(0).count);
  };
  const double block = elements(*teacher_) + 3 * elements(*student_);
  const double head = job_.distill.top_k == 0
                          ? 0
                          : 3.0 * source_.architecture.vocabulary * source_.architecture.width;
  const std::vector<uint32_t> begins =
      plan::split_units(layers, world, [&](auto, uint32_t first, uint32_t end) {
        return block * (end - first) + (end == layers ? head : 0);
      });
  std::vector<plan::BlockStage> stages;
  for (uint32_t rank = 0; rank < world; ++rank) {
    stages.push_back({begins[rank], begins[rank + 1]});
  }
  return stages;
}

/// Which blocks are this rank's, and who computes those before and behind.
Status Distillation::divide() {
  const Ranks& ranks = job_.ranks;
  const uint32_t layers = student_->layers();
  Result<std::vector<plan::BlockStage>> chosen = std::vector<plan::BlockStage>();
  if (ranks.first()) chosen = choose_stages();
  SI_RETURN_IF_ERROR(ranks.all_ok("the division", chosen.status()));
  SI_ASSIGN_OR_RETURN(const std::string text, ranks.from_first(stages_text(*chosen)));
  const std::vector<plan::BlockStage> stages = parse_stages(text).value();
  uint32_t used = 0;
  for (const plan::BlockStage& stage : stages) {
    used += stage.ranks;
    if (stage.ranks <= train().accumulation) continue;
    return cannot_distill(
        ErrorCode::kInvalidArgument,
        fmt::format("distill.stages is \"{}\", where {} ranks share the micro batches of a step, "
                    "and train.accumulation is {}",
                    text, stage.ranks, train().accumulation),
        fmt::format("Set train.accumulation = {} (and a smaller train.micro_batch), or give each "
                    "rank layers of its own",
                    stage.ranks));
  }
  if (stages.back().end != layers || used > ranks.world()) {
    return cannot_distill(
        ErrorCode::kInvalidArgument,
        fmt::format("distill.stages is \"{}\", of {} layers on {} ranks; there are {} layers and "
                    "{} ranks",
                    text, stages.back().end, used, layers, ranks.world()),
        "Write LAYERSxRANKS for each group of ranks, so that all layers are there");
  }
  begin_ = end_ = layers;  // of a rank that is left over
  if (ranks.alone()) begin_ = 0;
  uint32_t first_rank = 0;
  for (size_t i = 0; !ranks.alone() && i < stages.size(); first_rank += stages[i++].ranks) {
    const plan::BlockStage& stage = stages[i];
    std::vector<uint32_t> members(stage.ranks);
    std::iota(members.begin(), members.end(), first_rank);
    std::shared_ptr<engine::Collectives> group;
    if (stage.ranks > 1) {
      SI_ASSIGN_OR_RETURN(group, ranks.collectives()->group(members));
    }
    job_.note(fmt::format("rank {}{}: layers {} to {}", first_rank,
                          stage.ranks == 1 ? "" : fmt::format(" to {}", members.back()),
                          stage.first + 1, stage.end));
    if (ranks.rank() < first_rank || ranks.rank() > members.back()) continue;
    begin_ = stage.first;
    end_ = stage.end;
    if (group != nullptr) {
      std::vector<std::string> names;
      for (const uint32_t member : members) names.push_back(ranks.name(member));
      group_ = Ranks(group, std::move(names), ranks.local_rank(), ranks.local_world());
    }
    if (i > 0) {
      before_ = links(stages[i - 1], first_rank - stages[i - 1].ranks, /*before=*/true);
    }
    if (end_ < layers) behind_ = links(stages[i + 1], members.back() + 1, /*before=*/false);
  }
  return Status();
}

std::vector<Distillation::Link> Distillation::links(const plan::BlockStage& stage,
                                                    uint32_t first_rank, bool before) const {
  std::vector<Link> made;
  for (uint32_t place = 0; place < stage.ranks; ++place) {
    const plan::MicroBatchRange there = micro_batches_of(place, stage.ranks);
    const plan::MicroBatchRange both{std::max(mine().begin, there.begin),
                                     std::min(mine().end, there.end)};
    if (both.begin >= both.end) continue;
    StageLink::Ends ends;
    (before ? ends.before : ends.behind) = first_rank + place;
    made.push_back(
        {both, std::make_unique<StageLink>(job_.ranks.collectives(), std::move(ends),
                                           torch::dtype(scalar_type(type_)).device(device_),
                                           /*in_flight=*/kMessagesMax)});
  }
  return made;
}

/// Steps whose activations there is memory for beside one layer of each model.
Result<uint64_t> Distillation::steps_at_once() const {
  if (job_.steps_at_once != 0) return job_.steps_at_once;
  const Ranks& ranks = job_.ranks;
  const MemoryLimits limits =
      memory_limits(job_.options.memory, memory_of(device_), ranks.local_world());
  const model::Architecture& model = source_.architecture;
  const uint64_t value_bytes = base::data_type_bytes(type_);
  const uint64_t rows = uint64_t{train().micro_batch} * job_.options.data.sequence;
  const uint64_t layer_bytes = value_bytes * teacher_->layer_span(0).count;
  // Weights, their gradients and the tree's sums of them; of a rounded layer the exact weights and
  // offsets with their gradient, too.
  const auto sums = std::max<uint64_t>(std::bit_width(uint64_t{train().accumulation}) - 1, 1);
  const uint64_t layer_elements = student_->layer_span(0).count;
  const uint64_t student_bytes =
      layer_elements * (2 * value_bytes + 4 * sums + (rounds() ? value_bytes + 8 : 0));
  const uint64_t head_bytes = value_bytes * model.vocabulary * model.width;
  // What autograd keeps of one layer and micro batch: about so many rows.
  const uint64_t kept_bytes =
      4 * rows * (16 * uint64_t{model.width} + 4 * uint64_t{model.mlp_width});
  const plan::RankExchange exchange{.elements = layer_elements,
                                    .subgroup_elements = layer_elements};
  const uint64_t beside = limits.resident_bytes + layer_bytes + student_bytes + head_bytes +
                          kept_bytes + job_.updater.memory_budget_bytes +
                          (group_.alone() ? 0 : plan::rank_bytes(layer_elements, exchange));
  const bool own = job_.distill.inputs == BlockInputs::kStudent;
  const uint64_t sets = own ? 3 : (ranks.alone() ? 2 : end_ - begin_ + 1);
  const uint64_t of_step = sets * mine().size() * rows * model.width * value_bytes;
  const uint64_t steps = limits.host_bytes > beside ? (limits.host_bytes - beside) / of_step : 0;
  if (steps >= (own ? train().steps : 1)) {
    // Of several ranks the next one waits for the first part of the one before.
    const uint64_t most = ranks.alone() ? train().steps : base::divide_up(train().steps, kRelayed);
    const uint64_t mine = std::min(steps, most);
    SI_ASSIGN_OR_RETURN(const std::vector<uint64_t> all, ranks.all<uint64_t>(std::span(&mine, 1)));
    return *std::ranges::min_element(all);
  }
  return cannot_distill(
      ErrorCode::kOutOfMemory,
      fmt::format("the run needs {} of memory and may use {}: {} for the activations of {}",
                  base::format_bytes(beside + of_step * (own ? train().steps : 1)),
                  base::format_bytes(limits.host_bytes),
                  base::format_bytes(of_step * (own ? train().steps : 1)),
                  own ? "all steps, which distill.inputs = \"student\" keeps" : "one step"),
      own ? "Raise memory.host, or set distill.inputs = \"teacher\""
          : "Raise memory.host, or lower train.micro_batch, train.accumulation or "
            "engine.memory_budget");
}

Result<std::vector<Batch>> Distillation::batches_of(uint64_t first, uint64_t count) const {
  const uint64_t rows = train().micro_batch;
  const Windows& from = corpus_->training();
  std::vector<Batch> batches;
  std::vector<uint64_t> windows(rows);
  for (uint64_t i = first; i < first + count; ++i) {
    for (uint64_t row = 0; row < rows; ++row) {
      windows[row] = window_at(job_.options.data.seed, from.count(), i * rows + row);
    }
    SI_ASSIGN_OR_RETURN(Batch batch, read_batch(from, windows, source_.architecture.vocabulary,
                                                job_.options.data.sequence, device_));
    batches.push_back(std::move(batch));
  }
  return batches;
}

/// Spread evenly over what is held out, as in the trainer's validation.
Result<std::vector<Batch>> Distillation::held_out() const {
  const Windows& from = corpus_->validation();
  const uint64_t rows = train().micro_batch;
  const uint64_t wanted = std::min(from.count(), train().validation_batches * rows);
  std::vector<Batch> batches;
  for (uint64_t first = 0; first < wanted; first += rows) {
    std::vector<uint64_t> windows;
    for (uint64_t i = first; i < std::min(first + rows, wanted); ++i) {
      windows.push_back(i * from.count() / wanted);
    }
    SI_ASSIGN_OR_RETURN(Batch batch, read_batch(from, windows, source_.architecture.vocabulary,
                                                job_.options.data.sequence, device_));
    batches.push_back(std::move(batch));
  }
  return batches;
}

Result<std::unique_ptr<BlockTrainer>> Distillation::open_block(uint32_t block) const {
  return BlockTrainer::open({train(), job_.updater, parameters_, job_.distill.loss, type_, device_,
                             identity_, rounds() ? &*teacher_ : nullptr, quantising_.group, group_},
                            *student_, block);
}

std::vector<Tensor> Distillation::inputs_of(std::span<const Batch> batches, uint64_t steps) {
  if (before_.empty()) return teacher_->embed(batches);
  std::vector<int64_t> sizes = batches[0].tokens_BT.sizes().vec();
  sizes.push_back(source_.architecture.width);
  for (const Link& from : before_) {
    from.link->expect(StageLink::Way::kForward, sizes, from.both.size() * steps, /*at_once=*/4);
  }
  std::vector<Tensor> all_BTC;
  for (uint64_t step = 0; step < steps; ++step) {
    for (const Link& from : before_) {
      for (uint64_t i = 0; i < from.both.size(); ++i) {
        all_BTC.push_back(from.link->receive(StageLink::Way::kForward));
      }
    }
  }
  return all_BTC;
}

Result<Distillation::Lesson> Distillation::teach(uint32_t block, std::vector<Tensor> inputs,
                                                 std::span<const Batch> batches) {
  const torch::NoGradGuard no_grad;
  const uint64_t begin_ns = base::now_ns();
  Lesson lesson{block, std::move(inputs), {}, {}, 0};
  const bool to_logits = block + 1 == student_->layers() && job_.distill.top_k > 0;
  const ModelPart layer = teacher_->layer(block);
  if (to_logits && !head_) head_.emplace(teacher_->head());
  for (size_t i = 0; i < batches.size(); ++i) {
    if (job_.stop.stop_requested()) return Status(ErrorCode::kCancelled, "stopped");
    Tensor y_BTC = layer.run(lesson.inputs[i], batches[i].document_ends);
    ++summary_.teacher_layers;
    if (to_logits) {
      lesson.logits.push_back(top_logits(*head_, y_BTC, job_.distill.top_k));
    } else {
      lesson.targets.push_back(std::move(y_BTC));
    }
  }
  lesson.seconds = base::seconds_since(begin_ns);
  return lesson;
}

Status Distillation::run_part(uint64_t first_step, uint64_t end_step) {
  uint32_t last = student_->layers();  // behind all that have something left to learn
  while (last > 0 && steps_[last - 1] >= end_step) --last;
  if (last <= begin_) return Status();
  const uint64_t steps = end_step - first_step;
  std::vector<Batch> batches;  // of each step this rank's
  for (uint64_t step = first_step; step < end_step; ++step) {
    SI_ASSIGN_OR_RETURN(std::vector<Batch> of_step,
                        batches_of(step * train().accumulation + mine().begin, mine().size()));
    std::ranges::move(of_step, std::back_inserter(batches));
  }
  summary_.micro_batches += steps * train().accumulation;
  std::vector<Tensor> inputs = inputs_of(batches, steps);
  if (job_.distill.inputs == BlockInputs::kStudent) own_inputs_ = inputs;
  std::vector<Lesson> lessons;
  for (uint32_t block = begin_; block < std::min(end_, last); ++block) {
    SI_ASSIGN_OR_RETURN(Lesson lesson, teach(block, std::move(inputs), batches));
    inputs = lesson.targets;
    if (!job_.ranks.alone()) {
      lessons.push_back(std::move(lesson));  // the next rank is waiting
    } else {
      SI_RETURN_IF_ERROR(train_block(lesson, first_step, end_step, batches));
    }
  }
  for (uint64_t step = 0, at = 0; end_ < last && step < steps; ++step) {
    for (const Link& to : behind_) {
      for (uint64_t i = 0; i < to.both.size(); ++i) {
        to.link->send(StageLink::Way::kForward, inputs[at++]);
      }
    }
  }
  inputs.clear();
  for (Lesson& lesson : lessons) {
    SI_RETURN_IF_ERROR(train_block(lesson, first_step, end_step, batches));
    lesson = {};
  }
  return Status();
}

Status Distillation::train_block(Lesson& lesson, uint64_t first_step, uint64_t end_step,
                                 std::span<const Batch> batches) {
  const bool own = job_.distill.inputs == BlockInputs::kStudent;
  if (steps_[lesson.block] >= end_step && !own) return Status();
  SI_ASSIGN_OR_RETURN(const std::unique_ptr<BlockTrainer> trainer, open_block(lesson.block));
  const uint64_t each = mine().size();
  const bool to_logits = !lesson.logits.empty();
  std::vector<Tensor>& inputs = own ? own_inputs_ : lesson.inputs;
  for (uint64_t step = std::max(first_step, trainer->step()); step < end_step; ++step) {
    const std::array<uint8_t, 1> stops{uint8_t{job_.stop.stop_requested()}};
    SI_ASSIGN_OR_RETURN(const auto any_stops, group_.all<uint8_t>(stops));
    if (std::ranges::max(any_stops) > 0) {
      SI_RETURN_IF_ERROR(trainer->finish());
      return Status(ErrorCode::kCancelled, "stopped");
    }
    std::vector<BlockTrainer::Sample> samples;
    for (uint64_t i = (step - first_step) * each; i < (step - first_step + 1) * each; ++i) {
      samples.push_back({inputs[i], batches[i].document_ends, {}, nullptr});
      if (to_logits) {
        samples.back().logits = &lesson.logits[i];
      } else {
        samples.back().target_BTC = lesson.targets[i];
      }
    }
    SI_ASSIGN_OR_RETURN(const StepReport report,
                        trainer->train(samples, to_logits ? &*head_ : nullptr));
    if (!group_.first()) continue;
    auto line = nlohmann::ordered_json::parse(report.to_json());
    line["step"] = ++updates_;
    line["block"] = lesson.block;
    line["block_step"] = report.step;
    line["teacher_s"] = lesson.seconds / static_cast<double>(end_step - first_step);
    line["teacher_layers"] = summary_.teacher_layers;
    line["micro_batches"] = train().accumulation;
    line["own_micro_batches"] = each;
    if (job_.ranks.first()) {
      folder_->append_log(line.dump());
    } else {
      lines_ += line.dump() + "\n";
    }
    job_.show(report, lesson.block, student_->layers());
  }
  SI_RETURN_IF_ERROR(trainer->finish());
  if (!own) return Status();
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < batches.size(); ++i) {
    inputs[i] = trainer->part().run(inputs[i], batches[i].document_ends);
  }
  return Status();
}

/// A block's updater, which reads alone.
Result<std::unique_ptr<engine::Updater>> Distillation::stored(
    uint32_t block, const plan::ParameterSpace& space) const {
  engine::UpdaterOptions options = options_of_block(job_.updater, block);
  options.create = false;
  return engine::Updater::open(options, space, engine::local_sources(options, /*read_only=*/true));
}

Result<Tensor> Distillation::trained_rounding(uint32_t block, const Rounding& rounding) const {
  SI_ASSIGN_OR_RETURN(const std::unique_ptr<engine::Updater> updater,
                      stored(block, rounding.space()));
  Tensor trained = torch::zeros({static_cast<int64_t>(rounding.space().count())});
  if (rounded_to_nearest(updater->client_metadata())) return trained;
  float* const begin = trained.data_ptr<float>();
  SI_RETURN_IF_ERROR(updater->read_weights([&](uint64_t first, std::span<const float> values) {
    std::ranges::copy(values, begin + first);
    return Status();
  }));
  return trained.to(device_);
}

/// A block's weights, in order.
Status Distillation::read_block(uint32_t block, const TakeElements& take) const {
  if (rounds()) return read_rounded(block, /*trained=*/true, take);
  SI_ASSIGN_OR_RETURN(
      const std::unique_ptr<engine::Updater> updater,
      stored(block, space_of_block(parameters_.space, student_->layer_span(block))));
  return updater->read_weights(
      [&](uint64_t, std::span<const float> weights) { return take(weights); });
}

Status Distillation::read_rounded(uint32_t block, bool trained, const TakeElements& take) const {
  SI_ASSIGN_OR_RETURN(const Rounding rounding, rounding_of(block));
  Tensor decides = torch::zeros({static_cast<int64_t>(rounding.space().count())},
                                torch::dtype(torch::kFloat32).device(device_));
  if (trained) {
    SI_ASSIGN_OR_RETURN(decides, trained_rounding(block, rounding));
  }
  Tensor weights_N =
      torch::empty({static_cast<int64_t>(teacher_->layer_span(block).count)}, decides.options());
  rounding.put_weights(decides, weights_N);
  const Tensor on_host = weights_N.to(torch::kCPU);
  return take({on_host.const_data_ptr<float>(), static_cast<size_t>(on_host.numel())});
}

/// These layers between the teacher's embedding and head. like: a model of this space.
Status Distillation::write_between(
    const std::string& out, const ModelSource& source, const LayeredModel& like,
    const std::function<Status(uint32_t, const TakeElements&)>& layer) const {
  const auto copy = [&](const TakeElements& take, uint64_t first, uint64_t end) -> Status {
    std::vector<float> values;
    for (; first < end; first += values.size()) {
      values.resize(std::min(kReadAtOnce, end - first));
      SI_RETURN_IF_ERROR(teacher_->files().read(first, values));
      SI_RETURN_IF_ERROR(take(values));
    }
    return Status();
  };
  const uint32_t layers = like.layers();
  const auto read = [&](const TakeElements& take) -> Status {
    SI_RETURN_IF_ERROR(copy(take, 0, teacher_->layer_span(0).first));
    for (uint32_t block = 0; block < layers; ++block) {
      SI_RETURN_IF_ERROR(layer(block, take));
    }
    return copy(take, teacher_->layer_span(layers - 1).end(), teacher_->space().count());
  };
  const base::DataType type = like.files().type().value_or(base::DataType::kF32);
  SI_ASSIGN_OR_RETURN(TextFiles texts, read_model_files(source.folder));
  texts.back().second = model::with_type(texts.back().second, type);
  return write_model_folder(out, {like.space(), type, std::move(texts), "", read}, kShardBytesMax)
      .status();
}

Status Distillation::write_student() const {
  const std::string out = in_run(kStudentFolder);
  std::error_code error;
  if (!fs::exists(out, error)) {
    SI_RETURN_IF_ERROR(write_between(
        out, student_source_, *student_,
        [this](uint32_t block, const auto& take) { return read_block(block, take); }));
  }
  if (rounds() && !fs::exists(in_run(kPackedFolder), error)) return write_packed();
  return Status();
}

/// The student with its codes and scales. Source: compressed-tensors, format pack-quantized.
Status Distillation::write_packed() const {
  const base::DataType type = student_->files().type().value_or(base::DataType::kF32);
  const plan::ParameterSpace& space = student_->space();
  const plan::Unit layers{
      student_->layer_span(0).first,
      student_->layer_span(student_->layers() - 1).end() - student_->layer_span(0).first, 0, 1};
  const auto is_rounded = [&](const plan::ParameterRange& range) {
    return range.first >= layers.first && range.first < layers.end() && range.shape.size() == 2;
  };
  std::vector<model::TensorInfo> tensors;
  for (const plan::ParameterRange& range : space.ranges()) {
    if (!is_rounded(range)) {
      tensors.push_back({range.name, type, range.shape});
      continue;
    }
    const uint64_t rows = range.shape[0];
    const uint64_t columns = range.shape[1];
    tensors.push_back({range.name + "_packed", type, {rows, columns / 8}, sizeof(int32_t)});
    tensors.push_back({range.name + "_scale", type, {rows, columns / quantising_.group}});
    tensors.push_back({range.name + "_shape", type, {2}, sizeof(int64_t)});
  }
  const auto read = [&](const auto& take) -> Status {
    const auto take_tensor = [&](const Tensor& values) {
      const Tensor on_host = values.to(torch::kCPU).contiguous();
      return take({static_cast<const std::byte*>(on_host.const_data_ptr()), on_host.nbytes()});
    };
    std::optional<Rounding> rounding;
    Tensor trained;
    uint32_t block = 0;
    size_t matrix = 0;
    std::vector<std::byte> bytes;
    for (const plan::ParameterRange& range : space.ranges()) {
      if (!is_rounded(range)) {
        for (uint64_t done = 0; done < range.count; done += kReadAtOnce) {
          const uint64_t count = std::min(kReadAtOnce, range.count - done);
          bytes.resize(count * base::data_type_bytes(type));
          SI_RETURN_IF_ERROR(
              teacher_->files().read_as(type, range.first + done, count, bytes.data()));
          SI_RETURN_IF_ERROR(take(bytes));
        }
        continue;
      }
      if (!rounding || matrix == rounding->matrices().size()) {
        if (rounding) ++block;
        SI_ASSIGN_OR_RETURN(rounding, rounding_of(block));
        SI_ASSIGN_OR_RETURN(trained, trained_rounding(block, *rounding));
        matrix = 0;
      }
      const Rounding::Codes codes = rounding->codes(rounding->matrices()[matrix++], trained);
      SI_RETURN_IF_ERROR(take_tensor(packed_words(codes.code_RC)));
      SI_RETURN_IF_ERROR(take_tensor(codes.scale_RG.to(scalar_type(type))));
      const std::array<int64_t, 2> shape{codes.code_RC.size(0), codes.code_RC.size(1)};
      SI_RETURN_IF_ERROR(take(std::as_bytes(std::span(shape))));
    }
    return Status();
  };
  SI_ASSIGN_OR_RETURN(TextFiles texts, read_model_files(student_source_.folder));
  texts.back().second = packed_config(texts.back().second, quantising_);
  return write_model_folder(in_run(kPackedFolder),
                            {space, type, std::move(texts), "", {}, std::move(tensors), read},
                            kShardBytesMax)
      .status();
}

/// The teacher's, of the micro batches that the whole student learns from.
Status Distillation::keep_logits() {
  const torch::NoGradGuard no_grad;
  const std::string path = folder_->file(kLogitsFile);
  const uint64_t count = job_.distill.whole_steps * train().accumulation;
  const Result<StoredLogits> found = StoredLogits::open(path);
  if (found.ok() && found->micro_batches() >= count) return Status();
  const uint64_t rows = uint64_t{train().micro_batch} * job_.options.data.sequence;
  const model::TensorInfo tensor{
      StoredLogits::kTensor, base::DataType::kF32, {count, rows, 2 * job_.distill.top_k + 1}};
  SI_ASSIGN_OR_RETURN(model::SafetensorsWriter writer,
                      model::SafetensorsWriter::create(path, std::span(&tensor, 1), {}));
  const uint64_t at_once = at_once_ * train().accumulation;
  for (uint64_t first = 0; first < count; first += at_once) {
    SI_ASSIGN_OR_RETURN(const std::vector<Batch> batches,
                        batches_of(first, std::min(at_once, count - first)));
    std::vector<Tensor> all_BTC = teacher_->embed(batches);
    for (uint32_t index = 0; index < teacher_->layers(); ++index) {
      const ModelPart layer = teacher_->layer(index);
      for (size_t i = 0; i < batches.size(); ++i) {
        if (job_.stop.stop_requested()) return Status(ErrorCode::kCancelled, "stopped");
        all_BTC[i] = layer.run(all_BTC[i], batches[i].document_ends);
      }
    }
    const LayeredModel::Head head = teacher_->head();
    for (const Tensor& y_BTC : all_BTC) {
      const Tensor packed = StoredLogits::packed(top_logits(head, y_BTC, job_.distill.top_k));
      SI_RETURN_IF_ERROR(writer.append(std::as_bytes(
          std::span(packed.const_data_ptr<float>(), static_cast<size_t>(packed.numel())))));
    }
  }
  return writer.finish();
}

/// From the logits alone, with a store of its own on each device. Leaves the student in its folder.
Status Distillation::train_whole() const {
  Job job{.options = job_.options, .updater = job_.updater, .recipe = job_.recipe, .choice = {}};
  job.options.model.from = in_run(kStudentFolder);
  job.options.train.run = in_run(kWholeRun);
  job.options.train.steps = job_.distill.whole_steps;
  for (engine::DeviceOptions& device : job.updater.devices) device.path += "/whole";
  job.teacher_logits = folder_->file(kLogitsFile);
  SI_ASSIGN_OR_RETURN(std::unique_ptr<Trainer> trainer, Trainer::open(job));
  while (trainer->step() < job.options.train.steps) {
    SI_ASSIGN_OR_RETURN(const StepReport report, trainer->train_step(job_.stop));
    job_.show(report, student_->layers(), student_->layers());
  }
  SI_RETURN_IF_ERROR(trainer->finish().status());
  trainer.reset();
  ExportOptions out;
  out.out = in_run(kWholeFolder);
  return export_run(job, out).status();
}

Result<DistillLosses> Distillation::losses() const {
  SI_ASSIGN_OR_RETURN(const std::vector<Batch> batches, held_out());
  const auto of_folder = [&](std::string_view folder) -> Result<double> {
    SI_ASSIGN_OR_RETURN(const LayeredModel model,
                        LayeredModel::open(in_run(folder), student_source_.architecture, type_,
                                           device_, job_.options.data.sequence));
    return model.loss(batches);
  };
  DistillLosses losses{teacher_->loss(batches), student_->loss(batches)};
  SI_ASSIGN_OR_RETURN(losses.distilled, of_folder(kStudentFolder));
  if (job_.distill.whole_steps > 0) {
    SI_ASSIGN_OR_RETURN(losses.whole, of_folder(kWholeFolder));
  }
  return losses;
}

Status Distillation::train_all() {
  SI_ASSIGN_OR_RETURN(at_once_, steps_at_once());
  const auto millions = [](const LayeredModel& model) {
    return static_cast<double>(model.space().count()) * 1e-6;
  };
  job_.note(fmt::format(
      "teacher: {:.1f} million parameters, {} layers; student: {:.1f} million; {} steps of each "
      "layer, {} of them at once",
      millions(*teacher_), teacher_->layers(), millions(*student_), train().steps, at_once_));
  for (uint64_t first = 0; first < train().steps; first += at_once_) {
    SI_RETURN_IF_ERROR(run_part(first, std::min(first + at_once_, train().steps)));
  }
  for (const Link& to : behind_) to.link->finish();
  head_.reset();
  return Status();
}

/// All ranks have trained; the first one's log gets the lines of the others.
Status Distillation::end_together(const Status& trained) {
  if (!trained.ok()) job_.ranks.failed(trained);  // some may be waiting for this rank
  SI_RETURN_IF_ERROR(job_.ranks.all_ok_without_timeout("distillation", trained));
  SI_ASSIGN_OR_RETURN(const std::vector<std::string> lines, job_.ranks.all_texts(lines_));
  for (const std::string& of_rank : lines) {
    std::string_view left = of_rank;
    while (!left.empty()) {
      const size_t end = left.find('\n');
      auto line = nlohmann::ordered_json::parse(left.substr(0, end));
      line["step"] = ++updates_;
      folder_->append_log(line.dump());
      left.remove_prefix(end + 1);
    }
  }
  const std::array<uint64_t, 1> mine{summary_.teacher_layers};
  SI_ASSIGN_OR_RETURN(const auto layers, job_.ranks.all<uint64_t>(mine));
  summary_.teacher_layers = std::accumulate(layers.begin(), layers.end(), uint64_t{0});
  return Status();
}

Result<DistillSummary> Distillation::run() {
  const Ranks& ranks = job_.ranks;
  SI_RETURN_IF_ERROR(ranks.all_ok("start", prepare()));
  for (const bool turn : {true, false}) {  // the first rank's, then the others'
    const Status made = turn == ranks.first() ? make_student() : Status();
    SI_RETURN_IF_ERROR(ranks.all_ok_without_timeout("the student", made));
  }
  SI_RETURN_IF_ERROR(find_progress());
  SI_RETURN_IF_ERROR(divide());
  SI_RETURN_IF_ERROR(end_together(train_all()));
  summary_.folder = in_run(kStudentFolder);
  if (!ranks.first()) return summary_;
  SI_RETURN_IF_ERROR(write_student());
  if (rounds()) summary_.packed = in_run(kPackedFolder);
  if (job_.distill.whole_steps > 0) {
    summary_.folder = in_run(kWholeFolder);
    std::error_code error;
    if (!fs::exists(summary_.folder, error)) {
      SI_RETURN_IF_ERROR(keep_logits());
      SI_RETURN_IF_ERROR(train_whole());
    }
  }
  if (corpus_->validation().count() > 0) {
    SI_ASSIGN_OR_RETURN(summary_.losses, losses());
    folder_->append_validation(
        updates_, nlohmann::ordered_json{{"step", updates_},
                                         {"validation_loss", summary_.losses.distilled},
                                         {"untrained_loss", summary_.losses.untrained},
                                         {"teacher_loss", summary_.losses.teacher}}
                      .dump());
  }
  return summary_;
}

}  // namespace

Result<DistillSummary> distill(const DistillJob& job) {
  auto made = guarded("distillation", [&] { return Distillation(job).run(); });
  if (!made.ok()) job.ranks.failed(made.status());
  return made;
}

}  // namespace smartinf::train
