// The elements of largest magnitude of a subgroup, exactly, and their way back into one: what
// SmartComp sends over the host link in place of a whole gradient.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "smartinf/kernels/update.h"

namespace smartinf::kernels {

/// Finds the min(k, n) elements of largest |x| and writes their indices, ascending, and values.
/// Of equal magnitudes at the threshold the lowest indices are taken. NaN counts as larger than any
/// number, so that it is not lost. -0 and 0 are equal.
/// Shapes: in: [n]; indices, values: [k] each. Returns how many were written.
/// Threads: pure. Memory: 64 KiB of stack, nothing else. n < 2^32 (SI_CHECK).
/// Source: radix selection over the bit patterns: at most three histograms and a pass that
/// collects.
size_t top_k(const KernelTable& table, std::span<const float> in, size_t k, uint32_t* indices,
             float* values);

/// The same, for data whose k-th largest magnitude is about known: as that of the step before.
/// threshold: in: that magnitude, or 0; out: the k-th largest (0 where it is not finite). What is
/// found does not depend on it, only the time: elements near it or above are collected in one pass,
/// and the k largest of those few taken.
/// Shapes: indices, values: [room], room >= min(k, n); twice k is room enough to gain by it.
size_t top_k_near(const KernelTable& table, std::span<const float> in, size_t k, size_t room,
                  uint32_t* indices, float* values, float& threshold);

/// out[indices[i]] += values[i], in the order of i, so that repeated indices are well defined.
/// Shapes: indices, values: [n]. Every index lies inside `out` (SI_CHECK: check what comes from
/// outside before). Threads: safe on disjoint `out`.
void scatter_add(std::span<const uint32_t> indices, std::span<const float> values,
                 std::span<float> out);

}  // namespace smartinf::kernels
