// The part of Xilinx' <ap_int.h> that our kernels use, for builds without Vitis: wide words whose
// bits are read and written by ranges. Vitis takes its own header of this name.
#pragma once

#include <cstdint>

/// Ranges are of at most 64 bits and do not cross a multiple of 64: all that the kernels need.
template <int kBits>
class ap_uint {
 public:
  class Range {
   public:
    Range(uint64_t& part, int shift, uint64_t mask) : part_(part), shift_(shift), mask_(mask) {}
    uint64_t to_uint64() const { return part_ >> shift_ & mask_; }
    uint32_t to_uint() const { return static_cast<uint32_t>(to_uint64()); }
    Range& operator=(uint64_t value) {
      part_ = (part_ & ~(mask_ << shift_)) | (value & mask_) << shift_;
      return *this;
    }

   private:
    uint64_t& part_;
    int shift_;
    uint64_t mask_;
  };

  ap_uint() = default;
  ap_uint(uint64_t value) : parts_{value} {}  // NOLINT: Xilinx' converts as well

  Range range(int high, int low) {
    const int bits = high - low + 1;
    return {parts_[low / 64], low % 64, bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1};
  }
  const Range range(int high, int low) const {
    return const_cast<ap_uint*>(this)->range(high, low);
  }

 private:
  uint64_t parts_[(kBits + 63) / 64] = {};
};
