// Where a model's weights come from: an Updater's devices, or files that nobody changes.
#pragma once

#include <cstdint>
#include <functional>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::engine {

/// Where the weights of a span of the parameter space that starts at `first` go in host memory.
/// The engine asks once per subgroup (`first` is a multiple of base::kBlockElements), so weights
/// lie there in the order of the space, without gaps, at least as far as a subgroup reaches: one
/// flat buffer, of which a model's tensors are views. Null: those weights are not wanted.
using WeightsSink = std::function<void*(uint64_t first)>;

/// Threads: one caller.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  /// The current step's weights, of type. Where `sink` points they are complete on return.
  virtual base::Status load_weights(base::DataType type, const WeightsSink& sink) = 0;
  /// Waits until the new weights of [first, first + count) are where an update's sink pointed.
  /// Errors: of the device that failed, named.
  virtual base::Status wait_weights(uint64_t first, uint64_t count) = 0;

  /// The subgroup that holds an element of the space: what fetch_weights() fetches at once.
  virtual plan::Subgroup subgroup_at(uint64_t element) const = 0;
  /// Starts to bring the weights of the subgroup that begins at `first` to `out`, [count] of type,
  /// at any time. `out` stays until wait_fetched() has returned or the source is destroyed. Errors:
  /// kUnsupported where that is not possible; kInvalidArgument for a `first` within a subgroup;
  /// kFailedPrecondition while a fetch of the subgroup is under way.
  virtual base::Status fetch_weights(uint64_t first, base::DataType type, void* out) = 0;
  /// Waits until they are there. Errors: of the device or file, named, after which they can be
  /// fetched again; kFailedPrecondition where nothing was fetched.
  virtual base::Status wait_fetched(uint64_t first) = 0;
  /// Whether wait_fetched() would return at once. False also where the source cannot tell.
  virtual bool has_fetched(uint64_t /*first*/) const { return false; }
  /// A read was given up that does not end: where it puts weights is never freed.
  virtual bool hangs() const { return false; }
};

}  // namespace smartinf::engine
