// y[M, N] = x[M, K] * W[N, K]^T for MLX affine weights of 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128: the decode and verify form
// ("lanes split K"). One pass over the weights for up to 4 rows, and more rows in tiles of 4.
//
// A simdgroup owns R columns (rows of W) for all M rows of x. A lane takes 32 consecutive codes, BITS words of each column, so a
// simdgroup reads 128 * BITS contiguous bytes of a column. SPLIT simdgroups share columns and take every SPLIT-th block of 1024 k.
// Per 32 codes and column d = sum(code * x), then acc += scale * d + bias * sum(x): scale and bias cost 2 operations per 32 codes.
//
// ROW INVARIANCE. Which lane handles which k, and in which order its terms are added, follows from K and N alone. M says how many rows
// reuse the decoded weights. Every sum is written as fma; the library is built without fast math.
//
// Tiles of rows are neighbours in the grid: threadgroups of the same columns run at the same time, so the second tile of 5 rows and
// more finds the weights in the cache.
//
// Occupancy: 128 threads; M * R <= 16 sums twice, 16 codes, 4 x, BITS * R words: about 90 registers, 512 threads a core; 4 * 16 floats (512 bytes).
// Bytes: N * K * (BITS + 32 / GROUP) / 8 of weights a pass (from memory once, however many tiles), 4 * K of x and 2 * N of y a row.
// c(M) at 400 GB/s (M1 Max, 7.5 issue slots a 4-bit code): 4.5 slots at M = 1, 9 at M = 4, 18 at M = 8: c(2) 1.0, c(4) 1.2, c(8) 2.4.
#include "matmul.h"

constant bool GATE_UP [[function_constant(4)]];  // y = silu(x * W^T) * (x * U^T), each product rounded first
constant bool GATHERED [[function_constant(5)]]; // one row of x per slot, its expert's N rows of W

constant constexpr uint CHUNK = 32;  // codes that a lane takes at a time

template <ushort BITS>
inline void load_words(device const uint *w, thread uint *q) {
  if (BITS % 4 == 0) {
#pragma unroll
    for (ushort i = 0; i < BITS / 4; i++) {
      const uint4 u = reinterpret_cast<device const uint4 *>(w)[i];
      q[4 * i] = u.x, q[4 * i + 1] = u.y, q[4 * i + 2] = u.z, q[4 * i + 3] = u.w;
    }
  } else if (BITS % 2 == 0) {
#pragma unroll
    for (ushort i = 0; i < BITS / 2; i++) {
      const uint2 u = reinterpret_cast<device const uint2 *>(w)[i];
      q[2 * i] = u.x, q[2 * i + 1] = u.y;
    }
  } else {
#pragma unroll
    for (ushort i = 0; i < BITS; i++) q[i] = w[i];
  }
}

// Code i of a chunk minus 2^(BITS-1), exactly and without a conversion: the code goes into the mantissa of a power of two whose unit
// there is 1, and that power is taken away. Centred codes cancel less; the bias takes up the difference. i is known when compiled.
template <ushort BITS>
inline float code_at(thread const uint *q, ushort i) {
  constexpr uint mask = (1u << BITS) - 1u;
  const uint at = uint(i) * BITS, word = at / 32, s = at % 32;
  constexpr float centre = float(1u << (BITS - 1));
  if (s + BITS <= 23) {
    const uint power = (150u - s) << 23;
    return as_type<float>((q[word] & (mask << s)) | power) - (as_type<float>(power) + centre);
  }
  const uint high = s + BITS > 32 ? q[word + 1 < BITS ? word + 1 : word] << ((32u - s) & 31u) : 0u;
  return as_type<float>(((q[word] >> s | high) & mask) | 0x4b000000u) - (8388608.0f + centre);
}

// This simdgroup's share of the products of R columns and M rows; lane l gets the total of value l / (32 / V), value m * R + r.
template <ushort BITS, ushort M, ushort R, ushort V>
inline float products(device const uint *w, device const ushort *scales, device const ushort *biases, device const uint4 *x,
                      constant MatmulParams &p, thread const uint *column, thread const uint *row, uint split, ushort lane) {
  const uint chunks = p.k / CHUNK, groups = p.k / GROUP;
  float acc[V];
#pragma unroll
  for (ushort i = 0; i < V; i++) acc[i] = 0.0f;
  for (uint c = split * LANES + lane; c < chunks; c += SPLIT * LANES) {
    uint q[R][BITS];
    float s[R], b[R];
    const uint group = c / (GROUP / CHUNK);
#pragma unroll
    for (ushort r = 0; r < R; r++) {
      load_words<BITS>(w + (column[r] * chunks + c) * BITS, q[r]);
      s[r] = value_at(scales, column[r] * groups + group, SCALE_TYPE);
      b[r] = value_at(biases, column[r] * groups + group, SCALE_TYPE);
    }
    float d[V], sum[M];
#pragma unroll
    for (ushort i = 0; i < V; i++) d[i] = 0.0f;
#pragma unroll
    for (ushort m = 0; m < M; m++) sum[m] = 0.0f;
#pragma unroll
    for (ushort i = 0; i < CHUNK; i += 4) {
      float code[R][4];
#pragma unroll
      for (ushort r = 0; r < R; r++) {
#pragma unroll
        for (ushort e = 0; e < 4; e++) code[r][e] = code_at<BITS>(q[r], i + e);
      }
#pragma unroll
      for (ushort m = 0; m < M; m++) {  // the decoded weights stay in registers for all rows
        float v[4];
        load4(x, row[m] * (p.k / 4) + (c * CHUNK + i) / 4, X_TYPE, v);
#pragma unroll
        for (ushort e = 0; e < 4; e++) {
          sum[m] += v[e];
#pragma unroll
          for (ushort r = 0; r < R; r++) d[m * R + r] = fma(code[r][e], v[e], d[m * R + r]);
        }
      }
    }
#pragma unroll
    for (ushort r = 0; r < R; r++) {
      const float bias = fma(s[r], float(1u << (BITS - 1)), b[r]);
#pragma unroll
      for (ushort m = 0; m < M; m++) acc[m * R + r] = fma(s[r], d[m * R + r], fma(bias, sum[m], acc[m * R + r]));
    }
  }
  Fold<V, 16>::run(acc, lane);
  return acc[0];
}

template <ushort BITS, ushort M, ushort R>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * LANES)]] void affine_lanes(
    device const uint *w [[buffer(0)]],
    device const ushort *scales [[buffer(1)]],
    device const ushort *biases [[buffer(2)]],
    device const uint4 *x [[buffer(3)]],
    device ushort *y [[buffer(4)]],
    constant MatmulParams &p [[buffer(5)]],
    device const uint *up [[buffer(6)]],
    device const ushort *up_scales [[buffer(7)]],
    device const ushort *up_biases [[buffer(8)]],
    device const uint *experts [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  constexpr ushort V = power_of_two(M * R), SPAN = LANES / V;
  threadgroup float part[2][SIMDGROUPS * V];
  const uint split = simdgroup % SPLIT, tile = group.y * (SIMDGROUPS / SPLIT) + simdgroup / SPLIT;
  const uint first_column = tile * R, first_row = group.x * M;
  const uint expert = GATHERED ? experts[group.x] * p.n : 0u;
  uint column[R], row[M];  // past the edge: the last one again, dropped at the end, so nobody leaves before a shuffle
#pragma unroll
  for (ushort r = 0; r < R; r++) column[r] = expert + min(first_column + r, p.n - 1);
#pragma unroll
  for (ushort m = 0; m < M; m++) row[m] = GATHERED ? group.x / p.top : min(first_row + m, p.rows - 1);

  float total = products<BITS, M, R, V>(w, scales, biases, x, p, column, row, split, lane), second = 0.0f;
  if (GATE_UP) second = products<BITS, M, R, V>(up, up_scales, up_biases, x, p, column, row, split, lane);
  const ushort i = lane / SPAN;
  if (SPLIT > 1) {  // partial totals in a fixed order
    if (lane % SPAN == 0) {
      part[0][simdgroup * V + i] = total;
      if (GATE_UP) part[1][simdgroup * V + i] = second;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    total = 0.0f, second = 0.0f;
    for (ushort k = 0; k < SPLIT; k++) {
      total += part[0][(simdgroup - split + k) * V + i];
      if (GATE_UP) second += part[1][(simdgroup - split + k) * V + i];
    }
  }
  const uint m = i / R, n = first_column + i % R;
  if (split == 0 && lane % SPAN == 0 && m < M && n < p.n && (GATHERED || first_row + m < p.rows)) {
    if (GATE_UP) total = rounded(second) * silu_f32(rounded(total));
    store(y, (first_row + m) * p.n + n, total);
  }
}

// ONLY_BITS leaves out the other widths, so that a model compiles only what it uses.
#define LANES_OF(BITS) \
  INSTANCE("affine_lanes_b" #BITS "_m1", affine_lanes, BITS, 1, 4) \
  INSTANCE("affine_lanes_b" #BITS "_m2", affine_lanes, BITS, 2, 4) \
  INSTANCE("affine_lanes_b" #BITS "_m3", affine_lanes, BITS, 3, 4) \
  INSTANCE("affine_lanes_b" #BITS "_m4", affine_lanes, BITS, 4, 4)
#if !defined(ONLY_BITS) || ONLY_BITS == 2
LANES_OF(2)
#endif
#if !defined(ONLY_BITS) || ONLY_BITS == 3
LANES_OF(3)
#endif
#if !defined(ONLY_BITS) || ONLY_BITS == 4
LANES_OF(4)
#endif
#if !defined(ONLY_BITS) || ONLY_BITS == 5
LANES_OF(5)
#endif
#if !defined(ONLY_BITS) || ONLY_BITS == 6
LANES_OF(6)
#endif
#if !defined(ONLY_BITS) || ONLY_BITS == 8
LANES_OF(8)
#endif
