// The smartinf command: parses the command line, installs the log sink, runs one subcommand.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <system_error>

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include "smartinf/base/end_at_signals.h"
#include "smartinf/base/log.h"
#include "smartinf/base/nearest.h"
#include "smartinf/base/user_path.h"
#include "smartinf/config/keys.h"
#include "smartinf/kernels/update.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/recipe_flags.h"

namespace smartinf::apps {
namespace {

// Libraries leave remarks in the sink; a user sees warnings, and the rest with --verbose.
void install_log_sink(bool verbose) {
  auto logger = std::make_shared<spdlog::logger>(
      "smartinf", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  logger->set_pattern("%^%l%$: %v");
  logger->set_level(verbose ? spdlog::level::debug : spdlog::level::warn);
  base::set_log_sink([logger](base::LogLevel level, std::string_view message) {
    switch (level) {
      case base::LogLevel::kDebug:
        logger->debug("{}", message);
        break;
      case base::LogLevel::kInfo:
        logger->info("{}", message);
        break;
      case base::LogLevel::kWarning:
        logger->warn("{}", message);
        break;
    }
  });
}

/// "UINT:INT in [1 - 1024]" is N to a person, "TEXT:{f32,bf16}" is f32|bf16.
std::string plain_type(const std::string& type) {
  const size_t colon = type.find(':');
  std::string name = type.substr(0, colon);
  if (name == "UINT" || name == "INT") name = "N";
  if (name == "FLOAT") name = "NUMBER";
  if (name == "BOOLEAN") name = "true|false";
  if (name == "TEXT" && colon != std::string::npos && type.substr(colon, 2) == ":{") {
    name = type.substr(colon + 2, type.find('}') - colon - 2);
    std::ranges::replace(name, ',', '|');
  }
  return name;
}

/// Help with plain names of types, and defaults in brackets.
class PlainFormatter : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    if (option->get_type_size() == 0) return {};
    std::string text = " " + plain_type(option->get_type_name());
    const std::string& usual = option->get_default_str();
    if (!usual.empty() && usual != "[]") text += " [" + usual + "]";
    if (option->get_expected_max() == CLI::detail::expected_max_vector_size) text += " ...";
    if (option->get_required()) text += " (required)";
    return text;
  }
};

int usage(const std::string& problem, const std::string& advice) {
  std::fprintf(stderr, "smartinf: %s%s\n", problem.c_str(), advice.c_str());
  return kExitUsage;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& names,
                         const std::string& otherwise) {
  const std::vector<std::string_view> views(names.begin(), names.end());
  const std::string_view nearest = base::nearest_name(word, views);
  return nearest.empty() ? otherwise : "; did you mean " + std::string(nearest) + "?";
}

std::vector<std::string> subcommand_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

// The chosen subcommand, or null.
const CLI::App* chosen(const CLI::App& app) {
  const std::vector<CLI::App*> parsed = app.get_subcommands();
  return parsed.empty() ? nullptr : parsed.front();
}

// The flags of the whole program and of the chosen command with its own subcommand, and the
// recipe's keys where they are flags.
std::vector<std::string> flag_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* owner = &app; owner != nullptr; owner = chosen(*owner)) {
    for (const CLI::Option* option : owner->get_options({})) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
  }
  if (chosen(app) != nullptr && takes_recipe(*chosen(app))) {
    for (const config::Key& key : config::keys()) names.push_back("--" + std::string(key.name));
  }
  return names;
}

int explain(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) return app.exit(error);
  std::string help = "; see smartinf ";
  for (const CLI::App* command = chosen(app); command != nullptr; command = chosen(*command)) {
    help += command->get_name() + " ";
  }
  help += "--help";
  const std::vector<std::string> extras = app.remaining(true);
  // A flag that is required and misspelled is unknown first of all.
  const auto code = static_cast<CLI::ExitCodes>(error.get_exit_code());
  const bool about_words =
      code == CLI::ExitCodes::ExtrasError || code == CLI::ExitCodes::RequiredError;
  if (about_words && !extras.empty()) {
    const std::string& word = extras.front();
    if (!word.starts_with("-")) return usage("unexpected argument '" + word + "'", help);
    const std::string name = word.substr(0, word.find('='));
    return usage("unknown flag " + name, did_you_mean(name, flag_names(app), help));
  }
  return usage(error.what(), help);
}

/// No shell has seen the "~" of --out=~/x, or of what a program passes on.
void expand_home(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    const auto names = [&](const char* what) { return type.find(what) != std::string::npos; };
    if (!names("DIR") && !names("FILE") && !names("DEVICE") && !names("PATH") && !names("RUN") &&
        !names("RECIPE") && !names("CHECKPOINT") && !names("toml") && !names("MODEL")) {
      continue;
    }
    option->transform(CLI::Validator(
        [](std::string& path) {
          const base::Result<std::string> expanded = base::user_path(path);
          if (!expanded.ok()) return expanded.status().to_string();
          path = *expanded;
          return std::string();
        },
        std::string()));
  }
  for (CLI::App* command : app.get_subcommands({})) expand_home(*command);
}

/// Words of earlier versions, with what does the same now.
struct Gone {
  std::string_view command;
  std::string_view word;
  std::string_view advice;
};
constexpr Gone kGone[] = {
    {"bench", "scale", "python3 bench/scale.py, in the project's folder"},
    {"bench", "traffic", "python3 bench/traffic.py, in the project's folder"},
    {"simulate", "--figure", "python3 bench/paper/figures.py N, in the project's folder"},
    {"simulate", "--paper", "python3 bench/paper/rows.py, in the project's folder"},
    {"simulate", "--closed-form", "python3 bench/paper/closed_form.py, in the project's folder"},
};

const Gone* find_gone(std::span<const std::string> words) {
  for (const Gone& gone : kGone) {
    if (words.empty() || words.front() != gone.command) continue;
    const bool said = std::ranges::any_of(words.subspan(1), [&](std::string_view word) {
      return word.substr(0, word.find('=')) == gone.word;
    });
    if (said) return &gone;
  }
  return nullptr;
}

int run_command_line(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  base::Result<Overrides> overrides = config::take_overrides(words);
  if (!overrides.ok()) return report(overrides.status(), kExitUsage);
  const auto command =
      std::ranges::find_if(words, [](const std::string& word) { return !word.starts_with("-"); });
  if (const Gone* gone = find_gone({command, words.end()})) {
    return usage(fmt::format("{} {} has moved", gone->command, gone->word),
                 fmt::format(". Run {}.", gone->advice));
  }
  if (command != words.end()) {
    if (const std::optional<int> code = run_with_torch(*command, argv)) return *code;
  }

  CLI::App app(
      "Train language models whose optimizer state is stored and updated on storage devices.",
      "smartinf");
  app.set_version_flag("--version", SMARTINF_VERSION);
  app.formatter(std::make_shared<PlainFormatter>());  // before the commands, which take it over
  app.fallthrough();
  app.require_subcommand(0, 1);
  app.footer(
      "Examples:\n"
      "  smartinf doctor                        what this machine can do\n"
      "  smartinf train recipes/quickstart.toml\n"
      "  smartinf COMMAND --help\n\n"
      "Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.");
  bool verbose = false;
  app.add_flag("-v,--verbose", verbose, "Show all log messages, not only warnings");

  Run run;
  add_train(app, *overrides, run);
  add_distill(app, *overrides, run);
  add_export(app, run);
  add_generate(app, run);
  add_bench(app, run);
  add_calibrate(app, run);
  add_certificates(app, run);
  add_doctor(app, run);
  add_inspect(app, run);
  add_metrics(app, run);
  add_plot(app, run);
  add_plan(app, run);
  add_serve(app, run);
  add_simulate(app, run);
  add_fsck(app, run);
  add_checkpoint(app, run);
  add_restore(app, run);
  add_reshard(app, run);
  add_gc(app, run);

  if (!words.empty() && !words.front().starts_with("-")) {
    const std::vector<std::string> names = subcommand_names(app);
    if (std::find(names.begin(), names.end(), words.front()) == names.end()) {
      return usage("unknown command '" + words.front() + "'",
                   did_you_mean(words.front(), names, "; see smartinf --help"));
    }
  }
  expand_home(app);
  try {
    // CLI11 takes the words from the back.
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ParseError& error) {
    return explain(app, error);
  }
  if (!run) {
    std::fputs(app.help().c_str(), stderr);
    return kExitUsage;
  }
  if (!overrides->empty() && !takes_recipe(*chosen(app))) {
    return usage("--" + overrides->front().key + " is a key of a recipe, but `smartinf " +
                     chosen(app)->get_name() + "` takes no recipe",
                 "; see smartinf " + chosen(app)->get_name() + " --help");
  }
  install_log_sink(verbose);
  const base::Status isa = kernels::forced_isa_status();
  // The doctor lists it among its findings.
  if (!isa.ok() && chosen(app)->get_name() != "doctor") return report(isa, kExitUsage);
  return run();
}

}  // namespace

int report(const base::Status& status, int code) {
  std::fprintf(stderr, "smartinf: %s\n", status.to_string().c_str());
  return status.code() == base::ErrorCode::kCancelled ? kExitInterrupted : code;
}

}  // namespace smartinf::apps

int main(int argc, char** argv) {
  smartinf::base::end_at_signals("smartinf");
  // Writing beyond the limit of file sizes is then an error that is reported, and does not end the
  // process.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    return smartinf::apps::run_command_line(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs(
        "smartinf: there is not enough memory. Lower engine.memory_budget (--memory-budget) or the "
        "model's size, or raise the limit of this process (ulimit -v, the cgroup's memory).\n",
        stderr);
  } catch (const std::exception& error) {
    // Threads fail with this code; a std::filesystem_error is a system_error as well.
    const auto* system = dynamic_cast<const std::system_error*>(&error);
    if (system != nullptr && system->code() == std::errc::resource_unavailable_try_again) {
      std::fprintf(stderr,
                   "smartinf: no further thread can be started: %s. Raise the limit of processes "
                   "(ulimit -u, the container's pids.max) or of the address space (ulimit -v).\n",
                   error.what());
    } else {
      std::fprintf(stderr, "smartinf: unexpected failure: %s. This is a bug; please report it.\n",
                   error.what());
    }
  }
  return smartinf::apps::kExitFailed;
}
