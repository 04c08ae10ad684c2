// Scripts of the project, and the page of a plan: compiled in, so that an installed command has
// them. Scripts are run by the user's Python.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/types.h>

#include "smartinf/base/status.h"

namespace smartinf::apps {

/// scripts/certificates.py, make_token_files.py, plot_run.py, tokenize_text.py and
/// write_tensorboard.py.
std::string_view certificates_script();
std::string_view make_token_files_script();
std::string_view plot_run_script();
std::string_view tokenize_text_script();
std::string_view write_tensorboard_script();
/// plan.html, a static page that draws the plan it is given.
std::string_view plan_page();
/// plan_cluster.html, likewise of a cluster.
std::string_view cluster_page();

/// The way of a script's standard output. kAnswers: read_line() has it.
enum class ScriptOutput : uint8_t { kShown, kAnswers };

/// A script that runs. Its standard error is ours, and says why it failed. Threads: one caller.
class PythonScript {
 public:
  /// Starts SMARTINF_PYTHON, or else python3. Errors: kNotFound where there is no such Python, kIo.
  static base::Result<PythonScript> start(std::string_view script,
                                          const std::vector<std::string>& arguments,
                                          ScriptOutput output = ScriptOutput::kShown);
  PythonScript(PythonScript&& other) noexcept
      : python_(std::move(other.python_)),
        child_(std::exchange(other.child_, -1)),
        input_(std::exchange(other.input_, -1)),
        unread_(std::move(other.unread_)) {}
  PythonScript& operator=(PythonScript&& other) noexcept;
  ~PythonScript() { finish(); }

  /// To its standard input. False when it reads no more, because it failed.
  bool write(std::string_view text);
  /// The next line of its answers, without its end; waits for it. Nothing when there is none any
  /// more, because it has ended.
  std::optional<std::string> read_line();
  /// Whether the script has not ended yet.
  bool runs() const;
  /// Closes its input and waits for its end. Whether it did its work.
  bool finish();

 private:
  PythonScript(std::string python, pid_t child, int input)
      : python_(std::move(python)), child_(child), input_(input) {}

  std::string python_;
  pid_t child_ = -1;
  int input_ = -1;      // a socket: its answers come back there
  std::string unread_;  // of them
};

}  // namespace smartinf::apps
