// The messages of a training step: gradients go down, state is updated where it is, weights come
// up, and the step is committed. How each is answered in each state of a step: the table in
// docs/devices.md.
//
// Here and in the other families: memory that a message points to is the caller's and stays as it
// is until kDone. describe() binds all members for what goes over a network (base/codec.h), and
// memory() lists what the pointers among them point to, in the order in which it is sent:
//   visit.down(pointer, bytes)             read by the device
//   visit.up(pointer, bytes, subgroup)     written by it
//   visit.samples(pointer, subgroup)       written by it: the subgroup's of the whole space's
//   samples
// check() says whether a device may take a message at all, whenever it comes: a subgroup is its
// own, elements are within it. memory() is for messages that were checked.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "smartinf/base/choice.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/kernels/update_rule.h"
#include "smartinf/plan/take_order.h"

namespace smartinf::csd {

class DeviceSpace;  // device_space.h

/// Begins the step after the committed one (0: the first state); its gradients may follow at once.
struct BeginStep {
  static constexpr std::string_view kName = "begin step";
  base::StepNumber step = 0;
};

/// In a step, a hint that changes no result: the first subgroups of the update to come, in its
/// order. While gradients come in, their state is read into memory that is free, until another
/// command comes that is queued. Answered at once.
struct Prefetch {
  static constexpr std::string_view kName = "prefetch";
  std::vector<base::SubgroupId> subgroups;
};

/// A piece of a subgroup's gradient goes down. Pieces do not overlap; together they are all of it.
struct PutGradient {
  static constexpr std::string_view kName = "put gradient";
  base::SubgroupId subgroup;
  uint64_t first = 0;  // element within the subgroup
  uint64_t count = 0;  // elements
  base::DataType type = base::DataType::kBf16;
  const void* gradient = nullptr;  // [count] of type
};

/// A whole subgroup's gradient goes down compressed (compress/message.h), for devices that were
/// made for it (LocalDeviceOptions::compressed_block_bytes).
struct PutCompressedGradient {
  static constexpr std::string_view kName = "put gradient";
  base::SubgroupId subgroup;
  std::span<const std::byte> message;
};

/// Where an update's new weights of one subgroup go.
struct SubgroupUpdate {
  base::SubgroupId subgroup;
  void* weights_out = nullptr;  // [count] of Update::weights_type; null: not wanted
  /// Where samples of the new variances go: those of the whole space (compress::MatrixSamples), of
  /// which the subgroup's are written. For rules that keep one and devices that know the space's
  /// matrices (SI_CHECK); null: not wanted.
  base::Bf16* samples_out = nullptr;
};

/// Updates these subgroups; weights come up one subgroup at a time. By mode:
///   kInOrder      from their committed state, whatever the step has made of it before.
///   kAsCompleted  comes right after BeginStep. Done when all are updated, or when a StopUpdate or
///   an
///                 Update of another mode but kRest follows, which lets those finish that have
///                 begun. Errors: kUnsupported where the committed state does not stay beside the
///                 new one, and for compressed gradients.
///   kRest         what the step has updated already is not reported again. A kAsCompleted that
///   runs
///                 goes on to its end before this one; all gradients must be there.
///   kOnDemand     a subgroup without weights_out is taken up only when a ReadWeights of this step
///   and
///                 of weights_type has come for it, or after a FinishUpdate: the update follows
///                 whoever uses the weights at his pace. Commands behind it wait as ever.
struct Update {
  static constexpr std::string_view kName = "update";
  base::DataType weights_type = base::DataType::kBf16;
  plan::UpdateMode mode = plan::UpdateMode::kInOrder;
  std::vector<kernels::StepScalars> scalars;  // one entry per group of the parameter space
  std::vector<SubgroupUpdate> updates;
};

/// Ends an update of subgroups as their gradients become complete; no other.
struct StopUpdate {
  static constexpr std::string_view kName = "stop update";
};

/// Nobody will ask for weights any more: an update on demand takes up what is left.
struct FinishUpdate {
  static constexpr std::string_view kName = "finish update";
};

/// Elements [first, first + count) of a subgroup's planes, decoded to f32: of the committed step.
struct ReadState {
  static constexpr std::string_view kName = "read state";
  base::SubgroupId subgroup;
  uint64_t first = 0;  // a multiple of kBlockElements
  uint64_t count = 0;
  std::array<float*, 4> planes{};  // [count] for each plane of the layout; null: not wanted
};

/// A whole subgroup's planes from f32, as state of the step that has begun.
struct WriteState {
  static constexpr std::string_view kName = "write state";
  base::SubgroupId subgroup;
  uint64_t count = 0;                    // elements of the subgroup
  std::array<const float*, 4> planes{};  // [count] for each plane of the layout; null: zeros
  uint32_t plane_mask = ~0u;             // bit i: the i-th plane of the layout; others stay
  /// [count], the residual plane as it is stored, in place of its f32; or null. It comes over the
  /// host link and is counted there as state.
  const base::Bf16* residual = nullptr;
};

/// Makes the step durable beside the committed one, with the caller's own bytes.
struct Prepare {
  static constexpr std::string_view kName = "prepare";
  base::StepNumber step = 0;
  std::string client_metadata;
};

/// Makes the prepared step the committed one. Asked for again, it has the same answer: a reply may
/// be lost. Errors: kFailedPrecondition for a step that is neither prepared nor the committed one.
struct Commit {
  static constexpr std::string_view kName = "commit";
  base::StepNumber step = 0;
};

/// Forgets the step that has begun or is prepared; its update ends as kCancelled, also one that
/// waits to start. Has the same answer when it is asked for again; without such a step there is
/// nothing to do.
/// Errors: kFailedPrecondition for the committed step, or while another one is in progress.
struct Abort {
  static constexpr std::string_view kName = "abort";
  base::StepNumber step = 0;
};

/// Between steps: writes what the state cache holds and the drive does not.
struct Flush {
  static constexpr std::string_view kName = "flush";
};

using StepMessage =
    std::variant<BeginStep, Prefetch, PutGradient, PutCompressedGradient, Update, StopUpdate,
                 FinishUpdate, ReadState, WriteState, Prepare, Commit, Abort, Flush>;

base::Status check(const Prefetch& message, const DeviceSpace& space);
base::Status check(const PutGradient& message, const DeviceSpace& space);
base::Status check(const PutCompressedGradient& message, const DeviceSpace& space);
base::Status check(const Update& message, const DeviceSpace& space);
base::Status check(const ReadState& message, const DeviceSpace& space);
base::Status check(const WriteState& message, const DeviceSpace& space);
base::Status check(const Prepare& message, const DeviceSpace& space);

template <typename Wire>
void describe(Wire& wire, BeginStep& message) {
  auto& [step] = message;
  wire(step);
}
template <typename Wire>
void describe(Wire& wire, Prefetch& message) {
  auto& [subgroups] = message;
  wire(subgroups);
}
template <typename Wire>
void describe(Wire& wire, PutGradient& message) {
  auto& [subgroup, first, count, type, gradient] = message;
  wire(subgroup, first, count, base::choice(type, base::DataType::kF16), gradient);
}
template <typename Wire>
void describe(Wire& wire, PutCompressedGradient& put) {
  auto& [subgroup, message] = put;
  wire(subgroup, message);
}
template <typename Wire>
void describe(Wire& wire, SubgroupUpdate& update) {
  auto& [subgroup, weights_out, samples_out] = update;
  wire(subgroup, weights_out, samples_out);
}
template <typename Wire>
void describe(Wire& wire, Update& message) {
  auto& [weights_type, mode, scalars, updates] = message;
  wire(base::choice(weights_type, base::DataType::kF16),
       base::choice(mode, plan::UpdateMode::kOnDemand), scalars, updates);
}
template <typename Wire>
void describe(Wire& wire, ReadState& message) {
  auto& [subgroup, first, count, planes] = message;
  wire(subgroup, first, count, planes);
}
template <typename Wire>
void describe(Wire& wire, WriteState& message) {
  auto& [subgroup, count, planes, plane_mask, residual] = message;
  wire(subgroup, count, planes, plane_mask, residual);
}
template <typename Wire>
void describe(Wire& wire, Prepare& message) {
  auto& [step, client_metadata] = message;
  wire(step, client_metadata);
}
template <typename Wire>
void describe(Wire& wire, Commit& message) {
  auto& [step] = message;
  wire(step);
}
template <typename Wire>
void describe(Wire& wire, Abort& message) {
  auto& [step] = message;
  wire(step);
}

template <typename Visit, typename Space>
void memory(Visit& visit, PutGradient& message, const Space&) {
  visit.down(message.gradient, message.count * base::data_type_bytes(message.type));
}
template <typename Visit, typename Space>
void memory(Visit& visit, PutCompressedGradient& put, const Space&) {
  visit.down(put.message);
}
template <typename Visit, typename Space>
void memory(Visit& visit, Update& message, const Space& space) {
  const uint64_t element_bytes = base::data_type_bytes(message.weights_type);
  for (SubgroupUpdate& entry : message.updates) {
    visit.up(entry.weights_out, space.elements(entry.subgroup) * element_bytes, entry.subgroup);
    visit.samples(entry.samples_out, entry.subgroup);
  }
}
template <typename Visit, typename Space>
void memory(Visit& visit, ReadState& message, const Space&) {
  for (float*& plane : message.planes) {
    visit.up(plane, message.count * sizeof(float), message.subgroup);
  }
}
template <typename Visit, typename Space>
void memory(Visit& visit, WriteState& message, const Space&) {
  for (const float*& plane : message.planes) visit.down(plane, message.count * sizeof(float));
  visit.down(message.residual, message.count * sizeof(base::Bf16));
}

}  // namespace smartinf::csd
