// The update of a subgroup: a work group takes a block, verifies the checksums of its planes,
// updates its elements tile by tile and makes the checksums of what it wrote, while the block is in
// the cache. csd/cpu_processor.cc and kernels/update.cc are the truth; formulas are those of
// arithmetic.h.
//
// Compiled for a rule (SI_RULE), encodings of master weights and moments (SI_MASTER, SI_MOMENTS),
// types of gradients and weights (SI_GRADIENT, SI_WEIGHTS) by their numbers.

#define HAS_MOMENTUM (SI_RULE != 3)
#define HAS_VARIANCE (SI_RULE <= 1 || SI_RULE == 3)
#define MOMENTUM_PLANE 1
#define VARIANCE_PLANE (HAS_MOMENTUM ? 2 : 1)
#define PLANES (1u + HAS_MOMENTUM + HAS_VARIANCE)
#define CODED (SI_MOMENTS == Q8 || SI_MOMENTS == Q4)
#define BITS code_bits(SI_MOMENTS)

static inline ulong sum_bytes(uint which, ulong n) {
  if (which == kPlanesMax) return n * type_bytes(SI_GRADIENT);
  return encoded_bytes(which == 0 ? SI_MASTER : SI_MOMENTS, n);
}

/// Puts what was sent of a block's gradient among zeros. compress/message.cc and rice_code.h are the
/// truth.
static inline void expand_block(const UpdateArguments* a, global const uchar* message, ulong block,
                                uint n, global uchar* out) {
  global const uchar* entry = message + 48 + block * 8;
  const ulong begin = block == 0 ? 0 : as_uint(vload4(0, entry - 8));
  const ulong end = as_uint(vload4(0, entry));
  const uint count_and_byte = as_uint(vload4(0, entry + 4));
  const ulong values = count_and_byte & 0xffffffu;
  const uint low_bits = count_and_byte >> 24;
  const uint sign_bits = a->signs != 0 ? 1 : 0;
  global const uchar* data = message + a->sections_at + begin;
  global const uchar* bits = data + (sign_bits != 0 ? 2 : values * type_bytes(SI_GRADIENT));
  global const uchar* bits_end = message + a->sections_at + end;
  const uint magnitude = sign_bits != 0 ? as_ushort(vload2(0, data)) : 0;
  if (low_bits == 0xff) {  // all elements are there, and no indices
    for (uint i = 0; i < n; ++i) {
      if (sign_bits != 0) {
        ((global ushort*)out)[i] = (ushort)(magnitude | (bits[i / 8] >> i % 8 & 1u) << 15);
      } else if (SI_GRADIENT == F32) {
        ((global uint*)out)[i] = as_uint(vload4(i, data));
      } else {
        ((global ushort*)out)[i] = as_ushort(vload2(i, data));
      }
    }
    return;
  }
  const uint tail_bits = low_bits + sign_bits;
  const ulong tail_mask = (1ul << tail_bits) - 1;
  const ulong low_mask = (1ul << low_bits) - 1;
  global const uchar* highs = bits + (values * tail_bits + 7) / 8;
  ulong i = 0;
  ulong lows = 0;  // sum
  for (global const uchar* at = highs; at < bits_end; at += 8) {
    const ulong zeros_before = (ulong)(at - highs) * 8 - i;
    const ulong before = i;
    for (ulong word = word_within(at, bits_end); word != 0; word &= word - 1, ++i) {
      const ulong ones_at = popcount(~word & (word - 1));
      const ulong tail_at = i * tail_bits;
      const ulong tail =
          word_within(bits + tail_at / 8, bits_end) >> tail_at % 8 & tail_mask;
      lows += tail & low_mask;
      const ulong index = ((zeros_before + ones_at - (i - before)) << low_bits) + lows + i;
      if (sign_bits != 0) {
        ((global ushort*)out)[index] = (ushort)(magnitude | (uint)(tail >> low_bits) << 15);
      } else if (SI_GRADIENT == F32) {
        ((global uint*)out)[index] = as_uint(vload4(i, data));
      } else {
        ((global ushort*)out)[index] = as_ushort(vload2(i, data));
      }
    }
  }
}

/// A row's or column's factor.
static inline float factor_of(global const uchar* codes, ulong at, ulong scale) {
  const uint code = codes[at];
  return as_float(code == 0 ? 0u : (code + (uint)scale) << 20);
}

/// The squares that the variance of a tile takes. entry: the first that reaches into it.
static inline void tile_squares(global const MatrixEntry* entry, global const uchar* codes,
                                ulong element, uint count, float* squares) {
  for (uint lane = 0; lane < count; ++lane) {
    global const MatrixEntry* e = entry;
    while (e->end <= element + lane) ++e;
    const ulong from_row = element + lane - e->first + e->first_column;
    const ulong column = from_row % e->columns;
    const ulong position = column >= e->first_column ? column - e->first_column
                                                     : column + e->columns - e->first_column;
    squares[lane] = factor_of(codes, e->columns_at + position, e->column_scale) *
                    factor_of(codes, e->rows_at + from_row / e->columns, e->row_scale);
  }
}

#if CODED
#define LOAD(plane, i) values[(plane) - 1][(i) - tile]
#define STORE(value, plane, numbers, i) values[(plane) - 1][(i) - tile] = (value)
#else
#define LOAD(plane, i) load_plain(planes[plane], SI_MOMENTS, n, i)
#define STORE(value, plane, numbers, i) \
  store_plain(value, planes[plane], SI_MOMENTS, n, i, random_at(numbers, (i) - tile))
#endif

#define UPDATE_LANE(scalars_of_lane, changes, has_square, square)                            \
  {                                                                                          \
    const uint i = tile + lane;                                                              \
    ElementState e;                                                                          \
    e.master = load_plain(planes[0], SI_MASTER, n, i);                                       \
    e.momentum = HAS_MOMENTUM ? LOAD(MOMENTUM_PLANE, i) : 0.0f;                      \
    e.variance = HAS_VARIANCE ? LOAD(VARIANCE_PLANE, i) : 0.0f;                    \
    if (changes) {                                                                           \
      e = update_element(scalars_of_lane, load_as_f32(gradient, SI_GRADIENT, i), has_square, \
                         square, e);                                                         \
      store_plain(e.master, planes[0], SI_MASTER, n, i, random_at(master_numbers, lane));    \
    }                                                                                        \
    if (HAS_MOMENTUM) STORE(e.momentum, MOMENTUM_PLANE, key.momentum, i);            \
    if (HAS_VARIANCE) STORE(e.variance, VARIANCE_PLANE, key.variance, i);          \
  }

__attribute__((reqd_work_group_size(1, 1, 1))) kernel void update(
    const UpdateArguments a, global uchar* state, global const uchar* gradients,
    global uchar* weights, global const uchar* tables, global ulong* sums, global uchar* scratch) {
  float squares[TILE];
#if CODED
  float values[2][TILE];  // of the planes behind the master
#endif
  global const SpanEntry* spans = (global const SpanEntry*)(tables + a.spans_at);
  global const RuleScalars* scalars = (global const RuleScalars*)(tables + a.scalars_at);
  global const MatrixEntry* matrices = (global const MatrixEntry*)(tables + a.matrices_at);
  global const uchar* message = gradients + a.gradient_at;
  const ulong blocks = (a.count + BLOCK - 1) / BLOCK;
  for (ulong block = get_group_id(0); block < blocks; block += get_num_groups(0)) {
    const ulong first = block * BLOCK;
    const uint n = (uint)min(BLOCK, a.count - first);
    global const SumEntry* sums_in =
        (global const SumEntry*)(tables + a.sums_in_at) + block * kSumsPerBlock;
    global const SumEntry* sums_out =
        (global const SumEntry*)(tables + a.sums_out_at) + block * kSumsPerBlock;
    global uchar* planes[3];
    for (uint plane = 0; plane < PLANES; ++plane) {
      planes[plane] = state + a.plane_at[plane] + block * sum_bytes(plane, BLOCK);
    }
    global uchar* gradient = (global uchar*)message + first * type_bytes(SI_GRADIENT);
    if (a.compressed != 0) {
      gradient = scratch + get_group_id(0) * BLOCK * type_bytes(SI_GRADIENT);
      const uint words = (uint)((n * type_bytes(SI_GRADIENT) + 3) / 4);
      LANES(word, words) { ((global uint*)gradient)[word] = 0; }
      expand_block(&a, message, block, n, gradient);
    }

    uint bad = 0;
    for (uint which = 0; which < kSumsPerBlock; ++which) {
      if (sums_in[which].wanted == 0) continue;
      const ulong sum = xxh3(which == kPlanesMax ? gradient : planes[which], sum_bytes(which, n),
                             sums_in[which].seed);
      if (sum != sums_in[which].expected) bad |= 1u << which;
    }

    // A broken block is left as it is.
    const uint end = bad != 0 ? 0 : n;
    uint at_span = 0;
    uint at_matrix = 0;
    for (uint tile = 0; tile < end; tile += TILE) {
      const uint count = min(TILE, n - tile);
      const ulong element = first + tile;
      while (spans[at_span].end <= element) ++at_span;
      const bool whole = element + count <= spans[at_span].end;
      RuleScalars s = scalars[spans[at_span].scalars];
      s.rule = SI_RULE;
      // Not even decoded and encoded again, so that what is left alone keeps its bits.
      const uint changed = whole && s.skip != 0 ? 0 : count;
      if (a.matrices != 0) {
        while (matrices[at_matrix].end <= a.first_element + element) ++at_matrix;
        tile_squares(matrices + at_matrix, message + a.factors_at, a.first_element + element,
                     changed, squares);
      }
#if CODED
      for (uint plane = 1; plane < PLANES; ++plane) {
        decode_codes(BITS, planes[plane] + tile * (uint)BITS / 8,
                     steps_of(SI_MOMENTS, planes[plane], n)[tile / TILE],
                     HAS_VARIANCE && plane == VARIANCE_PLANE, changed, values[plane - 1]);
      }
#endif
      const Progression master_numbers = master_rounding(a.step_seed, a.first_element + element);
      const RoundingKey key = rounding_key(a.step_seed, a.first_element + element);
      if (whole && a.matrices == 0) {
        LANES(lane, changed) UPDATE_LANE(s, true, false, 0.0f)
      } else if (whole) {
        LANES(lane, changed) UPDATE_LANE(s, true, true, squares[lane])
      } else {
        for (uint lane = 0; lane < changed; ++lane) {
          global const SpanEntry* span = spans + at_span;
          while (span->end <= element + lane) ++span;
          RuleScalars own = scalars[span->scalars];
          own.rule = SI_RULE;
          UPDATE_LANE(own, own.skip == 0, a.matrices != 0, a.matrices != 0 ? squares[lane] : 0.0f)
        }
      }
#if CODED
      for (uint plane = 1; plane < PLANES && changed != 0; ++plane) {
        const bool variance = HAS_VARIANCE && plane == VARIANCE_PLANE;
        encode_codes(BITS, values[plane - 1], changed, variance,
                     variance ? key.variance : key.momentum,
                     planes[plane] + tile * (uint)BITS / 8,
                     steps_of(SI_MOMENTS, planes[plane], n) + tile / TILE);
      }
#endif
      if (a.has_weights != 0) {
        LANES(lane, count) {
          store_f32_as(load_plain(planes[0], SI_MASTER, n, tile + lane), weights + a.weights_at,
                       SI_WEIGHTS, element + lane);
        }
      }
    }

    for (uint which = 0; which < PLANES; ++which) {
      if (sums_out[which].wanted == 0) continue;
      sums[block * kSumsPerBlock + which] =
          xxh3(planes[which], sum_bytes(which, n), sums_out[which].seed);
    }
    sums[block * kSumsPerBlock + kPlanesMax] = bad;
  }
}
