#include "smartinf/base/state_format.h"

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"

namespace smartinf::base {
namespace {

uint64_t q8_block_bytes(uint64_t count) {
  return round_up(count, 4) + divide_up(count, kQ8GroupElements) * sizeof(float);
}

}  // namespace

uint64_t encoded_bytes(Encoding encoding, uint64_t count) {
  switch (encoding) {
    case Encoding::kF32:
      return count * 4;
    case Encoding::kBf16:
      return count * 2;
    case Encoding::kQ8: {
      const uint64_t rest = count % kBlockElements;
      return count / kBlockElements * q8_block_bytes(kBlockElements) +
             (rest != 0 ? q8_block_bytes(rest) : 0);
    }
  }
  SI_CHECK(false, "unknown encoding");
  return 0;
}

Encoding plane_encoding(StateFormat format, PlaneKind kind) {
  if (kind == PlaneKind::kMaster) return Encoding::kF32;
  if (kind == PlaneKind::kResidual) return Encoding::kBf16;
  switch (format) {
    case StateFormat::kF32:
      return Encoding::kF32;
    case StateFormat::kBf16:
      return Encoding::kBf16;
    case StateFormat::kQ8:
      return Encoding::kQ8;
  }
  SI_CHECK(false, "unknown state format");
  return Encoding::kF32;
}

}  // namespace smartinf::base
