// The host's part of a job: checksums of what is so short that kernels leave it, records of those
// that kernels computed, and samples of the variance.
#pragma once

#include <cstdint>
#include <optional>

#include "smartinf/base/status.h"
#include "smartinf/csd/opencl/job.h"
#include "smartinf/csd/plane_blocks.h"
#include "smartinf/csd/processor.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd::opencl {

/// XXH3 has other ways for up to so many bytes, which the host goes.
inline constexpr uint64_t kHostSumBytes = 240;

/// Entry that tells a kernel the checksum of `bytes` bytes, for it to compare.
SumEntry entry_of(const std::optional<storage::BlockSum>& sum, uint64_t bytes);
/// The same of a block of a plane that is read, and of one that is written.
SumEntry expected_entry(const PlaneBlocks& planes, size_t plane, uint64_t block);
SumEntry seal_entry(const PlaneBlocks& planes, size_t plane, uint64_t block);

/// Records what the kernel computed, or computes it here where that was left to the host.
void seal(const PlaneBlocks& planes, size_t plane, uint64_t block, uint64_t sum);
/// Verifies the block if that is the host's.
base::Status verify_short(const PlaneBlocks& planes, size_t plane, uint64_t block);
/// The error where the kernel has found another checksum than expected.
base::Status damaged(const PlaneBlocks& planes, size_t plane, uint64_t block);

/// UpdateJob::samples_out, from the planes in the slot.
void take_samples(const UpdateJob& job);

}  // namespace smartinf::csd::opencl
