// One channel of DRAM on the level of commands: requests in, the cycles of their commands out. No
// clock ticks: each request's commands are put at their earliest cycles, and of all that wait the
// one whose turn comes first is taken next. Of a request only bank and row matter, so addresses of
// columns, data and the order of requests to one address are not simulated.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "smartinf/base/enum_names.h"
#include "smartinf/sim/dram/config.h"

namespace smartinf::sim::dram {

enum class Command : uint8_t {
  kActivate,
  kPrecharge,
  kPrechargeAll,  // banks of a rank
  kRefresh,       // a rank
  kRead,
  kWrite,
  kSendOffsets,  // in a burst to the bank's buffer of offsets
  kSendWords,    // in a burst to the bank's buffer of words
  kGather,       // offsets' words of the open row into the buffer of words
  kScatter,      // the buffer of words to the offsets in the open row
  kFetchWords,   // the buffer of words in a burst
};
inline constexpr size_t kCommands = 11;
inline constexpr std::array<std::string_view, kCommands> kCommandNames{
    "activate",     "precharge",  "precharge_all", "refresh", "read",       "write",
    "send_offsets", "send_words", "gather",        "scatter", "fetch_words"};
constexpr std::span<const std::string_view> enum_names(Command) { return kCommandNames; }

struct IssuedCommand {
  int64_t cycle = 0;
  Command command = Command::kActivate;
  uint8_t rank = 0;
  uint8_t bank = 0;   // of the rank: group x banks of a group + bank of the group
  uint8_t words = 0;  // of a gather or scatter
  uint32_t row = 0;
};

struct Request {
  /// A read or write is of one burst, a gather or scatter of `words` words of one row.
  enum class Kind : uint8_t { kRead, kWrite, kGather, kScatter };
  Kind kind = Kind::kRead;
  uint8_t rank = 0;
  uint8_t bank = 0;
  uint8_t words = 0;
  uint16_t used_bytes = 0;  // of the burst, that the program asked for
  uint32_t row = 0;
  int64_t at = 0;  // cycle from which it may be served
};

/// What the data bus waited for, or did.
enum class Cause : uint8_t {
  kData,        // it moved a burst
  kBank,        // rows to be opened and closed, and gathers in their bank
  kActivates,   // tRRD and tFAW
  kColumns,     // tCCD_L, and the command bus
  kTurnaround,  // tWTR, turnaround and rank_switch
  kRefresh,
  kRequests,  // none had come
};
inline constexpr size_t kCauses = 7;
inline constexpr std::array<std::string_view, kCauses> kCauseNames{
    "data", "bank", "activates", "columns", "turnaround", "refresh", "requests"};
constexpr std::span<const std::string_view> enum_names(Cause) { return kCauseNames; }

struct Counts {
  std::array<uint64_t, kCommands> commands{};
  std::array<int64_t, kCauses> cycles{};  // their sum is the whole time
  uint64_t requests = 0;
  uint64_t row_hits = 0;   // requests whose row was open
  uint64_t bus_bytes = 0;  // of all bursts, offsets included
  uint64_t used_bytes = 0;
  uint64_t gathered_words = 0, scattered_words = 0;

  int64_t total_cycles() const;
  uint64_t count(Command command) const { return commands[static_cast<size_t>(command)]; }
  double used_share() const;
  double share(Cause cause) const;
};

/// Where bytes of a channel lie: neighbouring bursts in different bank groups, a row's bursts
/// before the next bank's.
struct Place {
  uint8_t rank = 0;
  uint8_t bank = 0;
  uint32_t row = 0;
};
class AddressMap {
 public:
  explicit AddressMap(const Organisation& organisation);
  Place place(uint64_t byte) const;
  uint64_t burst(uint64_t byte) const { return byte >> burst_bits_; }

 private:
  uint32_t burst_bits_, group_bits_, column_bits_, bank_bits_;
  uint32_t ranks_, groups_, banks_;
};

/// Threads: one caller. The same requests give the same commands.
class Memory {
 public:
  /// config: as check_config takes it. trace: gets every command, not in the order of cycles; may
  /// be null. queue: requests that wait at most, of which the next is chosen.
  explicit Memory(const Config& config, std::vector<IssuedCommand>* trace = nullptr,
                  uint32_t queue = 64);

  /// Puts a request into the queue, and where it is full serves others until it is not. Returns
  /// the cycle from which the request is in it, at least request.at.
  int64_t submit(const Request& request);
  /// Serves all that wait.
  void finish();
  /// Of all that has been served.
  const Counts& counts() const { return counts_; }

 private:
  static constexpr int64_t kLong = int64_t{1} << 60;
  static constexpr uint32_t kNone = ~uint32_t{0};

  struct Waiting {
    Request request;
    uint64_t number = 0;
    int64_t free_at = 0;                      // when its place in the queue became free
    uint32_t next = kNone;                    // of its bank
    uint32_t older = kNone, younger = kNone;  // of all
    uint64_t served = 0;                      // requests served when it came
  };
  struct Bank {
    int64_t row = -1;
    int64_t activate_at = 0, column_at = 0, precharge_at = 0;
    int64_t gather_at = 0;                     // a gather or scatter may begin
    int64_t offsets_at = 0, words_at = 0;      // a burst may arrive at that buffer
    bool refreshed = false;                    // activate_at is a refresh's end
    bool loaded = false;                       // offsets are sent of what has not begun
    uint32_t to_send = 0;                      // of its bursts: offsets, and a scatter's words
    bool gathered = false;                     // words wait to be fetched
    Request in_bank;                           // what is loaded
    uint64_t in_bank_number = 0;
    int64_t loaded_at = 0;
    uint64_t gathered_number = 0;
    int64_t gathered_at = 0;
    uint16_t gathered_bytes = 0;
    uint32_t first = kNone, last = kNone;
    uint32_t chosen = kNone, before_chosen = kNone;
  };
  // A bank has three things that may be next: a request's first burst, a burst of its buffers, and
  // the beginning of a gather or scatter.
  enum Lane : uint32_t { kQueue, kBuffer, kBegin, kLanes };
  enum Burst : uint32_t { kReadBurst, kWriteBurst, kFetchBurst, kSendBurst, kNoBurst, kBursts };
  struct Candidate {
    int64_t ready = kLong;  // of its bank, without the activate's and the bus' waiting
    int64_t at = 0;         // the request came
    uint64_t number = 0;
    uint32_t to_open = 0;  // tRCD where the row is to be opened
    Burst burst = kNoBurst;
  };
  struct Group {  // of a rank
    int64_t activate = -kLong, read = -kLong, write = -kLong, array_write = -kLong;
    int64_t activate_floor = 0;
    std::array<int64_t, kBursts> floor{};
  };
  struct Rank {
    std::array<int64_t, 4> activates{-kLong, -kLong, -kLong, -kLong};
    uint32_t next_activate = 0;
    int64_t activate = -kLong, read = -kLong, write = -kLong, array_write = -kLong;
    int64_t blocked_until = 0;  // by a refresh
    int64_t refresh_at = kLong;
  };

  Group& group_of(uint32_t bank) { return groups_[bank / config_.organisation.banks]; }
  uint32_t rank_of(uint32_t bank) const { return bank / config_.organisation.rank_banks(); }
  int64_t place_command(int64_t earliest, Command command, uint32_t bank, uint32_t row,
                        uint8_t words = 0);
  int64_t begin_floor(const Bank& bank) const;
  void set_floors();
  void set_candidates(uint32_t bank);
  void serve_one();
  void serve(uint32_t bank, Lane lane);
  void refresh(uint32_t rank);
  int64_t open_row(uint32_t bank, uint32_t row, int64_t at);
  void move_burst(uint32_t bank, Burst burst, int64_t at, int64_t asked, uint32_t used_bytes);
  Cause cause_of(uint32_t bank, const Candidate& candidate, int64_t at) const;
  void take_from_queue(uint32_t bank, int64_t at);

  Config config_;
  std::vector<IssuedCommand>* trace_;
  Counts counts_;
  std::vector<Waiting> queue_;
  std::vector<uint32_t> free_;
  uint32_t oldest_ = kNone, youngest_ = kNone;
  uint64_t number_ = 0, served_ = 0;
  std::vector<Bank> banks_;
  std::vector<Candidate> candidates_;  // kLanes for each bank
  std::array<uint64_t, 3> active_{};   // banks that have a candidate, for each lane
  std::vector<Group> groups_;
  std::vector<Rank> ranks_;
  std::vector<int64_t> slots_;  // of the command bus, by cycle
  int64_t bus_end_ = 0, last_end_ = 0, frontier_ = 0;
  uint32_t bus_rank_ = 0;
  Burst bus_burst_ = kNoBurst;
};

}  // namespace smartinf::sim::dram
