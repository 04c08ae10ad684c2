// Work of kernels on a tile of 256 elements. A work group is one work item, for processors with
// vectors, whose compilers make vector operations of the loops over lanes.

#define TILE 256u
#define BLOCK 65536ul
#define F32 0
#define BF16 1
#define F16 2
// Encodings of planes beside F32 and BF16: base::Encoding.
#define Q8 2
#define M24 3
#define Q4 4

// Turns of such a loop touch different elements: a compiler need not look for others.
#define LANES(lane, count)                                                       \
  _Pragma("clang loop vectorize(assume_safety)") for (uint lane = 0; lane < (count); ++lane)

static inline ulong type_bytes(uint type) { return type == F32 ? 4 : 2; }

static inline float load_as_f32(global const uchar* at, uint type, ulong i) {
  if (type == F32) return ((global const float*)at)[i];
  const ushort bits = ((global const ushort*)at)[i];
  return type == BF16 ? f32_of_bf16(bits) : f32_of_f16(bits);
}
static inline void store_f32_as(float value, global uchar* at, uint type, ulong i) {
  if (type == F32) {
    ((global float*)at)[i] = value;
  } else {
    ((global ushort*)at)[i] = type == BF16 ? bf16_of_f32(value) : f16_of_f32(value);
  }
}

/// Bits of a code of a tile with a step, of Q8 and Q4.
static inline int code_bits(uint encoding) { return encoding == Q8 ? 8 : 4; }

/// Bytes of n elements of a plane, as base::encoded_bytes() of at most a block; of its codes.
static inline ulong code_bytes(uint encoding, ulong n) {
  return (n * (ulong)code_bits(encoding) + 31) / 32 * 4;
}
static inline ulong encoded_bytes(uint encoding, ulong n) {
  if (encoding == F32) return n * 4;
  if (encoding == BF16) return n * 2;
  if (encoding == M24) return n * 3;
  return code_bytes(encoding, n) + (n + TILE - 1) / TILE * 4;
}
/// Where a block of n elements in Q8 or Q4 keeps its tiles' steps.
static inline global float* steps_of(uint encoding, global uchar* block, ulong n) {
  return (global float*)(block + code_bytes(encoding, n));
}

/// Elements of a block of n in F32, BF16 or M24.
static inline float load_plain(global const uchar* block, uint encoding, ulong n, ulong i) {
  if (encoding == M24) return decode_m24(((global const ushort*)block)[i], block[2 * n + i]);
  return load_as_f32(block, encoding, i);
}
static inline void store_plain(float value, global uchar* block, uint encoding, ulong n, ulong i,
                               uint random) {
  if (encoding == F32) {
    ((global float*)block)[i] = value;
  } else if (encoding == BF16) {
    ((global ushort*)block)[i] = round_bf16(value, random);
  } else {
    const uint bits = round_m24(value, random);
    ((global ushort*)block)[i] = (ushort)(bits >> 16);
    block[2 * n + i] = (uchar)(bits >> kM24Cut);
  }
}

static inline float value_of(int bits, uint code, float step, bool variance) {
  return variance ? decode_variance(bits, (uchar)code, step)
                  : decode_momentum(bits, (uchar)code, step);
}
static inline uint code_of(int bits, float value, float inverse, uint random, bool variance) {
  if (inverse == 0) return 0;
  return variance ? encode_root(bits, value, inverse, random)
                  : encode_momentum(bits, value, inverse, random);
}

/// A tile's codes to values.
static inline void decode_codes(int bits, global const uchar* codes, float step, bool variance,
                                uint count, float* values) {
  const uint mask = (1u << bits) - 1;
  if (count == TILE) {
    const uint words = code_words(bits);
    for (uint j = 0; j < TILE / words; ++j) {
      LANES(word, words) {
        const uint code = ((global const uint*)codes)[word] >> ((uint)bits * j) & mask;
        values[words * j + word] = value_of(bits, code, step, variance);
      }
    }
  } else {
    for (uint lane = 0; lane < count; ++lane) {
      const uint at = lane * (uint)bits;
      values[lane] = value_of(bits, codes[at / 8] >> at % 8 & mask, step, variance);
    }
  }
}

/// Momenta, or variances that become their roots, to codes.
static inline void encode_codes(int bits, float* values, uint count, bool variance,
                                Progression numbers, global uchar* codes, global float* step) {
  if (variance) {
    LANES(lane, count) { values[lane] = SI_SQRT(values[lane]); }
  }
  uint largest = 0;
  for (uint lane = 0; lane < count; ++lane) {
    largest = max(largest, as_uint(values[lane]) & kMagnitudeMask);
  }
  *step = variance ? root_step(bits, largest) : momentum_step(bits, largest);
  const float inverse = group_inverse(*step);
  if (count == TILE) {
    const uint words = code_words(bits);
    LANES(word, words) {
      uint packed = 0;
      for (uint j = 0; j < TILE / words; ++j) {
        const uint lane = words * j + word;
        packed |= code_of(bits, values[lane], inverse, random_at(numbers, lane), variance)
                  << ((uint)bits * j);
      }
      ((global uint*)codes)[word] = packed;
    }
  } else {
    for (uint lane = 0; lane < count; ++lane) {
      const uint at = lane * (uint)bits;
      const uint code = code_of(bits, values[lane], inverse, random_at(numbers, lane), variance);
      codes[at / 8] = (uchar)(at % 8 == 0 ? code : codes[at / 8] | code << at % 8);
    }
  }
}
