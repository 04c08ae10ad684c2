// Which cores are near a drive, and how a thread is kept on one. Two implementations, chosen by the
// build: with hwloc, and without it (no core is near, nothing is pinned).
#pragma once

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace smartinf::csd {

/// Cores this process may use, those on the same NUMA node as the drive that holds `path` first.
/// Empty where that cannot be found out.
std::vector<uint32_t> cores_near(const std::string& path);

/// Best effort: a refusal costs speed only.
void pin_thread(std::jthread& thread, uint32_t core);

}  // namespace smartinf::csd
