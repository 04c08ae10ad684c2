// In a build with torch, what computes with it goes on as smartinf-torch: the same command line,
// linked with torch, whose initialisers take a third of a second that no other command waits for.
#include <cerrno>
#include <cstring>
#include <filesystem>

#include <unistd.h>

#include "apps/smartinf/commands.h"
#include "apps/smartinf/interrupt.h"

namespace smartinf::apps {

void add_train(CLI::App& app, const Overrides& /*overrides*/, Run& /*run*/) {
  app.add_subcommand("train", kTrainSummary);  // for the list of commands
}

void add_generate(CLI::App& app, Run& /*run*/) { app.add_subcommand("generate", kGenerateSummary); }

std::optional<int> run_with_torch(std::string_view command, char** arguments) {
  if (command != "train" && command != "generate" && command != "calibrate") return std::nullopt;
  std::error_code failed;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", failed);
  const std::filesystem::path with_torch = self.parent_path() / "smartinf-torch";
  hold_signals();  // loading torch takes longer than a quick Ctrl-C
  if (!failed) ::execv(with_torch.c_str(), arguments);
  const std::string reason = failed ? failed.message() : std::strerror(errno);
  return report(base::Status(
      base::ErrorCode::kNotFound, "cannot start " + with_torch.string() + ": " + reason,
      "smartinf-torch has to be in the same folder as smartinf; build or install both."));
}

}  // namespace smartinf::apps
