#include "apps/smartinf/restart.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include "smartinf/base/clock.h"
#include "smartinf/base/units.h"
#include "smartinf/train/run_folder.h"

namespace smartinf::apps {

using base::ErrorCode;
using base::Status;

namespace {

// Between two tries, doubled from the first to the last.
constexpr double kWaitFirst = 0.5;
constexpr double kWaitLast = 10;

}  // namespace

bool is_lost(const Status& why) { return why.code() == ErrorCode::kUnavailable; }

// Busy: with a server that has not noticed yet that this client's connection is broken.
bool may_come_again(const Status& why) {
  return is_lost(why) || why.code() == ErrorCode::kTimeout || why.code() == ErrorCode::kBusy;
}

Status wait_for_try(const Restart& restart, double seconds, const Status& why,
                    Interrupt& interrupt) {
  interrupt.end_at_once(true);
  const double lost_s = base::seconds_since(restart.lost_ns);
  if (lost_s >= seconds) {
    return Status(
        why.code(),
        fmt::format("a device was lost, and training has made no progress for {} ({})",
                    base::format_seconds(lost_s), why.what()),
        "When its server can be reached, run the command again: it goes on from the committed "
        "step. remote.restart_seconds says for how long that is tried.");
  }
  if (restart.tries > 0 && !interrupt.requested()) {
    const auto doubled = static_cast<int>(std::min<uint64_t>(restart.tries - 1, 10));
    const double wait = std::min({std::ldexp(kWaitFirst, doubled), kWaitLast, seconds - lost_s});
    std::this_thread::sleep_for(std::chrono::duration<double>(wait));
  }
  interrupt.end();
  if (!interrupt.requested()) return Status();
  return Status(ErrorCode::kCancelled, "stopped before the devices were opened again",
                "Run the command again: it goes on from the committed step.");
}

Status begin_again(const std::string& run, bool json, bool verbose, const Restart& restart) {
  std::vector<std::string> words{"smartinf",
                                 "train",
                                 (std::filesystem::path(run) / train::kRecipeFile).string(),
                                 "--restarted",
                                 std::to_string(restart.lost_ns),
                                 std::to_string(restart.step),
                                 std::to_string(restart.tries)};
  if (json) words.emplace_back("--json");
  if (verbose) words.emplace_back("--verbose");
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  std::fflush(nullptr);
  // The file that runs, also when another one has its name by now.
  constexpr const char* kSelf = "/proc/self/exe";
  ::execv(kSelf, arguments.data());
  return base::errno_status(errno, "the training could not be begun again", kSelf, {}, {},
                            "Run the command again: it goes on from the committed step.");
}

}  // namespace smartinf::apps
