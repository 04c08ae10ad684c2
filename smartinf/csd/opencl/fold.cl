// Queries folded over consecutive blocks of keys and values: one head of one query to a work group,
// one token of a block, and every 32nd channel, to a work item.

#define TOKENS 32u
#define CACHE_BF16 0  // kernels::CacheFormat
#define CACHE_F32 1
#define CACHE_Q8 2

static inline float value_in(global const uchar* at, ulong format, ulong i) {
  if (format == CACHE_BF16) return f32_of_bf16(((global const ushort*)at)[i]);
  if (format == CACHE_F32) return ((global const float*)at)[i];
  return (float)((global const char*)at)[i];
}

/// queries: [rows][d]; states: [rows][2 + d]; first_tokens: [queries], of the sequence.
__attribute__((reqd_work_group_size(TOKENS, 1, 1))) kernel void fold(
    const FoldArguments a, global const uchar* blocks, global const float* queries,
    global float* states, global const ulong* first_tokens) {
  local float scores[TOKENS];
  local float weights[TOKENS];
  const uint item = get_local_id(0);
  const ulong row = get_group_id(0);
  const ulong width = a.head_width;
  const bool q8 = a.format == CACHE_Q8;
  const ulong half_bytes = width * TOKENS * (q8 ? 1 : a.format == CACHE_F32 ? 4 : 2);
  const ulong head_bytes = 2 * half_bytes + (q8 ? 2 * TOKENS * 4 : 0);
  const ulong first_token = first_tokens[row / a.heads];
  global const float* query = queries + row * width;
  global float* state = states + row * (2 + width);
  // All work items have both.
  float top = state[0];
  float sum = state[1];
  for (ulong block = 0; block < a.blocks; ++block) {
    const ulong begin = (a.first_block + block) * TOKENS;
    const uint first = (uint)min(max(first_token, begin) - begin, (ulong)TOKENS);
    const uint end = (uint)min(max(a.end_token, begin) - begin, (ulong)TOKENS);
    if (first >= end) continue;
    global const uchar* keys =
        blocks + block * a.block_bytes + row % a.heads / a.group * head_bytes;
    global const uchar* values = keys + half_bytes;
    global const float* key_scales = (global const float*)(values + half_bytes);
    global const float* value_scales = key_scales + TOKENS;
    const bool seen = item >= first && item < end;
    float score = 0;
    if (seen) {
      for (ulong c = 0; c < width; ++c) {
        score = fused(query[c], value_in(keys, a.format, c * TOKENS + item), score);
      }
      if (q8) score *= key_scales[item];
      score *= a.scale;
      if (a.softcap > 0) score = soft_capped(score, a.softcap, 1.0f / a.softcap);
    }
    scores[item] = score;
    barrier(CLK_LOCAL_MEM_FENCE);
    float new_top = top;
    for (uint t = first; t < end; ++t) new_top = greater(new_top, score_or_least(scores[t]));
    new_top = without_sign_of_zero(new_top);
    const float base = score_base(new_top);
    const float rescale = exp_of_negative(top - base);
    weights[item] = seen ? exp_of_negative(score - base) : 0.0f;
    barrier(CLK_LOCAL_MEM_FENCE);
    float terms[TOKENS];
    for (uint t = 0; t < TOKENS; ++t) terms[t] = weights[t];
    for (uint half_of = TOKENS / 2; half_of > 0; half_of /= 2) {
      for (uint t = 0; t < half_of; ++t) terms[t] += terms[t + half_of];
    }
    top = new_top;
    sum = canonical(sum * rescale + terms[0]);
    for (ulong c = item; c < width; c += TOKENS) {
      float value = state[2 + c] * rescale;
      for (uint t = first; t < end; ++t) {
        const float weight = q8 ? weights[t] * value_scales[t] : weights[t];
        value = fused(weight, value_in(values, a.format, t * width + c), value);
      }
      state[2 + c] = canonical(value);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  if (item == 0) {
    state[0] = top;
    state[1] = sum;
  }
}
