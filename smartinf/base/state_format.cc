#include "smartinf/base/state_format.h"

#include <array>
#include <vector>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"

namespace smartinf::base {

uint64_t code_bytes(Encoding encoding, uint64_t count) {
  return round_up(encoding == Encoding::kQ4 ? divide_up(count, 2) : count, 4);
}

uint64_t encoded_bytes(Encoding encoding, uint64_t count) {
  const auto coded_block = [encoding](uint64_t elements) {
    return code_bytes(encoding, elements) + divide_up(elements, kCodeGroupElements) * sizeof(float);
  };
  switch (encoding) {
    case Encoding::kF32:
      return count * 4;
    case Encoding::kBf16:
      return count * 2;
    case Encoding::kM24:
      return count * 3;
    case Encoding::kQ8:
    case Encoding::kQ4:
      return count / kBlockElements * coded_block(kBlockElements) +
             coded_block(count % kBlockElements);
  }
  SI_CHECK(false, "unknown encoding");
  return 0;
}

std::span<const StateFormat> all_state_formats() {
  static const std::vector<StateFormat> kAll = [] {
    std::vector<StateFormat> all;
    for (const std::string_view master : kMasterFormatNames) {
      for (const std::string_view moments : kMomentFormatNames) {
        all.push_back(
            {*enum_from_name<MomentFormat>(moments), *enum_from_name<MasterFormat>(master)});
      }
    }
    return all;
  }();
  return kAll;
}

std::string state_format_name(StateFormat format) {
  const std::string moments(enum_name(format.moments));
  if (format.master == MasterFormat::kF32) return moments;
  return std::string(enum_name(format.master)) + "+" + moments;
}

Encoding plane_encoding(StateFormat format, PlaneKind kind) {
  constexpr std::array kMasters = {Encoding::kF32, Encoding::kM24, Encoding::kBf16};
  constexpr std::array kMoments = {Encoding::kF32, Encoding::kBf16, Encoding::kQ8, Encoding::kQ4};
  if (kind == PlaneKind::kResidual) return Encoding::kBf16;
  return kind == PlaneKind::kMaster ? kMasters.at(static_cast<size_t>(format.master))
                                    : kMoments.at(static_cast<size_t>(format.moments));
}

}  // namespace smartinf::base
