#include "workloads/graph_kernels/accelerator.h"

#include <algorithm>
#include <bit>

namespace smartinf::workloads {

using sim::dram::kWordBytes;
using sim::dram::Place;
using sim::dram::Request;

Cache::Cache(uint64_t bytes, uint32_t line_words, uint32_t ways)
    : line_words_(line_words),
      ways_(ways),
      sets_(std::max<uint64_t>(1, bytes / (uint64_t{kWordBytes} * line_words * ways))),
      lines_(sets_ * ways) {}

Cache::Outcome Cache::access(uint64_t word, bool write) {
  const uint64_t number = word / line_words_;
  const auto bit = static_cast<uint16_t>(1u << (word % line_words_));
  // Hashed, because low bits of vertices that are asked for often are alike in R-MAT graphs.
  const uint64_t mixed = (number * 0x9E3779B97F4A7C15u) >> 32;
  Line* const set = &lines_[(mixed * sets_ >> 32) * ways_];
  Line* oldest = set;
  Outcome outcome;
  ++now_;
  for (Line* line = set; line < set + ways_; ++line) {
    if (line->number == number) {
      outcome.word_hit = (line->asked & bit) != 0;
      line->used_at = now_;
      line->asked |= bit;
      if (write) line->dirty |= bit;
      return outcome;
    }
    if (line->used_at < oldest->used_at) oldest = line;
  }
  outcome.hit = outcome.word_hit = false;
  outcome.evicts_dirty = oldest->dirty != 0;
  outcome.evicted_line = oldest->number;
  outcome.evicted_words = static_cast<uint32_t>(std::popcount(oldest->dirty));
  *oldest = {number, now_, bit, write ? bit : uint16_t{0}};
  return outcome;
}

GraphMachine::GraphMachine(const sim::dram::Config& memory, const Accelerator& accelerator,
                           uint64_t vertices, uint64_t edges)
    : config_(memory),
      accelerator_(accelerator),
      map_(memory.organisation),
      memory_(memory),
      cache_(accelerator.cache_bytes, accelerator.in_bank ? 1 : memory.organisation.burst_words(),
             accelerator.ways),
      gathers_(memory.organisation, Request::Kind::kGather, accelerator.rows_collected),
      scatters_(memory.organisation, Request::Kind::kScatter, accelerator.rows_collected) {
  // Values, then edges, then two streams, each from a row of all banks on.
  const auto& o = memory.organisation;
  const uint64_t rows = uint64_t{o.row_bytes} * o.ranks * o.rank_banks();
  const auto up = [&](uint64_t bytes) { return (bytes + rows - 1) / rows * rows; };
  const uint64_t values = up(vertices * kValueBytes);
  const uint64_t list = up(edges * 2 * kVertexBytes);
  edges_.first = values;
  for (size_t i = 0; i < streams_.size(); ++i) {
    // Long enough that no row of it is met again soon.
    streams_[i].first = streams_[i].next = values + list + i * 64 * rows;
    streams_[i].end = streams_[i].first + 64 * rows;
  }
}

void GraphMachine::submit(Request request) {
  // The memory's queue holds the processing elements back.
  request.at = static_cast<int64_t>(now_);
  now_ = std::max(now_, static_cast<double>(memory_.submit(request)));
}

void GraphMachine::burst(uint64_t byte, bool write) {
  const Place place = map_.place(byte);
  submit({.kind = write ? Request::Kind::kWrite : Request::Kind::kRead,
          .rank = place.rank,
          .bank = place.bank,
          .row = place.row});
}

void GraphMachine::move(Stream& stream, uint64_t bytes, bool write) {
  used_bytes_ += bytes;
  stream.next += bytes;
  const uint64_t size = config_.organisation.burst_bytes();
  // A write goes when its burst is full, a read when its first byte is wanted.
  for (;;) {
    const uint64_t at = std::max(stream.moved_to, stream.first);
    if (write ? at + size > stream.next : at >= stream.next) break;
    burst(at, write);
    stream.moved_to = at + size;
  }
  if (stream.next >= stream.end) stream.next = stream.moved_to = stream.first;
}

void GraphMachine::list(uint64_t first, uint64_t bytes) {
  if (bytes == 0) return;
  used_bytes_ += bytes;
  const uint64_t size = config_.organisation.burst_bytes();
  const uint64_t begin = edges_.first + first;
  for (uint64_t at = begin / size * size; at < begin + bytes; at += size) {
    if (at != edges_.moved_to) burst(at, false);  // the last burst may hold two lists' edges
    edges_.moved_to = at;
  }
}

void GraphMachine::access(Vertex vertex, bool write) {
  ++accesses_;
  if (!write) now_ += 1 / accelerator_.edges_per_cycle;
  const Cache::Outcome outcome = cache_.access(vertex, write);
  if (!outcome.word_hit) used_bytes_ += kWordBytes;
  if (outcome.hit) return;
  ++misses_;
  if (accelerator_.in_bank) {
    if (outcome.evicts_dirty) collect(scatters_, outcome.evicted_line);
    collect(gathers_, vertex);
    return;
  }
  if (outcome.evicts_dirty) {
    used_bytes_ += uint64_t{kWordBytes} * outcome.evicted_words;
    burst(outcome.evicted_line * config_.organisation.burst_bytes(), true);
  }
  burst(vertex * uint64_t{kValueBytes}, false);
}

void GraphMachine::collect(sim::dram::Collector& collector, uint64_t word) {
  if (&collector == &scatters_) used_bytes_ += kWordBytes;
  collector.add(map_.place(word * kWordBytes), kWordBytes,
                [this](const Request& request) { submit(request); });
}

void GraphMachine::finish() {
  cache_.flush([&](uint64_t line, uint32_t words) {
    if (accelerator_.in_bank) return collect(scatters_, line);
    used_bytes_ += uint64_t{kWordBytes} * words;
    burst(line * config_.organisation.burst_bytes(), true);
  });
  for (sim::dram::Collector* collector : {&gathers_, &scatters_}) {
    collector->flush([this](const Request& request) { submit(request); });
  }
  memory_.finish();
}

}  // namespace smartinf::workloads
