// How passes over a gradient set candidates aside. Compiled for every instruction set: it is
// included once by each, after highway.h.
#if defined(SMARTINF_KERNELS_CANDIDATES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SMARTINF_KERNELS_CANDIDATES_INL_H_
#undef SMARTINF_KERNELS_CANDIDATES_INL_H_
#else
#define SMARTINF_KERNELS_CANDIDATES_INL_H_
#endif

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace smartinf::kernels::HWY_NAMESPACE {

/// Bit l is lane l of the mask.
template <class D>
HWY_INLINE uint64_t bits_of_mask(D d, hwy::HWY_NAMESPACE::Mask<D> mask) {
  uint8_t bytes[8] = {};
  hwy::HWY_NAMESPACE::StoreMaskBits(d, mask, bytes);
  uint64_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return bits;
}

/// Writes the values whose lanes are set, one behind the other, and returns how many. A whole
/// vector is written: on many processors that is far quicker than a store under a mask.
template <class D>
HWY_INLINE size_t put_compressed(D d, hwy::HWY_NAMESPACE::Vec<D> values,
                                 hwy::HWY_NAMESPACE::Mask<D> mask,
                                 hwy::HWY_NAMESPACE::TFromD<D>* out) {
  hwy::HWY_NAMESPACE::StoreU(hwy::HWY_NAMESPACE::Compress(values, mask), d, out);
  return hwy::HWY_NAMESPACE::CountTrue(d, mask);
}

/// Elements whose candidates are written together.
inline constexpr size_t kCandidateGroup = 64;

/// Writes index and value of the set bits' elements, of a group that begins at `first`; returns how
/// many. Always kAtOnce of them, so that the processor foresees every branch but those of the rare
/// fuller groups; beyond the last one lies anything, which the next ones write over.
/// value_at: by the place in the group. Shapes: indices, values: [kCandidateGroup].
template <size_t kAtOnce, class ValueAt>
HWY_INLINE size_t put_candidates(uint64_t bits, size_t first, const ValueAt& value_at,
                                 uint32_t* indices, float* values) {
  static_assert(kCandidateGroup % kAtOnce == 0, "no more is written than a group has elements");
  const auto count = static_cast<size_t>(std::popcount(bits));
  for (size_t done = 0; done == 0 || done < count; done += kAtOnce) {
    for (size_t e = done; e < done + kAtOnce; ++e, bits &= bits - 1) {
      const size_t at = static_cast<size_t>(std::countr_zero(bits)) & (kCandidateGroup - 1);
      indices[e] = static_cast<uint32_t>(first + at);
      values[e] = value_at(at);
    }
  }
  return count;
}

}  // namespace smartinf::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
