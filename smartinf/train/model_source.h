// Which model a run trains: that of the recipe's numbers, or that of a folder of Hugging Face's,
// whose small files (config.json, the tokenizer) the run's folder keeps.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/stored_run.h"
#include "smartinf/engine/updater.h"
#include "smartinf/model/architecture.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// Bytes of a file of a tokenizer, at most.
inline constexpr uint64_t kTokenizerBytesMax = uint64_t{256} << 20;

/// The recipe's numbers, of the Llama family. `model` may leave out what follows from others.
model::Architecture architecture_of(const ModelOptions& model, uint32_t sequence);

struct ModelSource {
  model::Architecture architecture;
  std::string config_json;             // empty: the recipe says what the model is
  std::optional<base::DataType> type;  // the type that config.json names
  std::string notice;                  // a part of it that training leaves out; empty: nothing
  std::vector<std::string> notes;      // what in the folder changes nothing, and why
  std::string folder;                  // the folder that config.json is from
  std::vector<int64_t> end_tokens;     // tokens that the folder names, each of which ends a text
};
/// model.from's folder, else what the run has kept of it. With table.embedding the architecture has
/// a table. Errors: those of read_model_folder(), kInvalidArgument for a tied head beside a table,
/// kMismatch where both are there and config.json is not the same; where the run has kept nothing
/// yet, those of model::WeightFiles::open().
base::Result<ModelSource> find_model(const Options& options);

/// The rows of a run's table at its last step, read beside `updater`, which outlives them. Errors:
/// kMismatch for a run without one.
base::Result<engine::StoredRun> stored_table(engine::Updater& updater);

/// The model in a folder of Hugging Face's. ignored: model.ignored_keys; option: by which the user
/// names them. Errors: kNotFound, those of model::read_config() and model::find_folder_file().
base::Result<ModelSource> read_model_folder(const std::string& folder,
                                            std::span<const std::string> ignored,
                                            std::string_view option);

/// How text becomes a model's tokens and back.
struct TextForm {
  std::string tokenizer;  // the model's folder, or data.tokenizer's file; empty: there is none
  bool bytes = false;     // tokens are the bytes of text
};
/// data.tokenizer, else the model's own; without one the tokens of a vocabulary of 256 are bytes.
TextForm text_form(const Options& options, const ModelSource& source);

/// Files from which transformers loads a tokenizer and learns how it generates.
inline constexpr std::array<std::string_view, 10> kTokenizerFiles{"tokenizer.json",
                                                                  "tokenizer_config.json",
                                                                  "special_tokens_map.json",
                                                                  "added_tokens.json",
                                                                  "vocab.json",
                                                                  "merges.txt",
                                                                  "tokenizer.model",
                                                                  "chat_template.jinja",
                                                                  "chat_template.json",
                                                                  "generation_config.json"};
/// Names and contents.
using TextFiles = std::vector<std::pair<std::string, std::string>>;
/// The tokenizer's files in a model's folder, and config.json as the last one.
base::Result<TextFiles> read_model_files(const std::string& from);
/// Copies them from model.from's folder into the run's; with the last one the copy counts. Durable.
base::Status keep_model_files(const std::string& from, const std::string& run);
/// Files that were kept: names and contents, config.json left out.
base::Result<TextFiles> kept_tokenizer_files(const std::string& run);
/// After a start that failed.
void remove_model_files(const std::string& run);

}  // namespace smartinf::train
