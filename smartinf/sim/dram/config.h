// A memory as its data sheet describes it: banks, buses, and the cycles between commands. One
// channel is described; a memory has several that are alike.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::sim::dram {

/// Bytes of a word that gathers and scatters move.
inline constexpr uint32_t kWordBytes = 8;

struct Organisation {
  double clock_hz = 0;  // of commands; data move twice in a cycle
  uint32_t channels = 1;
  uint32_t ranks = 1;
  uint32_t bank_groups = 1;
  uint32_t banks = 1;      // of a group
  uint32_t row_bytes = 0;  // of a rank: of all its chips together
  uint32_t bus_bytes = 0;
  uint32_t burst_cycles = 0;    // half the burst length
  uint32_t command_cycles = 1;  // that a command takes of the command bus

  uint32_t burst_bytes() const { return 2 * bus_bytes * burst_cycles; }
  uint32_t burst_words() const { return burst_bytes() / kWordBytes; }
  uint32_t rank_banks() const { return bank_groups * banks; }
  /// Of one channel.
  double peak_bytes_per_s() const { return 2.0 * bus_bytes * clock_hz; }
};

/// Cycles, by their names in data sheets. _S: between bank groups, _L: in one.
struct Timing {
  uint32_t cl = 0;
  uint32_t cwl = 0;
  uint32_t rcd = 0;
  uint32_t rp = 0;
  uint32_t ras = 0;
  uint32_t rtp = 0;
  uint32_t wr = 0;
  uint32_t ccd_s = 0;
  uint32_t ccd_l = 0;
  uint32_t rrd_s = 0;
  uint32_t rrd_l = 0;
  uint32_t faw = 0;
  uint32_t wtr_s = 0;
  uint32_t wtr_l = 0;
  uint32_t turnaround = 0;   // of the data bus, from a read's burst to a write's
  uint32_t rank_switch = 0;  // of the data bus, from one rank's burst to another's
  uint32_t rfc = 0;
  uint32_t refi = 0;  // 0: no refresh
};

/// Gather and scatter in a bank (Piccolo, HPCA 2025): offsets go to a buffer of the bank in a
/// burst, the bank accesses that many words of its open row, and the words move in one burst.
struct InBank {
  uint32_t column_cycles = 0;  // from word to word; 0: tCCD_L
  uint32_t offset_bursts = 1;  // that bring a gather's or scatter's offsets
  /// Whether bursts to and from the buffers keep tWTR and the data bus' turn-around, as those of
  /// the array do. The paper counts their bursts alone.
  bool turnaround = false;
};

/// Currents of one chip in mA, by their names in data sheets. VDD 0: not known.
struct Currents {
  double vdd = 0;
  uint32_t chips = 1;  // of a rank
  double idd0 = 0;
  double idd2n = 0;
  double idd3n = 0;
  double idd4r = 0;
  double idd4w = 0;
  double idd5b = 0;
  /// Energy of a word that the bank itself takes or puts, of a burst's: 1 where all chips access a
  /// whole column for it, 1 / burst_words() where a column brings nothing but words.
  double word_share = 1;
};

struct Config {
  std::string name;
  std::string source;
  Organisation organisation;
  Timing timing;
  InBank in_bank;
  Currents currents;

  uint32_t column_cycles() const {
    return in_bank.column_cycles > 0 ? in_bank.column_cycles : timing.ccd_l;
  }
};

struct Preset {
  std::string_view name;
  std::string_view toml;
};
/// The shipped files, compiled in; the build writes the table from machines/memory/*.toml.
std::span<const Preset> presets();
std::vector<std::string_view> preset_names();

/// `name_or_path`: a preset, or a file when it ends in .toml or holds a slash.
/// Errors: kNotFound with the nearest preset; kInvalidArgument naming file, line and key, or two
/// timings that contradict each other, with both numbers.
base::Result<Config> load_config(std::string_view name_or_path);
base::Result<Config> parse_config(std::string_view toml_text, std::string_view origin);
/// The text that parse_config reads back to the same memory.
std::string config_to_toml(const Config& config);
base::Status check_config(const Config& config);

}  // namespace smartinf::sim::dram
