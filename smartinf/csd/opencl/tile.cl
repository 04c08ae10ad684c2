// Work of kernels on a tile of 256 elements. A work group is one work item, for processors with
// vectors, whose compilers make vector operations of the loops over lanes.

#define TILE 256u
#define BLOCK 65536ul
#define F32 0
#define BF16 1
#define F16 2
#define Q8 2

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

/// Bytes of n elements of a plane, as base::encoded_bytes() of at most a block.
static inline ulong encoded_bytes(uint encoding, ulong n) {
  if (encoding == F32) return n * 4;
  if (encoding == BF16) return n * 2;
  return (n + 3) / 4 * 4 + (n + TILE - 1) / TILE * 4;
}
/// Where a q8 block of n elements keeps its tiles' steps.
static inline global float* q8_steps(global uchar* block, ulong n) {
  return (global float*)(block + (n + 3) / 4 * 4);
}

static inline float q8_value(uint code, float step, bool variance) {
  return variance ? decode_variance((uchar)code, step) : decode_momentum((uchar)code, step);
}
static inline uint q8_code(float value, float inverse, uint random, bool variance) {
  if (inverse == 0) return 0;
  return variance ? encode_root(value, inverse, random) : encode_momentum(value, inverse, random);
}

/// A tile's codes to values.
static inline void decode_q8(global const uchar* codes, float step, bool variance, uint count,
                             float* values) {
  if (count == TILE) {
    LANES(word, kCodeWords) {
      const uint codes4 = ((global const uint*)codes)[word];
      values[word] = q8_value(codes4 & 0xffu, step, variance);
      values[word + 64] = q8_value(codes4 >> 8 & 0xffu, step, variance);
      values[word + 128] = q8_value(codes4 >> 16 & 0xffu, step, variance);
      values[word + 192] = q8_value(codes4 >> 24, step, variance);
    }
  } else {
    for (uint lane = 0; lane < count; ++lane) { values[lane] = q8_value(codes[lane], step, variance); }
  }
}

/// Momenta, or variances that become their roots, to codes.
static inline void encode_q8(float* values, uint count, bool variance, Progression numbers,
                             global uchar* codes, global float* step) {
  if (variance) {
    LANES(lane, count) { values[lane] = SI_SQRT(values[lane]); }
  }
  uint largest = 0;
  for (uint lane = 0; lane < count; ++lane) {
    largest = max(largest, as_uint(values[lane]) & kMagnitudeMask);
  }
  *step = variance ? variance_step(largest) : momentum_step(largest);
  const float inverse = group_inverse(*step);
  if (count == TILE) {
    LANES(word, kCodeWords) {
      uint codes4 = q8_code(values[word], inverse, random_at(numbers, word), variance);
      codes4 |= q8_code(values[word + 64], inverse, random_at(numbers, word + 64), variance) << 8;
      codes4 |= q8_code(values[word + 128], inverse, random_at(numbers, word + 128), variance)
                << 16;
      codes4 |= q8_code(values[word + 192], inverse, random_at(numbers, word + 192), variance)
                << 24;
      ((global uint*)codes)[word] = codes4;
    }
  } else {
    for (uint lane = 0; lane < count; ++lane) {
      codes[lane] = (uchar)q8_code(values[lane], inverse, random_at(numbers, lane), variance);
    }
  }
}
