// Keys and values of the sequences that a decoder continues, wherever they are kept. Attention is
// done where they are: queries go in, weighted means come out (kernels/attention.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/base/traffic.h"
#include "smartinf/kernels/attention.h"

namespace smartinf::engine {

using SequenceId = uint64_t;

/// One attend that is under way.
using AttendTicket = uint64_t;

struct KeyValueShape {
  kernels::AttentionShape attention;
  uint32_t layers = 0;
  std::vector<uint32_t> windows;  // by layer: last tokens that a query sees; 0: all. Empty: all 0

  uint32_t window(uint32_t layer) const { return windows.empty() ? 0 : windows[layer]; }
  /// The first token that the last of so many sees in the layer.
  uint64_t first_seen(uint32_t layer, uint64_t tokens) const {
    const uint64_t seen = window(layer);
    return seen == 0 || seen >= tokens ? 0 : tokens - seen;
  }
};

/// The beginning of a sequence that it shares with others: all of another one, which has it in
/// whole blocks.
struct SharedPrefix {
  SequenceId id = 0;
  uint64_t tokens = 0;  // tokens_max of it; 0: nothing is shared
};

/// Of a sequence, one query in one layer. Shapes: query, out: [heads][d].
struct AttendQuery {
  SequenceId id = 0;
  const float* query = nullptr;  // rotated
  float* out = nullptr;
};

/// Every sequence's answers depend on its own keys, values and queries only: not on the other
/// sequences, the number of threads or where the store keeps them.
/// Threads: one caller.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  /// Keeps room for tokens_max in every layer, but for those of the prefix: the sequence has these
  /// at once, goes on behind them, and its answers have the bits of one that shares nothing. The
  /// prefix has them before the first attend. Errors: kOutOfMemory or kNoSpace with what is needed
  /// and what is free, after which nothing has changed; kAlreadyExists; kNotFound, there is no such
  /// prefix; kInvalidArgument, it has other tokens_max or a prefix itself.
  virtual base::Status open(SequenceId id, uint64_t tokens_max, SharedPrefix prefix = {}) = 0;
  /// Tokens that all layers of a sequence have; 0 for one that is not open.
  virtual uint64_t tokens(SequenceId id) const = 0;
  /// Puts `count` tokens behind those that the layer has. Shapes: keys, values:
  /// [count][kv_heads][d] of type. Errors: kNotFound; kOutOfMemory beyond tokens_max.
  virtual base::Status append(SequenceId id, uint32_t layer, uint64_t count, base::DataType type,
                              const void* keys, const void* values) = 0;

  /// Begins attention of each query over all tokens that its sequence has in the layer, or the last
  /// ones that the layer's window shows. Queries and answers stay the caller's, and in place, until
  /// finish_attend(). At most two attends are under way. Errors: kNotFound.
  virtual base::Result<AttendTicket> begin_attend(uint32_t layer,
                                                  std::span<const AttendQuery> queries) = 0;
  /// Waits until the answers are there. An error is the first of those that failure() gives for the
  /// sequences of these queries; the answers of all others are there.
  virtual base::Status finish_attend(AttendTicket ticket) = 0;

  /// Why a sequence cannot be continued: kCorrupt, kIo, kTimeout and the like, with the device and
  /// the sequence. To be closed, and computed again. Others are unharmed.
  virtual base::Status failure(SequenceId) const { return {}; }

  /// Forgets a sequence; nothing where it is not open. One that others have as prefix stays for
  /// them; meanwhile open() with the same tokens_max takes it up again.
  virtual void close(SequenceId id) = 0;
  /// What is there survives this process, where it is kept outside of memory.
  virtual base::Status save() { return {}; }
  /// Bytes that drives have read (up) and written (down) for it since it was opened.
  virtual base::TrafficReading traffic() const { return {}; }
  /// Seconds for which finish_attend() has waited for devices.
  virtual double wait_seconds() const { return 0; }
};

/// Bytes that such a store takes for a sequence.
uint64_t memory_store_bytes(const KeyValueShape& shape, uint64_t tokens_max);
/// Threads of a decoder, for its products and for attention in memory: layers follow on each other
/// faster than a thread is woken. Two such teams would take the cores from each other.
std::shared_ptr<base::ThreadTeam> make_decoder_team(uint32_t threads);
/// A store in memory that takes at most memory_bytes for blocks. team: folds, called from within
/// begin_attend() only.
std::unique_ptr<KeyValueStore> make_memory_store(KeyValueShape shape, uint64_t memory_bytes,
                                                 std::shared_ptr<base::ThreadTeam> team);

}  // namespace smartinf::engine
