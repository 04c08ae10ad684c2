// Brings the weights of units to where the model computes: those that stay there, those that stay
// in the host's memory, and those that come from the devices through a window of slots.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <c10/core/Event.h>
#include <torch/types.h>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/layer_window.h"
#include "smartinf/engine/weight_source.h"
#include "smartinf/plan/slots.h"
#include "smartinf/plan/unit.h"
#include "smartinf/train/copy_streams.h"
#include "smartinf/train/model.h"
#include "smartinf/train/trained_weights.h"

namespace smartinf::train {

/// Threads: one caller.
class LayerStream final : public TrainedWeights {
 public:
  /// All memory is allocated here; beside an accelerator the host's is pinned. `source` lives
  /// until close(), `model` and `streams` longer than this. several_ranks: share the source, so
  /// that all have to ask it for the same in the same order, whenever their copies to the
  /// accelerator end. only: units that alone are computed with, ascending, of which placement says
  /// how many of the first stay; empty: all. Subgroups that others of these have a part in stay,
  /// too.
  LayerStream(engine::WeightSource& source, const Model& model, const CopyStreams& streams,
              base::DataType type, const plan::UnitPlacement& placement, bool several_ranks = false,
              std::span<const uint32_t> only = {});
  ~LayerStream() override { close(); }
  /// Waits for what is being read; nothing but the destructor is called afterwards. Its memory,
  /// into which an update may write, stays until then.
  void close();

  base::Status load() override;
  void* weights_at(uint64_t element) const override;
  void updated() override;
  base::Status wait_all() override;
  /// Some units do not stay in memory: each use reads them.
  bool streams() const { return window_ != nullptr; }

  /// The uses to come, in order.
  void start(std::vector<uint32_t> order);
  /// A unit's weights, of the last update; waits for them. They stay until release(). Errors:
  /// StatusError.
  const UnitWeights& get(size_t unit);
  /// Releases a unit whose computation has been started on the current stream.
  void release(size_t unit);

  /// Seconds that the caller has waited for updates and devices.
  double waited_s() const { return waited_s_; }

 private:
  /// A place on the accelerator for one unit at a time.
  struct AcceleratorSlot {
    torch::Tensor weights_N;
    std::optional<uint32_t> unit;
    bool held = false;
    bool host_held = false;  // the window's slot that it is copied from
    c10::Event copied;       // recorded where copies up run
    c10::Event used;         // recorded where the model computes
  };

  /// Elements of the space that are in memory, whole subgroups.
  struct Region {
    uint64_t first = 0;
    uint64_t end = 0;
    uint64_t at = 0;  // element of host_N_

    bool has(uint64_t element) const { return element >= first && element < end; }
  };
  void add_region(uint64_t first, uint64_t end);
  void add_regions(std::span<const uint32_t> only);
  bool in_memory(size_t unit) const { return model_.units()[unit].end() <= in_memory_end_; }
  /// Null where an element is not in memory.
  const Region* region_of(uint64_t element) const;
  base::Status arrive(uint64_t end);
  base::Status arrive_in_host(uint64_t end);
  bool is_at_hand(uint32_t unit) const;
  torch::Tensor in_host(size_t unit);
  torch::Tensor computed_with(void* weights, uint64_t elements) const;
  void end_oldest_use();
  AcceleratorSlot* slot_of(size_t unit);
  void add_accelerator_slot(uint64_t elements);
  plan::Uses uses() const { return {order_, next_, unit_elements_}; }
  AcceleratorSlot* bring(uint32_t unit, std::optional<size_t> ahead = std::nullopt);
  void bring_ahead();
  void finish_copy(AcceleratorSlot& slot);
  torch::Tensor part(const torch::Tensor& weights_N, const plan::Unit& unit) const;

  engine::WeightSource& source_;
  const Model& model_;
  const CopyStreams& streams_;
  const base::DataType type_;
  const plan::UnitPlacement placement_;
  const bool several_ranks_;
  std::vector<uint32_t> own_;         // units, ascending
  std::vector<Region> regions_;       // ascending
  uint64_t host_elements_ = 0;        // end of the last region
  uint64_t in_memory_end_ = 0;        // of units that stay in the host's memory
  uint64_t resident_elements_ = 0;    // where the model computes
  torch::Tensor host_N_;              // where updates arrive; pinned beside an accelerator
  torch::Tensor accelerator_N_;       // resident: the same tensor without an accelerator
  torch::Tensor slots_N_;             // the window's
  std::vector<UnitWeights> weights_;  // by unit; of one that is not resident while it is held
  std::unique_ptr<engine::LayerWindow> window_;
  std::vector<AcceleratorSlot> accelerator_slots_;
  std::deque<std::pair<uint32_t, c10::Event>> in_use_;  // in place: released units, until computed
  std::optional<c10::Event> old_used_;  // what is on the accelerator, before the last update
  std::optional<c10::Event> arrived_there_;
  std::vector<uint64_t> unit_elements_;  // of each unit
  std::vector<uint32_t> order_;          // of those that are not on the accelerator
  size_t next_ = 0;                      // in order_
  uint64_t host_arrived_ = 0;  // elements from the first on that have the last update's weights
  uint64_t arrived_ = 0;       // of them, where the model computes
  double waited_s_ = 0;
};

}  // namespace smartinf::train
