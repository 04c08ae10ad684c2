// `smartinf certificates`: goes on as scripts/certificates.py, which has the flags and their help.
#include <cerrno>
#include <cstdlib>

#include <fmt/format.h>
#include <unistd.h>

#include "apps/smartinf/commands.h"
#include "apps/smartinf/python_script.h"

namespace smartinf::apps {
namespace {

int run_certificates(const std::vector<std::string>& arguments) {
  const char* chosen = std::getenv("SMARTINF_PYTHON");
  std::vector<std::string> words{chosen != nullptr ? chosen : "python3", "-c",
                                 std::string(certificates_script())};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execvp(pointers[0], pointers.data());
  return report(base::errno_status(
      errno, "cannot start Python", words.front(), {}, {},
      "Install Python 3, or name one in the environment variable SMARTINF_PYTHON."));
}

}  // namespace

void add_certificates(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand(
      "certificates", "Make certificates for servers and users of remote devices");
  command->set_help_flag();
  command->fallthrough(false);
  command->prefix_command();  // every word is the script's
  command->callback(
      [command, &run] { run = [command] { return run_certificates(command->remaining()); }; });
}

}  // namespace smartinf::apps
