#include "apps/smartinf/scratch_directory.h"

#include <cerrno>
#include <cstdlib>
#include <utility>

namespace smartinf::apps {

namespace fs = std::filesystem;

base::Result<ScratchDirectory> ScratchDirectory::make(const std::string& parent) {
  std::error_code error;
  fs::path where = parent;
  if (parent.empty()) {
    where = fs::is_directory("/dev/shm", error) ? fs::path("/dev/shm") : fs::temp_directory_path();
  }
  std::string pattern = (where / "smartinf-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    return base::errno_status(errno, "cannot make a scratch directory", where.string(), {}, {},
                              "Name another place with --scratch.");
  }
  return ScratchDirectory(pattern);
}

ScratchDirectory::ScratchDirectory(ScratchDirectory&& other) noexcept
    : path_(std::exchange(other.path_, {})) {}

ScratchDirectory::~ScratchDirectory() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

}  // namespace smartinf::apps
