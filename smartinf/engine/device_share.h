// The share of each device of a run: memory, and what it has to know of the model.
#pragma once

#include <cstdint>
#include <vector>

#include "smartinf/compress/matrix_layout.h"
#include "smartinf/engine/device_source.h"
#include "smartinf/engine/options.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::engine {

/// The space's matrices where messages have factors of the second moment; else none.
std::vector<compress::MatrixLayout> matrices_of_second_moment(const UpdaterOptions& options,
                                                              const plan::ParameterSpace& space);
/// Bytes of gradients that devices keep until the update; compressed, about: their subgroups are
/// not known yet.
uint64_t gradient_bytes(const UpdaterOptions& options, const plan::ParameterSpace& space);
/// Bytes of the spool for each source: every rank that has one gets as much, which its sources
/// share as fast ones fill it; each a multiple of kIoAlignment. Errors: of DeviceSource::bandwidth.
base::Result<std::vector<uint64_t>> share_spool(uint64_t spool_bytes, const DeviceSources& sources);
/// slot_memory_bytes: what the budget leaves to the device; device_elements: of the space.
DeviceShare device_share(const UpdaterOptions& options, const plan::ParameterSpace& space,
                         uint64_t slot_memory_bytes, uint64_t device_elements);

}  // namespace smartinf::engine
