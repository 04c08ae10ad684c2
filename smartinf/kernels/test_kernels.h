// Code that the tests of this module share.
#pragma once

#include <cstddef>
#include <vector>

#include "smartinf/kernels/update.h"

namespace smartinf::kernels {

using base::DataType;
using base::Encoding;
using base::MasterFormat;
using base::MomentFormat;
using base::PlaneKind;
using base::StateFormat;

/// The plain truth, which every other table is compared with.
inline const KernelTable& scalar() { return *supported_tables().front(); }

/// An f32 plane as an UpdateBlock names it.
inline std::byte* plane_of(std::vector<float>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

}  // namespace smartinf::kernels
