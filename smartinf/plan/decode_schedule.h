// The order of one decode step of many sequences, as pure functions. Sequences are two halves:
// while devices attend to one, the host computes the other. The host's order is the decoder's
// (train/row_decoder.h) as well as the simulator's; the devices' tasks say to the simulator what
// csd/messages/cache does when it can.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "smartinf/base/enum_names.h"

namespace smartinf::plan {

enum class DecodeWork : uint8_t {
  kWeights,   // a layer's weights from a device, where they do not stay in memory
  kProducts,  // host: a half's queries, keys and values of a layer
  kQueries,   // down to a device
  kRead,      // a device reads a half's blocks of a layer, also before there are queries
  kFold,      // a device attends to its blocks of the half, in the order of the sequences
  kStates,    // up to the host
  kTails,     // host: folds the unfinished blocks, divides; the rest of the layer
  kLogits,    // host: the head, and the next token of each
  kAppend,    // a device writes what has become whole
};
std::string_view decode_work_name(DecodeWork work);

/// kProducts and kTails of a half and layer, or kLogits of a half.
struct DecodeHostTask {
  DecodeWork work = DecodeWork::kProducts;
  uint32_t layer = 0;
  uint32_t half = 0;
};
/// A step of the host, one task after another: a half's queries of the next layer are sent before
/// the other half's rest of this one is computed. Of each half one layer is under way at most. The
/// first half's logits are made while devices attend to the other one in the last layer;
/// logits_last: after all layers, where their weights take a place that the last layer's leave.
std::vector<DecodeHostTask> decode_host_order(uint32_t layers, uint32_t halves, bool logits_last);

struct DecodeTask {
  static constexpr uint32_t kHost = ~0u;
  DecodeWork work = DecodeWork::kProducts;
  uint32_t step = 0;
  uint32_t layer = 0;
  uint32_t half = 0;
  uint32_t device = kHost;
  std::vector<uint32_t> after;  // indices of tasks that must be done first, all of them smaller

  bool on_host() const { return device == kHost; }
};

/// Work that waits for its turn instead of running beside other work, as in software without such
/// an order. kAttention: that of host and devices; kAll: streamed weights, too.
enum class InTurn : uint8_t { kNothing, kAttention, kAll };
inline constexpr std::array<std::string_view, 3> kInTurnNames{"nothing", "attention", "all"};
constexpr base::EnumNames enum_names(InTurn) { return kInTurnNames; }

struct DecodeScheduleInput {
  uint32_t layers = 0;
  uint32_t halves = 2;
  uint32_t devices = 1;
  uint32_t steps = 1;
  /// By layer, whether its weights come from the devices in every step. Empty: none do.
  std::vector<bool> streamed;
  uint32_t weight_slots = 3;  // layers whose streamed weights are in memory together, at least 2
  InTurn in_turn = InTurn::kNothing;  // with one half
};

/// Tasks in an order in which each kind of worker takes its own: the host computes one after
/// another; a device reads, folds and writes in this order, streamed weights before blocks, and
/// appended blocks when no read waits: those of a step, of all layers, as one task. Until they are
/// written they are found in memory. How far ahead a device reads is a matter of its slots, and a
/// fold goes on as blocks come; both are left to the clock.
std::vector<DecodeTask> make_decode_schedule(const DecodeScheduleInput& input);

}  // namespace smartinf::plan
