// x * rsqrt(mean(x^2) + eps) * weight per row, or that times silu(z). f32 inside, one rounding. Zero-centred weights come as 1 + w.
//
// A row belongs to SIMDGROUPS simdgroups, chosen by the row's width alone: which lane adds what, and in which order, never depends on
// the number of rows. Up to 512 columns one simdgroup has a row, and there is no barrier.
//
// A row is read twice, the second time from the cache, and written once: 5120 bf16 and their f32 weights are 41 KB, 0.1 us at 400 GB/s.
// 24 registers, 128 bytes of threadgroup memory, full occupancy; 10 simdgroups for 5120 columns, 2 % of an M1 Max per row.
// c(M): rows run side by side until the GPU is full, so c(16) is 1.0.
#include "common.h"

constant ushort SIMDGROUPS [[function_constant(0)]];
constant bool GATED [[function_constant(1)]];

struct RmsNormParams {
  uint rows, width, inner;  // row r is (r / inner, r % inner)
  uint x_outer, x_inner, z_outer, z_inner;
  float eps;
};

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void rms_norm(
    device const T *x [[buffer(0)]],
    device const float *weight [[buffer(1)]],
    device T *y [[buffer(2)]],
    constant RmsNormParams &p [[buffer(3)]],
    device const T *z [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 size [[threads_per_threadgroup]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float parts[32];
  const uint threads = SIMDGROUPS * 32u, per_group = size.x / threads;
  const uint row = (group.y * groups.x + group.x) * per_group + thread_index / threads, t = thread_index % threads;
  // Several rows share a threadgroup only where a row is one simdgroup, so no barrier is skipped by this.
  if (row >= p.rows) return;
  const uint outer = row / p.inner, inner = row % p.inner;
  device const T *from = x + outer * p.x_outer + inner * p.x_inner;
  float sum = 0.0f;
  for (uint i = t; i < p.width; i += threads) {
    const float v = float(from[i]);
    sum = fma(v, v, sum);
  }
  sum = simd_sum(sum);
  if (SIMDGROUPS > 1) {
    if (lane == 0) parts[simdgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = 0.0f;
    for (ushort i = 0; i < SIMDGROUPS; i++) sum += parts[i];
  }
  const float scale = 1.0f / sqrt(sum / float(p.width) + p.eps);
  device const T *gate = z + outer * p.z_outer + inner * p.z_inner;
  device T *to = y + row * p.width;
  for (uint i = t; i < p.width; i += threads) {
    const float v = float(from[i]) * scale * weight[i];
    to[i] = T(GATED ? v * silu_f32(float(gate[i])) : v);
  }
}
INSTANCES("rms_norm", rms_norm)
