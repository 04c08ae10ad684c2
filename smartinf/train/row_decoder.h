// Continues sequences on CPUs: prompts by torch, one after another, part by part, then a token of
// all sequences in a step that uses each weight once for all of them (row_model.h). Keys and values
// are in a store, which also attends.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <stop_token>
#include <utility>
#include <vector>

#include "smartinf/engine/key_value_store.h"
#include "smartinf/train/row_model.h"
#include "smartinf/train/sequence_decoder.h"
#include "smartinf/train/unit_pass.h"

namespace smartinf::train {

/// A model that is in memory, or streamed, and outlives who uses it.
struct LoadedModel {
  const Model& model;
  LayerStream& stream;
  UnitPass& pass;
  Adapters* adapters;  // or null
  base::DataType type;
};

class RowDecoder final : public SequenceDecoder {
 public:
  struct Options {
    std::shared_ptr<base::ThreadTeam> team;  // for products, between attends
    /// The store works while the model computes: sequences go in two halves, of which one attends
    /// while the other is computed. Those with a common prefix are in one half.
    bool halves = false;
    std::stop_token stop;  // ends the call that is under way with kCancelled
  };
  RowDecoder(const LoadedModel& loaded, std::unique_ptr<engine::KeyValueStore> store,
             Options options);

  base::Status admit(std::span<const SequenceInput> sequences) override;
  base::Status step(const Choose& choose) override;
  void release(SequenceId id) override;
  std::vector<LostSequence> take_lost() override { return std::exchange(lost_, {}); }
  base::Status save() override { return store_->save(); }
  uint64_t shared_tokens() const override { return shared_tokens_; }

  /// Logits are made for so many rows at a time.
  static constexpr size_t kHeadRows = 64;
  /// Of prompts that are computed together, but for a longer one.
  static constexpr uint64_t kPassTokens = 65536;
  /// Memory of prompts between two layers: what goes from layer to layer, of all that are computed
  /// together, and keys and values of a beginning that some of them share.
  static uint64_t prompt_bytes(const model::Architecture& model, uint64_t sequences,
                               uint64_t longest, base::DataType type);

 private:
  struct Sequence {
    SequenceId id = 0;
    uint64_t tokens_max = 0;
    engine::SharedPrefix prefix;  // tokens 0: none
    std::deque<int64_t> next;  // that the store does not have yet; all but the last are known ones
  };
  struct Head {
    const UnitWeights* weights = nullptr;
    const torch::Tensor* matrix_VC = nullptr;
  };
  base::Result<Sequence*> open(const SequenceInput& input);
  bool open_prefix(const engine::SharedPrefix& prefix);
  void close_prefixes();
  void fill(std::span<const SequenceInput> inputs, std::span<Sequence* const> sequences);
  void run_pass(std::span<Sequence* const> sequences, const Choose* choose);
  void drop_lost();
  std::vector<ModelRows> groups_of(std::span<Sequence* const> sequences) const;
  void run_model(std::span<Sequence* const> sequences, std::span<ModelRows> groups,
                 const Choose* choose);
  void choose_tokens(std::span<Sequence* const> sequences, const ModelRows& rows, const Head& head,
                     const Choose& choose);
  RowModel::Layer layer_of(size_t unit, const UnitWeights& weights, uint32_t index) const;

  const LoadedModel loaded_;
  const std::unique_ptr<engine::KeyValueStore> store_;
  const Options options_;
  RowModel rows_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<LostSequence> lost_;  // until take_lost()
  std::set<SequenceId> prefixes_;   // open during admit()
  uint64_t shared_tokens_ = 0;
};

/// The shape of the stores that a decoder of this model works with.
engine::KeyValueShape key_value_shape(const model::Architecture& model,
                                      kernels::CacheFormat format);

}  // namespace smartinf::train
