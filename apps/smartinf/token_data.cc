#include "apps/smartinf/token_data.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "smartinf/train/model_source.h"
#include "smartinf/train/token_file.h"

#include "apps/smartinf/python_script.h"

namespace smartinf::apps {
namespace {

namespace fs = std::filesystem;
using base::ErrorCode;
using base::Status;
using Time = fs::file_time_type;

/// When the file, or the newest one in the folder, was changed; the oldest of all times where there
/// is none.
Time changed(const fs::path& path) {
  std::error_code error;
  Time newest = fs::last_write_time(path, error);
  if (error) return Time::min();
  auto entries = fs::recursive_directory_iterator(path, error);
  for (; !error && entries != fs::recursive_directory_iterator(); entries.increment(error)) {
    std::error_code unknown;
    const Time time = entries->last_write_time(unknown);
    if (!unknown) newest = std::max(newest, time);
  }
  return newest;
}

class TokenData {
 public:
  TokenData(const train::Options& options, std::string tokenizer, bool quiet,
            const std::stop_token& stop)
      : options_(options), tokenizer_(std::move(tokenizer)), quiet_(quiet), stop_(stop) {}

  /// Those of `paths` that are no token files become one. key: for messages.
  Status replace(const std::string& key, const std::string& name, std::vector<std::string>& paths) {
    std::vector<std::string> texts;
    for (const std::string& path : paths) {
      if (!train::is_token_file(path)) texts.push_back(path);
    }
    if (texts.empty()) return Status();
    if (std::ranges::find(texts, train::kPythonStdlib) != texts.end()) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("{}: \"{}\" is bytes, but the model has a tokenizer", key,
                                train::kPythonStdlib),
                    "Name your own text, conversations (.jsonl) or token files (docs/data.md)");
    }
    const fs::path out = fs::path(options_.train.run) / "data" / (name + ".safetensors");
    SI_RETURN_IF_ERROR(make(texts, out).with_context(key));
    std::erase_if(paths, [](const std::string& path) { return !train::is_token_file(path); });
    paths.push_back(out.string());
    return Status();
  }

 private:
  Status make(const std::vector<std::string>& texts, const fs::path& out) {
    std::error_code error;
    const bool there = fs::exists(out, error);
    bool newer = false;
    for (const std::string& text : texts) {
      if (!there && !fs::exists(text, error)) {
        return Status(ErrorCode::kNotFound, "no such file or folder", "Check the path",
                      base::ErrorPlace{text, {}, {}, 0});
      }
      newer = newer || (there && changed(text) > changed(out));
    }
    if (there && !newer) return Status();
    if (!quiet_) fmt::print("data: making tokens of {}\n", fmt::join(texts, ", "));
    std::vector<std::string> arguments{"--tokenizer", tokenizer_, "--out", out.string()};
    for (const std::string& suffix : options_.data.suffixes) {
      arguments.insert(arguments.end(), {"--suffix", suffix});
    }
    arguments.push_back("--");
    arguments.insert(arguments.end(), texts.begin(), texts.end());
    SI_ASSIGN_OR_RETURN(
        PythonScript script,
        PythonScript::start(make_token_files_script(), arguments,
                            quiet_ ? ScriptOutput::kDropped : ScriptOutput::kShown));
    if (script.finish()) return Status();
    if (stop_.stop_requested()) return Status(ErrorCode::kCancelled, "stopped");
    return Status(ErrorCode::kFailedPrecondition,
                  fmt::format("no token file could be made of {}", fmt::join(texts, ", ")),
                  "See what is said above");
  }

  const train::Options& options_;
  const std::string tokenizer_;  // the folder
  const bool quiet_;
  const std::stop_token& stop_;
};

}  // namespace

Status make_token_data(config::Recipe& recipe, bool quiet, const std::stop_token& stop) {
  train::DataOptions& data = recipe.options.data;
  // Text beside data.tokenizer is refused: a tokenizer.json has no chat template.
  if (recipe.options.model.from.empty() || !data.tokenizer.empty()) return Status();
  SI_ASSIGN_OR_RETURN(const train::ModelSource source, train::find_model(recipe.options));
  const train::TextForm form = train::text_form(recipe.options, source);
  if (form.tokenizer.empty()) return Status();
  TokenData made(recipe.options, source.folder, quiet, stop);
  SI_RETURN_IF_ERROR(made.replace("data.paths", "training", data.paths));
  SI_RETURN_IF_ERROR(made.replace("data.validation_paths", "validation", data.validation_paths));
  SI_ASSIGN_OR_RETURN(std::vector<train::EvaluationSet> sets, train::evaluation_sets(data));
  data.evaluation.clear();
  for (size_t i = 0; i < sets.size(); ++i) {
    SI_RETURN_IF_ERROR(
        made.replace("data.evaluation", fmt::format("evaluation-{}", i + 1), sets[i].paths));
    for (const std::string& path : sets[i].paths) {
      data.evaluation.push_back(fmt::format("{} = {}", sets[i].name, path));
    }
  }
  return Status();
}

}  // namespace smartinf::apps
