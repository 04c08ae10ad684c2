#include "smartinf/sim/dram/traffic.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include <fmt/format.h>

#include "smartinf/base/check.h"

namespace smartinf::sim::dram {
namespace {

using base::ErrorCode;
using base::Status;

/// Uniform below `bound`, the same with every standard library.
uint64_t below(std::mt19937_64& random, uint64_t bound) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(random()) * bound >> 64);
}

/// Bytes [first, first + length) of the address space, in rising order: bursts that they touch,
/// each once, or words by their rows.
class Touched {
  auto submit() {
    return [this](const Request& request) { memory_.submit(request); };
  }

 public:
  Touched(const Config& config, Memory& memory, bool writes, bool in_bank)
      : map_(config.organisation),
        burst_bytes_(config.organisation.burst_bytes()),
        memory_(memory),
        kind_(writes ? Request::Kind::kWrite : Request::Kind::kRead),
        collector_(config.organisation, writes ? Request::Kind::kScatter : Request::Kind::kGather,
                   // Rising: each bank's open row.
                   size_t{config.organisation.ranks} * config.organisation.rank_banks()),
        in_bank_(in_bank) {}

  void add(uint64_t first, uint64_t length) {
    const uint64_t unit = in_bank_ ? kWordBytes : burst_bytes_;
    for (uint64_t at = first; at < first + length;) {
      const uint64_t place = at / unit;
      const uint64_t end = std::min(first + length, (place + 1) * unit);
      if (place != place_) flush();
      place_ = place;
      used_ += static_cast<uint32_t>(end - at);
      at = end;
    }
  }
  void finish() {
    flush();
    if (in_bank_) collector_.flush(submit());
    memory_.finish();
  }

 private:
  void flush() {
    if (used_ == 0) return;
    const Place place = map_.place(place_ * (in_bank_ ? kWordBytes : burst_bytes_));
    if (in_bank_) {
      collector_.add(place, used_, submit());
    } else {
      memory_.submit({.kind = kind_,
                      .rank = place.rank,
                      .bank = place.bank,
                      .used_bytes = static_cast<uint16_t>(used_),
                      .row = place.row});
    }
    used_ = 0;
  }

  AddressMap map_;
  uint64_t burst_bytes_;
  Memory& memory_;
  Request::Kind kind_;
  Collector collector_;
  bool in_bank_;
  uint64_t place_ = ~uint64_t{0};  // of the burst or word that is not sent yet
  uint32_t used_ = 0;
};

/// Words of rows that are open in several banks at once, a burst of each bank in turn.
void simulate_words(const Config& config, const Traffic& traffic, bool in_bank, Memory& memory,
                    std::mt19937_64& random) {
  const Organisation& o = config.organisation;
  const uint32_t banks = traffic.banks > 0 ? traffic.banks : o.ranks * o.rank_banks();
  const uint32_t burst_words = o.burst_words();
  const uint32_t per_row = traffic.words_per_row > 0 ? traffic.words_per_row : o.burst_words();
  const Request::Kind kind =
      in_bank ? (traffic.writes ? Request::Kind::kScatter : Request::Kind::kGather)
              : (traffic.writes ? Request::Kind::kWrite : Request::Kind::kRead);
  std::vector<uint32_t> rows(banks, 0);
  for (uint64_t left = traffic.requests; left > 0;) {
    if (traffic.words_per_row > 0) {
      for (uint32_t& row : rows) row = static_cast<uint32_t>(below(random, 1u << 16));
    }
    for (uint32_t word = 0; word < per_row && left > 0;) {
      const uint32_t words = in_bank ? std::min(burst_words, per_row - word) : 1;
      for (uint32_t i = 0; i < banks && left > 0; ++i) {
        const auto now = static_cast<uint8_t>(std::min<uint64_t>(words, left));
        const uint32_t bank = i / o.ranks;  // neighbours in other groups
        memory.submit(
            {.kind = kind,
             .rank = static_cast<uint8_t>(i % o.ranks),
             .bank = static_cast<uint8_t>(bank % o.bank_groups * o.banks + bank / o.bank_groups),
             .words = now,
             .used_bytes = static_cast<uint16_t>(now * kWordBytes),
             .row = rows[i]});
        left -= now;
      }
      word += words;
    }
  }
  memory.finish();
}

}  // namespace

Collector::Collector(const Organisation& organisation, Request::Kind kind, size_t rows)
    : kind_(kind), rows_(rows), burst_words_(organisation.burst_words()) {}

Status check_traffic(const Config& config, const Traffic& traffic) {
  const Organisation& o = config.organisation;
  const auto refuse = [](std::string what, std::string advice) {
    return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
  };
  if (traffic.requests == 0) return refuse("no requests", "Give at least 1.");
  if (traffic.pattern == Pattern::kWords) {
    if (traffic.banks > o.ranks * o.rank_banks()) {
      return refuse(fmt::format("{} banks, but {} has {}", traffic.banks, config.name,
                                o.ranks * o.rank_banks()),
                    "Give fewer.");
    }
    if (const uint32_t bursts = o.row_bytes / o.burst_bytes(); traffic.words_per_row > bursts) {
      return refuse(fmt::format("{} words of a row that has {} bursts of {} bytes",
                                traffic.words_per_row, bursts, o.burst_bytes()),
                    "Each word is in a burst of its own: give fewer.");
    }
  }
  if (traffic.pattern == Pattern::kRows && (traffic.row_bytes == 0 || traffic.table_rows == 0)) {
    return refuse(
        fmt::format("a table of {} rows of {} bytes", traffic.table_rows, traffic.row_bytes),
        "Give at least 1 of both.");
  }
  if (traffic.pattern == Pattern::kTopK && !(traffic.share > 0 && traffic.share <= 1)) {
    return refuse(fmt::format("a share of {}", traffic.share), "Give one above 0 and at most 1.");
  }
  return {};
}

Counts simulate_traffic(const Config& config, const Traffic& traffic, bool in_bank,
                        std::vector<IssuedCommand>* trace) {
  SI_CHECK(check_traffic(config, traffic).ok(), "traffic that was not checked");
  Memory memory(config, trace);
  std::mt19937_64 random(traffic.seed);
  const Organisation& o = config.organisation;
  const uint64_t burst_bytes = o.burst_bytes();
  Touched touched(config, memory, traffic.writes || traffic.pattern == Pattern::kTopK, in_bank);
  switch (traffic.pattern) {
    case Pattern::kStream:
      touched.add(0, traffic.requests * burst_bytes);
      break;
    case Pattern::kRandom: {
      const AddressMap map(o);
      for (uint64_t i = 0; i < traffic.requests; ++i) {
        // 2^16 rows of each bank.
        const uint64_t bursts = uint64_t{o.ranks} * o.rank_banks() * (o.row_bytes / burst_bytes)
                                << 16;
        const Place place = map.place(below(random, bursts) * burst_bytes);
        memory.submit({.kind = traffic.writes ? Request::Kind::kWrite : Request::Kind::kRead,
                       .rank = place.rank,
                       .bank = place.bank,
                       .used_bytes = static_cast<uint16_t>(burst_bytes),
                       .row = place.row});
      }
      break;
    }
    case Pattern::kWords:
      simulate_words(config, traffic, in_bank, memory, random);
      return memory.counts();
    case Pattern::kRows: {
      std::vector<uint64_t> rows(traffic.requests);
      for (uint64_t& row : rows) row = below(random, traffic.table_rows);
      std::sort(rows.begin(), rows.end());
      rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
      for (const uint64_t row : rows) touched.add(row * traffic.row_bytes, traffic.row_bytes);
      break;
    }
    case Pattern::kTopK: {
      // Gaps between elements that are each selected with probability `share` are geometric.
      const double log_rest = std::log1p(-std::min(traffic.share, 1 - 1e-12));
      uint64_t element = 0;
      for (uint64_t i = 0; i < traffic.requests; ++i) {
        const double uniform = (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53;
        element += static_cast<uint64_t>(std::log(uniform) / log_rest);
        touched.add(element++ * sizeof(float), sizeof(float));
      }
      break;
    }
  }
  touched.finish();
  return memory.counts();
}

}  // namespace smartinf::sim::dram
