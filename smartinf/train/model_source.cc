#include "smartinf/train/model_source.h"

#include <filesystem>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include "smartinf/base/data_file.h"
#include "smartinf/base/file.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/checkpoint_folder.h"
#include "smartinf/model/config_json.h"
#include "smartinf/model/folder_file.h"
#include "smartinf/model/weight_files.h"
#include "smartinf/train/corpus.h"

namespace smartinf::train {
namespace {

namespace fs = std::filesystem;
using base::ErrorCode;
using base::Result;
using base::Status;

constexpr std::string_view kConfig = "config.json";
constexpr std::string_view kGenerationConfig = "generation_config.json";
constexpr uint64_t kConfigBytesMax = uint64_t{16} << 20;

fs::path kept_folder(const std::string& run) { return fs::path(run) / "model"; }

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

/// A small file of a model; nothing where it is not there.
Result<std::optional<std::string>> read_small_file(const fs::path& folder, std::string_view name,
                                                   uint64_t bytes_max) {
  SI_ASSIGN_OR_RETURN(const std::optional<std::string> path,
                      model::find_folder_file(folder.string(), name));
  if (!path) return std::optional<std::string>();
  SI_ASSIGN_OR_RETURN(std::string text, base::read_text_file(*path, "cannot read it", bytes_max));
  return std::optional(std::move(text));
}

/// Checks that others can read the file whole: no FIFO, and not without end.
Status check_small_file(const std::string& folder, std::string_view name) {
  SI_ASSIGN_OR_RETURN(const std::optional<std::string> path, model::find_folder_file(folder, name));
  if (!path) return Status();
  SI_ASSIGN_OR_RETURN(const base::DataFile file, base::DataFile::open(*path));
  if (file.size() <= kTokenizerBytesMax) return Status();
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{} is longer than {}", name, base::format_bytes(kTokenizerBytesMax)),
                "Get the model's folder again", base::ErrorPlace{*path, {}, {}, 0});
}

Result<std::string> read_config_text(const fs::path& folder) {
  SI_ASSIGN_OR_RETURN(std::optional<std::string> text,
                      read_small_file(folder, kConfig, kConfigBytesMax));
  if (text) return std::move(*text);
  std::error_code error;
  std::string advice = "Name a folder as transformers' save_pretrained() writes it";
  if (fs::is_directory(folder / "snapshots", error)) {
    advice = "Of the Hub's cache name a folder in snapshots/";
  } else if (!fs::exists(folder, error)) {
    advice += "; a model of the Hub is not fetched, which `hf download NAME` does";
  }
  return Status(ErrorCode::kNotFound, "there is no config.json", advice,
                base::ErrorPlace{(folder / kConfig).string(), {}, {}, 0});
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
                                      std::span<const std::string> ignored,
                                      std::string_view option) {
  ModelSource source;
  source.folder = folder;
  SI_ASSIGN_OR_RETURN(source.config_json, read_config_text(folder));
  const std::string path = (fs::path(folder) / kConfig).string();
  SI_ASSIGN_OR_RETURN(model::Config config,
                      model::read_config(source.config_json, path, ignored, option));
  source.architecture = std::move(config.architecture);
  source.type = config.type;
  source.notice = std::move(config.remark);
  // The values in generation_config.json count, as in transformers.
  SI_ASSIGN_OR_RETURN(const std::optional<std::string> generation,
                      read_small_file(folder, kGenerationConfig, kConfigBytesMax));
  model::EndTokens end;
  if (generation) {
    SI_ASSIGN_OR_RETURN(end, model::read_generation_config(
                                 *generation, (fs::path(folder) / kGenerationConfig).string(),
                                 source.architecture.vocabulary));
  }
  if (end.tokens.empty()) end = std::move(config.end);
  source.end_tokens = std::move(end.tokens);
  for (std::string* note : {&config.unknown_keys, &end.note}) {
    if (!note->empty()) source.notes.push_back(std::move(*note));
  }
  // Scripts open these by themselves, and what is exported has them.
  for (const std::string_view name : kTokenizerFiles) {
    SI_RETURN_IF_ERROR(check_small_file(folder, name));
  }
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

namespace {

/// The recipe's table, if it asks for one.
Status choose_table(const Options& options, model::Architecture& model) {
  model.table_embedding = options.embedding != EmbeddingRule::kNone;
  if (!model.table_embedding || !model.tied_head) return Status();
  return Status(
      ErrorCode::kInvalidArgument,
      "table.embedding is set, but the model's head is its embedding (tied), of which "
      "every token needs all rows",
      options.model.from.empty() ? "Set model.tied_head = false, or leave it out" : "Leave it out");
}

}  // namespace

Result<ModelSource> find_model(const Options& options) {
  ModelSource source;
  const ModelOptions& given = options.model;
  if (given.from.empty()) {
    source.architecture = architecture_of(given, options.data.sequence);
    SI_RETURN_IF_ERROR(choose_table(options, source.architecture));
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
  SI_ASSIGN_OR_RETURN(source,
                      read_model_folder(source.folder, given.ignored_keys, "--model.ignored_keys"));
  SI_RETURN_IF_ERROR(choose_table(options, source.architecture));
  if (!is_there(kept / kConfig) && given.init == ModelInit::kWeights) {
    // A run that is not begun: what its weights come from is looked at before anything is written.
    SI_RETURN_IF_ERROR(model::WeightFiles::open(given.from, source.architecture).status());
  }
  if (source.architecture.learned_positions &&
      options.data.sequence > source.architecture.positions) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("data.sequence is {}, but the model knows {} positions",
                              options.data.sequence, source.architecture.positions),
                  fmt::format("Choose at most {}", source.architecture.positions));
  }
  return source;
}

Result<engine::StoredRun> stored_table(engine::Updater& updater) {
  SI_ASSIGN_OR_RETURN(engine::StoredRun stored, updater.snapshot());
  if (stored.tables != nullptr) return stored;
  return Status(ErrorCode::kMismatch, "table.embedding is set, but the run has no table",
                "Use the recipe that the run was started with");
}

Result<TextFiles> read_model_files(const std::string& from) {
  TextFiles files;
  for (const std::string_view name : kTokenizerFiles) {
    SI_ASSIGN_OR_RETURN(std::optional<std::string> text,
                        read_small_file(from, name, kTokenizerBytesMax));
    if (text) files.emplace_back(name, std::move(*text));
  }
  SI_ASSIGN_OR_RETURN(std::string config, read_config_text(from));
  files.emplace_back(kConfig, std::move(config));
  return files;
}

Status keep_model_files(const std::string& from, const std::string& run) {
  SI_ASSIGN_OR_RETURN(const TextFiles files, read_model_files(from));
  const fs::path folder = kept_folder(run);
  SI_RETURN_IF_ERROR(engine::make_durable_folder(folder.string()));
  for (const auto& [name, text] : files) {
    SI_RETURN_IF_ERROR(base::write_text_file((folder / name).string(), text, "cannot write it"));
  }
  return engine::sync_folder(folder.string());
}

Result<TextFiles> kept_tokenizer_files(const std::string& run) {
  TextFiles files;
  for (const std::string_view name : kTokenizerFiles) {
    SI_ASSIGN_OR_RETURN(std::optional<std::string> text,
                        read_small_file(kept_folder(run), name, kTokenizerBytesMax));
    if (text) files.emplace_back(name, std::move(*text));
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
