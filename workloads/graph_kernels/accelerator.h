// An accelerator that runs a graph algorithm on DRAM: processing elements that take edges in at a
// steady rate, and a cache of vertices' values. The conventional one fetches a missing value's
// whole burst. Piccolo's caches words of 8 bytes each with a tag of its own, collects missing words
// by DRAM row, and fetches and writes them with gathers and scatters in the bank.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "smartinf/sim/dram/traffic.h"

#include "workloads/graph_kernels/algorithms.h"

namespace smartinf::workloads {

struct Accelerator {
  bool in_bank = false;           // Piccolo's
  uint64_t cache_bytes = 0;       // of data
  uint32_t ways = 8;              // lines of a set: of a burst, or in_bank of a word
  uint32_t rows_collected = 256;  // DRAM rows whose missing words wait, and as many for scatters
  double edges_per_cycle = 1;     // of the memory's clock
};

/// The values' cache, without data. A line is of `line_words` words; replaced is the one of its set
/// that was used longest ago.
class Cache {
 public:
  /// bytes / (8 x line_words x ways) sets, at least 1, any number.
  Cache(uint64_t bytes, uint32_t line_words, uint32_t ways);

  struct Outcome {
    bool hit = true;
    bool word_hit = true;  // it had been asked for since the line came
    bool evicts_dirty = false;
    uint64_t evicted_line = 0;
    uint32_t evicted_words = 0;  // dirty ones
  };
  Outcome access(uint64_t word, bool write);
  /// f(line, dirty words) of what is left.
  template <typename EachLine>
  void flush(const EachLine& each_line) {
    for (Line& line : lines_) {
      if (line.dirty != 0) each_line(line.number, static_cast<uint32_t>(std::popcount(line.dirty)));
      line = {};
    }
  }

 private:
  struct Line {
    uint64_t number = ~uint64_t{0};
    uint64_t used_at = 0;
    uint16_t asked = 0, dirty = 0;  // a bit for each word
  };
  uint32_t line_words_, ways_;
  uint64_t sets_;
  uint64_t now_ = 0;
  std::vector<Line> lines_;
};

/// The Machine that algorithms run on (algorithms.h).
class GraphMachine {
 public:
  GraphMachine(const sim::dram::Config& memory, const Accelerator& accelerator, uint64_t vertices,
               uint64_t edges);

  void stream(uint64_t bytes) { move(streams_[0], bytes, false); }
  void store(uint64_t bytes) { move(streams_[1], bytes, true); }
  void list(uint64_t first, uint64_t bytes);
  void read(Vertex vertex) { access(vertex, false); }
  void write(Vertex vertex) { access(vertex, true); }
  /// Writes what is dirty, and waits for all.
  void finish();

  const sim::dram::Counts& counts() const { return memory_.counts(); }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t accesses() const { return accesses_; }
  uint64_t misses() const { return misses_; }

 private:
  struct Stream {
    uint64_t next = 0;  // byte of the address space
    uint64_t first = 0, end = 0;
    uint64_t moved_to = 0;  // bursts below are moved
  };

  void access(Vertex vertex, bool write);
  void move(Stream& stream, uint64_t bytes, bool write);
  void burst(uint64_t byte, bool write);
  void collect(sim::dram::Collector& collector, uint64_t word);
  void submit(sim::dram::Request request);

  sim::dram::Config config_;
  Accelerator accelerator_;
  sim::dram::AddressMap map_;
  sim::dram::Memory memory_;
  Cache cache_;
  std::array<Stream, 2> streams_;
  Stream edges_;
  sim::dram::Collector gathers_, scatters_;  // missing words, and dirty ones that were replaced
  double now_ = 0;  // cycles
  uint64_t used_bytes_ = 0, accesses_ = 0, misses_ = 0;
};

}  // namespace smartinf::workloads
