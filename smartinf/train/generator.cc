#include "smartinf/train/generator.h"

#include <algorithm>
#include <filesystem>
#include <thread>
#include <utility>

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/memory.h"
#include "smartinf/engine/updater.h"
#include "smartinf/model/weight_files.h"
#include "smartinf/plan/inference_memory.h"
#include "smartinf/train/accelerator.h"
#include "smartinf/train/adapter_base.h"
#include "smartinf/train/adapters.h"
#include "smartinf/train/corpus.h"
#include "smartinf/train/decode.h"
#include "smartinf/train/embedding_table.h"
#include "smartinf/train/frozen_weights.h"
#include "smartinf/train/guarded.h"
#include "smartinf/train/memory_updater.h"
#include "smartinf/train/parameter_groups.h"
#include "smartinf/train/row_decoder.h"
#include "smartinf/train/run_folder.h"
#include "smartinf/train/scalar_type.h"
#include "smartinf/train/tensor_memory.h"
#include "smartinf/train/torch_decoder.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

constexpr const char* kLess = "Generate fewer tokens, of fewer or shorter prompts";

class TorchGenerator final : public Generator {
 public:
  TorchGenerator(GeneratorOptions options, ModelSource source, torch::Device accelerator)
      : options_(std::move(options)), source_(std::move(source)), accelerator_(accelerator) {}
  ~TorchGenerator() override {
    pass_.reset();
    if (stream_ != nullptr) stream_->close();
  }

  const ModelSource& source() const override { return source_; }
  TextForm text_form() const override { return train::text_form(options_.options, source_); }
  Status load(std::span<const uint64_t> tokens) override;
  Status load(const DecodeNeeds& needs) override {
    return guarded(
        "load the model", [&] { return load_all(needs); }, kLess);
  }
  uint64_t memory_left() const override { return memory_left_; }
  std::vector<std::string> describe() const override;
  Result<std::vector<std::pair<std::string, std::string>>> identity(
      const Progress& progress) const override;
  Status generate(std::span<const std::vector<int64_t>> prompts, const DecodeOptions& options,
                  const TakeToken& take) override {
    SI_ASSIGN_OR_RETURN(const std::unique_ptr<SequenceDecoder> by,
                        decoder({.store = nullptr, .stop = options.stop}));
    return decode(*by, prompts, options, take);
  }
  engine::KeyValueShape key_value_shape() const override {
    return train::key_value_shape(source_.architecture, type_ == base::DataType::kBf16
                                                            ? kernels::CacheFormat::kBf16
                                                            : kernels::CacheFormat::kF32);
  }
  Result<std::unique_ptr<SequenceDecoder>> decoder(DecoderOptions options) override;

 private:
  bool of_run() const { return !options_.options.train.run.empty(); }
  bool lora() const { return options_.options.lora.on(); }
  torch::TensorOptions weights_options() const {
    return torch::dtype(scalar_type(type_)).device(accelerator_);
  }
  uint32_t threads() const {
    return options_.threads != 0 ? options_.threads
                                 : std::max(1u, std::thread::hardware_concurrency());
  }
  Status load_all(const DecodeNeeds& needs);
  Status open_files();
  Status open_state();
  Status open_table();
  Status check_store(bool own_store) const;
  Status make_plan(DecodeNeeds needs);
  Result<plan::InferencePlan> plan_of(const DecodeNeeds& needs);
  uint64_t buffer_bytes() const;
  Status streams() const;

  // Destroyed last, as in TorchTrainer.
  struct TensorMemory {
    ~TensorMemory() { unmap_waiting_pages(); }
  } tensor_memory_;
  GeneratorOptions options_;
  ModelSource source_;
  const torch::Device accelerator_;
  const CopyStreams copies_{accelerator_};
  base::DataType type_ = base::DataType::kBf16;
  std::vector<model::LoraTarget> targets_;
  plan::ParameterSpace trained_;  // of the run
  uint64_t file_bytes_ = 0;       // of all weights in files
  uint64_t store_bytes_ = 0;      // of keys and values in memory
  plan::InferencePlan plan_;
  uint64_t memory_left_ = 0;
  std::unique_ptr<FrozenWeights> files_;
  std::unique_ptr<engine::Updater> updater_;
  std::optional<engine::StoredRun> stored_;  // with a table
  std::unique_ptr<EmbeddingTable> table_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<LayerStream> stream_;
  std::unique_ptr<Adapters> adapters_;
  std::unique_ptr<UnitPass> pass_;
};

/// The weights of a folder, or those beside adapters.
Status TorchGenerator::open_files() {
  const model::Architecture& architecture = source_.architecture;
  const std::string& folder = options_.options.model.from;
  SI_ASSIGN_OR_RETURN(model::WeightFiles files,
                      of_run()
                          ? open_adapter_base(folder, architecture, updater_->client_metadata())
                          : model::WeightFiles::open(folder, architecture));
  if (!of_run()) {
    type_ = options_.type.value_or(files.type() == base::DataType::kF32 ? base::DataType::kF32
                                                                        : base::DataType::kBf16);
  }
  file_bytes_ = files.bytes();
  files_ = std::make_unique<FrozenWeights>(std::move(files),
                                           model::make_units(architecture).back().end());
  return Status();
}

/// Opens the state that a run has trained.
Status TorchGenerator::open_state() {
  const Options& run = options_.options;
  type_ = options_.type.value_or(precision_data_type(run.train.precision));
  if (run.train.where == OptimizerWhere::kMemory) {
    SI_ASSIGN_OR_RETURN(updater_,
                        open_memory_updater(options_.updater.rule, trained_, run.train.run));
  } else {
    engine::UpdaterOptions options = options_.updater;
    options.create = false;
    options.state_cache_bytes = 0;
    options.stream_weights = !lora() && streams().ok();
    SI_ASSIGN_OR_RETURN(updater_,
                        engine::Updater::open(options, trained_,
                                              engine::local_sources(options, /*read_only=*/true)));
  }
  if (!updater_->fresh()) return open_table();
  return Status(ErrorCode::kNotFound, fmt::format("{} has trained nothing yet", run.train.run),
                "Train it first, or name the folder of a model");
}

/// The rows of an embedding that is a table.
Status TorchGenerator::open_table() {
  if (!source_.architecture.table_embedding) return Status();
  SI_ASSIGN_OR_RETURN(stored_, stored_table(*updater_));
  table_ =
      std::make_unique<EmbeddingTable>(*stored_->tables, source_.architecture, type_, accelerator_);
  return Status();
}

Status TorchGenerator::streams() const {
  if (!of_run() || lora()) return Status();
  if (options_.options.train.where == OptimizerWhere::kMemory) {
    return Status(ErrorCode::kUnsupported, "the run keeps its state in memory");
  }
  if (options_.updater.compress.on()) {
    return Status(ErrorCode::kUnsupported, "the run compresses gradients");
  }
  return Status();
}

/// Bytes of buffers of the weights' source.
uint64_t TorchGenerator::buffer_bytes() const {
  if (updater_ == nullptr) return 0;
  if (options_.options.train.where == OptimizerWhere::kMemory) return 16 * trained_.count();
  return updater_->memory_bytes();
}

Result<plan::InferencePlan> TorchGenerator::plan_of(const DecodeNeeds& needs) {
  const model::Architecture& model = source_.architecture;
  plan::InferenceMemoryInput input;
  input.units = model::make_units(model);
  input.value_bytes = static_cast<uint32_t>(base::data_type_bytes(type_));
  input.adapters = lora() ? trained_.count() : 0;
  input.cache_bytes = store_bytes_;
  const uint64_t longest = needs.longest;
  // Memory of the longest prompt, as if all of its tokens were there at once: inputs and results of
  // the largest products, some of the former in f32, and masks and scores where they are made.
  const uint64_t wide = uint64_t{model.mlp_width} * 4 * std::max(1u, model.experts_per_token) +
                        model.query_width() * 3 + model.kv_width() * 2 + model.width * uint64_t{8};
  input.activation_bytes = longest * wide * input.value_bytes;
  const bool masks =
      std::ranges::any_of(model.windows, [](uint32_t window) { return window != 0; });
  if (masks) input.activation_bytes += 2 * longest * longest;
  if (model.attention_softcap != 0) {
    input.activation_bytes += 12 * model.heads * longest * longest;
  }
  if (accelerator_.is_cpu()) {  // a step's rows, twice as they come and go; logits, and candidates
    const uint64_t heads = std::min<uint64_t>(needs.sequences, RowDecoder::kHeadRows);
    input.activation_bytes += RowDecoder::prompt_bytes(model, needs.sequences, longest, type_) +
                              8 * needs.sequences * wide + 4 * heads * model.vocabulary +
                              16 * model.vocabulary;
  } else {
    input.activation_bytes += 32 * needs.sequences * model.vocabulary;
  }
  const uint64_t resident = engine::resident_memory_bytes();
  constexpr uint64_t kLoadedLater = 96 * base::kMiB;
  input.source_bytes = buffer_bytes();
  input.process_bytes = std::max(resident, input.source_bytes) - input.source_bytes + kLoadedLater;
  const uint64_t subgroup =
      files_ != nullptr ? files_->subgroup_at(0).count : updater_->subgroup_elements();
  input.slot_padding_bytes = 2 * subgroup * input.value_bytes;
  input.streams = streams();
  input.host_limit_bytes =
      options_.host_bytes != 0 ? options_.host_bytes : resident + engine::available_memory_bytes();
  if (const AcceleratorMemory memory = memory_of(accelerator_); memory.unified) {
    input.process_bytes += memory.taken_bytes;
  } else if (memory.free_bytes > 0) {
    input.gpu = true;
    input.gpu_library_bytes = memory.taken_bytes;
    input.accelerator_limit_bytes =
        options_.accelerator_bytes != 0 ? options_.accelerator_bytes : memory.free_bytes;
  }
  Result<plan::InferencePlan> plan = plan::plan_inference(input);
  if (plan.ok()) memory_left_ = input.host_limit_bytes - plan->memory.host_bytes;
  return plan;
}

Status TorchGenerator::load(std::span<const uint64_t> tokens) {
  const auto store_bytes = [&](const engine::KeyValueShape& shape, uint64_t /*sequences*/) {
    uint64_t bytes = 0;
    for (const uint64_t one : tokens) {
      bytes += accelerator_.is_cpu()
                   ? engine::memory_store_bytes(shape, one)
                   : TensorCache::bytes(source_.architecture, one, base::data_type_bytes(type_));
    }
    return bytes;
  };
  return load({.sequences = tokens.size(),
               .longest = *std::ranges::max_element(tokens),
               .fewer = false,
               .own_store = false,
               .store_bytes = store_bytes});
}

Status TorchGenerator::check_store(bool own_store) const {
  if (!own_store || accelerator_.is_cpu()) return Status();
  return Status(ErrorCode::kUnsupported,
                "keys and values of a model on an accelerator are in its memory",
                "Add --accelerator cpu, or leave out --cache and --cache-format");
}

/// Of as many sequences as memory suffices for.
Status TorchGenerator::make_plan(DecodeNeeds needs) {
  while (true) {
    store_bytes_ = needs.store_bytes(key_value_shape(), needs.sequences);
    auto plan = plan_of(needs);
    if (plan.ok() || !needs.fewer || needs.sequences == 1) {
      SI_ASSIGN_OR_RETURN(plan_, std::move(plan));
      return Status();
    }
    needs.sequences /= 2;
  }
}

Status TorchGenerator::load_all(const DecodeNeeds& needs) {
  SI_RETURN_IF_ERROR(check_store(needs.own_store));
  const Options& options = options_.options;
  const model::Architecture& architecture = source_.architecture;
  SI_ASSIGN_OR_RETURN(const plan::ParameterSpace space, model::make_parameter_space(architecture));
  if (of_run()) {
    GroupedParameters parameters;
    if (lora()) {
      SI_ASSIGN_OR_RETURN(targets_, model::lora_targets(architecture, options.lora));
      SI_ASSIGN_OR_RETURN(trained_, model::lora_space(targets_, options.lora.rank));
      SI_ASSIGN_OR_RETURN(parameters, group_parameters(trained_, options.train));
    } else {
      SI_ASSIGN_OR_RETURN(parameters, group_model(architecture, options.train));
    }
    trained_ = std::move(parameters.space);
    SI_RETURN_IF_ERROR(open_state());
  }
  if (!of_run() || lora()) SI_RETURN_IF_ERROR(open_files());
  SI_RETURN_IF_ERROR(make_plan(needs));

  model_ =
      std::make_unique<Model>(architecture, space, weights_options(),
                              static_cast<uint32_t>(needs.longest), /*frozen=*/true, table_.get());
  engine::WeightSource* source = files_.get();
  if (source == nullptr) source = updater_.get();
  stream_ = std::make_unique<LayerStream>(*source, *model_, copies_, type_, plan_.placement);
  if (lora()) {
    adapters_ = std::make_unique<Adapters>(*updater_, targets_, options.lora, model_->units(),
                                           accelerator_, type_);
    SI_RETURN_IF_ERROR(adapters_->load());
  }
  SI_RETURN_IF_ERROR(stream_->load());
  pass_ = std::make_unique<UnitPass>(*model_, *stream_, adapters_.get(), /*recompute=*/true,
                                     UnitInputs(std::nullopt), std::nullopt);
  return Status();
}

Result<std::unique_ptr<SequenceDecoder>> TorchGenerator::decoder(DecoderOptions options) {
  return guarded("begin a decoder", [&]() -> Result<std::unique_ptr<SequenceDecoder>> {
    SI_RETURN_IF_ERROR(check_store(options.store != nullptr || options.format));
    if (!accelerator_.is_cpu()) {
      return std::unique_ptr<SequenceDecoder>(std::make_unique<TorchDecoder>(
          *model_, *pass_, weights_options(), std::move(options.stop)));
    }
    std::unique_ptr<engine::KeyValueStore> store = std::move(options.store);
    const std::shared_ptr<base::ThreadTeam> team = engine::make_decoder_team(threads());
    if (store == nullptr) {
      engine::KeyValueShape shape = key_value_shape();
      shape.attention.block.format = options.format.value_or(shape.attention.block.format);
      store = engine::make_memory_store(std::move(shape), store_bytes_, team);
    }
    return std::unique_ptr<SequenceDecoder>(std::make_unique<RowDecoder>(
        LoadedModel{*model_, *stream_, *pass_, adapters_.get(), type_}, std::move(store),
        RowDecoder::Options{team, options.store_works_beside, std::move(options.stop)}));
  });
}

Result<std::vector<std::pair<std::string, std::string>>> TorchGenerator::identity(
    const Progress& progress) const {
  std::string weights;
  if (of_run()) {
    const std::string& folder = options_.options.train.run;
    SI_ASSIGN_OR_RETURN(const std::optional<RunRecord> record, read_run_record(folder));
    weights = fmt::format("step {} of {}", updater_->committed_step(),
                          record ? record->run : std::filesystem::absolute(folder).string());
  } else {
    SI_ASSIGN_OR_RETURN(
        const model::WeightFiles files,
        model::WeightFiles::open(options_.options.model.from, source_.architecture));
    SI_ASSIGN_OR_RETURN(const uint64_t digest, files.digest(progress));
    weights = fmt::format("{:016x}", digest);
  }
  return std::vector<std::pair<std::string, std::string>>{
      {of_run() ? "the run" : "the digest of the weights", std::move(weights)},
      {"--type", std::string(base::enum_name(type_))},
      {"--accelerator", accelerator_.is_cpu() ? "cpu" : "cuda"}};
}

std::vector<std::string> TorchGenerator::describe() const {
  const model::Architecture& model = source_.architecture;
  const std::vector<plan::Unit> units = model::make_units(model);
  const uint64_t parameters = units.back().end();
  std::vector<std::string> lines;
  lines.push_back(fmt::format(
      "model: {}, {:.2f} million parameters{}, {} on {}{}", base::enum_name(model.family),
      static_cast<double>(parameters) * 1e-6, lora() ? " with adapters" : "",
      base::enum_name(type_), accelerator_.str(),
      updater_ != nullptr ? fmt::format(", of step {}", updater_->committed_step()) : ""));
  for (const std::string& note : source_.notes) lines.push_back("model: " + note);
  if (!plan_.memory.accelerator.empty()) {
    lines.push_back(fmt::format("memory: {} of the accelerator's memory are planned: {}",
                                base::format_bytes(plan_.memory.accelerator_bytes),
                                plan::describe_parts(plan_.memory.accelerator)));
  }
  lines.push_back(fmt::format("memory: {} of the host's memory are planned: {}",
                              base::format_bytes(plan_.memory.host_bytes),
                              plan::describe_parts(plan_.memory.host)));
  const uint32_t stay = plan_.placement.in_memory;
  if (stay == units.size()) return lines;
  const uint64_t streamed = parameters - plan::elements_of(units, stay);
  const bool from_files = files_ != nullptr;
  // The master weights are f32, whatever they are cast to.
  const double bytes_of_one =
      from_files ? static_cast<double>(file_bytes_) / static_cast<double>(parameters) : 4.0;
  const auto bytes = static_cast<uint64_t>(static_cast<double>(streamed) * bytes_of_one);
  lines.push_back(fmt::format(
      "weights: {} of {} units stay in memory; each token of all prompts together reads the others "
      "once, {} from {}",
      stay, units.size(), base::format_bytes(bytes),
      from_files ? "the model's files" : "the devices"));
  return lines;
}

/// Checks a folder before anything is read, for who has named another one.
Status check_folder(const std::string& folder) {
  const auto is_there = [&](const char* name) {
    std::error_code error;
    return std::filesystem::exists(std::filesystem::path(folder) / name, error);
  };
  if (is_there("config.json")) return Status();
  const base::ErrorPlace place{folder, {}, {}, 0};
  if (is_there("adapter_config.json")) {
    return Status(ErrorCode::kInvalidArgument, "the folder has adapters, and not their model",
                  "Name the run that they are of, or export it with --merge", place);
  }
  return Status(ErrorCode::kNotFound,
                "this is neither the folder of a run (recipe.toml) nor of a model (config.json)",
                "Name a folder of smartinf train, or of Hugging Face's save_pretrained()", place);
}

}  // namespace

Result<std::unique_ptr<Generator>> Generator::open(GeneratorOptions options) {
  return guarded("open the model", [&]() -> Result<std::unique_ptr<Generator>> {
    give_tensors_their_own_pages();
    const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
    at::set_num_threads(static_cast<int>(options.threads != 0 ? options.threads : cores));
    SI_ASSIGN_OR_RETURN(const torch::Device accelerator,
                        choose_accelerator("--accelerator", options.accelerator));
    if (!accelerator.is_cpu()) pin_what_is_asked_for();
    ModelSource source;
    if (options.options.train.run.empty()) {
      const ModelOptions& model = options.options.model;
      SI_RETURN_IF_ERROR(check_folder(model.from));
      SI_ASSIGN_OR_RETURN(source,
                          read_model_folder(model.from, model.ignored_keys, "--ignored-keys"));
    } else {
      SI_ASSIGN_OR_RETURN(source, find_model(options.options));
      model::Architecture& architecture = source.architecture;
      if (architecture.vocabulary == 0) architecture.vocabulary = kByteVocabulary;
      if (source.config_json.empty() && architecture.vocabulary == kByteVocabulary &&
          options.options.data.tokenizer.empty()) {
        source.end_tokens = {int64_t{kByteSeparator}};
      }
    }
    return std::unique_ptr<Generator>(
        std::make_unique<TorchGenerator>(std::move(options), std::move(source), accelerator));
  });
}

}  // namespace smartinf::train
