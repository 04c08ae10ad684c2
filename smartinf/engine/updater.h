// One optimizer over many devices: gradients in, norm and overflow found on the way, update,
// weights out, commit. SmartUpdate and the host update stand behind this same interface.
//
//   begin_step -> put_gradient ... -> finish_gradients -> start_update -> start_commit
//              -> wait_weights ... (the next forward) ... -> wait_commit
//
// What a step wrote becomes real in commit, on all devices or on none; before that it can be taken
// back, as if it had never been begun.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"
#include "smartinf/engine/compression.h"
#include "smartinf/engine/device_source.h"
#include "smartinf/engine/gradient_tracker.h"
#include "smartinf/engine/options.h"
#include "smartinf/engine/weight_source.h"
#include "smartinf/kernels/update_rule.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::engine {

struct StoredRun;  // stored_run.h
class RowTables;   // row_tables.h
class Spool;       // spool.h

struct UpdateOptions {
  double gradient_scale = 1;                  // multiplies every gradient: unscale x clip factor
  std::vector<kernels::GroupOptions> groups;  // one per group of the parameter space
  std::vector<double> table_rates;  // learning rate of each table; empty: the first group's
  /// Which step this is to the caller, from 1: stochastic rounding and compression's warm-up go by
  /// it. 0: committed_step() + 1, which also counts edits and begins anew on other devices.
  uint64_t number = 0;
};

/// Factor for gradients of this norm, so that it is at most norm_max (0: whatever it is), as
/// torch's clip_grad_norm_ has it: the trainer and the Python package go by this one rule.
inline double clip_factor(double norm, double norm_max) {
  return norm_max > 0 && std::isfinite(norm) ? std::min(1.0, norm_max / (norm + 1e-6)) : 1;
}

/// Sums of gradients of a span of the space: this rank's part of the sum over all micro batches of
/// a step.
struct GradientSums {
  uint64_t micro_batches = 1;                   // of the step, on all ranks together
  base::DataType type = base::DataType::kBf16;  // of the gradient of one micro batch
  /// plan::summation_nodes() of this rank's plan::micro_batches_of() among the ranks that compute
  /// the gradient, in order; [count] each: of `type` where the node is one micro batch, else of
  /// f32. None: the rank has no micro batch.
  std::span<const void* const> nodes;
  /// A gradient that is the sum of several, each a tree of its own: all nodes of the first come
  /// first, and the trees' sums are added in their order.
  uint32_t trees = 1;
};

struct UpdaterTraffic {
  base::TrafficReading host_link;  // all devices together
  base::TrafficReading store;
  /// Between ranks: up is what came from others, down what went to them.
  base::TrafficReading ranks;
  std::vector<std::string> devices;  // their names, in the order of the next two
  std::vector<base::TrafficReading> host_link_by_device;
  std::vector<base::TrafficReading> store_by_device;
  uint64_t state_bytes_cached = 0;  // of state that was in memory and not read from a drive

  /// Traffic between an earlier reading of the same updater and this one.
  UpdaterTraffic since(const UpdaterTraffic& earlier) const;
};

/// Errors: kInvalidArgument for fewer groups than the space has.
base::Status check_groups(const UpdateOptions& options, const plan::ParameterSpace& space);
/// Errors: kInvalidArgument for more bytes than a step keeps.
base::Status check_client_metadata(const std::string& client_metadata);

/// Where several ranks share the run (UpdaterOptions::collectives) all of them make the same calls
/// in the same order, but for readings, and get the same errors. Each has all weights and reads the
/// whole state (an empty `visit` only takes part), but fills and edits the subgroups of its own
/// devices alone. Sinks of all ranks have places for the same subgroups, as far as they compute
/// with them (UpdaterOptions::stages).
///
/// Threads: one caller. The devices' own threads work in between.
/// After kTimeout a device may still read or write what was handed in for it: gradients and weights
/// have to stay until the updater is destroyed.
class Updater : public WeightSource {
 public:
  /// Opens what is on the devices, or creates it when all of them are empty (see options.h).
  /// `fresh()` tells which. Recovery to the last committed step has happened on return.
  /// Errors: everything a user can get wrong about devices; each names the device.
  static base::Result<std::unique_ptr<Updater>> open(const UpdaterOptions& options,
                                                     const plan::ParameterSpace& space);
  /// The same over devices of any other kind: emulated, or a test's own. options.devices is not
  /// read.
  static base::Result<std::unique_ptr<Updater>> open(
      const UpdaterOptions& options, const plan::ParameterSpace& space,
      std::vector<std::unique_ptr<DeviceSource>> sources);
  ~Updater() override = default;

  virtual bool fresh() const = 0;
  virtual base::StepNumber committed_step() const = 0;
  virtual std::string client_metadata() const = 0;  // the trainer's text of the committed step
  virtual const plan::ParameterSpace& space() const = 0;

  /// Puts master weights of elements [first, first + out.size()) into out.
  using FillWeights = std::function<base::Status(uint64_t first, std::span<float> out)>;
  /// Fresh only: writes master weights as step 0, subgroup by subgroup within the memory budget;
  /// moments are zero. A failure of `fill` ends it, and the devices stay without a state.
  virtual base::Status initialize(const FillWeights& fill, const std::string& client_metadata) = 0;

  /// Reads the current state, piece by piece, in ascending order. `planes[i]` is the i-th plane of
  /// the rule as f32; unwanted ones (bit i of plane_mask clear) are empty. A failure of `visit`
  /// ends it.
  virtual base::Status read_state(
      uint32_t plane_mask,
      const std::function<base::Status(uint64_t first,
                                       std::span<const std::span<const float>> planes)>& visit) = 0;
  /// Rewrites the current state: `edit` gets each subgroup's planes as f32, in ascending order, and
  /// returns whether it changed them. What it changed becomes real at once, as a step of its own
  /// with `client_metadata` (committed_step() counts it); a failure leaves the state as it was.
  /// Beyond the memory budget it takes one subgroup's planes for the time it runs. Import, and
  /// weights that were written from outside. An empty `edit` changes no plane, and none is read for
  /// it. compression: of where the state comes from (ignored without feedback); what is empty there
  /// stays as it is. Errors: kUnsupported where state is not on devices.
  virtual base::Status edit_state(
      const std::function<base::Result<bool>(uint64_t first,
                                             std::span<const std::span<float>> planes)>& edit,
      const std::string& client_metadata, const CompressionState& compression = {});
  /// The current step's master weights as f32, piece by piece, in ascending order, as
  /// load_weights() gives them but for the rounding: what training has arrived at. With compression
  /// the stored ones lag behind by what was not sent yet (CompressionState::ahead).
  virtual base::Status read_weights(
      const std::function<base::Status(uint64_t first, std::span<const float>)>& visit) = 0;
  /// The weights that the current step's update sent up: resume and evaluation. What `sink` has no
  /// place for is not read.
  base::Status load_weights(base::DataType type, const WeightsSink& sink) override = 0;

  /// Starts committed_step() + 1, after waiting for a commit that was started.
  /// Errors: of that commit; kFailedPrecondition before initialize().
  virtual base::Status begin_step() = 0;
  /// A piece of the gradient, [count] of type; another type than UpdaterOptions::gradient_type is
  /// cast to that first, and the norm is of what was sent. It is copied or sent before the call
  /// returns. Pieces of a step cover every range once, in any order, and may span ranges; cuts
  /// within a range fall on multiples of kGradientCutElements of that range, so that the norm does
  /// not depend on them. Errors: kInvalidArgument for a cut elsewhere, kFailedPrecondition for a
  /// piece that was given before; else the device's. After an error of a device the step can only
  /// be aborted.
  static constexpr uint64_t kGradientCutElements = engine::kGradientCutElements;
  virtual base::Status put_gradient(uint64_t first, const void* gradient, base::DataType type,
                                    uint64_t count) = 0;
  /// The same where the ranks of a run (UpdaterOptions::collectives) share the micro batches of a
  /// step out among them: sums.nodes are free again when this returns. All ranks give the same
  /// spans in the same order, and the gradient is the sum of all nodes (plan/micro_batches.h). One
  /// process has one node. What a rank or a device fails with is said by finish_gradients(), on all
  /// ranks. put_gradient() is this with one micro batch on each rank. Errors: as put_gradient;
  /// kInvalidArgument for other nodes than those.
  virtual base::Status put_gradient_sums(uint64_t first, uint64_t count, const GradientSums& sums);
  /// Elements that get no gradient in this step, cut as for put_gradient; their groups must have
  /// `skip` set in start_update. A subgroup of which nothing is left is neither read nor written.
  /// Errors: as put_gradient; kUnsupported where state is not on devices.
  virtual base::Status skip_gradient(uint64_t first, uint64_t count);
  /// Errors: kFailedPrecondition when a range got no gradient (named).
  virtual base::Result<GradientSummary> finish_gradients(double unscale) = 0;

  /// Why start_early_update() cannot be called here; ok: it can.
  virtual base::Status early_update_possible() const;
  /// After begin_step(), before any gradient: devices update each subgroup as soon as its gradient
  /// is complete, with `guess`, and its weights go to `sink` at once; so whoever computes the
  /// gradients must have used those weights for the last time when he gives the last piece of
  /// their gradient. start_update() tells whether the guess was right: with the same options and
  /// type what was done counts, with others it is done again, from the committed state; the bits
  /// are those of a step without this call. After abort() weights that came up are stale.
  /// norm_max above 0: the guess holds up to this norm of all gradients, before unscaling. When
  /// those that are there have passed it, or are not finite, nothing more is started.
  virtual base::Status start_early_update(const UpdateOptions& guess, base::DataType type,
                                          const WeightsSink& sink, double norm_max);

  /// Starts the update; returns at once. Weights go to where `sink` points, `type` each; that
  /// memory stays valid until the step is committed or aborted.
  virtual base::Status start_update(const UpdateOptions& options, base::DataType type,
                                    const WeightsSink& sink) = 0;
  /// Waits until the new weights of [first, first + count) are there. Errors: of the device that
  /// failed, named; the step can then only be aborted, which commit does too.
  base::Status wait_weights(uint64_t first, uint64_t count) override = 0;

  /// The subgroup that holds an element of the space: what fetch_weights() fetches at once.
  plan::Subgroup subgroup_at(uint64_t element) const override;
  /// With UpdaterOptions::stream_weights: starts to bring the weights of the subgroup that begins
  /// at `first` to `out`, [count] of type, at any time. They are those of the newest step whose
  /// update was started (start_update), else of the committed one, and equal in bits to those that
  /// a sink gets. Where start_update's sink has no place for a subgroup, its update waits until it
  /// is fetched, so that the devices follow who uses the weights and no state is read twice; all
  /// calls that need the update to end let it go on. A second fetch of such a subgroup is read
  /// after the commit. `out` stays until wait_fetched() has returned or the updater is destroyed.
  /// Errors: kUnsupported without stream_weights; kInvalidArgument for a `first` within a subgroup;
  /// kFailedPrecondition before initialize(), or while a fetch of the subgroup is under way.
  base::Status fetch_weights(uint64_t first, base::DataType type, void* out) override;
  /// Waits until they are there. Errors: of the device, named, after which they can be fetched
  /// again; kCancelled when the step was aborted; kFailedPrecondition where nothing was fetched,
  /// and where they come only after a commit that was not started (then it may be called again).
  base::Status wait_fetched(uint64_t first) override;

  /// Starts the commit and returns at once: when all writes are done the step is prepared on every
  /// device, then committed on every device. At most kClientMetadataBytesMax of client metadata.
  virtual base::Status start_commit(const std::string& client_metadata) = 0;
  /// A commit that was started has not ended yet.
  virtual bool committing() const { return false; }
  /// Waits for its outcome; ok when none was started. On failure the step has been aborted on
  /// every device and the last committed one stands; weights that came up are stale (load_weights).
  virtual base::Status wait_commit() = 0;
  /// Between steps: writes what is in memory only (UpdaterOptions::state_cache_bytes with
  /// durability "none"; all where state is not on devices), after waiting for a commit that was
  /// started: before anything but this updater reads the state. The destructor of one over devices
  /// does so too, but can only log a failure. Ok where every step is written.
  virtual base::Status flush() { return wait_commit(); }
  /// Opens what the devices hold for reading: after flush(), before the next begin_step().
  /// Errors: of each device (named); kUnsupported where state is not on devices.
  virtual base::Result<StoredRun> snapshot();
  /// Both at once.
  base::Status commit(const std::string& client_metadata) {
    SI_RETURN_IF_ERROR(start_commit(client_metadata));
    return wait_commit();
  }
  /// Drops the step in progress: gradients, update, everything. Waits for what is in flight;
  /// weights that came up are stale. Ok when there is none. Errors: where state is updated in
  /// place, that of an update that has begun cannot be dropped; nothing goes on then until the
  /// state is opened again.
  virtual base::Status abort() = 0;

  /// Room on the devices for bytes that come back within this process; null without
  /// UpdaterOptions::spool_bytes. Lives as long as the updater. It may be used from another thread
  /// than the updater, and between any two of its calls.
  virtual Spool* spool() { return nullptr; }
  /// Null without UpdaterOptions::tables. Lives as long as the updater.
  virtual RowTables* tables() { return nullptr; }
  /// Null where gradients go down as they are. Lives as long as the updater.
  virtual Compression* compression() { return nullptr; }
  /// The ranks that make every call together; null: this process alone.
  virtual std::shared_ptr<Collectives> collectives() const { return nullptr; }
  virtual UpdaterTraffic traffic() const = 0;
  virtual uint64_t bytes_written_ever() const = 0;
  /// The devices' buffers, which nobody uses between wait_commit() and the next call: a checkpoint
  /// is copied through them, within the memory that the engine has anyway.
  virtual std::vector<std::span<std::byte>> scratch_memory() { return {}; }
  /// Buffers of the engine and its devices without gradients and without the state cache.
  virtual uint64_t memory_bytes() const = 0;
  /// State that stays in memory as well.
  virtual uint64_t state_cache_bytes() const { return 0; }
  virtual uint64_t gradient_memory_bytes() const = 0;
  /// Subgroups that a device may have in flight, the most of any; 0 where state is not on devices.
  virtual uint32_t slots() const { return 0; }
  /// Parameters of a subgroup, the last one's fewer; 0 likewise.
  virtual uint64_t subgroup_elements() const { return 0; }
  /// One line per device for people: kind, ring, slots, share of the space.
  virtual std::vector<std::string> describe_devices() const = 0;
};

}  // namespace smartinf::engine
