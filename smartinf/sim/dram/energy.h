// Energy of a memory's commands from the currents of its data sheet, as Micron's technical notes on
// memory power (TN-40-07) take it: each command's share of the current above that of standby.
#pragma once

#include <array>

#include "smartinf/sim/dram/memory.h"

namespace smartinf::sim::dram {

enum class Energy : uint8_t {
  kActivates,  // with their precharges
  kReads,      // bursts
  kWrites,     // bursts
  kInBank,     // words of gathers and scatters
  kBuffers,    // bursts to and from the banks' buffers, as much as reads and writes
  kRefreshes,
  kStandby,  // all the time, as with rows open
};
inline constexpr std::array<std::string_view, 7> kEnergyNames{
    "activates", "reads", "writes", "in_bank", "buffers", "refreshes", "standby"};
constexpr std::span<const std::string_view> enum_names(Energy) { return kEnergyNames; }

struct EnergyUse {
  std::array<double, kEnergyNames.size()> joules{};

  double total() const;
  double share(Energy energy) const { return joules[static_cast<size_t>(energy)] / total(); }
};

/// Of one channel's commands; all 0 where the memory's currents are not known. Without that of
/// drivers and terminations on the bus, which data sheets' currents leave out.
EnergyUse energy_of(const Config& config, const Counts& counts);

}  // namespace smartinf::sim::dram
