// Planes to f32 and back, and the master plane to weights, a block to a work group, with the
// checksums of what is read and written.

#define BLOCK_OF_PLANE                                                                      \
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
      if (a.encoding == Q8) {
        decode_q8(codes + tile, q8_steps(codes, n)[tile / TILE], a.variance != 0,
                  min(TILE, n - tile), decoded);
        LANES(lane, count) { out[tile + lane] = decoded[lane]; }
      } else {
        LANES(lane, count) { out[tile + lane] = load_as_f32(codes, (uint)a.encoding, tile + lane); }
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
    if (a.encoding == Q8) {
      // The padding between codes and steps takes part in the checksum.
      for (uint pad = n; pad < (n + 3) / 4 * 4; ++pad) codes[pad] = 0;
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
      const Progression numbers = a.variance != 0 ? key.variance : key.momentum;
      if (a.encoding == Q8) {
        encode_q8(tile_values, count, a.variance != 0, numbers, codes + tile,
                  q8_steps(codes, n) + tile / TILE);
      } else if (a.encoding == BF16) {
        LANES(lane, count) {
          ((global ushort*)codes)[tile + lane] =
              round_bf16(tile_values[lane], random_at(numbers, lane));
        }
      } else {
        LANES(lane, count) { ((global float*)codes)[tile + lane] = tile_values[lane]; }
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
      store_f32_as(((global const float*)codes)[lane], weights + a.values_at, (uint)a.type,
                   first + lane);
    }
    sums[a.results_at + index] = bad;
  }
}
