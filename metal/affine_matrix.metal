// y[M, N] = x[M, K] * W[N, K]^T for MLX affine weights of 2 to 6 bits in groups of 64 or 128, f16 or bf16 x, M <= 8 (16): the form for wide
// verify passes ("sg8"). One pass over the weights; every M up to 8 costs the same.
//
// 8x8 matrices: A = 8 columns of y (rows of W) x 8 k, B = 8 k x 8 rows of x, so the result is y transposed; rows past M are zero. A lane
// fills its two elements of A from its own codes: of 64 k a lane of pair j takes codes 16 j ... 16 j + 15, step i takes codes
// 8 (i / 4) + i % 4 and that + 4, at 4 bits two codes 16 bits apart in one word. Each becomes an exact 128 + code by bits alone
// (bf16 0x4300 | q, f16 0x5800 | q << 3), so nothing is dequantized: out += scale * sum((128 + q) x) + (bias - 128 scale) * sum(x) per group.
// A simdgroup brings its 64 k of x into that order itself, and sums them. 4 simdgroups split K, group by group, and are added in order.
//
// ROW INVARIANCE. One kernel does every M <= 8, and a row's results come from its own column of B. 9...16 rows are two tiles of the same.
//
// Per code 8 multiply slots whatever M is, 1 to 3 to unpack, 1.6 to bring x: 10.6 at 4 bits, 7.5 are free on an M1 Max at 400 GB/s:
// c(1) = c(8) = 1.4 times the bandwidth's time. The policy takes lanes for passes of up to 8 rows. About 50 registers.
// Threadgroup memory: 4 x 1 KB of x, 2 KB of partial sums (both doubled for 16 rows), 0.4 KB: 6.4 KB or 12.8 KB, 5 or 2 threadgroups a core.
#include "matmul.h"
#include <metal_simdgroup_matrix>

constant constexpr uint TILES = 2;  // of 8 columns a simdgroup
constant constexpr uint UNIT = 64;  // k at a time

template <typename T> struct Exact;
template <> struct Exact<half> {
  typedef half2 pair;
  static constant constexpr uint base = 0x58005800u, shift = 3;
};
IF_BFLOAT(template <> struct Exact<bfloat> {
  typedef bfloat2 pair;
  static constant constexpr uint base = 0x43004300u, shift = 0;
};)

// The 16 codes of a lane, as words; an odd number of half words leaves the last one's upper half empty.
template <ushort BITS>
inline void load_codes(device const ushort *w, thread uint *q) {
#pragma unroll
  for (ushort i = 0; i < BITS / 2; i++) {
    if (BITS % 2 == 0) q[i] = reinterpret_cast<device const uint *>(w)[i];
    else q[i] = uint(w[2 * i]) | uint(w[2 * i + 1]) << 16;
  }
  if (BITS % 2 == 1) q[BITS / 2] = uint(w[BITS - 1]);
}

template <ushort BITS>
inline uint code_of(thread const uint *q, ushort c) {
  const uint at = uint(c) * BITS, word = at / 32, s = at % 32;
  const uint high = s + BITS > 32 ? q[word + 1] << ((32u - s) & 31u) : 0u;
  return (q[word] >> s | high) & ((1u << BITS) - 1u);
}

// The two elements of A of step i.
template <typename T, ushort BITS>
inline simdgroup_matrix<T, 8, 8> codes(thread const uint *q, ushort i) {
  const ushort first = 8 * (i / 4) + i % 4;
  uint two;
  if (BITS == 4) {
    const uint word = q[i / 4];
    const ushort right = 4 * (i % 4);
    two = (word >> right & 0x000f000fu) << Exact<T>::shift;
  } else {
    two = (code_of<BITS>(q, first) | code_of<BITS>(q, first + 4) << 16) << Exact<T>::shift;
  }
  simdgroup_matrix<T, 8, 8> a;
  reinterpret_cast<thread typename Exact<T>::pair &>(a.thread_elements()) = as_type<typename Exact<T>::pair>(two | Exact<T>::base);
  return a;
}

template <typename T, ushort BITS, ushort ROWS>  // ROWS: tiles of 8 rows
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * LANES)]] void affine_matrix(
    device const ushort *w [[buffer(0)]],
    device const ushort *scales [[buffer(1)]],
    device const ushort *biases [[buffer(2)]],
    device const uint4 *x [[buffer(3)]],
    device ushort *y [[buffer(4)]],
    constant MatmulParams &p [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup T xs[SIMDGROUPS][ROWS * 8 * 64];  // [tile of rows][step][row][k]
  threadgroup float sums[SIMDGROUPS][ROWS * 8];
  threadgroup float2 part[SIMDGROUPS * TILES * ROWS * LANES];
  threadgroup float index[64];

  // A lane's place in a matrix, found by loading a matrix of indices: Apple does not document it. Assumed: its two elements are neighbours.
  for (ushort i = thread_index; i < 64; i += SIMDGROUPS * LANES) index[i] = float(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<float, 8, 8> places;
  simdgroup_load(places, index, 8);
  const ushort place = ushort(places.thread_elements()[0]), r = place / 8, j = place % 8 / 2;

  const uint units = p.k / UNIT, groups = p.k / GROUP, n0 = group.x * 8 * TILES, m0 = group.y * 8 * ROWS;
  uint column[TILES];
#pragma unroll
  for (ushort t = 0; t < TILES; t++) column[t] = min(n0 + t * 8 + r, p.n - 1);
  float2 acc[TILES][ROWS];
#pragma unroll
  for (ushort t = 0; t < TILES; t++) {
#pragma unroll
    for (ushort u = 0; u < ROWS; u++) acc[t][u] = float2(0.0f);
  }
  // Bringing x: this lane takes 16 k of one row per tile.
  const ushort own_row = lane / 4, own_part = lane % 4;

  for (uint b = simdgroup; b < units; b += SIMDGROUPS) {
    uint q[TILES][(BITS + 1) / 2];
    float scale[TILES], bias[TILES];
#pragma unroll
    for (ushort t = 0; t < TILES; t++) {
      load_codes<BITS>(w + ((column[t] * units + b) * 4 + j) * BITS, q[t]);
      const uint g = column[t] * groups + b * UNIT / GROUP;
      scale[t] = value_at(scales, g, SCALE_TYPE);
      bias[t] = fma(-128.0f, scale[t], value_at(biases, g, SCALE_TYPE));
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);  // the last unit's x has been used
#pragma unroll
    for (ushort u = 0; u < ROWS; u++) {
      const uint m = m0 + u * 8 + own_row;
      float v[16], sum = 0.0f;
#pragma unroll
      for (ushort i = 0; i < 4; i++) {
        if (m < p.rows) {
          load4(x, m * (p.k / 4) + b * (UNIT / 4) + own_part * 4 + i, X_TYPE, v + 4 * i);
        } else {
#pragma unroll
          for (ushort e = 0; e < 4; e++) v[4 * i + e] = 0.0f;
        }
      }
#pragma unroll
      for (ushort i = 0; i < 16; i++) sum += v[i];
#pragma unroll
      for (ushort i = 0; i < 8; i++) {
        const ushort first = 8 * (i / 4) + i % 4;
        threadgroup T *to = xs[simdgroup] + (u * 8 + i) * 64 + own_row * 8 + own_part * 2;
        to[0] = T(v[first]);
        to[1] = T(v[first + 4]);
      }
      sum += simd_shuffle_xor(sum, 1);
      sum += simd_shuffle_xor(sum, 2);
      if (own_part == 0) sums[simdgroup][u * 8 + own_row] = sum;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<float, 8, 8> d[TILES][ROWS];
#pragma unroll
    for (ushort t = 0; t < TILES; t++) {
#pragma unroll
      for (ushort u = 0; u < ROWS; u++) d[t][u] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
#pragma unroll
    for (ushort i = 0; i < 8; i++) {
      simdgroup_matrix<T, 8, 8> a[TILES];
#pragma unroll
      for (ushort t = 0; t < TILES; t++) a[t] = codes<T, BITS>(q[t], i);
#pragma unroll
      for (ushort u = 0; u < ROWS; u++) {
        simdgroup_matrix<T, 8, 8> rows;
        simdgroup_load(rows, xs[simdgroup] + (u * 8 + i) * 64, 8, ulong2(0, 0), true);
#pragma unroll
        for (ushort t = 0; t < TILES; t++) simdgroup_multiply_accumulate(d[t][u], a[t], rows, d[t][u]);
      }
    }
#pragma unroll
    for (ushort u = 0; u < ROWS; u++) {
      const float s0 = sums[simdgroup][u * 8 + j * 2], s1 = sums[simdgroup][u * 8 + j * 2 + 1];
#pragma unroll
      for (ushort t = 0; t < TILES; t++) {
        const vec<float, 2> e = d[t][u].thread_elements();
        acc[t][u].x = fma(scale[t], e[0], fma(bias[t], s0, acc[t][u].x));
        acc[t][u].y = fma(scale[t], e[1], fma(bias[t], s1, acc[t][u].y));
      }
    }
  }

#pragma unroll
  for (ushort t = 0; t < TILES; t++) {
#pragma unroll
    for (ushort u = 0; u < ROWS; u++) part[((simdgroup * TILES + t) * ROWS + u) * LANES + lane] = acc[t][u];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (ushort i = simdgroup; i < TILES * ROWS; i += SIMDGROUPS) {  // one tile of y a simdgroup
    float2 total = float2(0.0f);
#pragma unroll
    for (ushort s = 0; s < SIMDGROUPS; s++) total += part[(s * TILES * ROWS + i) * LANES + lane];
    const uint n = n0 + i / ROWS * 8 + r, m = m0 + i % ROWS * 8 + j * 2;
    if (n < p.n && m < p.rows) store(y, m * p.n + n, total.x);
    if (n < p.n && m + 1 < p.rows) store(y, (m + 1) * p.n + n, total.y);
  }
}

// ONLY_BITS leaves out the other widths, so that a model compiles only what it uses.
#define MATRIX_OF(BITS) \
  INSTANCE("affine_matrix_b" #BITS "_r8_f16", affine_matrix, half, BITS, 1) \
  INSTANCE("affine_matrix_b" #BITS "_r16_f16", affine_matrix, half, BITS, 2) \
  IF_BFLOAT(INSTANCE("affine_matrix_b" #BITS "_r8_bf16", affine_matrix, bfloat, BITS, 1) \
            INSTANCE("affine_matrix_b" #BITS "_r16_bf16", affine_matrix, bfloat, BITS, 2))
#if !defined(ONLY_BITS) || ONLY_BITS == 2
MATRIX_OF(2)
#endif
#if !defined(ONLY_BITS) || ONLY_BITS == 3
MATRIX_OF(3)
#endif
#if !defined(ONLY_BITS) || ONLY_BITS == 4
MATRIX_OF(4)
#endif
#if !defined(ONLY_BITS) || ONLY_BITS == 5
MATRIX_OF(5)
#endif
#if !defined(ONLY_BITS) || ONLY_BITS == 6
MATRIX_OF(6)
#endif
