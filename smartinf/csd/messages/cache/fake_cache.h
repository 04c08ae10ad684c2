// The cache of the fake device: nothing but memory. For tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "smartinf/csd/fake_spool.h"
#include "smartinf/csd/messages/cache/cache.h"

namespace smartinf::csd {

/// What was appended is saved at once. Hints do nothing.
class FakeCache final : public FakeAccess {
 public:
  bool serves(const Command& command) const override { return is_cache_message(command.message); }
  base::Status carry_out(const Command& command) override {
    if (const auto* open = command.as<OpenCache>()) {
      layers_ = open->layers;
      shape_ = open->shape;
      if (open->saved_sequences != nullptr) *open->saved_sequences = sequences_.size();
      return base::Status();
    }
    if (const auto* open = command.as<OpenSequence>()) return this->open(*open);
    if (const auto* close = command.as<CloseSequence>()) {
      return sequences_.erase(close->id) > 0 ? base::Status() : not_found();
    }
    if (const auto* append = command.as<AppendKeysValues>()) return this->append(*append);
    if (const auto* attend = command.as<Attend>()) return this->attend(*attend);
    if (const auto* tail = command.as<ReadTail>()) return read_tail(*tail);
    return base::Status();
  }

 private:
  struct Layer {
    std::vector<std::byte> blocks;
    std::vector<std::byte> tail;
    uint32_t tail_tokens = 0;
  };
  struct Sequence {
    uint64_t tokens_max = 0;
    std::vector<Layer> layers;
  };
  static base::Status not_found() {
    return base::Status(base::ErrorCode::kNotFound, "no such sequence");
  }
  uint64_t block_bytes() const { return kernels::cache_block_bytes(shape_.block); }
  Layer* find(uint64_t id, uint32_t layer) {
    const auto found = sequences_.find(id);
    if (found == sequences_.end() || layer >= layers_) return nullptr;
    return &found->second.layers[layer];
  }

  base::Status open(const OpenSequence& open) {
    if (open.saved_only) return not_found();
    const auto [made, is_new] = sequences_.try_emplace(open.id);
    if (!is_new) return base::Status(base::ErrorCode::kAlreadyExists, "open already");
    made->second = {open.tokens_max, std::vector<Layer>(layers_)};
    if (open.saved_tokens != nullptr) *open.saved_tokens = 0;
    return base::Status();
  }
  base::Status append(const AppendKeysValues& append) {
    Layer* layer = find(append.id, append.layer);
    if (layer == nullptr) return not_found();
    const uint64_t there = layer->blocks.size() / block_bytes() * kernels::kCacheBlockTokens;
    if (append.first_token != there ||
        append.first_token + append.tokens > sequences_[append.id].tokens_max) {
      return base::Status(base::ErrorCode::kInvalidArgument, "it does not follow");
    }
    const uint64_t whole = append.tokens / kernels::kCacheBlockTokens * block_bytes();
    const auto bytes = append.blocks;
    layer->blocks.insert(layer->blocks.end(), bytes.begin(),
                         bytes.begin() + static_cast<ptrdiff_t>(whole));
    layer->tail.assign(bytes.begin() + static_cast<ptrdiff_t>(whole), bytes.end());
    layer->tail_tokens = append.tokens % kernels::kCacheBlockTokens;
    host->add_down(base::TrafficKind::kCache, bytes.size());
    store->add_down(base::TrafficKind::kCache, bytes.size());
    return base::Status();
  }
  base::Status attend(const Attend& attend) {
    auto* state = reinterpret_cast<float*>(attend.state_out.data());
    kernels::begin_fold(shape_, state);
    if (!attend.state_in.empty()) std::ranges::copy(attend.state_in, attend.state_out.begin());
    const kernels::FoldQuery query{reinterpret_cast<const float*>(attend.query.data()), state};
    if (attend.prefix_end_token > 0) {
      SI_RETURN_IF_ERROR(fold(find(attend.prefix_id, attend.layer), attend.prefix_first_token,
                              attend.prefix_end_token, query));
    }
    SI_RETURN_IF_ERROR(
        fold(find(attend.id, attend.layer), attend.first_token, attend.end_token, query));
    host->add_down(base::TrafficKind::kCache, attend.query.size() + attend.state_in.size());
    host->add_up(base::TrafficKind::kCache, attend.state_out.size());
    return base::Status();
  }
  base::Status fold(const Layer* layer, uint64_t first_token, uint64_t end_token,
                    const kernels::FoldQuery& query) {
    if (layer == nullptr) return not_found();
    constexpr uint64_t kTokens = kernels::kCacheBlockTokens;
    const uint64_t end = end_token / kTokens;
    if (end_token % kTokens != 0 || end * block_bytes() > layer->blocks.size()) {
      return base::Status(base::ErrorCode::kInvalidArgument, "it is not there");
    }
    for (uint64_t block = first_token / kTokens; block < end; ++block) {
      kernels::fold_block(shape_,
                          std::span(layer->blocks).subspan(block * block_bytes(), block_bytes()),
                          kernels::range_in_block(block, first_token, end_token), {&query, 1});
      store->add_up(base::TrafficKind::kCache, block_bytes());
    }
    return base::Status();
  }
  base::Status read_tail(const ReadTail& read) {
    const Layer* layer = find(read.id, read.layer);
    if (layer == nullptr || layer->tail_tokens != read.tokens) return not_found();
    std::ranges::copy(layer->tail, read.block.begin());
    return base::Status();
  }

  uint32_t layers_ = 0;
  kernels::AttentionShape shape_;
  std::map<uint64_t, Sequence> sequences_;
};

}  // namespace smartinf::csd
