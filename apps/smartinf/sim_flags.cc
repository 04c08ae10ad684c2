#include "apps/smartinf/sim_flags.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>

#include <fmt/format.h>

#include "smartinf/base/file.h"
#include "smartinf/base/nearest.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/attention.h"
#include "smartinf/train/options.h"

namespace smartinf::apps {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
namespace fs = std::filesystem;

enum class Use : uint8_t { kBoth, kTraining, kGeneration };

struct Flag {
  const char* name;
  const char* type;
  const char* help;
  Use use = Use::kTraining;
};

constexpr std::array kFlags{
    Flag{"model", "NAME|FILE",
         "Model: a preset (llama3-8B, ...), a model's folder, or a Hugging Face config.json "
         "[gpt2-4.0B]"},
    Flag{"parameters", "N",
         "Number of parameters of a config.json whose model_type is not known here", Use::kBoth},
    Flag{"layers", "N", "Number of layers, for a GPT-2 model given by its shape"},
    Flag{"hidden", "N", "Hidden size"},
    Flag{"heads", "N", "Number of attention heads [hidden / 128]", Use::kBoth},
    Flag{"kv-heads", "N", "Number of key-value heads [heads]", Use::kBoth},
    Flag{"feed-forward", "N", "Inner width of the feed-forward part [4 x hidden]", Use::kBoth},
    Flag{"vocab", "N", "Size of the vocabulary [50257]", Use::kBoth},
    Flag{"batch", "N", "Sequences in a step, per GPU [4]"},
    Flag{"seq", "N", "Tokens in a sequence [the model's]"},
    Flag{"machine", "NAME|FILE",
         "Machine: a preset (workstation-gen5, ...) or a TOML file [smartssd-a5000; in plan "
         "workstation-gen4]",
         Use::kBoth},
    Flag{"gpu", "NAME",
         "GPU that the machine has instead of its own (A5000, A100, A4000, RTX4090, ...)",
         Use::kBoth},
    Flag{"gpus", "N", "Number of GPUs"},
    Flag{"devices", "N", "Number of devices of the machine's first kind", Use::kBoth},
    Flag{"method", "NAME",
         "Method: baseline (host update), su (SmartUpdate), su+o (overlapped) or su+o+c "
         "(compressed) [su+o]"},
    Flag{"ratio", "R",
         "Bytes of compressed gradients divided by their bytes in f32, for su+o+c [0.02]"},
    Flag{"recompute", "true|false",
         "Whether backward computes activations again instead of keeping them "
         "(memory.activations) [true]"},
    Flag{"optimizer", "NAME", "Update rule: adamw, adam, sgd, adagrad or lion [adamw]"},
    Flag{"state-format", "NAME", "Format of momentum and variance: f32, bf16, q8 or q4 [f32]"},
    Flag{"master", "NAME", "Format of the master weights: f32, m24 or bf16 [f32]"},
    Flag{"subgroup", "N", "Elements of a subgroup [the machine file's]"},
    Flag{"slots", "N", "Subgroups in flight on a device [the machine file's]"},
    Flag{"state-cache", "SIZE",
         "Size of the part of the state that is kept in memory as well and not read again, e.g. "
         "24GB [0]"},
    Flag{"overlap", "NAME",
         "Computation that runs beside the update, as optimizer.overlap: none, late (the next "
         "forward) or early (backward as well) [none; in plan late for `smartinf train`]"},
    Flag{"accumulation", "N",
         "Micro batches in a step, of all ranks together; with more than one, or with ranks, "
         "weights stay on the GPU, as in `smartinf train` [one for each rank]"},
    Flag{"ranks", "N", "Processes of `smartinf train` that train together, each with a GPU [1]"},
    Flag{"machines", "N",
         "Machines of the described kind, with the same number of ranks on each [1]"},
    Flag{kClusterFlag, "FILE",
         "Cluster in place of a machine: boxes, and the links between them (docs/cluster.md)"},
    Flag{"tokens-per-step", "N", "Tokens of a step of all ranks of a cluster"},
    Flag{"stages", "N",
         "Stages of a pipeline over a cluster, ranks.pipeline [as many as are fastest]"},
    Flag{"compress", "FORM,FORM",
         "Forms that exposed gradients between stages may be tried in, which lose something: "
         "int8, int4, lowrank [none]"},
    Flag{"chunks", "N", "Chunks of a stage, ranks.chunks [as few as there is memory for]"},
    Flag{"guess", "right|wrong",
         "Guess of an early update, that no gradient is clipped; after a wrong guess the update is "
         "made again [right]"},
    Flag{"table", "ROWSxDIM",
         "Table beside the model's other parameters of which a step touches few rows "
         "(docs/rows.md), e.g. 4e7x64"},
    Flag{"table-ids", "N", "Rows of the table that each token looks up [1]"},
    Flag{"table-rule", "NAME",
         "Update rule of its rows: sgd, sparse_adam, row_adagrad, row_adam or adamw "
         "[sparse_adam]"},
    Flag{"table-zipf", "R",
         "Exponent of Zipf's law for the rows that are looked up; 0: all alike, which costs most "
         "[0]"},
    Flag{"table-memory", "SIZE", "Memory for the table, of all devices together [256MiB]"},
    Flag{"table-log", "SIZE", "Room on the devices for rows on their way home [chosen]"},
    Flag{kGenerateFlag, "MODEL",
         "Model that answers prompts, as --model, in place of a training step: decoding with keys "
         "and values on devices",
         Use::kGeneration},
    Flag{"context", "N", "Tokens of a prompt [8192]", Use::kGeneration},
    Flag{"sequences", "N", "Prompts: that are answered at once; in plan all of the job's [16]",
         Use::kGeneration},
    Flag{"tokens", "N", "New tokens of each answer [128]", Use::kGeneration},
    Flag{"prefix", "N", "First tokens of the prompts, which all of them share [0]",
         Use::kGeneration},
    Flag{"cache-format", "bf16|f32|q8",
         "How keys and values are kept; with f32 the weights are f32, too [bf16]",
         Use::kGeneration},
    Flag{"memory", "SIZE", "Memory of the host that may be used [all of the machine's]",
         Use::kGeneration},
    Flag{"cache-in", "NAME",
         "Place of keys and values: memory or devices [auto: where it takes less time]",
         Use::kGeneration},
    Flag{"attention", "NAME",
         "Place where queries meet keys and values: devices, or host, to which all are fetched in "
         "every step, as in FlexGen [devices]",
         Use::kGeneration},
    Flag{"in-turn", "NAME",
         "What waits for its turn, as in other systems, which bring all weights to the GPU in "
         "every step: attention, or all (streamed weights as well) [nothing]",
         Use::kGeneration},
    Flag{"write-back", "N",
         "Tokens after which other systems write keys and values, each head's row by itself; the "
         "host has them until then [whole blocks]",
         Use::kGeneration},
    Flag{"inputs", "R|auto",
         "Share of the prompts of which inputs of layers are kept in place of keys and values, as "
         "other systems do [0]",
         Use::kGeneration},
    Flag{"inputs-in-memory", "true|false", "Whether those inputs are in the host's memory [false]",
         Use::kGeneration},
};

/// Name of the flag in earlier versions; refused with what to write in its place.
constexpr const char* kOldOverlapFlag = "--hide";

Status bad_value(std::string_view flag, std::string_view value, std::string advice) {
  return Status(ErrorCode::kInvalidArgument, fmt::format("--{} {}", flag, value),
                std::move(advice));
}

Result<double> number(std::string_view flag, const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    return bad_value(flag, text, "That is not a number.");
  }
  return value;
}

Result<uint64_t> count(std::string_view flag, const std::string& text) {
  SI_ASSIGN_OR_RETURN(const double value, number(flag, text));
  if (value > 1e15) return bad_value(flag, text, "Give at most 1e15.");
  if (value < 1 || value != std::floor(value)) {
    return bad_value(flag, text, "Give a whole number of at least 1.");
  }
  return static_cast<uint64_t>(value);
}

/// names: those of the enumeration that may be given.
template <typename E>
Status by_name(std::string_view flag, const std::string& text, E& target,
               base::EnumNames names = enum_names(E{})) {
  const auto found = base::enum_from_name<E>(text);
  if (found && std::find(names.begin(), names.end(), text) != names.end()) {
    target = *found;
    return {};
  }
  const std::string_view nearest =
      base::nearest_name(text, std::vector<std::string_view>(names.begin(), names.end()));
  return bad_value(flag, text,
                   nearest.empty() ? fmt::format("Known: {}.", fmt::join(names, ", "))
                                   : fmt::format("Did you mean {}?", nearest));
}

Status apply_rank_flags(const SimFlags& flags, sim::StepOptions& options) {
  const auto number_of = [&](const char* name, uint32_t most, uint32_t& target) -> Status {
    const auto given = flags.find(name);
    if (given == flags.end()) return {};
    SI_ASSIGN_OR_RETURN(const uint64_t value, count(name, given->second));
    if (value > most) return bad_value(name, given->second, fmt::format("Give at most {}.", most));
    target = static_cast<uint32_t>(value);
    return {};
  };
  SI_RETURN_IF_ERROR(number_of("ranks", 1024, options.ranks));
  SI_RETURN_IF_ERROR(number_of("machines", 1024, options.machines));
  options.accumulation = options.ranks;
  SI_RETURN_IF_ERROR(number_of("accumulation", 1 << 20, options.accumulation));
  if (options.accumulation > 1 || options.ranks > 1) {
    options.weights = sim::ResidentStep{};
  }
  return {};
}

/// The cluster, and what is asked about it.
Status apply_cluster_flags(const SimFlags& flags, SimQuestion& question) {
  const auto value_of = [&](const char* name) -> const std::string* {
    const auto found = flags.find(name);
    return found == flags.end() ? nullptr : &found->second;
  };
  const std::string* const file = value_of(kClusterFlag);
  if (file == nullptr) {
    for (const char* name : {"tokens-per-step", "stages", "chunks", "compress"}) {
      if (const std::string* text = value_of(name)) {
        return bad_value(name, *text, "It is of a cluster: add --cluster FILE.");
      }
    }
    return {};
  }
  for (const char* name :
       {"machine", "gpu", "gpus", "devices", "ranks", "machines", "accumulation", "method",
        "overlap", "guess", "ratio", "state-cache", "slots", "table"}) {
    if (const std::string* text = value_of(name)) {
      return bad_value(name, *text, "It is of a machine alone: leave it or --cluster out.");
    }
  }
  const std::string* const tokens = value_of("tokens-per-step");
  if (tokens == nullptr) {
    return bad_value(kClusterFlag, *file, "Give --tokens-per-step N, for example 65536.");
  }
  SI_ASSIGN_OR_RETURN(question.cluster, sim::load_cluster(*file));
  sim::ClusterRequest& request = question.cluster_request;
  request.options = question.options;
  SI_ASSIGN_OR_RETURN(request.tokens_per_step, count("tokens-per-step", *tokens));
  if (const std::string* text = value_of("stages")) {
    SI_ASSIGN_OR_RETURN(const uint64_t stages, count("stages", *text));
    if (stages > 1024) return bad_value("stages", *text, "Give at most 1024.");
    request.pipeline = static_cast<uint32_t>(stages);
  }
  if (const std::string* text = value_of("chunks")) {
    SI_ASSIGN_OR_RETURN(const uint64_t chunks, count("chunks", *text));
    if (chunks > 1024) return bad_value("chunks", *text, "Give at most 1024.");
    request.chunks = static_cast<uint32_t>(chunks);
  }
  if (const std::string* text = value_of("compress")) {
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
      end = text->find(',', begin);  // behind a comma there is a name, too
      const std::string name = text->substr(begin, end - begin);
      const auto form = base::enum_from_name<train::GradientForm>(name);
      if (!form || *form == train::GradientForm::kNone) {
        return bad_value("compress", *text, "Give some of int8, int4, lowrank, with commas.");
      }
      train::StageCompression compression;
      compression.form = *form;
      request.forms.push_back({name, [compression, width = question.model.hidden](uint64_t rows) {
                                 return train::compressed_bytes(compression, rows, width);
                               }});
    }
  }
  if (value_of("batch") != nullptr) request.micro_batch = question.model.batch;
  if (value_of("recompute") != nullptr) request.recompute = question.options.recompute;
  return {};
}

Result<std::optional<sim::RowTable>> table_by(const SimFlags& flags,
                                              const sim::StepOptions& options) {
  const auto value_of = [&](const char* name) -> const std::string* {
    const auto found = flags.find(name);
    return found == flags.end() ? nullptr : &found->second;
  };
  const std::string* const shape = value_of("table");
  if (shape == nullptr) {
    for (const char* name :
         {"table-ids", "table-rule", "table-zipf", "table-memory", "table-log"}) {
      if (const std::string* text = value_of(name)) {
        return bad_value(name, *text, "It is of a table: add --table ROWSxDIM.");
      }
    }
    return std::optional<sim::RowTable>();
  }
  if (options.ranks > 1 || options.machines > 1) {
    return bad_value("table", *shape, "A table is planned for one process: leave --ranks out.");
  }
  sim::RowTable table;
  const size_t times = shape->find('x');
  if (times == std::string::npos)
    return bad_value("table", *shape, "Give rows x dim. Write e.g. 4e7x64.");
  SI_ASSIGN_OR_RETURN(table.rows, count("table", shape->substr(0, times)));
  SI_ASSIGN_OR_RETURN(const uint64_t dim, count("table", shape->substr(times + 1)));
  if (dim > 1 << 20) return bad_value("table", *shape, "A row has 2^20 values at most.");
  table.dim = static_cast<uint32_t>(dim);
  table.ids = 1;
  if (const std::string* text = value_of("table-ids")) {
    SI_ASSIGN_OR_RETURN(table.ids, count("table-ids", *text));
  }
  if (const std::string* text = value_of("table-rule")) {
    SI_RETURN_IF_ERROR(by_name("table-rule", *text, table.rule));
  }
  if (const std::string* text = value_of("table-zipf")) {
    SI_ASSIGN_OR_RETURN(table.zipf, number("table-zipf", *text));
    if (table.zipf < 0 || table.zipf > 10) return bad_value("table-zipf", *text, "Give 0 to 10.");
  }
  for (const auto& [name, target] : std::initializer_list<std::pair<const char*, uint64_t*>>{
           {"table-memory", &table.memory_bytes}, {"table-log", &table.log_bytes}}) {
    if (const std::string* text = value_of(name)) {
      SI_ASSIGN_OR_RETURN(*target, base::parse_bytes(*text));
    }
  }
  return std::optional(table);
}

Status apply_generation_flags(const SimFlags& flags, sim::GenerationOptions& options) {
  const auto value_of = [&](const char* name) -> const std::string* {
    const auto found = flags.find(name);
    return found == flags.end() ? nullptr : &found->second;
  };
  for (const auto& [name, target] :
       std::initializer_list<std::pair<const char*, uint64_t*>>{{"context", &options.context},
                                                                {"sequences", &options.sequences},
                                                                {"tokens", &options.tokens},
                                                                {"prefix", &options.prefix}}) {
    if (const std::string* text = value_of(name)) {
      SI_ASSIGN_OR_RETURN(*target, count(name, *text));
    }
  }
  if (const std::string* text = value_of("cache-format")) {
    SI_RETURN_IF_ERROR(by_name("cache-format", *text, options.format));
  }
  if (const std::string* text = value_of("memory")) {
    SI_ASSIGN_OR_RETURN(options.memory_bytes, base::parse_bytes(*text));
    if (options.memory_bytes == 0) return bad_value("memory", *text, "Give more than 0.");
  }
  if (const std::string* text = value_of("cache-in")) {
    SI_RETURN_IF_ERROR(by_name("cache-in", *text, options.cache));
  }
  if (const std::string* text = value_of("attention")) {
    SI_RETURN_IF_ERROR(by_name("attention", *text, options.attention));
  }
  if (const std::string* text = value_of("in-turn")) {
    SI_RETURN_IF_ERROR(by_name("in-turn", *text, options.in_turn));
  }
  if (const std::string* text = value_of("write-back")) {
    SI_ASSIGN_OR_RETURN(const uint64_t tokens, count("write-back", *text));
    if (tokens > 1 << 20) return bad_value("write-back", *text, "Give at most 2^20.");
    options.write_back = static_cast<uint32_t>(tokens);
  }
  if (const std::string* text = value_of("inputs")) {
    options.inputs = sim::GenerationOptions::kAuto;
    if (*text != "auto") {
      SI_ASSIGN_OR_RETURN(options.inputs, number("inputs", *text));
      if (options.inputs < 0 || options.inputs > 1) {
        return bad_value("inputs", *text, "Give a share from 0 to 1, or auto.");
      }
    }
  }
  if (const std::string* text = value_of("inputs-in-memory")) {
    if (*text != "true" && *text != "false") {
      return bad_value("inputs-in-memory", *text, "Say true or false.");
    }
    options.inputs_in_memory = *text == "true";
  }
  return {};
}

/// The config.json that a model is named by: itself, or its folder; empty: a preset is named.
std::string config_file(const std::string& name) {
  std::error_code error;
  if (fs::is_directory(name, error)) {
    if (name.find('/') != std::string::npos || fs::exists(fs::path(name) / "config.json", error)) {
      return (fs::path(name) / "config.json").string();
    }
  }
  return name.ends_with(".json") || name.find('/') != std::string::npos ? name : "";
}

bool has_weights(const fs::path& folder) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".safetensors") return true;
  }
  return false;
}

Result<sim::ModelShape> model_of_config(const std::string& config, const SimFlags& flags) {
  constexpr uint64_t kConfigBytesMax = uint64_t{16} << 20;
  SI_ASSIGN_OR_RETURN(
      const std::string text,
      base::read_text_file(config, "cannot read the model's config", kConfigBytesMax));
  uint64_t parameters = 0;
  if (const auto given = flags.find("parameters"); given != flags.end()) {
    SI_ASSIGN_OR_RETURN(parameters, count("parameters", given->second));
  }
  Result<sim::ModelShape> model = sim::model_from_hf_config(text, config, parameters);
  const fs::path folder = fs::path(config).parent_path();
  if (!model.ok() && model.status().code() == ErrorCode::kUnsupported && parameters == 0) {
    return Status(
        ErrorCode::kUnsupported, model.status().what(),
        fmt::format(
            "{}. For another one give --parameters N, which this prints:\n  python3 -c \"import "
            "torch, transformers as t; torch.set_default_device('meta'); print(sum(p.numel() for p "
            "in t.AutoModelForCausalLM.from_config(t.AutoConfig.from_pretrained('{}')).parameters()"
            "))\"\nor a shape of GPT-2's form: --layers N --hidden N",
            model.status().advice(), folder.empty() ? "." : folder.string()));
  }
  if (!model.ok()) return model;
  if (fs::path(config).filename() == "config.json" && has_weights(folder.empty() ? "." : folder)) {
    model->folder = folder.empty() ? "." : folder.string();
  }
  return model;
}

Result<sim::ModelShape> model_by(const SimFlags& flags) {
  const auto find = [&](std::string_view name) { return flags.find(name); };
  const auto end = flags.end();
  if (find("layers") != end || find("hidden") != end) {
    if (find("model") != end) {
      return Status(ErrorCode::kInvalidArgument, "--model and --layers or --hidden are given",
                    "Name a model or give its shape, not both.");
    }
    if (find("layers") == end || find("hidden") == end) {
      return Status(ErrorCode::kInvalidArgument, "a shape needs --layers and --hidden",
                    "Give both.");
    }
  }
  sim::ModelShape model;
  const auto named = find(find(kGenerateFlag) != end ? kGenerateFlag : "model");
  const bool shaped = find("layers") != end;
  bool changed = false;
  const std::string name = named == end ? "gpt2-4.0B" : named->second;
  const std::string config = shaped ? "" : config_file(name);
  if (!shaped) {
    if (!config.empty()) {
      SI_ASSIGN_OR_RETURN(model, model_of_config(config, flags));
    } else {
      SI_ASSIGN_OR_RETURN(model, sim::model_preset(name));
      if (find("parameters") != end)
        return bad_value("parameters", find("parameters")->second, "It is for a config.json.");
    }
  } else {
    model.name = "custom";
    model.type = "gpt2";
    model.vocabulary = 50257;
  }
  for (const auto& [flag, target] : std::initializer_list<std::pair<const char*, uint64_t*>>{
           {"layers", &model.layers},
           {"hidden", &model.hidden},
           {"heads", &model.heads},
           {"kv-heads", &model.kv_heads},
           {"feed-forward", &model.feed_forward},
           {"vocab", &model.vocabulary},
           {"batch", &model.batch},
           {"seq", &model.sequence}}) {
    const auto given = find(flag);
    if (given == end) continue;
    const bool shape = target != &model.batch && target != &model.sequence;
    if (shape && !shaped && !config.empty()) {
      return bad_value(flag, given->second, fmt::format("{} says it; change that.", config));
    }
    SI_ASSIGN_OR_RETURN(*target, count(flag, given->second));
    changed |= shape;
  }
  if (shaped) {
    if (model.heads == 0) model.heads = std::max<uint64_t>(1, model.hidden / 128);
    if (model.hidden % model.heads != 0) {
      return bad_value(
          "heads", std::to_string(model.heads),
          fmt::format("The number of heads must divide the hidden size {}.", model.hidden));
    }
    if (model.kv_heads == 0) model.kv_heads = model.heads;
    if (model.feed_forward == 0) model.feed_forward = 4 * model.hidden;
    model.head_size = model.hidden / model.heads;
    model.positions = model.sequence;
  }
  SI_RETURN_IF_ERROR(sim::check_model(model));
  if (changed) SI_RETURN_IF_ERROR(sim::complete_model(model));
  return model;
}

}  // namespace

void add_sim_flags(CLI::App& command, SimFlags& flags) {
  for (const Flag& flag : kFlags) {
    const std::string name = flag.name;
    CLI::Option* option = command.add_option_function<std::string>(
        "--" + name, [&flags, name](const std::string& value) { flags[name] = value; }, flag.help);
    option->type_name(flag.type);
    if (flag.use == Use::kGeneration) option->group("Generation in place of training");
  }
  command
      .add_option_function<std::string>(
          kOldOverlapFlag, [&flags](const std::string& value) { flags[kOldOverlapFlag] = value; })
      ->group("");  // not in the help
}

std::vector<std::string_view> sim_flag_names() {
  std::vector<std::string_view> names;
  for (const Flag& flag : kFlags) names.push_back(flag.name);
  return names;
}

Result<SimQuestion> apply_sim_flags(const SimFlags& flags) {
  const auto value_of = [&](std::string_view name) -> const std::string* {
    const auto found = flags.find(name);
    return found == flags.end() ? nullptr : &found->second;
  };
  const bool generates = value_of(kGenerateFlag) != nullptr;
  for (const Flag& flag : kFlags) {
    const Use other = generates ? Use::kTraining : Use::kGeneration;
    if (flag.use != other || value_of(flag.name) == nullptr) continue;
    return bad_value(flag.name, *value_of(flag.name),
                     generates ? "It is for a training step, not for --generate."
                               : "It is for generation: add --generate MODEL.");
  }
  if (const std::string* text = value_of(kOldOverlapFlag)) {
    return Status(ErrorCode::kInvalidArgument, "--hide " + *text,
                  "The flag is now --overlap: late for forward, early for backward or both.");
  }
  SimQuestion question;
  SI_ASSIGN_OR_RETURN(question.model, model_by(flags));
  const std::string* machine = value_of("machine");
  const char* usual = generates ? "workstation-gen4" : "smartssd-a5000";
  SI_ASSIGN_OR_RETURN(question.machine, sim::load_machine(machine ? *machine : usual));
  if (const std::string* gpu = value_of("gpu")) {
    sim::Gpu& old = question.machine.gpu;
    SI_ASSIGN_OR_RETURN(sim::Gpu fresh, sim::gpu_preset(*gpu));
    fresh.count = old.count;
    fresh.links_shared = old.links_shared;
    fresh.link_is_host_link = old.link_is_host_link;
    old = fresh;
  }
  if (const std::string* gpus = value_of("gpus")) {
    SI_ASSIGN_OR_RETURN(const uint64_t many, count("gpus", *gpus));
    if (many > 64) return bad_value("gpus", *gpus, "The simulator takes at most 64.");
    question.machine.gpu.count = static_cast<uint32_t>(many);
  }
  if (const std::string* devices = value_of("devices")) {
    SI_ASSIGN_OR_RETURN(const uint64_t many, count("devices", *devices));
    if (many > 4096) return bad_value("devices", *devices, "The simulator takes at most 4096.");
    question.machine.devices.resize(1);
    question.machine.devices.front().count = static_cast<uint32_t>(many);
  }
  sim::StepOptions& options = question.options;
  if (const std::string* text = value_of("method")) {
    SI_RETURN_IF_ERROR(by_name("method", *text, options.method));
  }
  if (const std::string* text = value_of("optimizer")) {
    SI_RETURN_IF_ERROR(by_name("optimizer", *text, options.rule));
  }
  if (const std::string* text = value_of("state-format")) {
    SI_RETURN_IF_ERROR(by_name("state-format", *text, options.format.moments));
  }
  if (const std::string* text = value_of("master")) {
    SI_RETURN_IF_ERROR(by_name("master", *text, options.format.master));
  }
  if (const std::string* text = value_of("overlap")) {
    SI_RETURN_IF_ERROR(by_name("overlap", *text, options.overlap,
                               enum_names(options.overlap).subspan(1)));  // not "auto"
  }
  if (const std::string* text = value_of("guess")) {
    if (*text != "right" && *text != "wrong")
      return bad_value("guess", *text, "Say right or wrong.");
    options.wrong_guess = *text == "wrong";
  }
  if (const std::string* text = value_of("recompute")) {
    if (*text != "true" && *text != "false") {
      return bad_value("recompute", *text, "Say true or false.");
    }
    options.recompute = *text == "true";
  }
  if (const std::string* text = value_of("ratio")) {
    SI_ASSIGN_OR_RETURN(options.ratio, number("ratio", *text));
    if (!(options.ratio > 0 && options.ratio <= 1)) {
      return bad_value("ratio", *text,
                       "The ratio is compressed bytes divided by f32 bytes: above 0, at most 1.");
    }
  }
  if (const std::string* text = value_of("state-cache")) {
    SI_ASSIGN_OR_RETURN(options.state_cache_bytes, base::parse_bytes(*text));
  }
  if (const std::string* text = value_of("subgroup")) {
    SI_ASSIGN_OR_RETURN(options.subgroup_elements, count("subgroup", *text));
  }
  if (const std::string* text = value_of("slots")) {
    SI_ASSIGN_OR_RETURN(const uint64_t many, count("slots", *text));
    if (many > 1024) return bad_value("slots", *text, "The simulator takes at most 1024.");
    options.slots = static_cast<uint32_t>(many);
  }
  SI_RETURN_IF_ERROR(apply_rank_flags(flags, options));
  if (generates) SI_RETURN_IF_ERROR(apply_generation_flags(flags, question.generation));
  SI_RETURN_IF_ERROR(apply_cluster_flags(flags, question));
  SI_ASSIGN_OR_RETURN(question.table, table_by(flags, options));
  return question;
}

std::string parts_text(const std::vector<plan::MemoryPart>& parts) {
  std::vector<std::string> texts;
  for (const plan::MemoryPart& part : parts) {
    if (part.bytes > 0)
      texts.push_back(fmt::format("{} {}", part.name, base::format_bytes(part.bytes)));
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

}  // namespace smartinf::apps
