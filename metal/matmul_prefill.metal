// y[M, N] = x[M, K] * W[N, K]^T for many rows: affine weights of any bits and plain ones (BITS 0). The prefill form; at most 16 rows take
// the other files' kernels, whose rows are bitwise what they are alone.
//
// A threadgroup of 4 simdgroups owns 32 rows and 32 columns. Per 32 k it brings x and the dequantized weights, rounded to x's dtype, into
// threadgroup memory; each simdgroup multiplies 16x16 of them as 8x8 matrices into f32.
//
// 32 x 32 x 2 bytes of x and 32 x 32 x BITS / 8 of weights are read per 32 * 32 * 32 multiplications: 57 flops a byte at 4 bits. 400 GB/s
// would feed 20 Tflops, so matrix units are the limit (M1 Max: about 10): 512 rows of 4096 x 4096 take about 2 ms there.
// Threadgroup memory: 2 x 32 x 40 x 2 bytes and 32 x 33 floats for the result, 9.3 KB (14.4 KB for f32): 3 (2) threadgroups a core.
#include "matmul.h"
#include <metal_simdgroup_matrix>

constant ushort BITS [[function_constant(4)]];

constant constexpr uint TILE = 32;
constant constexpr uint STRIDE = TILE + 8;  // spreads rows over banks, keeps 16-byte alignment
constant constexpr uint RESULT = TILE + 1;

// Values 8 * i .. 8 * i + 7 of row n. Codes may cross words; the row's last word has none after it.
inline void weights8(device const uint *w, device const ushort *scales, device const ushort *biases, constant MatmulParams &p, uint n,
                     uint i, thread float *v) {
  if (BITS == 0) {
    load4(reinterpret_cast<device const uint4 *>(w), n * (p.k / 4) + 2 * i, SCALE_TYPE, v);
    load4(reinterpret_cast<device const uint4 *>(w), n * (p.k / 4) + 2 * i + 1, SCALE_TYPE, v + 4);
    return;
  }
  const uint words = p.k * BITS / 32, first = i * BITS / 4, last = words - 1;  // 8 * BITS bits start in word `first`
  const uint group = n * (p.k / GROUP) + i * 8 / GROUP;
  const float scale = value_at(scales, group, SCALE_TYPE), bias = value_at(biases, group, SCALE_TYPE);
  device const uint *row = w + n * words;
  const uint q0 = row[first], q1 = row[min(first + 1, last)], q2 = row[min(first + 2, last)];
#pragma unroll
  for (ushort e = 0; e < 8; e++) {
    const uint at = i * 8 * BITS % 32 + e * BITS, s = at % 32;
    const uint low = at < 32 ? q0 : at < 64 ? q1 : q2, high = at < 32 ? q1 : q2;
    const uint code = (low >> s | (s + BITS > 32 ? high << ((32 - s) & 31) : 0u)) & ((1u << BITS) - 1u);
    v[e] = fma(scale, float(code), bias);
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * LANES)]] void matmul_prefill(
    device const uint *w [[buffer(0)]],
    device const ushort *scales [[buffer(1)]],
    device const ushort *biases [[buffer(2)]],
    device const uint4 *x [[buffer(3)]],
    device ushort *y [[buffer(4)]],
    constant MatmulParams &p [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup T xs[TILE * STRIDE];
  threadgroup T ws[TILE * STRIDE];
  threadgroup float result[TILE * RESULT];
  const uint m0 = group.y * TILE, n0 = group.x * TILE;
  const uint line = thread_index / 4, part = thread_index % 4;  // what this thread brings: 8 values of one row
  const uint m = min(m0 + line, p.rows - 1), n = min(n0 + line, p.n - 1);
  const uint row = simdgroup / 2 * 16, column = simdgroup % 2 * 16;
  simdgroup_matrix<float, 8, 8> acc[2][2];
#pragma unroll
  for (ushort i = 0; i < 2; i++) {
#pragma unroll
    for (ushort j = 0; j < 2; j++) acc[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (uint k0 = 0; k0 < p.k; k0 += TILE) {
    float v[8], u[8];
    const uint i = k0 / 8 + part;  // past the end of a K that is no multiple of 32: zeros
#pragma unroll
    for (ushort e = 0; e < 8; e++) v[e] = 0.0f, u[e] = 0.0f;
    if (i * 8 < p.k) {
      load4(x, m * (p.k / 4) + 2 * i, X_TYPE, v);
      load4(x, m * (p.k / 4) + 2 * i + 1, X_TYPE, v + 4);
      weights8(w, scales, biases, p, n, i, u);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (ushort e = 0; e < 8; e++) {
      xs[line * STRIDE + part * 8 + e] = T(v[e]);
      ws[line * STRIDE + part * 8 + e] = T(u[e]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint k = 0; k < TILE; k += 8) {
      simdgroup_matrix<T, 8, 8> a[2], b[2];
#pragma unroll
      for (ushort i = 0; i < 2; i++) {
        simdgroup_load(a[i], xs + (row + 8 * i) * STRIDE + k, STRIDE);
        simdgroup_load(b[i], ws + (column + 8 * i) * STRIDE + k, STRIDE, ulong2(0, 0), true);
      }
#pragma unroll
      for (ushort i = 0; i < 2; i++) {
#pragma unroll
        for (ushort j = 0; j < 2; j++) simdgroup_multiply_accumulate(acc[i][j], a[i], b[j], acc[i][j]);
      }
    }
  }
#pragma unroll
  for (ushort i = 0; i < 2; i++) {
#pragma unroll
    for (ushort j = 0; j < 2; j++) simdgroup_store(acc[i][j], result + (row + 8 * i) * RESULT + column + 8 * j, RESULT);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < TILE * TILE; i += SIMDGROUPS * LANES) {
    const uint r = i / TILE, c = i % TILE;
    if (m0 + r < p.rows && n0 + c < p.n) store(y, (m0 + r) * p.n + n0 + c, result[r * RESULT + c]);
  }
}
INSTANCES("matmul_prefill", matmul_prefill)
