// The shipped machine files, compiled in so that the command works from anywhere. The build writes
// the table from machines/*.toml.
#pragma once

#include <span>
#include <string_view>

namespace smartinf::sim {

/// Rate that a GPU's PCIe 4.0 x16 link carries in this kind of work; fitted to the paper's forward
/// and backward times (docs/simulator.md).
inline constexpr double kPcie4x16GbPerS = 14.5;

struct MachinePreset {
  std::string_view name;
  std::string_view toml;
};

std::span<const MachinePreset> machine_presets();

}  // namespace smartinf::sim
