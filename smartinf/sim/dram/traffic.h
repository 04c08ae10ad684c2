// What a program asks of a memory, as requests: streams, random bursts, words of open rows, rows of
// a table, and the selected elements of a gradient.
#pragma once

#include <cstdint>

#include "smartinf/sim/dram/memory.h"

namespace smartinf::sim::dram {

enum class Pattern : uint8_t {
  kStream,  // bursts one after another
  kRandom,  // bursts at random places
  kWords,   // words of open rows, each in a burst of its own
  kRows,    // rows of a table, a batch of them collected by DRAM row
  kTopK,    // selected f32 elements of a gradient, put to their places
};
inline constexpr std::array<std::string_view, 5> kPatternNames{"stream", "random", "words", "rows",
                                                               "topk"};
constexpr std::span<const std::string_view> enum_names(Pattern) { return kPatternNames; }

struct Traffic {
  Pattern pattern = Pattern::kStream;
  uint64_t requests = 1'000'000;  // bursts, words, rows of the table, or elements
  bool writes = false;            // to places in place of from them; kTopK always does
  uint32_t row_bytes = 320;       // of a table's row
  uint64_t table_rows = 1'000'000;
  uint32_t banks = 0;          // that words are in; 0: all
  uint32_t words_per_row = 0;  // of a DRAM row, before the bank's next one is opened; 0: of one row
  double share = 0.01;         // of elements that are selected
  uint64_t seed = 1;
};

/// Errors: kInvalidArgument for what the memory does not have: more banks than its own, more words
/// than bursts of a row.
base::Status check_traffic(const Config& config, const Traffic& traffic);

/// The requests on one channel. in_bank: with gathers and scatters (kWords, kRows, kTopK).
Counts simulate_traffic(const Config& config, const Traffic& traffic, bool in_bank,
                        std::vector<IssuedCommand>* trace = nullptr);

/// Words of rows by the bank that they are in, given in the order of rows, as gathers or scatters
/// of as many as a burst holds.
class Collector {
 public:
  Collector(const Config& config, Memory& memory, Request::Kind kind);
  /// used_bytes: of the word.
  void add(const Place& place, uint32_t used_bytes, int64_t at = 0);
  void flush();

 private:
  void send(size_t bank);

  const Organisation& organisation_;
  Memory& memory_;
  std::vector<Request> open_;  // one for each bank; no words: none
  Request::Kind kind_;
};

}  // namespace smartinf::sim::dram
