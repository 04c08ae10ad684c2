#include "smartinf/train/initial_weights.h"

#include <algorithm>

#include "smartinf/train/random.h"

namespace smartinf::train {

InitialWeights::InitialWeights(const model::Architecture& architecture,
                               const plan::ParameterSpace& space, uint64_t seed)
    : space_(space), tensors_(model::tensors_of(architecture)), seed_(seed) {}

void InitialWeights::fill(uint64_t first, std::span<float> out) const {
  uint64_t element = first;
  const uint64_t end = first + out.size();
  while (element < end) {
    const size_t index = space_.index_at(element);
    const plan::ParameterRange& range = space_.ranges()[index];
    const model::Tensor& tensor = tensors_[index];
    for (const uint64_t stop = std::min(end, range.first + range.count); element < stop;
         ++element) {
      out[element - first] =
          tensor.init_std == 0
              ? tensor.init_value
              : static_cast<float>(tensor.init_std * random_normal(seed_, element));
    }
  }
}

}  // namespace smartinf::train
