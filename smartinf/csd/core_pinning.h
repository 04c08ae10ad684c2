// Which cores are near a drive, how devices share them, and how a thread is kept on one. Two
// implementations, chosen by the build: with hwloc, and without it (no core is near, nothing is
// pinned).
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace smartinf::csd {

/// Cores this process may use, those on the same NUMA node as the drive that holds `path` first;
/// `path` may still have to be made. Empty where that cannot be found out.
std::vector<uint32_t> cores_near(const std::string& path);

/// Cores given out to one device after another, so that no two share one while there are others.
class CoreShare {
 public:
  /// The first `threads` of `near` that nobody has. Empty when there are not enough of them:
  /// threads that would share a core are better left to the system.
  std::vector<uint32_t> take(std::span<const uint32_t> near, uint32_t threads);

 private:
  std::set<uint32_t> taken_;
};

/// Best effort: a refusal costs speed only.
void pin_thread(std::jthread& thread, uint32_t core);

}  // namespace smartinf::csd
