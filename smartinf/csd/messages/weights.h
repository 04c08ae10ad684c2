// The messages of who reads weights beside a step: a layer stream, an evaluation, an export.
#pragma once

#include <cstdint>
#include <string_view>
#include <variant>

#include "smartinf/base/choice.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"

namespace smartinf::csd {

class DeviceSpace;  // device_space.h

/// A whole subgroup's weights: its master plane, cast as an update casts it. Not queued behind
/// other commands: it is served while gradients come in, while an update runs and between steps,
/// for devices with memory for it (LocalDeviceOptions::weight_read_slots). Of the committed step
/// they are read from the drive or the state cache, unless a Commit of the next step waits already;
/// a Commit waits for those that came before it. Of the step in progress, whose BeginStep has come,
/// they are written to weights_out by the update that makes them, if this is there before it takes
/// the subgroup up and that update is not kAsCompleted, which may be done again; else they are read
/// after the Commit. Errors: kUnsupported without memory for it; kFailedPrecondition for another
/// step, for a second one that would wait for the same subgroup, before there is a committed state,
/// and where the step in progress overwrites the subgroup in place (durability "none"); kCancelled
/// when the step that it waits for is aborted; the update's error when that fails; kCorrupt.
struct ReadWeights {
  static constexpr std::string_view kName = "read weights";
  base::SubgroupId subgroup;
  base::StepNumber step = 0;
  base::DataType type = base::DataType::kBf16;
  void* weights_out = nullptr;  // [count] of type
};

using WeightsMessage = std::variant<ReadWeights>;

base::Status check(const ReadWeights& message, const DeviceSpace& space);

template <typename Wire>
void describe(Wire& wire, ReadWeights& message) {
  auto& [subgroup, step, type, weights_out] = message;
  wire(subgroup, step, base::choice(type, base::DataType::kF16), weights_out);
}
template <typename Visit, typename Space>
void memory(Visit& visit, ReadWeights& message, const Space& space) {
  visit.up(message.weights_out,
           space.elements(message.subgroup) * base::data_type_bytes(message.type),
           message.subgroup);
}

}  // namespace smartinf::csd
