#include "smartinf/base/user_path.h"

#include <cctype>
#include <cstdlib>
#include <filesystem>

#include <fmt/format.h>
#include <pwd.h>
#include <unistd.h>

namespace smartinf::base {

namespace {

/// Home directory of a user by name, or of this one. Empty: there is none.
std::string home_of(const std::string& user) {
  if (user.empty()) {
    if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') return home;
  }
  const passwd* entry = user.empty() ? getpwuid(getuid()) : getpwnam(user.c_str());
  return entry == nullptr ? std::string() : entry->pw_dir;
}

bool has_variable(std::string_view text) {
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    const auto next = static_cast<unsigned char>(text[i + 1]);
    if (text[i] == '$' && (std::isalpha(next) != 0 || next == '_' || next == '{')) return true;
  }
  return false;
}

}  // namespace

Result<std::string> user_path(std::string_view text) {
  std::string path(text);
  const auto refuse = [&](std::string what, std::string advice) {
    return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
  };
  std::error_code error;
  if (std::filesystem::exists(path, error)) return path;
  if (path.starts_with("~")) {
    const size_t slash = path.find('/');
    const std::string user = path.substr(1, slash == std::string::npos ? slash : slash - 1);
    const std::string home = home_of(user);
    if (home.empty()) {
      return refuse(
          fmt::format("{}: there is no home folder of {}", path, user.empty() ? "this user" : user),
          fmt::format("Write the path out, or ./{} for a folder of that name", path));
    }
    path = home + (slash == std::string::npos ? "" : path.substr(slash));
  }
  if (has_variable(path) && !std::filesystem::exists(path, error)) {
    return refuse(fmt::format("{}: variables in paths are expanded by shells only", path),
                  "Write the path out; \"~\" stands for your home folder");
  }
  return path;
}

}  // namespace smartinf::base
