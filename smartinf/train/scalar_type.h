// The project's types of numbers as torch's.
#pragma once

#include <torch/types.h>

#include "smartinf/base/float_formats.h"

namespace smartinf::train {

inline torch::ScalarType scalar_type(base::DataType type) {
  switch (type) {
    case base::DataType::kF32:
      return torch::kFloat32;
    case base::DataType::kBf16:
      return torch::kBFloat16;
    case base::DataType::kF16:
      return torch::kFloat16;
  }
  return torch::kFloat32;
}

}  // namespace smartinf::train
