// The messages of the cache: keys and values of sequences that are continued, kept on a device, and
// queries that the device folds over them (kernels/attention.h). Of no step; carried out beside
// everything else. What is not saved is gone with the process, and all of it can be computed again
// from the sequences' tokens.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "smartinf/base/choice.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/kernels/attention.h"

namespace smartinf::csd {

class DeviceSpace;  // device_space.h

/// The first message of the family. Takes up what the same job has saved on the device, so many
/// sequences; with `afresh` nothing is taken up, and what is there is lost. Errors: kUnsupported,
/// the device was opened without memory for it (DeviceInfo::cache_memory_bytes); kMismatch, another
/// job's keys and values are there; kCorrupt, what is there cannot be used; kOutOfMemory;
/// kFailedPrecondition, the cache is open; the drive's.
struct OpenCache {
  static constexpr std::string_view kName = "open cache";
  std::array<uint8_t, 16> job{};
  uint32_t device_index = 0;
  uint32_t device_count = 1;
  uint32_t layers = 0;
  kernels::AttentionShape shape;
  std::string identity;  // what else keys and values depend on, compared as it is
  bool afresh = false;
  uint64_t* saved_sequences = nullptr;
};

/// Takes up what was saved of the sequence with this room, or else reserves room for tokens_max in
/// every layer; with `saved_only` it is kNotFound then. saved_tokens: those that all layers have,
/// 0: it is new. Errors: kNoSpace with what is needed and free, after which nothing has changed;
/// kAlreadyExists.
struct OpenSequence {
  static constexpr std::string_view kName = "open sequence";
  uint64_t id = 0;
  uint64_t tokens_max = 0;
  bool saved_only = false;
  uint64_t* saved_tokens = nullptr;
};

/// Its room is free. Errors: kNotFound; kFailedPrecondition, the sequence is in use by a message.
struct CloseSequence {
  static constexpr std::string_view kName = "close sequence";
  uint64_t id = 0;
};

/// Blocks of a layer, from first_token on, where the last message ended or its last block began; a
/// last block that is not whole is kept to be read back, in place of an earlier such. Done when the
/// memory is the caller's again and Attend sees whole blocks; on the drive after SaveCache. Errors:
/// kInvalidArgument; kNotFound; those of the drive, also of earlier messages, after which the
/// sequence is of no use.
struct AppendKeysValues {
  static constexpr std::string_view kName = "append keys and values";
  uint64_t id = 0;
  uint32_t layer = 0;
  uint64_t first_token = 0;  // a multiple of kernels::kCacheBlockTokens
  uint64_t tokens = 0;
  std::span<const std::byte> blocks;
};

/// Reads back the block that is not whole, of `tokens` tokens. Errors: kNotFound, kCorrupt; the
/// drive's.
struct ReadTail {
  static constexpr std::string_view kName = "read tail";
  uint64_t id = 0;
  uint32_t layer = 0;
  uint32_t tokens = 0;
  std::span<std::byte> block;
};

/// Folds a query over tokens [first_token, end_token) of whole blocks, and before these over such
/// of another sequence, the prefix. Shapes, all f32: query: [heads][d]; state_in, state_out:
/// [heads][2 + d]; state_in is where another fold stopped, empty: it begins. Reads only blocks that
/// have such tokens; those of the prefix once for the messages that come together. Errors:
/// kNotFound; kCorrupt, a block is not what was written: its sequence's keys and values are to be
/// computed again; kInvalidArgument; the drive's.
struct Attend {
  static constexpr std::string_view kName = "attend";
  uint64_t id = 0;
  uint32_t layer = 0;
  uint64_t first_token = 0;
  uint64_t end_token = 0;  // a multiple of kernels::kCacheBlockTokens
  std::span<const std::byte> query;
  std::span<const std::byte> state_in;
  std::span<std::byte> state_out;
  uint64_t prefix_id = 0;
  uint64_t prefix_first_token = 0;
  uint64_t prefix_end_token = 0;  // 0: no prefix
  bool more = false;  // the next message is an Attend of this layer and prefix, to come together
};

/// A hint that changes no result: the order in which Attends will come, over and over. The device
/// reads ahead as far as it has memory.
struct LayerSequence {
  uint32_t layer = 0;
  uint64_t id = 0;
  friend bool operator==(const LayerSequence&, const LayerSequence&) = default;
};
struct AttendOrder {
  static constexpr std::string_view kName = "attend order";
  std::vector<LayerSequence> order;
};

/// Everything that was appended by now is durable when it is done. Errors: the drive's; what was
/// saved before then stands.
struct SaveCache {
  static constexpr std::string_view kName = "save cache";
};

using CacheMessage = std::variant<OpenCache, OpenSequence, CloseSequence, AppendKeysValues,
                                  ReadTail, Attend, AttendOrder, SaveCache>;

/// Whether a device's message is one of them.
template <typename Message>
bool is_cache_message(const Message& message) {
  return [&]<typename... Messages>(const std::variant<Messages...>*) {
    return (std::holds_alternative<Messages>(message) || ...);
  }(static_cast<const CacheMessage*>(nullptr));
}

/// check() of it.
base::Status check_shape(const OpenCache& message);
/// Of what both ends of a message know; the rest is the device's to see.
base::Status check(const OpenCache& message, const DeviceSpace& space);
base::Status check(const Attend& message, const DeviceSpace& space);

template <typename Wire>
void describe(Wire& wire, OpenCache& message) {
  auto& [job, device_index, device_count, layers, shape, identity, afresh, saved_sequences] =
      message;
  auto& [block, heads, scale, softcap] = shape;
  auto& [kv_heads, head_width, format] = block;
  wire(job, device_index, device_count, layers, kv_heads, head_width,
       base::choice(format, kernels::CacheFormat::kQ8), heads, scale, softcap, identity, afresh,
       saved_sequences);
}
template <typename Wire>
void describe(Wire& wire, OpenSequence& message) {
  auto& [id, tokens_max, saved_only, saved_tokens] = message;
  wire(id, tokens_max, saved_only, saved_tokens);
}
template <typename Wire>
void describe(Wire& wire, CloseSequence& message) {
  auto& [id] = message;
  wire(id);
}
template <typename Wire>
void describe(Wire& wire, AppendKeysValues& message) {
  auto& [id, layer, first_token, tokens, blocks] = message;
  wire(id, layer, first_token, tokens, blocks);
}
template <typename Wire>
void describe(Wire& wire, ReadTail& message) {
  auto& [id, layer, tokens, block] = message;
  wire(id, layer, tokens, block);
}
template <typename Wire>
void describe(Wire& wire, Attend& message) {
  auto& [id, layer, first_token, end_token, query, state_in, state_out, prefix_id,
         prefix_first_token, prefix_end_token, more] = message;
  wire(id, layer, first_token, end_token, query, state_in, state_out, prefix_id, prefix_first_token,
       prefix_end_token, more);
}
template <typename Wire>
void describe(Wire& wire, LayerSequence& one) {
  auto& [layer, id] = one;
  wire(layer, id);
}
template <typename Wire>
void describe(Wire& wire, AttendOrder& message) {
  auto& [order] = message;
  wire(order);
}

template <typename Visit, typename Space>
void memory(Visit& visit, OpenCache& message, const Space&) {
  visit.up(message.saved_sequences, sizeof(uint64_t), base::SubgroupId{});
}
template <typename Visit, typename Space>
void memory(Visit& visit, OpenSequence& message, const Space&) {
  visit.up(message.saved_tokens, sizeof(uint64_t), base::SubgroupId{});
}
template <typename Visit, typename Space>
void memory(Visit& visit, AppendKeysValues& message, const Space&) {
  visit.down(message.blocks);
}
template <typename Visit, typename Space>
void memory(Visit& visit, ReadTail& message, const Space&) {
  visit.up(message.block, base::SubgroupId{});
}
template <typename Visit, typename Space>
void memory(Visit& visit, Attend& message, const Space&) {
  visit.down(message.query);
  // An empty span of the wire's is not null, and no part of what is sent.
  if (!message.state_in.empty()) visit.down(message.state_in);
  visit.up(message.state_out, base::SubgroupId{});
}

}  // namespace smartinf::csd
