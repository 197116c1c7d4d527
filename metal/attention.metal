// Grouped-query attention over a key/value cache, causal by order in the cache. The queries of a key head are numbered row by
// row, i = row * group + head in the group; a query of row r sees the slots below len - rows + r + 1.
//
// Decode and verify (up to 16 rows): attention_split takes SPLIT slots for TILE queries, attention_merge adds the splits up in order.
// Splits start at multiples of SPLIT whatever the rows are and every sum has one order, so a row's bits do not depend on its company.
// Prefill: attention_prefill, with matrix units, for 32 (16 in f32 at head dim 256) queries; near the other's bits, not equal to them.
#include "common.h"

struct AttentionParams {
  uint rows, heads, group, len;
  uint q_row, q_head, k_head, k_slot, v_head, v_slot;  // strides in elements
  float scale;
};

constant constexpr uint SPLIT = 128, TILE = 8, CHUNK = 16;

// Slots that query i sees; none if there is no such query.
inline uint seen(constant AttentionParams &p, uint i) {
  return i < p.rows * p.group ? p.len - p.rows + i / p.group + 1 : 0;
}

inline float larger(float a, float b) { return b > a ? b : a; }

template <typename T>
constant constexpr uint PITCH = CHUNK + (sizeof(T) == 2 ? 2 : 1);  // of staged keys: an odd number of words

// Products of TILE queries with the thread's own slot, lane by lane of the head, so that no sum crosses threads. Leaves `shared` free after
// the next barrier.
template <typename T, uint DIM>
inline void score_slot(device const T *q, device const T *k, constant AttentionParams &p, uint i0, uint head, uint filled, uint tid,
                       threadgroup float *shared, threadgroup T *keys, thread float (&scores)[TILE]) {
  for (uint j = tid; j < TILE * DIM; j += SPLIT) {
    const uint i = i0 + j / DIM, d = j % DIM;
    const bool real = i < p.rows * p.group;
    shared[d * TILE + j / DIM] = real ? float(q[i / p.group * p.q_row + (head * p.group + i % p.group) * p.q_head + d]) : 0.0f;
  }
  for (uint i = 0; i < TILE; i++) scores[i] = 0.0f;
  for (uint d0 = 0; d0 < DIM; d0 += CHUNK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint j = tid; j < SPLIT * CHUNK; j += SPLIT) {
      const uint slot = j / CHUNK, d = j % CHUNK;
      keys[slot * PITCH<T> + d] = slot < filled ? k[slot * p.k_slot + d0 + d] : T(0.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = 0; d < CHUNK; d++) {
      const float key = float(keys[tid * PITCH<T> + d]);
      for (uint i = 0; i < TILE; i++) scores[i] = fma(shared[(d0 + d) * TILE + i], key, scores[i]);
    }
  }
  for (uint i = 0; i < TILE; i++) scores[i] *= p.scale;
}

// A thread scores one slot for TILE queries, then sums values for one or two lanes.
//
// Threadgroup memory at head dim 256, bf16: 8 KB queries (then weights) + 4.6 KB keys: two threadgroups of 128 threads a core; 50 registers.
// Bytes: keys and values once per TILE queries (further tiles find them in the cache), 4 / SPLIT of a row's own f32 sums on top: +3 % a row.
// c(M) at 32K slots, group 6, 400 GB/s: 134 MB, 0.34 ms; 1.6 GFMA at M = 4 take 0.6 ms on 32 cores at half of peak: c(4) near 2, c(2) 1.
template <typename T, uint DIM>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_split(
    device const T *q [[buffer(0)]], device const T *k [[buffer(1)]], device const T *v [[buffer(2)]],
    device float *sums [[buffer(3)]],   // [splits, rows, heads, DIM]
    device float2 *tops [[buffer(4)]],  // [splits, rows, heads]: largest score, sum of weights relative to it
    constant AttentionParams &p [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint THREADS = SPLIT, COLUMNS = (DIM + THREADS - 1) / THREADS;
  threadgroup float shared[TILE * (DIM > SPLIT ? DIM : SPLIT)];
  threadgroup T keys[SPLIT * PITCH<T>];
  const uint first = group.y * SPLIT, i0 = group.x * TILE, head = group.z, filled = min(p.len - first, SPLIT);
  device const T *own_v = v + head * p.v_head + first * p.v_slot;
  float scores[TILE];
  score_slot<T, DIM>(q, k + head * p.k_head + first * p.k_slot, p, i0, head, filled, tid, shared, keys, scores);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < TILE; i++) shared[tid * TILE + i] = scores[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint visible[TILE], most = 0;
  for (uint i = 0; i < TILE; i++) {
    const uint all = seen(p, i0 + i);
    visible[i] = all > first ? min(all - first, SPLIT) : 0;
    most = max(most, visible[i]);
  }
  const uint queries = p.rows * p.heads;
  for (uint i = simd; i < TILE; i += THREADS / 32) {
    const uint all = seen(p, i0 + i), mine = all > first ? min(all - first, SPLIT) : 0;
    float top = -INFINITY, sum = 0.0f;
    for (uint s = lane; s < mine; s += 32) top = larger(top, shared[s * TILE + i]);
    top = simd_max(top);
    for (uint s = lane; s < SPLIT; s += 32) {
      const float weight = s < mine ? exp_f32(shared[s * TILE + i] - top) : 0.0f;
      shared[s * TILE + i] = weight;
      sum += weight;
    }
    sum = simd_sum(sum);
    const uint row = (i0 + i) / p.group;
    if (lane == 0 && row < p.rows) tops[group.y * queries + row * p.heads + head * p.group + (i0 + i) % p.group] = float2(top, sum);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid >= DIM) return;
  float out[TILE][COLUMNS] = {{0}};
  for (uint s = 0; s < most; s++) {
    float value[COLUMNS];
    for (uint c = 0; c < COLUMNS; c++) value[c] = float(own_v[s * p.v_slot + c * THREADS + tid]);
    for (uint i = 0; i < TILE; i++) {
      const float weight = shared[s * TILE + i];
      // Not weight 0: a value that a query does not see may be NaN.
      for (uint c = 0; c < COLUMNS; c++) out[i][c] = s < visible[i] ? fma(weight, value[c], out[i][c]) : out[i][c];
    }
  }
  for (uint i = 0; i < TILE; i++) {
    const uint row = (i0 + i) / p.group;
    if (row >= p.rows) break;
    device float *to = sums + (group.y * queries + row * p.heads + head * p.group + (i0 + i) % p.group) * DIM + tid;
    for (uint c = 0; c < COLUMNS; c++) to[c * THREADS] = out[i][c];
  }
}

// One lane of one query: its splits, in order. Reads what attention_split wrote, 4 * DIM + 8 bytes a split and query; a few registers.
template <typename T>
[[kernel]] void attention_merge(
    device const float *sums [[buffer(0)]], device const float2 *tops [[buffer(1)]], device T *y [[buffer(2)]],
    constant AttentionParams &p [[buffer(3)]], constant uint &dim [[buffer(4)]],
    uint2 id [[thread_position_in_grid]]) {
  const uint queries = p.rows * p.heads, splits = (p.len - p.rows + id.y / p.heads + SPLIT) / SPLIT;
  float top = -INFINITY, sum = 0.0f, out = 0.0f;
  for (uint s = 0; s < splits; s++) top = larger(top, tops[s * queries + id.y].x);
  for (uint s = 0; s < splits; s++) {
    const float2 own = tops[s * queries + id.y];
    const float weight = exp_f32(own.x - top);
    sum = fma(weight, own.y, sum);
    out = fma(weight, sums[(s * queries + id.y) * dim + id.x], out);
  }
  y[id.y * dim + id.x] = T(out / sum);
}

// Scores of all slots for all queries, without a causal mask: [heads, rows, len]. SpecPrefill weighs a prompt's tokens with their softmax.
//
// 12.6 KB of threadgroup memory at head dim 256 and 128 threads: two threadgroups a core; 24 registers.
// Bytes: keys once per TILE queries, 4 a score out. 8 rows, group 4, 32K slots, 2 key heads of 256 lanes: 34 MB and 8 MB, 0.1 ms at 400 GB/s,
// beside 0.5 GFMA, 0.2 ms at half of 5 TFMA/s: c(8) near 3.
template <typename T, uint DIM>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_scores(
    device const T *q [[buffer(0)]], device const T *k [[buffer(1)]], device float *out [[buffer(2)]],
    constant AttentionParams &p [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float shared[TILE * DIM];
  threadgroup T keys[SPLIT * PITCH<T>];
  const uint first = group.y * SPLIT, i0 = group.x * TILE, head = group.z, filled = min(p.len - first, SPLIT);
  float scores[TILE];
  score_slot<T, DIM>(q, k + head * p.k_head + first * p.k_slot, p, i0, head, filled, tid, shared, keys, scores);
  if (tid >= filled) return;
  for (uint i = 0; i < TILE; i++) {
    const uint row = (i0 + i) / p.group;
    if (row >= p.rows) break;
    out[((head * p.group + (i0 + i) % p.group) * p.rows + row) * p.len + first + tid] = scores[i];
  }
}

// The softmax of every row of `len` scores, in place: a threadgroup a row, three passes, 5 * 4 bytes a score, at memory speed.
[[kernel, max_total_threads_per_threadgroup(256)]] void attention_softmax(
    device float *scores [[buffer(0)]], constant uint &len [[buffer(1)]],
    uint row [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float tops[8];
  threadgroup float sums[8];
  device float *own = scores + row * len;
  float top = -INFINITY, sum = 0.0f;
  for (uint s = tid; s < len; s += 256) top = larger(top, own[s]);
  top = simd_max(top);
  if (lane == 0) tops[simd] = top;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < 8; i++) top = larger(top, tops[i]);
  for (uint s = tid; s < len; s += 256) {
    const float weight = exp_f32(own[s] - top);
    own[s] = weight;
    sum += weight;
  }
  sum = simd_sum(sum);
  if (lane == 0) sums[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum = 0.0f;
  for (uint i = 0; i < 8; i++) sum += sums[i];
  const float inverse = 1.0f / sum;
  for (uint s = tid; s < len; s += 256) own[s] *= inverse;
}

// Flash attention (Dao, arXiv 2307.08691): a simdgroup owns 8 queries, their sums stay in matrix registers; keys and values of a
// block are staged once for all simdgroups. Lanes of a matrix: row (lane/4 & 4) + lane/2 % 4, two columns, as MLX and llama.cpp rely on.
//
// Head dim 256, bf16: 64 registers of sums + 8 of scores, 128 threads; 25.3 KB of threadgroup memory (f32: 64 threads): one threadgroup a core.
// Bytes: a block of keys and values per 32 queries, so 2 * 32 FLOP a byte of bf16 cache, from the cache after the first tile.
// 2,048 rows at len 2,048, 24 heads, dim 256: 52 GFLOP causal, 10 ms at half of 10 TFLOPS; a 27B's matmuls take 10 s for these rows.
template <typename T, uint DIM, uint SIMDS, uint BLOCK>
[[kernel, max_total_threads_per_threadgroup(SIMDS * 32)]] void attention_prefill(
    device const T *q [[buffer(0)]], device const T *k [[buffer(1)]], device const T *v [[buffer(2)]],
    device T *y [[buffer(3)]], constant AttentionParams &p [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint THREADS = SIMDS * 32, QUERIES = SIMDS * 8, ROW = DIM + 16 / sizeof(T);
  threadgroup T queries[QUERIES * ROW];
  threadgroup T block[BLOCK * ROW];
  threadgroup uint strange[SIMDS];  // whether a simdgroup staged a value that is NaN or infinite
  const uint i0 = group.x * QUERIES, head = group.y, count = p.rows * p.group;
  device const T *own_k = k + head * p.k_head, *own_v = v + head * p.v_head;
  for (uint j = tid; j < QUERIES * DIM; j += THREADS) {
    const uint i = i0 + j / DIM, d = j % DIM;
    queries[j / DIM * ROW + d] = i < count ? q[i / p.group * p.q_row + (head * p.group + i % p.group) * p.q_head + d] : T(0.0f);
  }
  const uint quad = lane / 4, row = (quad & 4) + lane / 2 % 4, column = (quad & 2) * 2 + lane % 2 * 2;
  const uint i = i0 + simd * 8 + row, mine = seen(p, i), most = seen(p, min(i0 + QUERIES, count) - 1);
  simdgroup_matrix<float, 8, 8> out[DIM / 8];
  for (uint d = 0; d < DIM / 8; d++) out[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  float top = -INFINITY, sum = 0.0f;
  for (uint first = 0; first < most; first += BLOCK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint j = tid; j < BLOCK * DIM; j += THREADS) {
      const uint slot = first + j / DIM, d = j % DIM;
      block[j / DIM * ROW + d] = slot < p.len ? own_k[slot * p.k_slot + d] : T(0.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<float, 8, 8> scores[BLOCK / 8];
    for (uint j = 0; j < BLOCK / 8; j++) scores[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint d = 0; d < DIM; d += 8) {
      simdgroup_matrix<T, 8, 8> a, b;
      simdgroup_load(a, queries + simd * 8 * ROW + d, ROW);
      for (uint j = 0; j < BLOCK / 8; j++) {
        simdgroup_load(b, block + j * 8 * ROW + d, ROW, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(scores[j], a, b, scores[j]);
      }
    }
    float best = top;
    for (uint j = 0; j < BLOCK / 8; j++) {
      for (uint e = 0; e < 2; e++) {
        const bool visible = first + j * 8 + column + e < mine;
        const float score = visible ? scores[j].thread_elements()[e] * p.scale : -INFINITY;
        scores[j].thread_elements()[e] = score;
        best = larger(best, score);
      }
    }
    best = larger(best, simd_shuffle_xor(best, ushort(1)));
    best = larger(best, simd_shuffle_xor(best, ushort(8)));
    const float shrink = top == best ? 1.0f : exp_f32(top - best);
    top = best;
    sum *= shrink;
    for (uint j = 0; j < BLOCK / 8; j++) {
      for (uint e = 0; e < 2; e++) {
        const bool visible = first + j * 8 + column + e < mine;
        const float weight = visible ? exp_f32(scores[j].thread_elements()[e] - top) : 0.0f;
        scores[j].thread_elements()[e] = weight;
        sum += weight;
      }
    }
    for (uint d = 0; d < DIM / 8; d++) out[d].thread_elements() *= shrink;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    bool odd = false;
    for (uint j = tid; j < BLOCK * DIM; j += THREADS) {
      const uint slot = first + j / DIM, d = j % DIM;
      const T value = slot < most ? own_v[slot * p.v_slot + d] : T(0.0f);
      odd = odd || !isfinite(float(value));
      block[j / DIM * ROW + d] = value;
    }
    odd = simd_any(odd);
    if (lane == 0) strange[simd] = odd;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    odd = false;
    for (uint s = 0; s < SIMDS; s++) odd = odd || strange[s] != 0;
    // A matrix product would give weight 0 of a hidden slot times NaN to every query of the tile. So such values are 0 in the product, and
    // the queries that see their slots add them one by one.
    if (odd) {
      for (uint j = 0; j < BLOCK; j++) {
        const ushort c = ushort(j % 8), from = ushort((lane & ~9u) | (c >> 1 & 1) | (c >> 2 & 1) << 3);
        const float weight = simd_shuffle(scores[j / 8].thread_elements()[c % 2], from);
        for (uint d = 0; d < DIM / 8 && first + j < mine; d++) {
          for (uint e = 0; e < 2; e++) {
            const float value = float(block[j * ROW + d * 8 + column + e]);
            if (!isfinite(value)) out[d].thread_elements()[e] = fma(weight, value, out[d].thread_elements()[e]);
          }
        }
      }
    }
    for (uint j = 0; j < BLOCK / 8; j++) {
      for (uint d = 0; d < DIM / 8; d++) {
        simdgroup_matrix<T, 8, 8> own;
        simdgroup_matrix<float, 8, 8> b;
        simdgroup_load(own, block + j * 8 * ROW + d * 8, ROW);
        const float a0 = float(own.thread_elements()[0]), a1 = float(own.thread_elements()[1]);
        b.thread_elements() = odd ? float2(isfinite(a0) ? a0 : 0.0f, isfinite(a1) ? a1 : 0.0f) : float2(a0, a1);
        simdgroup_multiply_accumulate(out[d], scores[j], b, out[d]);
      }
    }
  }
  sum += simd_shuffle_xor(sum, ushort(1));
  sum += simd_shuffle_xor(sum, ushort(8));
  if (i >= count) return;
  const float inverse = 1.0f / sum;
  device T *to = y + (i / p.group * p.heads + head * p.group + i % p.group) * DIM + column;
  for (uint d = 0; d < DIM / 8; d++) {
    for (uint e = 0; e < 2; e++) to[d * 8 + e] = T(out[d].thread_elements()[e] * inverse);
  }
}

#define DECODE(suffix, type) \
  INSTANCE("attention_split_32_" suffix, attention_split, type, 32) \
  INSTANCE("attention_split_64_" suffix, attention_split, type, 64) \
  INSTANCE("attention_split_128_" suffix, attention_split, type, 128) \
  INSTANCE("attention_split_256_" suffix, attention_split, type, 256) \
  INSTANCE("attention_scores_32_" suffix, attention_scores, type, 32) \
  INSTANCE("attention_scores_64_" suffix, attention_scores, type, 64) \
  INSTANCE("attention_scores_128_" suffix, attention_scores, type, 128) \
  INSTANCE("attention_scores_256_" suffix, attention_scores, type, 256)
DECODE("f32", float)
DECODE("f16", half)
IF_BFLOAT(DECODE("bf16", bfloat))
INSTANCES("attention_merge", attention_merge)

// Simdgroups and slots of a block: as many as fit into 32 KB.
#define PREFILL_16_BIT(suffix, type) \
  INSTANCE("attention_prefill_32_" suffix, attention_prefill, type, 32, 4, 32) \
  INSTANCE("attention_prefill_64_" suffix, attention_prefill, type, 64, 4, 32) \
  INSTANCE("attention_prefill_128_" suffix, attention_prefill, type, 128, 4, 32) \
  INSTANCE("attention_prefill_256_" suffix, attention_prefill, type, 256, 4, 16)
PREFILL_16_BIT("f16", half)
IF_BFLOAT(PREFILL_16_BIT("bf16", bfloat))
INSTANCE("attention_prefill_32_f32", attention_prefill, float, 32, 4, 32)
INSTANCE("attention_prefill_64_f32", attention_prefill, float, 64, 4, 32)
INSTANCE("attention_prefill_128_f32", attention_prefill, float, 128, 4, 16)
INSTANCE("attention_prefill_256_f32", attention_prefill, float, 256, 2, 8)
