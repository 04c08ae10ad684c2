#include "smartinf/csd/opencl/host_side.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "smartinf/base/units.h"
#include "smartinf/kernels/feedback.h"
#include "smartinf/kernels/state_codec.h"

namespace smartinf::csd::opencl {
namespace {

using base::kBlockElements;

SumEntry entry_of(const std::optional<uint64_t>& seed, uint64_t bytes) {
  if (!seed || bytes <= kHostSumBytes) return {};
  return {.seed = *seed, .expected = 0, .wanted = 1};
}
/// One value of a plane in memory.
float value_at(const PlaneBlocks& planes, size_t plane, uint64_t element) {
  const uint64_t block = element / kBlockElements;
  const uint64_t n = planes.elements(block);
  const uint64_t i = element % kBlockElements;
  const std::byte* bytes = planes.bytes(plane, block).data();
  switch (planes.encoding(plane)) {
    case base::Encoding::kF32: {
      float value = 0;
      std::memcpy(&value, bytes + i * sizeof(value), sizeof(value));
      return value;
    }
    case base::Encoding::kBf16: {
      uint16_t bits = 0;
      std::memcpy(&bits, bytes + i * sizeof(bits), sizeof(bits));
      return base::f32_of_bf16(bits);
    }
    case base::Encoding::kM24: {
      uint16_t upper = 0;
      std::memcpy(&upper, bytes + i * sizeof(upper), sizeof(upper));
      return kernels::decode_m24(upper, std::to_integer<uint8_t>(bytes[n * sizeof(upper) + i]));
    }
    case base::Encoding::kQ8:
    case base::Encoding::kQ4:
      break;
  }
  const int code_bits = planes.encoding(plane) == base::Encoding::kQ8 ? 8 : 4;
  const uint64_t tile = i / kernels::kGroupElements;
  const uint64_t first = tile * kernels::kGroupElements;
  const uint64_t count = std::min<uint64_t>(kernels::kGroupElements, n - first);
  float step = 0;
  std::memcpy(&step, bytes + base::code_bytes(planes.encoding(plane), n) + tile * sizeof(step),
              sizeof(step));
  const auto* codes = reinterpret_cast<const uint8_t*>(bytes);
  const uint64_t position = first + kernels::code_position(code_bits, i - first, count);
  return kernels::decode_code(code_bits, planes.planes()[plane],
                              kernels::code_at(code_bits, codes, position), step);
}

}  // namespace

SumEntry entry_of(const std::optional<storage::BlockSum>& sum, uint64_t bytes) {
  if (!sum || bytes <= kHostSumBytes) return {};
  return {.seed = sum->seed, .expected = sum->checksum, .wanted = 1};
}
SumEntry expected_entry(const PlaneBlocks& planes, size_t plane, uint64_t block) {
  return entry_of(planes.expected_sum(plane, block), planes.bytes(plane, block).size());
}
SumEntry seal_entry(const PlaneBlocks& planes, size_t plane, uint64_t block) {
  return entry_of(planes.seal_seed(plane, block), planes.bytes(plane, block).size());
}
void seal(const PlaneBlocks& planes, size_t plane, uint64_t block, uint64_t sum) {
  if (planes.bytes(plane, block).size() <= kHostSumBytes) {
    planes.seal(plane, block);
  } else if (planes.seal_seed(plane, block)) {
    planes.seal(plane, block, sum);
  }
}
base::Status verify_short(const PlaneBlocks& planes, size_t plane, uint64_t block) {
  if (planes.bytes(plane, block).size() > kHostSumBytes) return base::Status();
  return planes.verify(plane, block);
}

base::Status damaged(const PlaneBlocks& planes, size_t plane, uint64_t block) {
  SI_RETURN_IF_ERROR(planes.verify(plane, block));
  return base::Status(
      base::ErrorCode::kCorrupt,
      "block " + std::to_string(block) + " of the " +
          std::string(base::plane_kind_name(planes.planes()[plane])) + " plane of subgroup " +
          std::to_string(planes.subgroup().id.value) +
          " was damaged on its way to the OpenCL device",
      "The step is aborted and can be repeated; if it happens again, the device or its "
      "memory is failing.");
}

void take_samples(const UpdateJob& job) {
  const PlaneBlocks& planes = job.planes;
  const size_t plane = kernels::variance_plane(job.scalars.front().rule);
  const storage::StoredSubgroup& subgroup = planes.subgroup();
  for (const compress::MatrixLayout& matrix :
       compress::matrices_in(job.matrices, subgroup.first_element, subgroup.count)) {
    compress::MatrixSamples{matrix}.each_in(
        subgroup.first_element, subgroup.count,
        [&](uint64_t element, uint64_t sample, uint64_t count) {
          for (uint64_t i = 0; i < count; ++i) {
            job.samples_out[sample + i] =
                base::to_bf16(value_at(planes, plane, element + i - subgroup.first_element));
          }
        });
  }
}

}  // namespace smartinf::csd::opencl
