// The order of one decode step of many sequences, as a pure function, for an engine on the real
// clock and the simulator on a virtual one. Sequences are two halves: while devices attend to one,
// the host computes the other.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "smartinf/base/enum_names.h"

namespace smartinf::plan {

enum class DecodeWork : uint8_t {
  kWeights,   // a layer's weights from a device, where they do not stay in memory
  kProducts,  // host: a half's queries, keys and values of a layer
  kQueries,   // down to a device
  kRead,      // a device reads ahead into free slots, before there are queries
  kFold,      // a device attends to its blocks of the half, in the order of the sequences
  kStates,    // up to the host
  kTails,     // host: folds the unfinished blocks, divides; the rest of the layer
  kLogits,    // host: the head, and the next token of each
  kAppend,    // a device writes what has become whole
};
std::string_view decode_work_name(DecodeWork work);

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
  uint32_t weight_slots = 2;  // layers whose streamed weights are in memory together, at least 2
  /// By device, halves of a layer whose blocks fit in its slots, at least 1. Empty: one each.
  std::vector<uint32_t> halves_ahead;
  InTurn in_turn = InTurn::kNothing;
};

/// Tasks in an order in which each kind of worker takes its own: the host computes one after
/// another; a device reads, folds and writes in this order, streamed weights before blocks, and
/// appended blocks when no read waits. A half's queries are sent before the host goes on with the
/// other half. Blocks that are appended in a step are found in memory until they are written.
std::vector<DecodeTask> make_decode_schedule(const DecodeScheduleInput& input);

/// The half of each sequence. bytes: that a step reads of it; device: that has it; prefix:
/// sequences of the same one, where it is not 0, are in one half, so that the prefix is read once.
/// On each device halves read about as much. Pure and deterministic.
std::vector<uint32_t> decode_halves(std::span<const uint64_t> bytes,
                                    std::span<const uint32_t> device,
                                    std::span<const uint32_t> prefix = {});

}  // namespace smartinf::plan
