// What a program asks of a memory, as requests: streams, random bursts, words of open rows, rows of
// a table, and the selected elements of a gradient.
#pragma once

#include <cstdint>
#include <iterator>
#include <list>
#include <unordered_map>

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

/// Words that wait for others of their DRAM row. A row's go as a gather or scatter when they are as
/// many as a burst holds, or when more rows wait than `rows`, where the row that came first goes.
class Collector {
 public:
  Collector(const Organisation& organisation, Request::Kind kind, size_t rows);

  /// send(request) of what goes. used_bytes: of the word.
  template <typename Send>
  void add(const Place& place, uint32_t used_bytes, const Send& send) {
    const auto [found, is_new] = waiting_.try_emplace(key(place));
    if (is_new) {
      order_.push_back({.kind = kind_, .rank = place.rank, .bank = place.bank, .row = place.row});
      found->second = std::prev(order_.end());
    }
    Request& request = *found->second;
    ++request.words;
    request.used_bytes = static_cast<uint16_t>(request.used_bytes + used_bytes);
    if (request.words == burst_words_) go(found->second, send);
    if (order_.size() > rows_) go(order_.begin(), send);
  }
  /// What waits, the row that came first before others.
  template <typename Send>
  void flush(const Send& send) {
    while (!order_.empty()) go(order_.begin(), send);
  }

 private:
  uint64_t key(const Place& place) const {
    return (uint64_t{place.row} << 16) | (uint64_t{place.rank} << 8) | place.bank;
  }
  template <typename Send>
  void go(std::list<Request>::iterator at, const Send& send) {
    const Request request = *at;
    waiting_.erase(key({request.rank, request.bank, request.row}));
    order_.erase(at);
    send(request);
  }

  Request::Kind kind_;
  size_t rows_;
  uint32_t burst_words_;
  std::list<Request> order_;
  std::unordered_map<uint64_t, std::list<Request>::iterator> waiting_;
};

}  // namespace smartinf::sim::dram
