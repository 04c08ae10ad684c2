// How a step's gradient gets to the devices, and what follows from it for the rest of the step:
// dense as it comes in, or compressed when it is whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/csd/device.h"
#include "smartinf/engine/compression.h"
#include "smartinf/engine/device_replies.h"
#include "smartinf/engine/device_set.h"
#include "smartinf/engine/gradient_tracker.h"
#include "smartinf/engine/step_metadata.h"
#include "smartinf/engine/updater.h"
#include "smartinf/engine/whole_state.h"

namespace smartinf::engine {

/// Parts of the updater that a path belongs to; the updater outlives the path.
struct PathParts {
  const UpdaterOptions& options;
  const plan::ParameterSpace& space;
  const DeviceSet& set;
  WholeState& state;
  GradientTracker& tracker;
  base::ThreadTeam& team;
  DeviceWatch& watch;
};

/// A step: begin_step, put ..., finish, start_update, weights_arrived ..., start_commit, committed.
/// What has not been committed when the next step begins was aborted. Threads: calls that say so
/// come from the updater's own thread, all others from its caller's.
class GradientPath {
 public:
  explicit GradientPath(const PathParts& parts) : parts_(parts) {}
  virtual ~GradientPath() = default;

  /// Before the devices begin the step.
  virtual base::Status begin_step() { return base::Status(); }
  /// Takes pieces of the gradient, and measures them. gradient: values of type from element `first`
  /// on, free again when this returns. Errors: the device's.
  virtual base::Status put(std::span<const GradientTracker::Piece> pieces, uint64_t first,
                           const void* gradient, base::DataType type) = 0;
  /// When the gradient is whole (what was skipped is in the tracker): the devices get what they
  /// lack of it. Returns what they are to multiply it by.
  virtual base::Result<double> finish(const UpdateOptions& options, base::StepNumber number) = 0;
  /// Why devices cannot update what is complete of the gradient before the rest; ok: they can.
  virtual base::Status early_update_possible() const { return base::Status(); }

  /// The messages of the step's update, one for each device, before they are sent.
  virtual void start_update(const UpdateOptions&, base::StepNumber, std::span<csd::Update>) {}
  /// New weights of a subgroup have come. Adds to `ready` the subgroups whose weights are as the
  /// next forward uses them from now on. Updater's thread.
  virtual void weights_arrived(size_t subgroup, base::DataType, std::vector<size_t>& ready) {
    ready.push_back(subgroup);
  }

  /// next: metadata of the step in progress, which so far has the committed one's; the path
  /// changes what is its own. True: each device's next_write() is to be written before the step is
  /// prepared.
  virtual bool start_commit(base::StepNumber, StepMetadata&) { return false; }
  /// The same for state that is written from outside, when its planes have been; changed: there may
  /// be other planes than before. Errors: kInvalidArgument for an import that does not fit.
  virtual base::Result<bool> start_commit_of_edit(const CompressionState& import, bool changed,
                                                  base::StepNumber committed, StepMetadata& next);
  /// Nothing: the device has all. Updater's thread, or in the call that led to start_commit().
  virtual std::optional<csd::WriteState> next_write(size_t /*device*/) { return std::nullopt; }
  /// The step in progress is real. Updater's thread.
  virtual void committed() {}

  /// Whether weights are others than the master weights, cast.
  virtual bool adjusts_weights() const { return false; }
  /// Between steps, before adjust_weights(): reads what that takes.
  virtual base::Status prepare_weights() { return base::Status(); }
  /// Takes stored weights of the committed step to what the next forward uses. weights: [count] of
  /// type.
  virtual void adjust_weights(uint64_t /*first*/, uint64_t /*count*/, void* /*weights*/,
                              base::DataType /*type*/) {}

  virtual Compression* compression() { return nullptr; }
  virtual uint64_t memory_bytes() const { return 0; }

 protected:
  const PathParts parts_;
};

/// Threads that take in a step's gradient: as many as there are cores, up to 8, which fill the
/// memory of any machine.
uint32_t gradient_threads();

/// True when every group of the subgroup is skipped in the step.
bool is_skipped(const plan::ParameterSpace& space, const plan::Subgroup& subgroup,
                const UpdateOptions& options);

/// Gradients go down as they come in, of UpdaterOptions::gradient_type.
std::unique_ptr<GradientPath> make_dense_path(const PathParts& parts);
/// Gradients are collected, and go down compressed when they are whole (compress/).
base::Result<std::unique_ptr<GradientPath>> make_compressed_path(const PathParts& parts,
                                                                 const StepMetadata& committed);
/// Makes the path that the options ask for. committed: metadata of the committed step.
base::Result<std::unique_ptr<GradientPath>> make_gradient_path(const PathParts& parts,
                                                               const StepMetadata& committed);

}  // namespace smartinf::engine
