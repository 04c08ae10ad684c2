#include "apps/smartinf/python_script.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace smartinf::apps {

using base::ErrorCode;
using base::Result;
using base::Status;

Result<PythonScript> PythonScript::start(std::string_view script,
                                         const std::vector<std::string>& arguments,
                                         ScriptOutput output) {
  const char* chosen = std::getenv("SMARTINF_PYTHON");
  std::vector<std::string> words{chosen != nullptr ? chosen : "python3", "-c", std::string(script)};
  words.insert(words.end(), arguments.begin(), arguments.end());
  // A socket: writing to one that nobody reads is an error, and no signal.
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    return base::errno_status(errno, "cannot start Python", words.front());
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
  if (output == ScriptOutput::kAnswers) {
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  }
  // The child blocks no signals, though our threads do.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  std::fflush(stdout);  // what we have said comes first
  pid_t child = -1;
  const int failed =
      ::posix_spawnp(&child, pointers[0], &actions, &attributes, pointers.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  ::close(ends[1]);
  if (failed == 0) return PythonScript(words.front(), child, ends[0]);
  ::close(ends[0]);
  if (failed != ENOENT) return base::errno_status(failed, "cannot start Python", words.front());
  return Status(ErrorCode::kNotFound, fmt::format("there is no {}", words.front()),
                "Install Python 3, or name one in the environment variable SMARTINF_PYTHON");
}

PythonScript& PythonScript::operator=(PythonScript&& other) noexcept {
  std::swap(python_, other.python_);
  std::swap(child_, other.child_);
  std::swap(input_, other.input_);
  std::swap(unread_, other.unread_);
  return *this;
}

bool PythonScript::write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t sent = ::send(input_, text.data(), text.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    text.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

std::optional<std::string> PythonScript::read_line() {
  size_t end = unread_.find('\n');
  while (end == std::string::npos) {
    std::array<char, 4096> part{};
    const ssize_t count = ::recv(input_, part.data(), part.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::nullopt;
    unread_.append(part.data(), static_cast<size_t>(count));
    end = unread_.find('\n');
  }
  std::string line = unread_.substr(0, end);
  unread_.erase(0, end + 1);
  return line;
}

bool PythonScript::runs() const {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(child_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == 0;
}

bool PythonScript::finish() {
  if (child_ < 0) return false;
  ::close(std::exchange(input_, -1));
  int status = 0;
  while (::waitpid(child_, &status, 0) < 0 && errno == EINTR) {
  }
  child_ = -1;
  if (WIFSIGNALED(status)) {
    std::fprintf(stderr, "smartinf: %s was ended by signal %d (%s)\n", python_.c_str(),
                 WTERMSIG(status), strsignal(WTERMSIG(status)));
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace smartinf::apps
