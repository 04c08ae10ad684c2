#include "smartinf/sim/dram/memory.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "smartinf/base/check.h"

namespace smartinf::sim::dram {
namespace {

/// Slots of the command bus that are remembered; commands are put no further back than half of it.
constexpr int64_t kSlots = 1 << 15;

}  // namespace

int64_t Counts::total_cycles() const { return std::accumulate(cycles.begin(), cycles.end(), 0ll); }

double Counts::used_share() const {
  return bus_bytes == 0 ? 0 : static_cast<double>(used_bytes) / static_cast<double>(bus_bytes);
}

double Counts::share(Cause cause) const {
  const int64_t total = total_cycles();
  return total == 0
             ? 0
             : static_cast<double>(cycles[static_cast<size_t>(cause)]) / static_cast<double>(total);
}

AddressMap::AddressMap(const Organisation& o)
    : burst_bits_(static_cast<uint32_t>(std::countr_zero(o.burst_bytes()))),
      group_bits_(static_cast<uint32_t>(std::countr_zero(o.bank_groups))),
      column_bits_(static_cast<uint32_t>(std::countr_zero(o.row_bytes / o.burst_bytes()))),
      bank_bits_(static_cast<uint32_t>(std::countr_zero(o.banks))),
      ranks_(o.ranks),
      groups_(o.bank_groups),
      banks_(o.banks) {}

Place AddressMap::place(uint64_t byte) const {
  uint64_t rest = byte >> burst_bits_;
  const uint64_t group = rest & (groups_ - 1);
  rest >>= group_bits_ + column_bits_;
  const uint64_t bank = rest & (banks_ - 1);
  rest >>= bank_bits_;
  return {static_cast<uint8_t>(rest % ranks_), static_cast<uint8_t>(group * banks_ + bank),
          static_cast<uint32_t>(rest / ranks_)};
}

Memory::Memory(const Config& config, std::vector<IssuedCommand>* trace, uint32_t queue)
    : config_(config), trace_(trace), queue_(queue), slots_(kSlots, -1) {
  const Organisation& o = config.organisation;
  SI_CHECK(check_config(config).ok() && queue > 0, "a memory of a config that was not checked");
  banks_.resize(size_t{o.ranks} * o.rank_banks());
  candidates_.resize(kLanes * banks_.size());
  groups_.resize(size_t{o.ranks} * o.bank_groups);
  ranks_.resize(o.ranks);
  for (Rank& rank : ranks_) {
    if (config.timing.refi > 0) rank.refresh_at = config.timing.refi;
  }
  for (uint32_t i = queue; i-- > 0;) free_.push_back(i);
  set_floors();
}

int64_t Memory::submit(const Request& request) {
  const Organisation& o = config_.organisation;
  const bool in_bank =
      request.kind == Request::Kind::kGather || request.kind == Request::Kind::kScatter;
  SI_CHECK(request.rank < o.ranks && request.bank < o.rank_banks(), "a bank that is not there");
  SI_CHECK(!in_bank || (request.words > 0 && request.words <= o.burst_words()),
           "a gather has as many words as a burst at most");
  while (free_.empty()) serve_one();
  const uint32_t place = free_.back();
  free_.pop_back();
  Waiting& waiting = queue_[place];
  const int64_t at = std::max(request.at, waiting.free_at);
  waiting.request = request;
  waiting.request.at = at;
  waiting.number = number_++;
  waiting.served = served_;
  waiting.next = kNone;
  waiting.older = youngest_;
  waiting.younger = kNone;
  (youngest_ == kNone ? oldest_ : queue_[youngest_].younger) = place;
  youngest_ = place;
  const uint32_t bank = request.rank * o.rank_banks() + request.bank;
  Bank& its = banks_[bank];
  (its.first == kNone ? its.first : queue_[its.last].next) = place;
  its.last = place;
  // What was chosen stays, unless only this one is of the open row.
  const bool stays =
      its.chosen != kNone && (request.row != its.row || queue_[its.chosen].request.row == its.row);
  if (!stays) set_candidates(bank);
  return at;
}

void Memory::finish() {
  while ((active_[kQueue] | active_[kBuffer] | active_[kBegin]) != 0) serve_one();
  // The last scatters end in their banks.
  if (last_end_ > bus_end_) {
    counts_.cycles[static_cast<size_t>(Cause::kBank)] += last_end_ - bus_end_;
    bus_end_ = last_end_;
  }
}

int64_t Memory::place_command(int64_t earliest, Command command, uint32_t bank, uint32_t row,
                              uint8_t words) {
  const int64_t cycles = config_.organisation.command_cycles;
  int64_t slot = std::max(earliest, frontier_ - kSlots / 2);
  if (cycles > 1) slot = (slot + cycles - 1) / cycles;
  const auto place = [](int64_t of) { return static_cast<size_t>(of & (kSlots - 1)); };
  while (slots_[place(slot)] == slot) ++slot;
  slots_[place(slot)] = slot;
  ++counts_.commands[static_cast<size_t>(command)];
  const int64_t cycle = slot * cycles;
  if (trace_ != nullptr) {
    const uint32_t rank = rank_of(bank);
    trace_->push_back({cycle, command, static_cast<uint8_t>(rank),
                       static_cast<uint8_t>(bank - rank * config_.organisation.rank_banks()), words,
                       row});
  }
  return cycle;
}

/// The first cycles that ranks, bank groups and the data bus allow. A bank's own are apart.
void Memory::set_floors() {
  const Timing& t = config_.timing;
  const bool was_read = bus_burst_ == kReadBurst || bus_burst_ == kFetchBurst;
  const bool was_array = bus_burst_ == kReadBurst || bus_burst_ == kWriteBurst;
  const bool kept = config_.in_bank.turnaround;
  const int64_t written = int64_t{t.cwl} + config_.organisation.burst_cycles;
  const uint32_t groups = config_.organisation.bank_groups;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const Rank& rank = ranks_[r];
    const int64_t bus = bus_end_ + (bus_burst_ != kNoBurst && r != bus_rank_ ? t.rank_switch : 0);
    const int64_t activate = std::max(
        {rank.blocked_until, rank.activate + t.rrd_s, rank.activates[rank.next_activate] + t.faw});
    const int64_t read = std::max({rank.blocked_until, rank.read + t.ccd_s,
                                   rank.array_write + written + t.wtr_s, bus - t.cl});
    const int64_t array = was_read && (kept || was_array) ? t.turnaround : 0;
    const int64_t buffer = was_read && kept ? t.turnaround : 0;
    const int64_t write = std::max(rank.blocked_until, rank.write + t.ccd_s);
    for (uint32_t g = r * groups; g < (r + 1) * groups; ++g) {
      Group& group = groups_[g];
      group.activate_floor = std::max(activate, group.activate + t.rrd_l);
      group.floor[kReadBurst] = group.floor[kFetchBurst] =
          std::max({read, group.read + t.ccd_l, group.array_write + written + t.wtr_l});
      const int64_t column = std::max(write, group.write + t.ccd_l);
      group.floor[kWriteBurst] = std::max(column, bus + array - t.cwl);
      group.floor[kSendBurst] = std::max(column, bus + buffer - t.cwl);
      group.floor[kNoBurst] = rank.blocked_until;
    }
  }
}

/// The first cycle that a bank's buffers allow what is loaded to begin: all bursts have come, and
/// the first word of the gather before it is gone when its own comes. A burst takes words faster
/// than a gather brings them.
int64_t Memory::begin_floor(const Bank& bank) const {
  const bool gathers = bank.in_bank.kind == Request::Kind::kGather;
  return gathers ? std::max(bank.loaded_at, bank.words_at - int64_t{config_.column_cycles()})
                 : bank.loaded_at;
}

/// What of a bank may be next, of each lane. Of requests: the oldest of the open row, else the
/// oldest. A bank whose offsets are loaded takes no other gather or scatter.
void Memory::set_candidates(uint32_t b) {
  Bank& bank = banks_[b];
  const Timing& t = config_.timing;
  Candidate* const lanes = &candidates_[size_t{kLanes} * b];
  const auto in_bank = [](Request::Kind kind) {
    return kind == Request::Kind::kGather || kind == Request::Kind::kScatter;
  };
  const auto set = [&](Lane lane, const Candidate& candidate) {
    lanes[lane] = candidate;
    active_[lane] |= uint64_t{1} << b;
  };
  const auto to_row = [&](uint32_t row, int64_t at, int64_t open_at, Candidate& candidate) {
    if (bank.row == row) {
      candidate.ready = std::max(at, open_at);
      return;
    }
    candidate.to_open = t.rcd;
    candidate.ready =
        bank.row >= 0 ? std::max(at, bank.precharge_at) + t.rp : std::max(at, bank.activate_at);
  };
  for (uint64_t& lane : active_) lane &= ~(uint64_t{1} << b);

  bank.chosen = kNone;
  for (uint32_t i = bank.first, before = kNone; i != kNone; before = i, i = queue_[i].next) {
    if (bank.loaded && in_bank(queue_[i].request.kind)) continue;
    const bool hit = queue_[i].request.row == bank.row;
    if (bank.chosen != kNone && !hit) continue;
    bank.chosen = i;
    bank.before_chosen = before;
    if (hit) break;
  }
  if (bank.chosen != kNone) {
    const Request& request = queue_[bank.chosen].request;
    Candidate candidate{.at = request.at, .number = queue_[bank.chosen].number};
    if (in_bank(request.kind)) {
      candidate.burst = kSendBurst;
      candidate.ready = std::max(request.at, bank.offsets_at - t.cwl);
    } else {
      candidate.burst = request.kind == Request::Kind::kRead ? kReadBurst : kWriteBurst;
      to_row(request.row, request.at, bank.column_at, candidate);
    }
    set(kQueue, candidate);
  }
  const bool scatters = bank.in_bank.kind == Request::Kind::kScatter;
  const bool offsets = bank.to_send > scatters;
  if (bank.gathered && !offsets) {
    set(kBuffer,
        {.ready = bank.gathered_at, .at = 0, .number = bank.gathered_number, .burst = kFetchBurst});
  } else if (bank.to_send > 0) {
    set(kBuffer, {.ready = std::max(bank.loaded_at - config_.organisation.burst_cycles,
                                    offsets ? bank.offsets_at : bank.words_at) -
                           t.cwl,
                  .at = bank.in_bank.at,
                  .number = bank.in_bank_number,
                  .burst = kSendBurst});
  }
  if (bank.loaded && bank.to_send == 0 && !bank.gathered) {
    Candidate candidate{.at = bank.in_bank.at, .number = bank.in_bank_number};
    to_row(bank.in_bank.row, bank.in_bank.at, bank.gather_at, candidate);
    // Of a row to be opened `ready` is the activate's.
    candidate.ready = std::max(candidate.ready, begin_floor(bank) - candidate.to_open);
    set(kBegin, candidate);
  }
}

void Memory::serve_one() {
  // No request waits while more than four times the queue are served.
  if (oldest_ != kNone && served_ - queue_[oldest_].served > 4 * queue_.size()) {
    const Request& request = queue_[oldest_].request;
    const uint32_t b = request.rank * config_.organisation.rank_banks() + request.bank;
    Bank& bank = banks_[b];
    if (!(bank.loaded && request.kind >= Request::Kind::kGather)) {
      // The bank's first: what is older of all is older in its bank.
      bank.chosen = bank.first;
      bank.before_chosen = kNone;
      Candidate& candidate = candidates_[size_t{kLanes} * b];
      candidate = {.at = request.at, .number = queue_[oldest_].number};
      candidate.burst = request.kind == Request::Kind::kRead    ? kReadBurst
                        : request.kind == Request::Kind::kWrite ? kWriteBurst
                                                                : kSendBurst;
      const int64_t at = std::max(request.at, bus_end_ - config_.timing.cl);
      if (at >= ranks_[request.rank].refresh_at) return refresh(request.rank);
      return serve(b, kQueue);
    }
  }
  int64_t best = kLong;
  uint64_t best_number = 0;
  uint32_t best_bank = 0;
  Lane best_lane = kQueue;
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    for (uint64_t left = active_[lane]; left != 0; left &= left - 1) {
      const auto bank = static_cast<uint32_t>(std::countr_zero(left));
      const Candidate& candidate = candidates_[size_t{kLanes} * bank + lane];
      const Group& group = group_of(bank);
      int64_t at = candidate.ready;
      if (candidate.to_open > 0) at = std::max(at, group.activate_floor) + candidate.to_open;
      at = std::max(at, group.floor[candidate.burst]);
      if (at < best || (at == best && candidate.number < best_number)) {
        best = at;
        best_number = candidate.number;
        best_bank = bank;
        best_lane = static_cast<Lane>(lane);
      }
    }
  }
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (best >= ranks_[rank].refresh_at) return refresh(rank);
  }
  serve(best_bank, best_lane);
}

int64_t Memory::open_row(uint32_t b, uint32_t row, int64_t at) {
  Bank& bank = banks_[b];
  const Timing& t = config_.timing;
  if (bank.row == row) return bank.column_at;
  int64_t activate_at = std::max(at, bank.activate_at);
  if (bank.row >= 0) {
    const int64_t closed = place_command(std::max(at, bank.precharge_at), Command::kPrecharge, b,
                                         static_cast<uint32_t>(bank.row));
    activate_at = closed + t.rp;
  }
  Group& group = group_of(b);
  Rank& rank = ranks_[rank_of(b)];
  activate_at =
      place_command(std::max(activate_at, group.activate_floor), Command::kActivate, b, row);
  rank.activate = group.activate = activate_at;
  rank.activates[rank.next_activate] = activate_at;
  rank.next_activate = (rank.next_activate + 1) % 4;
  bank.row = row;
  bank.refreshed = false;
  bank.column_at = bank.gather_at = activate_at + t.rcd;
  bank.precharge_at = activate_at + t.ras;
  return bank.column_at;
}

void Memory::serve(uint32_t b, Lane lane) {
  Bank& bank = banks_[b];
  const Timing& t = config_.timing;
  const int64_t burst_cycles = config_.organisation.burst_cycles;
  const Candidate candidate = candidates_[size_t{kLanes} * b + lane];
  const int64_t floor = group_of(b).floor[candidate.burst];
  if (lane == kBegin) {
    const Request request = bank.in_bank;
    const bool gathers = request.kind == Request::Kind::kGather;
    counts_.row_hits += bank.row == request.row;
    open_row(b, request.row, request.at);
    const int64_t at = place_command(std::max({bank.gather_at, begin_floor(bank), floor}),
                                     gathers ? Command::kGather : Command::kScatter, b, request.row,
                                     request.words);
    const int64_t step = config_.column_cycles();
    const int64_t end = at + request.words * step;
    const int64_t last = end - step;  // the last word's access
    // A burst's last offset comes at its end. It is sent behind this command.
    bank.offsets_at = std::max(last + 1 - burst_cycles, at + 1 + int64_t{t.cwl});
    bank.loaded = false;
    (gathers ? counts_.gathered_words : counts_.scattered_words) += request.words;
    bank.gather_at = bank.column_at = std::max(bank.column_at, end);
    if (gathers) {
      bank.precharge_at = std::max(bank.precharge_at, last + t.rtp);
      bank.gathered = true;
      bank.gathered_at = end;
      bank.gathered_number = bank.in_bank_number;
      bank.gathered_bytes = request.used_bytes;
    } else {
      bank.words_at = bank.offsets_at;
      bank.precharge_at = std::max(bank.precharge_at, end + t.wr);
      bank.gather_at = bank.column_at = std::max(bank.column_at, end + t.wtr_l);
      last_end_ = std::max(last_end_, end + t.wr);
      counts_.used_bytes += request.used_bytes;
    }
  } else if (lane == kBuffer) {
    const bool fetches = candidate.burst == kFetchBurst;
    const int64_t asked = std::max(candidate.ready, floor);
    const bool scatters = bank.in_bank.kind == Request::Kind::kScatter;
    const Command command = fetches                   ? Command::kFetchWords
                            : bank.to_send > scatters ? Command::kSendOffsets
                                                      : Command::kSendWords;
    const int64_t at = place_command(asked, command, b, 0);
    move_burst(b, candidate.burst, at, asked, fetches ? bank.gathered_bytes : 0);
    if (fetches) {
      bank.gathered = false;
      bank.words_at = std::max(bank.words_at, at + 1);
    } else {
      --bank.to_send;
      bank.loaded_at = std::max(bank.loaded_at, at + t.cwl + burst_cycles);
    }
  } else {
    const Waiting waiting = queue_[bank.chosen];
    const Request& request = waiting.request;
    ++counts_.requests;
    if (candidate.burst == kSendBurst) {
      const int64_t asked = std::max({request.at, bank.offsets_at - t.cwl, floor});
      const int64_t at = place_command(asked, Command::kSendOffsets, b, request.row);
      move_burst(b, kSendBurst, at, asked, 0);
      bank.loaded = true;
      bank.to_send =
          config_.in_bank.offset_bursts - 1 + (request.kind == Request::Kind::kScatter ? 1 : 0);
      bank.in_bank = request;
      bank.in_bank_number = waiting.number;
      bank.loaded_at = at + t.cwl + burst_cycles;
      take_from_queue(b, at);
    } else {
      const bool reads = request.kind == Request::Kind::kRead;
      counts_.row_hits += bank.row == request.row;
      const int64_t open_at = open_row(b, request.row, request.at);
      const int64_t asked = std::max({request.at, open_at, floor});
      const int64_t at =
          place_command(asked, reads ? Command::kRead : Command::kWrite, b, request.row);
      move_burst(b, candidate.burst, at, asked, request.used_bytes);
      const int64_t written = at + t.cwl + burst_cycles;
      bank.gather_at = std::max(bank.gather_at, reads ? at + t.ccd_l : written + t.wtr_l);
      bank.precharge_at = std::max(bank.precharge_at, reads ? at + t.rtp : written + t.wr);
      take_from_queue(b, at);
    }
    ++served_;
  }
  set_floors();
  set_candidates(b);
}

void Memory::move_burst(uint32_t b, Burst burst, int64_t at, int64_t asked, uint32_t used_bytes) {
  const bool reads = burst == kReadBurst || burst == kFetchBurst;
  const int64_t begin = at + (reads ? config_.timing.cl : config_.timing.cwl);
  const int64_t cycles = config_.organisation.burst_cycles;
  if (begin > bus_end_) {
    const Lane lane =
        burst == kReadBurst || burst == kWriteBurst || (burst == kSendBurst && !banks_[b].loaded)
            ? kQueue
            : kBuffer;
    const Cause cause = at - asked >= begin - bus_end_
                            ? Cause::kColumns
                            : cause_of(b, candidates_[size_t{kLanes} * b + lane], asked);
    counts_.cycles[static_cast<size_t>(cause)] += begin - bus_end_;
  }
  counts_.cycles[static_cast<size_t>(Cause::kData)] += cycles;
  counts_.bus_bytes += config_.organisation.burst_bytes();
  counts_.used_bytes += used_bytes;
  bus_end_ = begin + cycles;
  frontier_ = std::max(frontier_, at);
  bus_burst_ = burst;
  bus_rank_ = rank_of(b);
  Rank& rank = ranks_[bus_rank_];
  Group& group = group_of(b);
  (reads ? rank.read : rank.write) = at;
  (reads ? group.read : group.write) = at;
  if (burst == kWriteBurst || (burst == kSendBurst && config_.in_bank.turnaround)) {
    rank.array_write = group.array_write = at;
  }
}

/// What a burst at cycle `at` waited for last.
Cause Memory::cause_of(uint32_t b, const Candidate& candidate, int64_t at) const {
  const Group& group = groups_[b / config_.organisation.banks];
  const Rank& rank = ranks_[rank_of(b)];
  const Timing& t = config_.timing;
  if (at <= candidate.at) return Cause::kRequests;
  const bool activates = candidate.to_open > 0 && group.activate_floor > candidate.ready;
  const int64_t own =
      (activates ? group.activate_floor : candidate.ready) + int64_t{candidate.to_open};
  const int64_t floor = group.floor[candidate.burst];
  if (std::max(floor, own) - candidate.to_open <= rank.blocked_until + t.rp) {
    return rank.blocked_until > 0 ? Cause::kRefresh : Cause::kBank;
  }
  if (own >= floor) return activates ? Cause::kActivates : Cause::kBank;
  const bool reads = candidate.burst == kReadBurst || candidate.burst == kFetchBurst;
  const int64_t columns = reads ? std::max(rank.read + t.ccd_s, group.read + t.ccd_l)
                                : std::max(rank.write + t.ccd_s, group.write + t.ccd_l);
  return floor == columns ? Cause::kColumns : Cause::kTurnaround;
}

void Memory::take_from_queue(uint32_t b, int64_t at) {
  Bank& bank = banks_[b];
  Waiting& waiting = queue_[bank.chosen];
  (bank.before_chosen == kNone ? bank.first : queue_[bank.before_chosen].next) = waiting.next;
  if (bank.last == bank.chosen) bank.last = bank.before_chosen;
  (waiting.older == kNone ? oldest_ : queue_[waiting.older].younger) = waiting.younger;
  (waiting.younger == kNone ? youngest_ : queue_[waiting.younger].older) = waiting.older;
  waiting.free_at = at;
  free_.push_back(bank.chosen);
  bank.chosen = kNone;
}

void Memory::refresh(uint32_t r) {
  const Timing& t = config_.timing;
  const uint32_t banks = config_.organisation.rank_banks();
  Rank& rank = ranks_[r];
  int64_t closed = std::max({rank.refresh_at, rank.read + 1, rank.write + 1});
  int64_t close_at = rank.refresh_at;
  bool open = false;
  for (uint32_t b = r * banks; b < (r + 1) * banks; ++b) {
    open |= banks_[b].row >= 0;
    if (banks_[b].row >= 0) close_at = std::max(close_at, banks_[b].precharge_at);
    if (banks_[b].row < 0) closed = std::max(closed, banks_[b].activate_at);
  }
  if (open) {
    closed = std::max(closed, place_command(close_at, Command::kPrechargeAll, r * banks, 0) + t.rp);
  }
  const int64_t at = place_command(closed, Command::kRefresh, r * banks, 0);
  rank.blocked_until = at + t.rfc;
  rank.refresh_at += t.refi;
  set_floors();
  for (uint32_t b = r * banks; b < (r + 1) * banks; ++b) {
    banks_[b].row = -1;
    banks_[b].activate_at = std::max(banks_[b].activate_at, at + t.rfc);
    set_candidates(b);
  }
}

}  // namespace smartinf::sim::dram
