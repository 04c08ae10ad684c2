#include "smartinf/sim/dram/energy.h"

#include <numeric>

namespace smartinf::sim::dram {

double EnergyUse::total() const { return std::accumulate(joules.begin(), joules.end(), 0.0); }

EnergyUse energy_of(const Config& config, const Counts& counts) {
  const Currents& c = config.currents;
  const Timing& t = config.timing;
  const double burst = config.organisation.burst_cycles;
  // Of a rank, in mA and cycles.
  const double activate = c.idd0 * (t.ras + t.rp) - c.idd3n * t.ras - c.idd2n * t.rp;
  const double read = (c.idd4r - c.idd3n) * burst;
  const double write = (c.idd4w - c.idd3n) * burst;
  const double refresh = (c.idd5b - c.idd3n) * t.rfc;
  const double unit = c.vdd * 1e-3 * c.chips / config.organisation.clock_hz;
  const auto times = [&](double current, Command command) {
    return unit * current * static_cast<double>(counts.count(command));
  };
  const auto words = [&](double current, uint64_t number) {
    return unit * current * c.word_share * static_cast<double>(number);
  };
  using enum Command;
  return {
      {times(activate, kActivate), times(read, kRead), times(write, kWrite),
       words(read, counts.gathered_words) + words(write, counts.scattered_words),
       times(read, kFetchWords) + times(write, kSendOffsets) + times(write, kSendWords),
       times(refresh, kRefresh),
       unit * c.idd3n * config.organisation.ranks * static_cast<double>(counts.total_cycles())}};
}

}  // namespace smartinf::sim::dram
