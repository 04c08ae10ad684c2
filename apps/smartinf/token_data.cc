#include "apps/smartinf/token_data.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include "smartinf/train/model_source.h"
#include "smartinf/train/token_file.h"

#include "apps/smartinf/python_script.h"
#include "apps/smartinf/state_places.h"

namespace smartinf::apps {
namespace {

namespace fs = std::filesystem;
using base::ErrorCode;
using base::Result;
using base::Status;

/// In front of the line that says why the script fails.
constexpr std::string_view kError = "error: ";

/// Found before tokens are made, which can take hours.
Status check_can_write(const std::string& run) {
  std::error_code error;
  fs::path there = fs::absolute(run, error);
  while (!fs::exists(there, error) && there.has_relative_path()) there = there.parent_path();
  const bool is_folder = fs::is_directory(there, error);
  if (is_folder && ::access(there.c_str(), W_OK | X_OK) == 0) return Status();
  return base::errno_status(is_folder ? errno : ENOTDIR, "train.run: cannot write in the folder", there.string(), {}, {},
                            "Choose another folder");
}

class TokenData {
 public:
  TokenData(const train::Options& options, std::string tokenizer, bool quiet,
            const std::stop_token& stop)
      : options_(options), tokenizer_(std::move(tokenizer)), quiet_(quiet), stop_(stop) {}

  /// Replaces those of `paths` that are no token files by one that is made of them. key: for
  /// messages. of_run: what the script is to know of the run (its --for-recipe).
  Status replace(const std::string& key, const std::string& name, const std::string& of_run,
                 std::vector<std::string>& paths) {
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
    SI_RETURN_IF_ERROR(check_can_write(options_.train.run));
    const fs::path out = fs::path(options_.train.run) / "data" / (name + ".safetensors");
    SI_RETURN_IF_ERROR(make(texts, out, of_run).with_context(key));
    std::erase_if(paths, [](const std::string& path) { return !train::is_token_file(path); });
    paths.push_back(out.string());
    return Status();
  }

 private:
  Status make(const std::vector<std::string>& texts, const fs::path& out,
              const std::string& of_run) {
    std::vector<std::string> arguments{"--tokenizer", tokenizer_,     "--out",
                                       out.string(),  "--for-recipe", of_run};
    for (const std::string& suffix : options_.data.suffixes) {
      arguments.insert(arguments.end(), {"--suffix", suffix});
    }
    arguments.push_back("--");
    arguments.insert(arguments.end(), texts.begin(), texts.end());
    SI_ASSIGN_OR_RETURN(
        PythonScript script,
        PythonScript::start(make_token_files_script(), arguments, ScriptOutput::kAnswers));
    std::string why = "no tokens could be made; see what Python says above";
    while (const std::optional<std::string> line = script.read_line()) {
      if (line->starts_with(kError)) {
        why = line->substr(kError.size());
      } else if (!quiet_) {
        fmt::print("data: {}\n", *line);
        std::fflush(stdout);
      }
    }
    if (script.finish()) return Status();
    if (stop_.stop_requested()) return Status(ErrorCode::kCancelled, "stopped");
    return Status(ErrorCode::kFailedPrecondition, why);
  }

  const train::Options& options_;
  const std::string tokenizer_;  // the folder
  const bool quiet_;
  const std::stop_token& stop_;
};

}  // namespace

Status make_token_data(config::Recipe& recipe, bool start_over, bool quiet,
                       const std::stop_token& stop) {
  train::DataOptions& data = recipe.options.data;
  if (recipe.options.model.from.empty()) return Status();
  // Also where no tokens are made: a folder that is refused is refused before anything is written.
  Result<train::ModelSource> found = train::find_model(recipe.options);
  if (!found.ok()) {
    Status refused = std::move(found).status();
    return recipe.distill.teacher.empty() ? refused
                                          : std::move(refused).with_context("teacher.from");
  }
  const train::ModelSource source = std::move(*found);
  // Text beside data.tokenizer is refused: a tokenizer.json has no chat template.
  if (!data.tokenizer.empty()) return Status();
  const train::TextForm form = train::text_form(recipe.options, source);
  if (form.tokenizer.empty()) return Status();
  const bool begun = has_begun(recipe.options.train.run);
  const std::string of_run = !begun ? "new" : start_over ? "over" : "begun";
  TokenData made(recipe.options, source.folder, quiet, stop);
  SI_RETURN_IF_ERROR(made.replace("data.paths", "training", of_run, data.paths));
  SI_RETURN_IF_ERROR(
      made.replace("data.validation_paths", "validation", of_run, data.validation_paths));
  SI_ASSIGN_OR_RETURN(std::vector<train::EvaluationSet> sets, train::evaluation_sets(data));
  data.evaluation.clear();
  for (size_t i = 0; i < sets.size(); ++i) {
    // Data that is only evaluated may change.
    SI_RETURN_IF_ERROR(
        made.replace("data.evaluation", fmt::format("evaluation-{}", i + 1), "new", sets[i].paths));
    for (const std::string& path : sets[i].paths) {
      data.evaluation.push_back(fmt::format("{} = {}", sets[i].name, path));
    }
  }
  return Status();
}

}  // namespace smartinf::apps
