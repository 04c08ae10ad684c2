#include "smartinf/train/model_source.h"

#include <filesystem>
#include <string_view>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/file.h"
#include "smartinf/base/text.h"
#include "smartinf/engine/checkpoint_folder.h"
#include "smartinf/model/config_json.h"
#include "smartinf/train/corpus.h"

namespace smartinf::train {
namespace {

namespace fs = std::filesystem;
using base::ErrorCode;
using base::Result;
using base::Status;

constexpr std::string_view kConfig = "config.json";
constexpr uint64_t kConfigBytesMax = uint64_t{16} << 20;
constexpr uint64_t kTokenizerBytesMax = uint64_t{256} << 20;

fs::path kept_folder(const std::string& run) { return fs::path(run) / "model"; }

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

Result<std::string> read_config_text(const fs::path& folder) {
  const std::string path = (folder / kConfig).string();
  Result<std::string> text = base::read_text_file(path, "cannot read it", kConfigBytesMax);
  if (!text.ok()) return std::move(text).status().with_context("model.from");
  return text;
}

/// eos_token_id: a number, or several.
std::vector<int64_t> end_tokens_of(std::string_view text) {
  const nlohmann::json json = base::parse_json(text);
  const auto found = json.is_object() ? json.find("eos_token_id") : json.end();
  if (!json.is_object() || found == json.end()) return {};
  std::vector<int64_t> tokens;
  const nlohmann::json list = found->is_array() ? *found : nlohmann::json::array({*found});
  for (const nlohmann::json& token : list) {
    if (token.is_number_integer()) tokens.push_back(token.get<int64_t>());
  }
  return tokens;
}

}  // namespace

model::Architecture architecture_of(const ModelOptions& given, uint32_t sequence) {
  const ModelOptions options = with_defaults(given);
  model::Architecture model;
  model.layers = options.layers;
  model.width = options.width;
  model.heads = options.heads;
  model.kv_heads = options.kv_heads;
  model.head_width = options.head_width();
  model.mlp_width = options.mlp_width;
  model.vocabulary = options.vocabulary;
  model.positions = sequence;
  model.norm_eps = options.norm_eps;
  model.rope.base = options.rope_base;
  model.window_rope = model.rope;
  model.windows.assign(options.layers, 0);
  model.tied_head = options.tied_head;
  model.init_std = options.init_std;
  return model;
}

Result<ModelSource> read_model_folder(const std::string& folder,
                                      std::span<const std::string> ignored) {
  ModelSource source;
  source.folder = folder;
  SI_ASSIGN_OR_RETURN(source.config_json, read_config_text(folder));
  SI_ASSIGN_OR_RETURN(
      model::Config config,
      model::read_config(source.config_json, (fs::path(folder) / kConfig).string(), ignored));
  source.architecture = std::move(config.architecture);
  source.type = config.type;
  source.remark = std::move(config.remark);
  // What generation_config.json says counts, as in transformers.
  const Result<std::string> generation = base::read_text_file(
      (fs::path(folder) / "generation_config.json").string(), "cannot read it", kConfigBytesMax);
  if (generation.ok()) source.end_tokens = end_tokens_of(*generation);
  if (source.end_tokens.empty()) source.end_tokens = end_tokens_of(source.config_json);
  return source;
}

TextForm text_form(const Options& options, const ModelSource& source) {
  TextForm form;
  form.tokenizer = options.data.tokenizer;
  if (form.tokenizer.empty() && !source.folder.empty()) {
    if (is_there(fs::path(source.folder) / "tokenizer.json")) form.tokenizer = source.folder;
  }
  form.bytes = form.tokenizer.empty() && source.architecture.vocabulary == kByteVocabulary;
  return form;
}

Result<ModelSource> find_model(const Options& options) {
  ModelSource source;
  const ModelOptions& given = options.model;
  if (given.from.empty()) {
    source.architecture = architecture_of(given, options.data.sequence);
    return source;
  }
  const fs::path kept = kept_folder(options.train.run);
  const bool from_kept = is_there(kept / kConfig) && !is_there(fs::path(given.from) / kConfig);
  source.folder = from_kept ? kept.string() : given.from;
  if (!from_kept && is_there(kept / kConfig)) {
    SI_ASSIGN_OR_RETURN(const std::string before, read_config_text(kept));
    SI_ASSIGN_OR_RETURN(const std::string now, read_config_text(source.folder));
    if (before != now) {
      return Status(ErrorCode::kMismatch,
                    "model.from: config.json is not the one that the run was started with",
                    "Name the folder that it was started from, or choose another train.run",
                    base::ErrorPlace{(fs::path(given.from) / kConfig).string(), {}, {}, 0});
    }
  }
  SI_ASSIGN_OR_RETURN(source, read_model_folder(source.folder, given.ignored_keys));
  if (source.architecture.learned_positions &&
      options.data.sequence > source.architecture.positions) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("data.sequence is {}, but the model knows {} positions",
                              options.data.sequence, source.architecture.positions),
                  fmt::format("Choose at most {}", source.architecture.positions));
  }
  return source;
}

Status keep_model_files(const std::string& from, const std::string& run) {
  const fs::path folder = kept_folder(run);
  SI_RETURN_IF_ERROR(engine::make_durable_folder(folder.string()));
  for (const std::string_view name : kTokenizerFiles) {
    if (!is_there(fs::path(from) / name)) continue;
    SI_ASSIGN_OR_RETURN(
        const std::string text,
        base::read_text_file((fs::path(from) / name).string(), "model.from", kTokenizerBytesMax));
    SI_RETURN_IF_ERROR(base::write_text_file((folder / name).string(), text, "cannot write it"));
  }
  // Last: with it the folder counts.
  SI_ASSIGN_OR_RETURN(const std::string config, read_config_text(from));
  SI_RETURN_IF_ERROR(base::write_text_file((folder / kConfig).string(), config, "cannot write it"));
  return engine::sync_folder(folder.string());
}

Result<std::vector<std::pair<std::string, std::string>>> kept_tokenizer_files(
    const std::string& run) {
  std::vector<std::pair<std::string, std::string>> files;
  for (const std::string_view name : kTokenizerFiles) {
    const fs::path path = kept_folder(run) / name;
    if (!is_there(path)) continue;
    SI_ASSIGN_OR_RETURN(std::string text,
                        base::read_text_file(path.string(), "cannot read it", kTokenizerBytesMax));
    files.emplace_back(name, std::move(text));
  }
  return files;
}

void remove_model_files(const std::string& run) {
  std::error_code ignored;
  for (const std::string_view name : kTokenizerFiles) {
    fs::remove(kept_folder(run) / name, ignored);
  }
  fs::remove(kept_folder(run) / kConfig, ignored);
  fs::remove(kept_folder(run), ignored);
}

}  // namespace smartinf::train
