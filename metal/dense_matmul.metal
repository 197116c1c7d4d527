// y[M, N] = x[M, K] * W[N, K]^T for plain weights (f32, f16, bf16), tiles of up to 4 rows: routers, gates, unquantized models.
//
// As affine_matmul.metal: a simdgroup owns R columns for all M rows; a lane takes 4 neighbouring k of every 128, SPLIT simdgroups take every
// SPLIT-th 128. The order of additions follows from N and K alone, so a row has the bits that it has alone.
//
// Occupancy: 128 threads, 60 registers (M * R <= 16 sums, 16 weights, 4 x): full; 4 * 16 floats (256 bytes) of threadgroup memory.
// Bytes: 2 * N * K of bf16 weights a pass (tiles of rows are neighbours in the grid and share them), 4 * K of x and 2 * N of y a row.
// c(M) at 400 GB/s: half a slot to unpack a weight, M fma, M / R for x, of the 27 slots that an M1 Max has for 16 bits: c(8) is 1.0.
#include "matmul.h"

template <ushort M, ushort R>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * LANES)]] void dense_lanes(
    device const uint4 *w [[buffer(0)]],
    device const uint4 *x [[buffer(3)]],
    device ushort *y [[buffer(4)]],
    constant MatmulParams &p [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  constexpr ushort V = power_of_two(M * R), SPAN = LANES / V;
  threadgroup float part[SIMDGROUPS * V];
  const uint split = simdgroup % SPLIT, tile = group.y * (SIMDGROUPS / SPLIT) + simdgroup / SPLIT;
  const uint first_column = tile * R, first_row = group.x * M, quads = p.k / 4;
  uint column[R], row[M];  // past the edge: the last one again, dropped at the end
#pragma unroll
  for (ushort r = 0; r < R; r++) column[r] = min(first_column + r, p.n - 1);
#pragma unroll
  for (ushort m = 0; m < M; m++) row[m] = min(first_row + m, p.rows - 1);
  float acc[V];
#pragma unroll
  for (ushort i = 0; i < V; i++) acc[i] = 0.0f;
  for (uint c = split * LANES + lane; c < quads; c += SPLIT * LANES) {
    float weight[R][4];
#pragma unroll
    for (ushort r = 0; r < R; r++) load4(w, column[r] * quads + c, SCALE_TYPE, weight[r]);
#pragma unroll
    for (ushort m = 0; m < M; m++) {
      float v[4];
      load4(x, row[m] * quads + c, X_TYPE, v);
#pragma unroll
      for (ushort r = 0; r < R; r++) {
#pragma unroll
        for (ushort e = 0; e < 4; e++) acc[m * R + r] = fma(weight[r][e], v[e], acc[m * R + r]);
      }
    }
  }
  Fold<V, 16>::run(acc, lane);
  const ushort i = lane / SPAN;
  float total = acc[0];
  if (SPLIT > 1) {
    if (lane % SPAN == 0) part[simdgroup * V + i] = total;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    total = 0.0f;
    for (ushort k = 0; k < SPLIT; k++) total += part[(simdgroup - split + k) * V + i];
  }
  const uint m = i / R, n = first_column + i % R;
  if (split == 0 && lane % SPAN == 0 && m < M && n < p.n && first_row + m < p.rows) store(y, (first_row + m) * p.n + n, total);
}

INSTANCE("dense_lanes_m1", dense_lanes, 1, 4)
INSTANCE("dense_lanes_m2", dense_lanes, 2, 4)
INSTANCE("dense_lanes_m3", dense_lanes, 3, 4)
INSTANCE("dense_lanes_m4", dense_lanes, 4, 4)
