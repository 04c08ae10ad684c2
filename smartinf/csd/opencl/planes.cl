// Planes to f32 and back, and the master plane to weights, a block to a work group, with the
// checksums of what is read and written.

#define MASTER 0  // base::PlaneKind
#define VARIANCE 2

#define BLOCK_OF_PLANE                                                                      \
  const bool coded = a.encoding == Q8 || a.encoding == Q4;                                  \
  const int bits = code_bits((uint)a.encoding);                                             \
  const ulong block = a.first_block + index;                                                \
  const ulong first = block * BLOCK;                                                        \
  const uint n = (uint)min(BLOCK, a.count - first);                                         \
  global uchar* codes = state + a.plane_at + block * encoded_bytes((uint)a.encoding, BLOCK); \
  const ulong bytes = encoded_bytes((uint)a.encoding, n);                                   \
  global const SumEntry* entry = (global const SumEntry*)(tables + a.sums_at) + index;

__attribute__((reqd_work_group_size(1, 1, 1))) kernel void decode(
    const PlaneArguments a, global uchar* state, global float* values, global const uchar* tables,
    global ulong* sums) {
  float decoded[TILE];
  for (ulong index = get_group_id(0); index < a.blocks; index += get_num_groups(0)) {
    BLOCK_OF_PLANE
    bool bad = false;
    if (entry->wanted != 0) {
      bad = xxh3(codes, bytes, entry->seed) != entry->expected;
    }
    global float* out = values + a.values_at / 4 + index * BLOCK;
    const uint end = bad ? 0 : (uint)min((ulong)n, a.wanted - index * BLOCK);
    for (uint tile = 0; tile < end; tile += TILE) {
      const uint count = min(TILE, end - tile);
      if (coded) {
        decode_codes(bits, codes + tile * (uint)bits / 8,
                     steps_of((uint)a.encoding, codes, n)[tile / TILE], a.kind == VARIANCE,
                     min(TILE, n - tile), decoded);
        LANES(lane, count) { out[tile + lane] = decoded[lane]; }
      } else {
        LANES(lane, count) {
          out[tile + lane] = load_plain(codes, (uint)a.encoding, n, tile + lane);
        }
      }
    }
    sums[a.results_at + index] = bad;
  }
}

__attribute__((reqd_work_group_size(1, 1, 1))) kernel void encode(
    const PlaneArguments a, global uchar* state, global const uchar* values,
    global const uchar* tables, global ulong* sums) {
  float tile_values[TILE];
  const ulong step_seed = rounding_seed(0, 0);
  for (ulong index = get_group_id(0); index < a.blocks; index += get_num_groups(0)) {
    BLOCK_OF_PLANE
    global const uchar* in = values + a.values_at;
    if (coded) {
      // The padding between codes and steps takes part in the checksum.
      for (ulong pad = (n * (ulong)bits + 7) / 8; pad < code_bytes((uint)a.encoding, n); ++pad) {
        codes[pad] = 0;
      }
    }
    for (uint tile = 0; tile < n; tile += TILE) {
      const uint count = min(TILE, n - tile);
      const ulong element = first + tile;
      if (a.type == BF16) {  // as they are
        LANES(lane, count) {
          ((global ushort*)codes)[tile + lane] = ((global const ushort*)in)[element + lane];
        }
        continue;
      }
      LANES(lane, count) {
        tile_values[lane] = a.zeros != 0 ? 0.0f : ((global const float*)in)[element + lane];
      }
      const RoundingKey key = rounding_key(step_seed, a.first_element + element);
      const Progression numbers = a.kind == MASTER
                                      ? master_rounding(step_seed, a.first_element + element)
                                  : a.kind == VARIANCE ? key.variance
                                                       : key.momentum;
      if (coded) {
        encode_codes(bits, tile_values, count, a.kind == VARIANCE, numbers,
                     codes + tile * (uint)bits / 8,
                     steps_of((uint)a.encoding, codes, n) + tile / TILE);
      } else {
        LANES(lane, count) {
          store_plain(tile_values[lane], codes, (uint)a.encoding, n, tile + lane,
                      random_at(numbers, lane));
        }
      }
    }
    if (entry->wanted != 0) {
      sums[a.results_at + index] = xxh3(codes, bytes, entry->seed);
    }
  }
}

__attribute__((reqd_work_group_size(1, 1, 1))) kernel void cast(
    const PlaneArguments a, global uchar* state, global uchar* weights,
    global const uchar* tables, global ulong* sums) {
  for (ulong index = get_group_id(0); index < a.blocks; index += get_num_groups(0)) {
    BLOCK_OF_PLANE
    bool bad = false;
    if (entry->wanted != 0) {
      bad = xxh3(codes, bytes, entry->seed) != entry->expected;
    }
    const uint end = bad ? 0 : n;
    LANES(lane, end) {
      store_f32_as(load_plain(codes, (uint)a.encoding, n, lane), weights + a.values_at,
                   (uint)a.type, first + lane);
    }
    sums[a.results_at + index] = bad;
  }
}
