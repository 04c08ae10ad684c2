// The samples of a subgroup's new variances on their way: those that are its own, in the order of
// their elements, in place of the whole space's list of which it fills some places.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/compress/matrix_layout.h"
#include "smartinf/storage/store.h"

namespace smartinf::serve::wire {

/// act(sample, count): runs of places among the space's samples.
template <typename Act>
void each_sample_run(std::span<const compress::MatrixLayout> matrices,
                     const storage::StoredSubgroup& subgroup, const Act& act) {
  for (const compress::MatrixLayout& matrix :
       compress::matrices_in(matrices, subgroup.first_element, subgroup.count)) {
    compress::MatrixSamples{matrix}.each_in(
        subgroup.first_element, subgroup.count,
        [&](uint64_t, uint64_t sample, uint64_t count) { act(sample, count); });
  }
}

inline std::vector<base::Bf16> pack_samples(std::span<const compress::MatrixLayout> matrices,
                                            const storage::StoredSubgroup& subgroup,
                                            const base::Bf16* samples) {
  std::vector<base::Bf16> packed;
  each_sample_run(matrices, subgroup, [&](uint64_t sample, uint64_t count) {
    packed.insert(packed.end(), samples + sample, samples + sample + count);
  });
  return packed;
}

/// False: not as many as the subgroup has.
inline bool unpack_samples(std::span<const compress::MatrixLayout> matrices,
                           const storage::StoredSubgroup& subgroup,
                           std::span<const base::Bf16> packed, base::Bf16* samples) {
  size_t at = 0;
  bool enough = true;
  each_sample_run(matrices, subgroup, [&](uint64_t sample, uint64_t count) {
    enough = enough && count <= packed.size() - at;
    if (!enough) return;
    std::copy_n(packed.begin() + static_cast<std::ptrdiff_t>(at), count, samples + sample);
    at += count;
  });
  return enough && at == packed.size();
}

}  // namespace smartinf::serve::wire
