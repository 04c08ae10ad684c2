#include <cerrno>
#include <cstring>
#include <filesystem>

#include <fmt/format.h>
#include <unistd.h>

#include "smartinf/train/ranks/environment.h"

#include "workloads/gnn/ranks.h"

namespace smartinf::workloads {

using base::ErrorCode;
using base::Status;

namespace {

base::Result<bool> has_ranks() {
  SI_ASSIGN_OR_RETURN(const auto environment, train::rank_environment());
  return environment.has_value();
}

}  // namespace

int start_with_ranks(char** arguments) {
  const base::Result<bool> ranks = has_ranks();
  if (!ranks.ok() || !*ranks) return 0;  // join_ranks() says what is wrong
  std::error_code failed;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", failed);
  const std::filesystem::path program = self.parent_path() / "smartinf-gnn-ranks";
  if (!failed) ::execv(program.c_str(), arguments);
  fmt::print(
      stderr,
      "smartinf-gnn: cannot start {}: {}. It is in the same folder in a build with torch, which "
      "several ranks need.\n",
      program.string(), failed ? failed.message() : std::strerror(errno));
  return 1;
}

Status join_ranks(RankOptions& /*ranks*/) { return has_ranks().status(); }

}  // namespace smartinf::workloads
