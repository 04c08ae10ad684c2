// Start of a run: it is chosen, its devices are opened, its history kept.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <thread>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/compress/density.h"
#include "smartinf/engine/found_run.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/new_run.h"
#include "smartinf/model/weight_files.h"
#include "smartinf/plan/pipeline_schedule.h"
#include "smartinf/plan/stage_plan.h"
#include "smartinf/train/accelerator.h"
#include "smartinf/train/adapter_base.h"
#include "smartinf/train/embedding_table.h"
#include "smartinf/train/initial_weights.h"
#include "smartinf/train/model_source.h"
#include "smartinf/train/random.h"
#include "smartinf/train/ranks/rank_start.h"
#include "smartinf/train/saved_tensors.h"
#include "smartinf/train/scalar_type.h"
#include "smartinf/train/torch_trainer.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

Status different(const char* key, const std::string& here, const std::string& there) {
  return Status(ErrorCode::kMismatch,
                fmt::format("{} is {} here, but {} in the run", key, here, there),
                "Use the value that the run was started with, or choose another train.run");
}

// A run's log has steps, and its devices have no state.
Status without_state(const RunFolder& folder, base::StepNumber trained, const std::string& where) {
  return Status(
      ErrorCode::kNotFound,
      fmt::format("train.run: {} has trained {} step{}, but {}", folder.path(), trained,
                  trained == 1 ? "" : "s", where),
      fmt::format("Name the devices that it was trained on (see {}), or start a new run in "
                  "another train.run",
                  folder.file(kRecipeFile)));
}

/// Half of what is free on each device is left alone: by what nobody has asked for.
bool have_room_to_spare(const engine::DeviceSources& sources, uint64_t spool_bytes) {
  return std::ranges::all_of(sources, [&](const auto& source) {
    const Result<uint64_t> free_bytes = source->capacity_bytes();
    return !free_bytes.ok() || spool_bytes / sources.size() <= *free_bytes / 2;
  });
}

/// Deletes the state of one run, and nothing that is of another.
Status discard_run(const engine::DeviceSources& sources, const storage::RunId& run) {
  for (const auto& source : sources) {
    SI_ASSIGN_OR_RETURN(const auto state, source->peek());
    if (state && state->run == run) SI_RETURN_IF_ERROR(source->erase());
  }
  return Status();
}

/// A run goes on with the data that it was started with.
Status check_same_data(const Position& there, const Position& here) {
  if (there.corpus != here.corpus) {
    return Status(ErrorCode::kMismatch,
                  "data.paths: the training text is not the text that the run was started with",
                  "Use the same files, data.suffixes and data.validation_share, or choose "
                  "another train.run");
  }
  if (there.sequence != here.sequence) {
    return different("data.sequence", std::to_string(here.sequence),
                     std::to_string(there.sequence));
  }
  if (there.data_seed != here.data_seed) {
    return different("data.seed", std::to_string(here.data_seed), std::to_string(there.data_seed));
  }
  return Status();
}

Result<RunStart> choose_start(const Job& job) {
  const bool chosen = !job.choice.take_over.empty() || !job.choice.start_over.empty();
  if (job.options.train.where != OptimizerWhere::kMemory) {
    std::vector<std::string> devices;
    for (const auto& device : job.updater.devices) devices.push_back(device.path);
    std::optional<engine::FoundRun> found = engine::find_run(sources_of(job.ranks, job.updater));
    // Only rank 0 has a folder to look into, and needs more than this.
    RunStart of_devices;
    of_devices.found = found;
    of_devices.discard = !job.choice.start_over.empty();
    Result<RunStart> start = std::move(of_devices);
    if (job.ranks.first()) {
      start = choose_run(job.options.train.run, devices, std::move(found), job.choice);
    }
    SI_RETURN_IF_ERROR(job.ranks.all_ok("choice of a run", start.status()));
    return start;
  }
  if (!chosen) return RunStart{};
  return Status(
      ErrorCode::kInvalidArgument,
      "--take-over and --start-over are for states on devices, but optimizer.where is \"memory\"",
      "To start over, choose another train.run");
}

}  // namespace

/// Bytes for all ranks, in the engine's numbers, of which the plan gives `bytes` to the rank with
/// the most devices.
uint64_t TorchTrainer::bytes_of_all(const engine::UpdaterOptions& options, uint64_t bytes) const {
  if (ranks_.alone()) return bytes;
  return base::divide_up(bytes, device_sharing(options, ranks_.world()).most) *
         options.devices.size();
}

engine::UpdaterOptions TorchTrainer::planned(engine::UpdaterOptions options) const {
  if (!plan_.streams) return options;
  options.stream_weights = targets_.empty();
  options.gradient_budget_bytes = bytes_of_all(options, plan_.gradient_memory_bytes);
  if (plan_.spool_bytes == 0) return options;
  // An entry of the spool lies on one device whole: each may have less room than that left over.
  const uint64_t largest = std::max(plan_.input_bytes, plan_.saved_bytes);
  options.spool_bytes =
      ranks_.world() * (plan_.spool_bytes + device_sharing(options, ranks_.world()).most *
                                                base::round_up(largest, base::kIoAlignment));
  return options;
}

// Opens the devices with a spool where they have room for what autograd keeps; only who asks for it
// gets an error.
Result<std::unique_ptr<engine::Updater>> TorchTrainer::open_with_spool(
    engine::UpdaterOptions options, base::StepNumber trained) {
  if (plan_.measures_offload &&
      !have_room_to_spare(sources_of(ranks_, options), bytes_of_all(options, plan_.spool_bytes))) {
    give_up_offload();
  }
  base::Result<std::unique_ptr<engine::Updater>> opened =
      engine::Updater::open(planned(options), space_);
  if (opened.status().code() == ErrorCode::kNoSpace && plan_.measures_offload) {
    give_up_offload();
    return open_with_spool(std::move(options), trained);
  }
  if (opened.status().code() == ErrorCode::kNotFound && trained > 0) {
    return without_state(run_.folder, trained, opened.status().what());
  }
  return opened;
}

void TorchTrainer::give_up_offload() {
  run_.notices.push_back(
      fmt::format("activations: not offloaded, the devices do not have {} to spare",
                  base::format_bytes(plan_.saved_spool_bytes)));
  plan_ = plan::without_offload(std::move(plan_));
}

/// Whether the new run will begin that takes the place of `old`: what can be known is known before
/// anything of the old one is erased.
Status TorchTrainer::check_beginning(const Job& job, const engine::UpdaterOptions& options,
                                     const storage::RunId& old) {
  Status possible = engine::check_new_run(planned(options), space_, old);
  if (possible.code() == ErrorCode::kNoSpace && plan_.measures_offload) {
    give_up_offload();
    possible = engine::check_new_run(planned(options), space_, old);
  }
  SI_RETURN_IF_ERROR(possible);
  if (source_.config_json.empty()) return Status();
  SI_RETURN_IF_ERROR(
      ranks_.all_ok("files of the model", read_model_files(source_.folder).status()));
  SI_RETURN_IF_ERROR(open_frozen_weights(job));
  if (!targets_.empty() || options_.model.init == ModelInit::kRandom) return Status();
  const auto read_all = [&]() -> Status {
    SI_ASSIGN_OR_RETURN(const model::WeightFiles files,
                        model::WeightFiles::open(options_.model.from, source_.architecture));
    return files.digest(job.progress).status();
  };
  return ranks_.all_ok("the model's weights", read_all());
}

Status TorchTrainer::open_devices(const Job& job, const RunStart& run_start) {
  SI_ASSIGN_OR_RETURN(const base::StepNumber logged, run_.logged_step(ranks_));
  const base::StepNumber trained = run_start.discard ? 0 : logged;
  engine::UpdaterOptions options = job.updater;
  options.collectives = ranks_.collectives();
  options.stages = spans_of_stages();
  options.tables = tables_of(options_, source_.architecture, options.rule);
  if (!ranks_.alone()) share_cores(options, ranks_);
  options.where = options_.train.where == OptimizerWhere::kHost ? engine::UpdateWhere::kHost
                                                                : engine::UpdateWhere::kDevice;
  if (run_start.discard) {
    Status possible = check_beginning(job, options, run_start.found->run);
    if (!possible.ok()) return std::move(possible).with_context("nothing was erased");
    SI_RETURN_IF_ERROR(discard_run(sources_of(ranks_, options), run_start.found->run));
    SI_ASSIGN_OR_RETURN(const std::string aside, run_.folder.set_log_aside());
    if (!aside.empty()) run_.notices.push_back("log: that of the run before is in " + aside);
  }
  // A run that has trained has its state somewhere: it is not begun anew on empty devices.
  options.create = trained == 0;
  SI_ASSIGN_OR_RETURN(updater_, open_with_spool(std::move(options), trained));
  // From here on the devices are locked.
  SI_ASSIGN_OR_RETURN(const auto run, engine::run_made_for(sources_of(ranks_, job.updater)));
  if (!run) {
    return Status(ErrorCode::kIo, "a device that was just opened cannot be read",
                  "Check it with smartinf fsck",
                  base::ErrorPlace{run_.record.devices.front(), {}, {}, 0});
  }
  const bool expected = !run_start.discard && run_start.found;
  if (!updater_->fresh() && !(expected && *run == run_start.found->run)) {
    return Status(ErrorCode::kBusy, "another process has just started a run on the devices",
                  "Run the command again to see which run it is");
  }
  run_.record.run = run->to_string();
  return Status();
}

/// First weights of what is trained.
Result<engine::Updater::FillWeights> TorchTrainer::first_weights() const {
  using Fill = engine::Updater::FillWeights;
  if (!targets_.empty()) {
    return Fill([this](uint64_t first, std::span<float> out) {
      model::fill_lora(targets_, options_.lora.rank, first, out, random_uniform,
                       options_.train.seed);
      return Status();
    });
  }
  if (source_.config_json.empty() || options_.model.init == ModelInit::kRandom) {
    const model::Architecture whole = source_.architecture.whole();
    SI_ASSIGN_OR_RETURN(plan::ParameterSpace made, model::make_parameter_space(whole));
    const auto space = std::make_shared<const plan::ParameterSpace>(std::move(made));
    const InitialWeights initial(whole, *space, options_.train.seed);
    return Fill([space, initial](uint64_t first, std::span<float> out) {
      initial.fill(first, out);
      return Status();
    });
  }
  SI_ASSIGN_OR_RETURN(model::WeightFiles opened,
                      model::WeightFiles::open(options_.model.from, source_.architecture));
  const auto files = std::make_shared<const model::WeightFiles>(std::move(opened));
  return Fill([files](uint64_t first, std::span<float> out) { return files->read(first, out); });
}

namespace {

/// First weights of the table, some rows at a time.
Status fill_rows(engine::RowTables& tables, const engine::Updater::FillWeights& fill) {
  const engine::TableOptions& table = tables.table(0);
  const uint64_t at_once = std::max<uint64_t>(1, 4 * base::kMiB / (table.dim * sizeof(float)));
  std::vector<int64_t> rows;
  std::vector<float> weights;
  for (uint64_t first = 0; first < table.rows; first += rows.size()) {
    rows.resize(std::min(at_once, table.rows - first));
    std::iota(rows.begin(), rows.end(), static_cast<int64_t>(first));
    weights.resize(rows.size() * table.dim);
    SI_RETURN_IF_ERROR(fill(first * table.dim, weights));
    SI_RETURN_IF_ERROR(tables.put(0, rows, weights));
  }
  return Status();
}

}  // namespace

Status TorchTrainer::initialize(const Job& job) {
  const auto begin = [&]() -> Status {
    // Before there is a state that the folder would not know.
    if (!in_memory_) SI_RETURN_IF_ERROR(run_.folder.keep_run_record(run_.record));
    if (!source_.config_json.empty() && ranks_.first()) {
      SI_RETURN_IF_ERROR(keep_model_files(source_.folder, run_.folder.path()));
    }
    return Status();
  };
  const auto fill_devices = [&]() -> Status {
    const Result<engine::Updater::FillWeights> fill = first_weights();
    SI_RETURN_IF_ERROR(ranks_.all_ok("first weights", fill.status()));
    const uint64_t of_table = source_.architecture.table_elements();
    uint64_t done = 0;
    const auto fill_and_report = [&](uint64_t first, std::span<float> out) -> Status {
      SI_RETURN_IF_ERROR((*fill)(first, out));
      done += out.size();
      return job.progress ? job.progress(4 * done, 4 * (of_table + space_.count())) : Status();
    };
    if (of_table > 0) SI_RETURN_IF_ERROR(fill_rows(*updater_->tables(), fill_and_report));
    return updater_->initialize(
        [&](uint64_t first, std::span<float> out) {
          return fill_and_report(of_table + first, out);
        },
        run_.position.to_json());
  };
  Status begun = ranks_.all_ok("begin of a run", begin());
  if (begun.ok()) begun = fill_devices();
  if (begun.ok()) return begun;
  updater_.reset();
  // Others may have step 0 already. What is there is completed or begun anew by the next start.
  if (!ranks_.alone()) return begun;
  if (!in_memory_) {
    for (const auto& source :
         engine::sources_at(run_.record.devices, storage::RingKind::kAuto, job.updater.remote)) {
      if (const Status erased = source->erase(); !erased.ok()) {
        base::log(base::LogLevel::kWarning, erased.to_string());
      }
    }
  }
  remove_model_files(run_.folder.path());
  run_.folder.remove_run_record();
  return begun;
}

/// Opens the weights that stay as they are beside adapters.
Status TorchTrainer::open_frozen_weights(const Job& job) {
  if (targets_.empty() || weights_.frozen()) return Status();
  const model::Architecture& architecture = source_.architecture;
  SI_ASSIGN_OR_RETURN(model::WeightFiles files,
                      model::WeightFiles::open(options_.model.from, architecture));
  const auto digest = files.digest(job.progress);
  SI_RETURN_IF_ERROR(ranks_.all_ok("weights beside adapters", digest.status()));
  run_.position.base = *digest;
  SI_RETURN_IF_ERROR(check_same_files("model.from", run_.position.base, ranks_));
  if (updater_ != nullptr && !updater_->fresh()) {
    SI_ASSIGN_OR_RETURN(const Position there, Position::from_json(updater_->client_metadata()));
    SI_RETURN_IF_ERROR(check_adapter_base(there, files, run_.position.base));
  }
  weights_.freeze(std::make_unique<FrozenWeights>(std::move(files),
                                                  model::make_units(architecture).back().end()));
  return Status();
}

Status TorchTrainer::start(const Job& job, const RunStart& run_start) {
  const TrainOptions& train = options_.train;
  if (!job.teacher_logits.empty()) {
    SI_ASSIGN_OR_RETURN(teacher_logits_, StoredLogits::open(job.teacher_logits));
    SI_CHECK(teacher_logits_->micro_batches() >= train.steps * train.accumulation,
             "logits of fewer micro batches than the run has");
  }
  for (const engine::DeviceOptions& device : job.updater.devices) {
    run_.record.devices.push_back(device.path);
  }
  std::error_code error;
  SI_ASSIGN_OR_RETURN(
      const std::string folder,
      ranks_.from_first(std::filesystem::absolute(run_.folder.path(), error).lexically_normal()));
  run_.position = {0, options_.data.seed, options_.data.sequence, corpus_.digest(), 0, 0, folder};
  if (train.where == OptimizerWhere::kMemory) {
    in_memory_ = true;
    SI_ASSIGN_OR_RETURN(updater_,
                        open_memory_updater(job.updater.rule, space_, run_.folder.path()));
  } else {
    SI_RETURN_IF_ERROR(open_devices(job, run_start));
  }
  SI_ASSIGN_OR_RETURN(const base::StepNumber logged, run_.logged_step(ranks_));
  if (updater_->fresh() && logged > 0)
    return without_state(run_.folder, logged, "no state is there");
  ring_ = job.updater.ring;
  if (job.updater.compress.on()) {
    compression_ = compress::describe_compression(job.updater.compress);
    const uint32_t stages = pipeline_.on() ? pipeline_.stages.count() : 1;
    const uint32_t compressed = std::min(stages, job.updater.compress.stages);
    if (!ranks_.alone()) {
      compression_ =
          compressed == 0
              ? "dense, because compressing them is not worth it (compress.stages)"
              : fmt::format("{}to each other replicas send {}",
                            compressed < stages
                                ? fmt::format("of the first {} of {} stages ", compressed, stages)
                                : "",
                            compression_);
    }
  }

  SI_RETURN_IF_ERROR(open_frozen_weights(job));
  if (updater_->fresh()) {
    SI_RETURN_IF_ERROR(initialize(job));
  } else {
    SI_ASSIGN_OR_RETURN(const Position there, Position::from_json(updater_->client_metadata()));
    SI_RETURN_IF_ERROR(check_same_data(there, run_.position));
    run_.position.windows = there.windows;
  }
  run_.step = updater_->committed_step();
  if (job.updater.compress.on() && job.updater.compress.residual_on_devices()) {
    residual_ = ResidualSchedule(job.updater.compress.residual_every, run_.step);
  }
  // Where nothing is trained the folder stays as it is.
  Status kept;
  if (run_.step < train.steps) {
    kept = run_.keep_history(job.recipe, run_start, /*has_state=*/!in_memory_, logged);
  } else if (run_.step == train.steps) {
    kept = run_.folder.keep_log_until(run_.step).status();
  }
  SI_RETURN_IF_ERROR(ranks_.all_ok("the run's folder", kept));

  if (train.overlap == Overlap::kEarly) {
    Status possible = updater_->early_update_possible();
    if (!possible.ok()) {
      return Status(possible.code(),
                    fmt::format("optimizer.overlap is \"early\", but {}", possible.what()),
                    "Set it to \"auto\" or \"late\"");
    }
  }
  SI_RETURN_IF_ERROR(make_pass(job.updater.gradient_type));
  traffic_ = updater_->traffic();
  return Status();
}

std::vector<plan::RankSpan> TorchTrainer::spans_of_stages() const {
  const model::Architecture& model = source_.architecture;
  const std::vector<plan::Unit> units = model::make_units(model);
  if (!pipeline_.on()) return {};
  if (targets_.empty()) {
    return plan::rank_spans(pipeline_.stages, units,
                            model.tied_head ? uint64_t{model.vocabulary} * model.width : 0);
  }
  std::vector<plan::RankSpan> spans;  // of adapters, which lie in the order of layers
  for (const model::LoraTarget& target : targets_) {
    const auto unit = std::ranges::find_if(units, [&](const plan::Unit& one) {
      return target.layer >= one.first_layer && target.layer < one.first_layer + one.layers;
    });
    const uint32_t first = pipeline_.stages.of_unit(static_cast<uint32_t>(unit - units.begin())) *
                           pipeline_.stages.replicas;
    const uint64_t end = target.first_b + options_.lora.rank * target.out;
    if (spans.empty() || spans.back().first_rank != first) {
      spans.push_back({target.first_a, 0, first, pipeline_.stages.replicas});
    }
    spans.back().count = end - spans.back().first;
  }
  return spans;
}

std::optional<UnitPass::Stage> TorchTrainer::make_stage() const {
  if (!pipeline_.on()) return std::nullopt;
  const uint32_t stages = pipeline_.stages.count();
  const uint32_t stage = pipeline_.stage();
  StageLink::Ends ends;
  for (uint32_t one = 0; one < stages; ++one) {
    ends.column.push_back(one * replicas() + pipeline_.stages.replica(ranks_.rank()));
  }
  const bool looped = pipeline_.stages.chunks > 1;
  const bool folds = ends.folds = pipeline_.stages.folds;
  const bool ring = looped || folds;
  if (stage > 0 || ring) ends.before = ends.column[(stage + stages - 1) % stages];
  if (stage + 1 < stages || ring) ends.behind = ends.column[(stage + 1) % stages];
  UnitPass::Stage made;
  for (uint32_t chunk = 0; chunk < pipeline_.chunks(); ++chunk) {
    made.chunks.push_back({pipeline_.begin(chunk), pipeline_.end(chunk)});
  }
  const uint64_t count = mine_.size();
  made.looped = looped;
  made.actions = looped ? plan::looped_actions(pipeline_.chunks(), count)
                        : plan::pipeline_actions(stages, stage, count, pipeline_.ahead, folds);
  // A stage in chunks gets and sends the next chunk's messages while it computes this one.
  made.at_once = looped ? count : 1 + pipeline_.ahead;
  const uint64_t sent =
      looped ? count : plan::pipeline_in_flight(stages, 0, count, pipeline_.ahead, folds);
  made.link =
      std::make_unique<StageLink>(ranks_.collectives(), std::move(ends), weights_.tensor_options(),
                                  sent, options_.ranks.compression);
  return made;
}

Status TorchTrainer::make_pass(base::DataType gradient_type) {
  constexpr uint64_t kSmallPages = 64 * base::kKiB;
  // Where much of what a layer makes is dropped while small parts of it stay; else those of which
  // there is one for each token, so that with few tokens they do not lie in a heap between others.
  const bool keeps_beside_adapters = options().lora.on() && !plan_.recompute;
  const uint64_t of_tokens = uint64_t{options_.train.micro_batch} * options_.data.sequence *
                             source_.architecture.kv_width() *
                             base::data_type_bytes(weights_.type());
  give_pages_to_tensors_of(plan_.saved_bytes > 0 || keeps_beside_adapters
                               ? kSmallPages
                               : std::clamp(of_tokens, kSmallPages, base::kMiB));
  std::vector<uint32_t> stage_units;
  if (pipeline_.on()) stage_units = pipeline_.units(source_.architecture.tied_head);
  SI_RETURN_IF_ERROR(weights_.load(
      *updater_, {source_.architecture, options_.data.sequence, targets_, options_.lora,
                  plan_.placement, /*several_ranks=*/!ranks_.alone(), stage_units}));
  std::optional<SpooledBuffers> inputs;
  std::optional<SpooledBuffers> saved;
  Status spools;
  if (plan_.inputs_spooled + plan_.saved_bytes > 0 && updater_->spool() == nullptr) {
    spools = Status(ErrorCode::kUnsupported,
                    "activations are to lie on devices, but none of this rank's is in use",
                    "Set memory.activations = \"recompute\", or start fewer ranks");
  }
  SI_RETURN_IF_ERROR(ranks_.all_ok("spool", spools));
  if (plan_.inputs_spooled > 0) {
    inputs.emplace(*updater_->spool(), weights_.copy_streams(), plan_.inputs_in_memory,
                   plan_.input_bytes);
  }
  if (plan_.saved_bytes > 0) {
    saved.emplace(*updater_->spool(), weights_.copy_streams(),
                  std::max(plan_.saved_in_memory, SpooledBuffers::kOnTheirWay), plan_.saved_bytes);
  }
  const uint64_t offloaded = (weights_.model().units().size() - 2) * mine_.size();
  if (plan_.measures_offload) {
    SI_ASSIGN_OR_RETURN(const SpoolRates rates, measure_spool(*updater_->spool(), saved->memory()));
    offload_choice_.emplace(
        OffloadChoice::Entries{offloaded, saved->in_memory(), saved->bytes_max(), rates});
  }
  pass_ = std::make_unique<UnitPass>(weights_.model(), weights_.stream(), weights_.adapters(),
                                     plan_.recompute, UnitInputs(std::move(inputs)),
                                     std::move(saved), make_stage());
  pass_->offload(offload_choice_ ? offload_choice_->offloaded() : offloaded);
  std::unique_ptr<GradientCopies> copies;
  if (!weights_.accelerator().is_cpu() && ranks_.alone()) {
    copies = std::make_unique<GradientCopies>(
        weights_.copy_streams(), scalar_type(gradient_type),
        plan::gradient_copies_elements(training_model(source_.architecture, options_, space_),
                                       weights_.model().units()));
  }
  gradients_.emplace(*updater_,
                     StepGradients::Options{.type = gradient_type,
                                            .alone = ranks_.alone(),
                                            .micro_batches = options_.train.accumulation,
                                            .mine = mine_,
                                            .leaf_type = weights_.type(),
                                            .may_wait = plan_.gradients_wait},
                     std::move(copies), [this] { return begin_step(); });
  return Status();
}

namespace {

/// A run before its folder and its devices are looked at.
struct Prepared {
  Options options;
  ModelSource source;
  std::vector<model::LoraTarget> targets;
  Corpus corpus;
  GroupedParameters parameters;
  torch::Device accelerator;
  plan::TrainingPlan plan;
  plan::Pipeline pipeline;
  std::vector<std::string> stage_lines;  // for people; empty without a pipeline
};

/// Before there is a state that could not be gone on with. The devices' own reasons come later.
Status check_early(const Job& job) {
  if (job.options.train.overlap != Overlap::kEarly) return Status();
  std::string_view why;
  if (!job.ranks.alone()) why = "several ranks do not update before all gradients are there";
  if (job.updater.compress.on())
    why = "an early update needs whole gradients, and these are compressed";
  if (job.updater.durability == storage::Durability::kNone) {
    why = "with engine.durability \"none\" an update overwrites the committed state";
  }
  if (why.empty()) return Status();
  return Status(ErrorCode::kUnsupported, fmt::format("optimizer.overlap is \"early\", but {}", why),
                "Set it to \"auto\" or \"late\"");
}

/// What the devices of this rank's stage have of the state of a run that goes on.
Result<std::vector<plan::Subgroup>> held_by_stage(const Job& job, const plan::Pipeline& pipeline) {
  std::vector<plan::Subgroup> held;
  engine::UpdaterOptions own = job.updater;
  if (!job.choice.start_over.empty()) own.devices.clear();
  std::erase_if(own.devices, [&](const auto& one) { return one.rank != job.ranks.rank(); });
  for (const auto& source : engine::local_sources(own)) {
    const auto state = source->peek();
    if (!state.ok() || !*state || !(*state)->initialized) continue;
    const auto snapshot = source->snapshot(storage::ReaderLock::kLeave);
    if (!snapshot.ok()) continue;
    for (const storage::StoredSubgroup& one : (*snapshot)->layout().subgroups) {
      held.push_back({one.id, one.first_element, one.count});
    }
  }
  const std::vector<uint64_t> count{held.size()};
  SI_ASSIGN_OR_RETURN(const std::vector<uint64_t> counts, job.ranks.all<uint64_t>(count));
  const uint64_t most = *std::ranges::max_element(counts);
  held.resize(most);
  SI_ASSIGN_OR_RETURN(const std::vector<plan::Subgroup> all, job.ranks.all<plan::Subgroup>(held));
  held.clear();
  for (uint32_t rank = 0; rank < job.ranks.world(); ++rank) {
    if (pipeline.stages.of_rank(rank) != pipeline.stage()) continue;
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(rank * most);
    held.insert(held.end(), first, first + static_cast<std::ptrdiff_t>(counts[rank]));
  }
  return held;
}

/// Stages whose weights come from the devices: of the fewest chunks that all ranks have memory for,
/// or of ranks.chunks.
Result<plan::TrainingPlan> plan_chunks(const Job& job, const Options& options,
                                       const model::Architecture& model,
                                       const plan::ParameterSpace& space,
                                       const MemoryLimits& limits, plan::Pipeline& pipeline) {
  const uint32_t given = options.ranks.chunks;
  const auto units = static_cast<uint32_t>(model::make_units(model).size());
  const uint32_t most = given > 1 ? given : std::max(2u, units / options.ranks.pipeline);
  std::vector<plan::Stages> stages;
  std::vector<Result<plan::TrainingPlan>> plans;
  struct Outcome {
    uint64_t fits = 0;
    uint64_t gradient_bytes = 0;
  };
  std::vector<Outcome> mine;
  for (uint32_t chunks = given > 1 ? given : 2; chunks <= most; ++chunks) {
    SI_ASSIGN_OR_RETURN(pipeline.stages, divide_stages(model, options, job.ranks.world(), chunks));
    stages.push_back(pipeline.stages);
    plans.push_back(
        plan_run(model, options, job.updater, space, limits, job.ranks.world(), pipeline));
    const auto& plan = plans.back();
    mine.push_back(plan.ok() ? Outcome{1, plan->gradient_memory_bytes} : Outcome{});
  }
  SI_ASSIGN_OR_RETURN(const std::vector<Outcome> all, job.ranks.all<Outcome>(mine));
  for (size_t i = 0; i < plans.size(); ++i) {
    uint64_t fit = 0;
    uint64_t gradient_bytes = ~uint64_t{0};
    for (uint32_t rank = 0; rank < job.ranks.world(); ++rank) {
      const Outcome& of_rank = all[rank * plans.size() + i];
      fit += of_rank.fits;
      gradient_bytes = std::min(gradient_bytes, of_rank.gradient_bytes);
    }
    if (fit < job.ranks.world()) continue;
    pipeline.stages = stages[i];
    plans[i]->gradient_memory_bytes = gradient_bytes;  // one budget for all devices
    return std::move(plans[i]);
  }
  SI_RETURN_IF_ERROR(job.ranks.all_ok("plan of a stage", plans.back().status()));
  return Status(ErrorCode::kOutOfMemory, "no number of chunks suits the memory of all ranks",
                "Set ranks.chunks, allow more memory, or start more ranks");
}

/// Divides the layers as equally as all ranks have memory for what stays in it; false: it is not
/// enough for any division.
Result<bool> divide_by_memory(const Job& job, const Options& options,
                              const model::Architecture& model, const plan::ParameterSpace& space,
                              const MemoryLimits& limits, plan::Pipeline& pipeline) {
  const std::vector<plan::Unit> units = model::make_units(model);
  plan::Stages& stages = pipeline.stages;
  const auto count = static_cast<uint32_t>(units.size()) - (stages.folds ? 1 : 0);
  const auto fits = [&](uint32_t first, uint32_t end) {
    plan::Pipeline tried = pipeline;
    tried.ahead = options.ranks.chunks == 1 ? 0 : plan::kPipelineAheadMax;  // chunks may do better
    for (uint32_t stage = 0; stage <= pipeline.stage(); ++stage) tried.stages.begin[stage] = first;
    tried.stages.begin[pipeline.stage() + 1] = end;
    return plan_run(model, options, job.updater, space, limits, job.ranks.world(), tried).ok();
  };
  std::vector<uint32_t> mine;  // units from each one on
  for (uint32_t first = 0; first < count; ++first) {
    uint32_t least = 0, most = count - first;  // more units need more
    while (least < most) {
      const uint32_t middle = most - (most - least) / 2;
      const bool has = fits(first, first + middle);
      (has ? least : most) = has ? middle : middle - 1;
    }
    mine.push_back(least);
  }
  SI_ASSIGN_OR_RETURN(const std::vector<uint32_t> all, job.ranks.all<uint32_t>(mine));
  std::vector<uint32_t> begins = plan::divide_units_by_memory(
      stage_costs(units, model, options), stages.count(), stages.folds,
      [&](uint32_t stage, uint32_t first) {
        uint32_t least = count;
        for (uint32_t replica = 0; replica < stages.replicas; ++replica) {
          least = std::min(least, all[(stage * stages.replicas + replica) * count + first]);
        }
        return least;
      });
  if (begins.empty()) return false;
  stages.begin = std::move(begins);
  return true;
}

/// What stays in memory of a stage, on every rank for itself: as many micro batches under way as
/// all have memory for, before anything is computed again for it.
Result<plan::TrainingPlan> plan_stage(const Job& job, const Options& options,
                                      const model::Architecture& model,
                                      const plan::ParameterSpace& space, const MemoryLimits& limits,
                                      plan::Pipeline& pipeline) {
  using enum plan::AheadCost;
  std::vector<Result<plan::TrainingPlan>> plans;
  bool resident = false;
  const auto plan_all = [&]() -> Status {
    plans.clear();
    std::vector<plan::AheadCost> mine;
    for (uint32_t ahead = 0; ahead <= plan::kPipelineAheadMax; ++ahead) {
      pipeline.ahead = ahead;
      plans.push_back(
          plan_run(model, options, job.updater, space, limits, job.ranks.world(), pipeline));
      mine.push_back(!plans.back().ok() ? kDoesNotFit
                                        : (plans.back()->recompute ? kRecomputes : kKeeps));
    }
    SI_ASSIGN_OR_RETURN(const auto all, job.ranks.all<plan::AheadCost>(mine));
    pipeline.ahead = plan::most_ahead(all);
    resident = true;
    for (size_t last = plan::kPipelineAheadMax; last < all.size(); last += plans.size()) {
      resident = resident && all[last] != kDoesNotFit;
    }
    return Status();
  };
  SI_RETURN_IF_ERROR(plan_all());
  if (!resident && options.ranks.split.empty() && options.ranks.chunks < 2) {
    SI_ASSIGN_OR_RETURN(const bool divided,
                        divide_by_memory(job, options, model, space, limits, pipeline));
    if (divided) SI_RETURN_IF_ERROR(plan_all());
  }
  const bool may_loop = options.ranks.chunks != 1 && options.ranks.split.empty() &&
                        !options.ranks.compression.on() &&
                        options.memory.activations != plan::Activations::kKeep;
  if (options.ranks.chunks > 1 || (!resident && may_loop)) {
    return plan_chunks(job, options, model, space, limits, pipeline);
  }
  SI_RETURN_IF_ERROR(job.ranks.all_ok("plan of a stage", plans[pipeline.ahead].status()));
  return std::move(plans[pipeline.ahead]);
}

Result<std::vector<std::string>> describe_stages(const plan::Pipeline& pipeline,
                                                 const plan::TrainingPlan& plan,
                                                 const model::Architecture& model,
                                                 const Options& options, const Ranks& ranks) {
  const std::vector<plan::Unit> units = model::make_units(model);
  std::string what = pipeline.begin(0) == 0 ? "the embedding" : "";
  for (uint32_t chunk = 0; chunk < pipeline.chunks(); ++chunk) {
    uint32_t first = 0;
    uint32_t layers = 0;
    for (uint32_t unit = pipeline.begin(chunk); unit < pipeline.end(chunk); ++unit) {
      if (layers == 0) first = units[unit].first_layer;
      layers += units[unit].layers;
    }
    if (layers == 0) continue;
    what += fmt::format("{}layers {} to {}", what.empty() ? "" : ", ", first, first + layers - 1);
  }
  if (pipeline.has_head()) what += what.empty() ? "the head" : ", the head";
  const uint64_t batches = base::divide_up(options.train.accumulation, pipeline.stages.replicas);
  const uint32_t chunks = pipeline.stages.chunks;
  const uint64_t in_flight =
      chunks > 1 ? batches
                 : plan::pipeline_in_flight(pipeline.stages.count(), pipeline.stage(), batches,
                                            pipeline.ahead, pipeline.stages.folds);
  std::string mine = fmt::format(
      "stage {}, rank {}: {}; {}{} micro batch{} under way{}", pipeline.stage(), ranks.rank(), what,
      chunks > 1 ? fmt::format("{} chunks by turns; ", chunks) : "", in_flight,
      in_flight == 1 ? "" : "es", plan.recompute ? ", computed again in backward" : "");
  for (const std::string& line : describe_plan(plan)) mine += "; " + line;
  return ranks.all_texts(std::move(mine));
}

Result<Prepared> prepare(const Job& job) {
  SI_RETURN_IF_ERROR(validate(job.options));
  SI_RETURN_IF_ERROR(check_early(job));
  give_tensors_their_own_pages();
  watch_saved_tensors();
  Options options = job.options;
  options.model = with_defaults(options.model);
  SI_RETURN_IF_ERROR(check_ranks(job.options, job.ranks));
  const uint32_t cores =
      std::max(1u, std::thread::hardware_concurrency() / job.ranks.local_world());
  at::set_num_threads(static_cast<int>(options.train.threads != 0 ? options.train.threads : cores));

  SI_ASSIGN_OR_RETURN(
      const torch::Device accelerator,
      choose_accelerator("train.accelerator", options.train.accelerator, job.ranks.local_rank()));
  if (!accelerator.is_cpu()) pin_what_is_asked_for();
  SI_ASSIGN_OR_RETURN(Corpus corpus, Corpus::open(options.data));
  SI_RETURN_IF_ERROR(check_same_files("data.paths", corpus.digest(), job.ranks));
  if (options.train.epochs > 0) {
    const double windows = options.train.epochs * static_cast<double>(corpus.training().count());
    const double windows_of_step =
        static_cast<double>(options.train.micro_batch) * options.train.accumulation;
    options.train.steps =
        static_cast<uint64_t>(std::max(1.0, std::ceil(windows / windows_of_step)));
  }
  if (options.train.keep_best && corpus.validation().count() == 0) {
    return Status(ErrorCode::kInvalidArgument,
                  "train.keep_best is set, but no data is held out for validation",
                  "Set data.validation_share or data.validation_paths");
  }
  const bool from = !options.model.from.empty();
  if (!from && options.model.vocabulary == 0 && corpus.bytes()) {
    options.model.vocabulary = corpus.vocabulary();
  }
  SI_ASSIGN_OR_RETURN(ModelSource source, find_model(options));
  const model::Architecture& model = source.architecture;
  if (model.vocabulary == 0) {
    // An export has it from the recipe later, and the token files may be gone by then.
    return Status(
        ErrorCode::kInvalidArgument, "model.vocabulary is not given",
        fmt::format(
            "Set it to the number of tokens of the tokenizer{}",
            corpus.vocabulary() == 0 ? "" : fmt::format(", at least {}", corpus.vocabulary())));
  }
  if (model.vocabulary < corpus.vocabulary()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} is {}, and the text has {} tokens",
                              from ? "config.json: vocab_size" : "model.vocabulary",
                              model.vocabulary, corpus.vocabulary()),
                  from ? std::string("Tokenize the data with the model's own tokenizer")
                       : fmt::format("Choose at least {}{}", corpus.vocabulary(),
                                     corpus.bytes() ? ", or leave the key out" : ""));
  }
  std::vector<model::LoraTarget> targets;
  GroupedParameters parameters;
  if (options.lora.on()) {
    SI_ASSIGN_OR_RETURN(targets, model::lora_targets(model, options.lora));
    SI_ASSIGN_OR_RETURN(const auto adapters, model::lora_space(targets, options.lora.rank));
    SI_ASSIGN_OR_RETURN(parameters, group_parameters(adapters, options.train));
  } else {
    SI_ASSIGN_OR_RETURN(parameters, group_model(model, options.train));
  }
  const plan::ParameterSpace& space = parameters.space;  // of what is trained
  plan::TrainingPlan plan;
  plan::Pipeline pipeline{{{0, 0}, job.ranks.world()}, job.ranks.rank(), 0};
  std::vector<std::string> stage_lines;
  if (options.ranks.pipeline > 1) {
    SI_ASSIGN_OR_RETURN(pipeline.stages,
                        divide_stages(model, options, job.ranks.world(), /*chunks=*/1));
    MemoryLimits limits =
        memory_limits(options.memory, memory_of(accelerator), job.ranks.local_world());
    SI_ASSIGN_OR_RETURN(const MemoryLimits least, least_of_ranks(limits, job.ranks));
    if (pipeline.stages.replicas > 1) limits = least;  // replicas bring the same weights
    SI_ASSIGN_OR_RETURN(limits.held, held_by_stage(job, pipeline));
    SI_ASSIGN_OR_RETURN(plan, plan_stage(job, options, model, space, limits, pipeline));
    SI_ASSIGN_OR_RETURN(stage_lines, describe_stages(pipeline, plan, model, options, job.ranks));
  } else if (job.plan.has_value()) {
    plan = *job.plan;
  } else {
    SI_ASSIGN_OR_RETURN(const MemoryLimits limits,
                        least_of_ranks(memory_limits(options.memory, memory_of(accelerator),
                                                     job.ranks.local_world()),
                                       job.ranks));
    SI_ASSIGN_OR_RETURN(plan,
                        plan_run(model, options, job.updater, space, limits, job.ranks.world()));
  }
  return Prepared{std::move(options), std::move(source),     std::move(targets),
                  std::move(corpus),  std::move(parameters), accelerator,
                  std::move(plan),    std::move(pipeline),   std::move(stage_lines)};
}

}  // namespace

Result<std::vector<std::string>> Trainer::describe_memory(const Job& job) {
  return guarded("plan", [&]() -> Result<std::vector<std::string>> {
    SI_ASSIGN_OR_RETURN(const Prepared run, prepare(job));
    if (!run.stage_lines.empty()) return run.stage_lines;
    return describe_plan(run.plan);
  });
}

namespace {

/// Checks that checkpoints can be written there, by all ranks: each writes its devices' part of
/// one.
Status check_checkpoints(const Ranks& ranks, const std::string& folder) {
  Status checked;  // by one rank: it makes a file there and removes it
  if (ranks.first()) checked = engine::check_checkpoint_folder(folder);
  SI_RETURN_IF_ERROR(ranks.all_ok("the folder of checkpoints", checked));
  if (ranks.alone()) return Status();
  namespace fs = std::filesystem;
  const fs::path path(folder);
  SI_ASSIGN_OR_RETURN(const std::string name, ranks.from_first(fmt::format(
                                                  "ranks-{}", storage::make_run_id().to_string())));
  if (ranks.first() && !std::ofstream(path / name)) {
    checked = base::errno_status(errno, "checkpoints cannot be written here", folder);
  }
  SI_RETURN_IF_ERROR(ranks.all_ok("the folder of checkpoints", checked));
  std::error_code error;
  if (!fs::exists(path / name, error)) {
    checked = Status(ErrorCode::kInvalidArgument,
                     fmt::format("{} is another folder on this rank's machine", folder),
                     "Name one on a file system that all ranks' machines share");
  }
  const Status seen = ranks.all_ok("the folder of checkpoints", checked);
  if (ranks.first()) fs::remove(path / name, error);
  return seen;
}

Result<std::unique_ptr<Trainer>> open_trainer(const Job& job) {
  SI_ASSIGN_OR_RETURN(Prepared run, prepare(job));
  Options& options = run.options;
  SI_ASSIGN_OR_RETURN(const RunStart run_start, choose_start(job));
  Result<RunFolder> folder = RunFolder::left_alone(options.train.run);
  if (job.ranks.first()) folder = RunFolder::open(options.train.run);
  SI_RETURN_IF_ERROR(job.ranks.all_ok("the run's folder", folder.status()));
  if (options.checkpoint.folder.empty()) {
    options.checkpoint.folder = folder->file(kCheckpointsFolder);
  }
  // Checked up front, not after the first so many steps.
  if (options.checkpoint.every != 0 || options.train.keep_best) {
    Status checked = check_checkpoints(job.ranks, options.checkpoint.folder);
    if (!checked.ok()) return std::move(checked).with_context("checkpoint.folder");
  }
  auto trainer = std::make_unique<TorchTrainer>(
      std::move(options), std::move(run.source), std::move(run.targets), std::move(run.corpus),
      std::move(*folder), std::move(run.parameters), run.accelerator, std::move(run.plan),
      std::move(run.pipeline), std::move(run.stage_lines), job.ranks);
  SI_RETURN_IF_ERROR(trainer->start(job, run_start));
  return std::unique_ptr<Trainer>(std::move(trainer));
}

}  // namespace

Result<std::unique_ptr<Trainer>> Trainer::open(const Job& job) {
  auto opened = guarded("start", [&] { return open_trainer(job); });
  if (!opened.ok()) job.ranks.failed(opened.status());
  return opened;
}

}  // namespace smartinf::train
