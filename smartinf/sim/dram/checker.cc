#include "smartinf/sim/dram/checker.h"

#include <algorithm>
#include <deque>
#include <initializer_list>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace smartinf::sim::dram {
namespace {

using base::ErrorCode;
using base::Status;

constexpr int64_t kNever = -(int64_t{1} << 60);
/// A refresh may be put off by so many intervals (JESD79-4, 4.26).
constexpr int64_t kPutOff = 8;
/// Bursts that may be on their way at once, far more than fit between command and data.
constexpr size_t kBurstsAtOnce = 16;

enum class Scope : uint8_t { kBank, kGroup, kRank };

/// `after` comes no earlier than `cycles` behind the last `before` in the same bank, group or rank.
struct Rule {
  std::string_view name;
  Command before;
  Command after;
  Scope scope;
  int64_t cycles;
};

std::vector<Rule> rules_of(const Config& config) {
  using enum Command;
  const Timing& t = config.timing;
  std::vector<Rule> rules;
  const auto add = [&](std::string_view name, std::initializer_list<Command> before,
                       std::initializer_list<Command> after, Scope scope, int64_t cycles) {
    for (const Command one : before) {
      for (const Command other : after) rules.push_back({name, one, other, scope, cycles});
    }
  };
  const int64_t written = int64_t{t.cwl} + config.organisation.burst_cycles;
  add("tRRD_S", {kActivate}, {kActivate}, Scope::kRank, t.rrd_s);
  add("tRRD_L", {kActivate}, {kActivate}, Scope::kGroup, t.rrd_l);
  add("tRCD", {kActivate}, {kRead, kWrite, kGather, kScatter}, Scope::kBank, t.rcd);
  add("tRAS", {kActivate}, {kPrecharge}, Scope::kBank, t.ras);
  add("tRAS", {kActivate}, {kPrechargeAll}, Scope::kRank, t.ras);
  add("tRP", {kPrecharge}, {kActivate}, Scope::kBank, t.rp);
  add("tRP", {kPrecharge}, {kRefresh}, Scope::kRank, t.rp);
  add("tRP", {kPrechargeAll}, {kActivate, kRefresh}, Scope::kRank, t.rp);
  add("tRFC", {kRefresh},
      {kActivate, kRefresh, kSendOffsets, kSendWords, kFetchWords, kGather, kScatter}, Scope::kRank,
      t.rfc);
  add("tRTP", {kRead}, {kPrecharge}, Scope::kBank, t.rtp);
  add("tRTP", {kRead}, {kPrechargeAll}, Scope::kRank, t.rtp);
  add("tWR", {kWrite}, {kPrecharge}, Scope::kBank, written + t.wr);
  add("tWR", {kWrite}, {kPrechargeAll}, Scope::kRank, written + t.wr);
  const auto reads = {kRead, kFetchWords};
  const auto writes = {kWrite, kSendOffsets, kSendWords};
  for (const auto& bursts : {std::vector<Command>(reads), std::vector<Command>(writes)}) {
    for (const Command one : bursts) {
      for (const Command other : bursts) {
        add("tCCD_S", {one}, {other}, Scope::kRank, t.ccd_s);
        add("tCCD_L", {one}, {other}, Scope::kGroup, t.ccd_l);
      }
    }
  }
  add("tWTR_S", {kWrite}, reads, Scope::kRank, written + t.wtr_s);
  add("tWTR_L", {kWrite}, reads, Scope::kGroup, written + t.wtr_l);
  add("tWTR_L", {kWrite}, {kGather}, Scope::kBank, written + t.wtr_l);
  add("tCCD_L", {kRead}, {kGather, kScatter}, Scope::kBank, t.ccd_l);
  if (config.in_bank.turnaround) {
    add("tWTR_S", {kSendOffsets, kSendWords}, reads, Scope::kRank, written + t.wtr_s);
    add("tWTR_L", {kSendOffsets, kSendWords}, reads, Scope::kGroup, written + t.wtr_l);
  }
  add("offsets", {kSendOffsets}, {kGather, kScatter}, Scope::kBank, written);
  add("words", {kSendWords}, {kScatter}, Scope::kBank, written);
  return rules;
}

struct Burst {
  int64_t begin, end;
  bool reads, buffer;
  uint8_t rank;
};

struct BankState {
  int64_t row = -1;
  int64_t busy_until = kNever;    // with a gather or scatter
  int64_t column_until = kNever;  // reads of the bank wait for that
  int64_t close_from = kNever;
  int64_t buffers_from = kNever;  // a burst may come to them
  uint32_t offsets = 0;           // bursts
  bool words = false;
  std::deque<int64_t>
      gathered;  // when what is not fetched yet is there: one, or while it is fetched two
  int64_t fetch_by = -kNever;  // the next gather's first word comes
};

class Checker {
 public:
  explicit Checker(const Config& config)
      : config_(config),
        rules_(kCommands),
        banks_(size_t{config.organisation.ranks} * config.organisation.rank_banks()),
        activates_(config.organisation.ranks),
        refreshes_(config.organisation.ranks, 0) {
    for (const Rule& rule : rules_of(config)) {
      rules_[static_cast<size_t>(rule.after)].push_back(rule);
    }
    const size_t groups = size_t{config.organisation.ranks} * config.organisation.bank_groups;
    last_.assign(kCommands * (banks_.size() + groups + config.organisation.ranks), kNever);
  }

  Status take(const IssuedCommand& c) {
    const Organisation& o = config_.organisation;
    if (c.rank >= o.ranks || c.bank >= o.rank_banks()) return broken(c, "no such bank", 0, 0);
    if (c.cycle < command_free_) return broken(c, "command bus", command_free_, c.cycle);
    command_free_ = c.cycle + o.command_cycles;
    for (const Rule& rule : rules_[static_cast<size_t>(c.command)]) {
      const int64_t since = c.cycle - last(rule.before, rule.scope, c);
      if (since < rule.cycles) {
        return broken(c, fmt::format("{} after {}", rule.name, base::enum_name(rule.before)),
                      rule.cycles, since);
      }
    }
    SI_RETURN_IF_ERROR(take_state(c));
    for (const Scope scope : {Scope::kBank, Scope::kGroup, Scope::kRank}) {
      last(c.command, scope, c) = c.cycle;
    }
    return {};
  }

  /// At the end, or at a refresh, whether none is missing.
  Status refreshed(uint8_t rank, int64_t cycle) const {
    const int64_t interval = config_.timing.refi;
    if (interval == 0 || cycle <= (refreshes_[rank] + 1 + kPutOff) * interval) return {};
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("tREFI: rank {} has {} refreshes by cycle {}", rank, refreshes_[rank], cycle));
  }

 private:
  int64_t& last(Command command, Scope scope, const IssuedCommand& c) {
    const Organisation& o = config_.organisation;
    const size_t bank = size_t{c.rank} * o.rank_banks() + c.bank;
    const size_t group = banks_.size() + bank / o.banks;
    const size_t rank = banks_.size() + size_t{o.ranks} * o.bank_groups + c.rank;
    const size_t place = scope == Scope::kBank ? bank : scope == Scope::kGroup ? group : rank;
    return last_[place * kCommands + static_cast<size_t>(command)];
  }

  Status broken(const IssuedCommand& c, std::string_view rule, int64_t least, int64_t is) const {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: {} at cycle {} in rank {} bank {} row {} ({} instead of {})", rule,
                    base::enum_name(c.command), c.cycle, c.rank, c.bank, c.row, is, least));
  }

  Status take_state(const IssuedCommand& c) {
    using enum Command;
    const Organisation& o = config_.organisation;
    const Timing& t = config_.timing;
    BankState& bank = banks_[size_t{c.rank} * o.rank_banks() + c.bank];
    const auto from = [&](std::string_view rule, int64_t cycle) {
      return c.cycle >= cycle ? Status() : broken(c, rule, cycle, c.cycle);
    };
    switch (c.command) {
      case kActivate: {
        if (bank.row >= 0) return broken(c, "row open already", -1, bank.row);
        bank.row = c.row;
        std::deque<int64_t>& window = activates_[c.rank];
        if (window.size() == 4) {
          SI_RETURN_IF_ERROR(from("tFAW", window.front() + t.faw));
          window.pop_front();
        }
        window.push_back(c.cycle);
        return {};
      }
      case kPrecharge:
        if (bank.row < 0) return broken(c, "no row open", 0, -1);
        bank.row = -1;
        return from("gather before precharge", bank.close_from);
      case kPrechargeAll:
        for (size_t b = size_t{c.rank} * o.rank_banks(); b < (c.rank + 1u) * o.rank_banks(); ++b) {
          SI_RETURN_IF_ERROR(from("gather before precharge", banks_[b].close_from));
          banks_[b].row = -1;
        }
        return {};
      case kRefresh:
        for (size_t b = size_t{c.rank} * o.rank_banks(); b < (c.rank + 1u) * o.rank_banks(); ++b) {
          if (banks_[b].row >= 0) return broken(c, "refresh of an open row", -1, banks_[b].row);
        }
        SI_RETURN_IF_ERROR(refreshed(c.rank, c.cycle));
        ++refreshes_[c.rank];
        return {};
      case kRead:
      case kWrite:
        if (bank.row != c.row) return broken(c, "another row open", c.row, bank.row);
        SI_RETURN_IF_ERROR(from("gather before access", bank.column_until));
        return burst(c);
      case kSendOffsets:
        if (bank.offsets == config_.in_bank.offset_bursts) {
          return broken(c, "offsets are loaded already", 0, bank.offsets);
        }
        ++bank.offsets;
        SI_RETURN_IF_ERROR(from("offsets in use", bank.buffers_from - t.cwl));
        return burst(c);
      case kSendWords:
        if (bank.offsets < config_.in_bank.offset_bursts || bank.words || !bank.gathered.empty()) {
          return broken(c, "buffer of words in use", 0, 1);
        }
        bank.words = true;
        SI_RETURN_IF_ERROR(from("words in use", bank.buffers_from - t.cwl));
        return burst(c);
      case kGather:
      case kScatter: {
        const bool gathers = c.command == kGather;
        if (bank.row != c.row) return broken(c, "another row open", c.row, bank.row);
        if (bank.offsets < config_.in_bank.offset_bursts || bank.gathered.size() > 1 ||
            bank.words == gathers) {
          return broken(c, "buffers are not ready", 1, 0);
        }
        SI_RETURN_IF_ERROR(from("gather before gather", bank.busy_until));
        if (c.words == 0 || c.words > o.burst_words()) {
          return broken(c, "words", o.burst_words(), c.words);
        }
        const int64_t step = config_.column_cycles();
        const int64_t end = c.cycle + c.words * step;
        bank.offsets = 0;
        bank.words = false;
        bank.buffers_from = end - step - (o.burst_cycles - 1);
        bank.busy_until = bank.column_until = gathers ? end : end + t.wtr_l;
        bank.close_from = gathers ? end - step + t.rtp : end + t.wr;
        if (gathers) {
          if (!bank.gathered.empty()) bank.fetch_by = c.cycle + step - 1;
          bank.gathered.push_back(end);
        }
        return {};
      }
      case kFetchWords:
        if (bank.gathered.empty()) return broken(c, "nothing was gathered", 1, 0);
        SI_RETURN_IF_ERROR(from("gather before fetch", bank.gathered.front()));
        if (c.cycle > bank.fetch_by) return broken(c, "words in use", bank.fetch_by, c.cycle);
        bank.gathered.pop_front();
        bank.fetch_by = -kNever;
        return burst(c);
    }
    return {};
  }

  /// The data bus.
  Status burst(const IssuedCommand& c) {
    using enum Command;
    const Timing& t = config_.timing;
    const bool reads = c.command == kRead || c.command == kFetchWords;
    const int64_t begin = c.cycle + (reads ? t.cl : t.cwl);
    const Burst one{begin, begin + config_.organisation.burst_cycles, reads,
                    c.command != kRead && c.command != kWrite, c.rank};
    for (const Burst& other : bursts_) {
      const Burst& early = other.begin < one.begin ? other : one;
      const Burst& late = other.begin < one.begin ? one : other;
      int64_t gap = early.rank != late.rank ? t.rank_switch : 0;
      if (early.reads && !late.reads &&
          (config_.in_bank.turnaround || !(early.buffer || late.buffer))) {
        gap += t.turnaround;
      }
      if (late.begin < early.end + gap) {
        return broken(c, "data bus", early.end + gap, late.begin);
      }
    }
    bursts_.push_back(one);
    if (bursts_.size() > kBurstsAtOnce) bursts_.pop_front();
    return {};
  }

  const Config& config_;
  std::vector<std::vector<Rule>> rules_;  // by `after`
  std::vector<BankState> banks_;
  std::vector<std::deque<int64_t>> activates_;
  std::vector<int64_t> refreshes_;
  std::vector<int64_t> last_;
  std::deque<Burst> bursts_;
  int64_t command_free_ = 0;
};

}  // namespace

Status check_commands(const Config& config, std::span<const IssuedCommand> commands) {
  SI_RETURN_IF_ERROR(check_config(config));
  std::vector<IssuedCommand> sorted(commands.begin(), commands.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.cycle < b.cycle; });
  Checker checker(config);
  for (const IssuedCommand& command : sorted) SI_RETURN_IF_ERROR(checker.take(command));
  if (!sorted.empty()) {
    for (uint8_t r = 0; r < config.organisation.ranks; ++r) {
      SI_RETURN_IF_ERROR(checker.refreshed(r, sorted.back().cycle));
    }
  }
  return {};
}

}  // namespace smartinf::sim::dram
