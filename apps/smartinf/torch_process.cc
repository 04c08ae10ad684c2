// In a build with torch, what computes with it goes on as smartinf-torch: the same command line,
// linked with torch, whose initialisers take a third of a second that no other command waits for.
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include "smartinf/base/units.h"

#include "apps/smartinf/child.h"
#include "apps/smartinf/commands.h"
#include "apps/smartinf/interrupt.h"

namespace smartinf::apps {
namespace {

using base::ErrorCode;
using base::Status;

/// Stacks of a thread, and what systems give it: torch's kernels need some hundred KiB, and end the
/// process where they are not there.
constexpr rlim_t kStackLeast = rlim_t{1} << 20;
constexpr rlim_t kStackUsual = rlim_t{8} << 20;
constexpr std::chrono::seconds kLoadWait{120};

/// Raises what may be raised; the program that is started next has it.
Status give_stack() {
  rlimit stack{};
  if (::getrlimit(RLIMIT_STACK, &stack) != 0 || stack.rlim_cur >= kStackLeast) return Status();
  const rlim_t had = stack.rlim_cur;
  stack.rlim_cur = std::min(kStackUsual, stack.rlim_max);
  if (stack.rlim_cur >= kStackLeast && ::setrlimit(RLIMIT_STACK, &stack) == 0) return Status();
  return Status(ErrorCode::kOutOfMemory,
                fmt::format("the stack of a thread may have {}, and torch needs {}",
                            base::format_bytes(had), base::format_bytes(kStackLeast)),
                "Raise its limit (ulimit -s 8192).");
}

/// The loader's own words would be that a segment cannot be mapped.
Status check_address_space(const std::filesystem::path& with_torch) {
  rlimit space{};
  if (::getrlimit(RLIMIT_AS, &space) != 0 || space.rlim_cur == RLIM_INFINITY) return Status();
  if (child_output({with_torch.string(), "--version"}, kLoadWait)) return Status();
  return Status(ErrorCode::kOutOfMemory,
                fmt::format("torch cannot be loaded within an address space of {}",
                            base::format_bytes(space.rlim_cur)),
                "Raise its limit (ulimit -v unlimited); memory.host bounds the memory that a run "
                "takes.");
}

}  // namespace

void add_train(CLI::App& app, const Overrides& /*overrides*/, Run& /*run*/) {
  app.add_subcommand("train", kTrainSummary);  // for the list of commands
}

void add_distill(CLI::App& app, const Overrides& /*overrides*/, Run& /*run*/) {
  app.add_subcommand("distill", kDistillSummary);
}

void add_generate(CLI::App& app, Run& /*run*/) { app.add_subcommand("generate", kGenerateSummary); }

std::optional<int> run_with_torch(std::string_view command, char** arguments) {
  constexpr std::array<std::string_view, 4> kWithTorch{"train", "distill", "generate", "calibrate"};
  if (std::ranges::find(kWithTorch, command) == kWithTorch.end()) return std::nullopt;
  std::error_code failed;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", failed);
  const std::filesystem::path with_torch = self.parent_path() / "smartinf-torch";
  if (!failed) {
    Status room = give_stack();
    if (room.ok()) room = check_address_space(with_torch);
    if (!room.ok()) return report(room);
  }
  hold_signals();  // loading torch takes longer than a quick Ctrl-C
  if (!failed) ::execv(with_torch.c_str(), arguments);
  const std::string reason = failed ? failed.message() : std::strerror(errno);
  return report(
      Status(ErrorCode::kNotFound, "cannot start " + with_torch.string() + ": " + reason,
             "smartinf-torch has to be in the same folder as smartinf; build or install both."));
}

}  // namespace smartinf::apps
