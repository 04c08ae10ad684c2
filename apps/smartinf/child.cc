#include "apps/smartinf/child.h"

#include <array>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace smartinf::apps {
namespace {

constexpr size_t kOutputBytesMax = size_t{1} << 20;

}  // namespace

std::optional<std::string> child_output(const std::vector<std::string>& words,
                                        std::chrono::milliseconds wait) {
  std::array<int, 2> pipe_ends{};
  if (::pipe2(pipe_ends.data(), O_CLOEXEC) != 0) return std::nullopt;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  pid_t child = -1;
  const int spawned =
      ::posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(pipe_ends[1]);
  if (spawned != 0) {
    ::close(pipe_ends[0]);
    return std::nullopt;
  }
  std::string output;
  const auto deadline = std::chrono::steady_clock::now() + wait;
  bool ended = false;
  while (!ended && output.size() < kOutputBytesMax) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd entry{pipe_ends[0], POLLIN, 0};
    if (left.count() <= 0 || ::poll(&entry, 1, static_cast<int>(left.count())) <= 0) break;
    std::array<char, 4096> part{};
    const ssize_t count = ::read(pipe_ends[0], part.data(), part.size());
    if (count > 0) output.append(part.data(), static_cast<size_t>(count));
    ended = count <= 0;
  }
  ::close(pipe_ends[0]);
  if (!ended) ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  if (!ended || output.empty()) return std::nullopt;
  return output;
}

}  // namespace smartinf::apps
