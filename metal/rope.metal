// Position-mapped rotary embedding. A thread turns one pair of lanes in up to HEADS heads of a row, or copies one lane
// past the rotary ones. Angles are position * position_scale * frequency in f32, one rounding each.
//
// Reads and writes each element once: [1, 16, 256] bf16 is 16 KB, 0.04 us at 400 GB/s; a launch costs more. 20 registers, full
// occupancy; 16 heads of 256 lanes are 896 threads a row, so prefill of 64 rows fills a GPU.
// c(M): bound by the launch up to about 100 rows, so c(16) is 1.0.
#include "common.h"

constant bool INTERLEAVED [[function_constant(0)]];

struct RopeParams {
  uint heads, dim, pairs, table;          // table: pairs that turn; the rest is scaled only
  uint x_row, x_head;                     // strides of x
  uint position_axis, position_row;       // strides of positions
  uint height, width;                     // pairs i % 3 == 1 below height follow axis 1, i % 3 == 2 below width axis 2
  float position_scale, pre_scale;
};

constant constexpr uint HEADS = 4;

template <typename T, typename P>
[[kernel]] void rope(device const T *x [[buffer(0)]],
                     device const P *positions [[buffer(1)]],
                     device T *y [[buffer(2)]],
                     constant RopeParams &p [[buffer(3)]],
                     constant float *frequencies [[buffer(4)]],
                     uint3 id [[thread_position_in_grid]]) {
  const uint i = id.x, row = id.z, first = id.y * HEADS, last = min(first + HEADS, p.heads);
  if (i >= p.pairs) {
    const uint lane = p.pairs + i;
    for (uint h = first; h < last; h++) y[(row * p.heads + h) * p.dim + lane] = x[row * p.x_row + h * p.x_head + lane];
    return;
  }
  const uint axis = (i % 3 == 1 && i < p.height) || (i % 3 == 2 && i < p.width) ? i % 3 : 0;
  float sine = 0.0f, cosine = 1.0f;
  if (i < p.table) {
    const float position = float(positions[axis * p.position_axis + row * p.position_row]);
    sincos_f32(position * p.position_scale * frequencies[i], sine, cosine);
  }
  const uint a = INTERLEAVED ? 2 * i : i, b = INTERLEAVED ? 2 * i + 1 : i + p.pairs;
  for (uint h = first; h < last; h++) {
    device const T *from = x + row * p.x_row + h * p.x_head;
    device T *to = y + (row * p.heads + h) * p.dim;
    const float u = float(from[a]) * p.pre_scale, v = float(from[b]) * p.pre_scale;
    to[a] = T(fma(u, cosine, -(v * sine)));
    to[b] = T(fma(v, cosine, u * sine));
  }
}

INSTANCE("rope_u32_f32", rope, float, uint)
INSTANCE("rope_u32_f16", rope, half, uint)
IF_BFLOAT(INSTANCE("rope_u32_bf16", rope, bfloat, uint))
INSTANCE("rope_i64_f32", rope, float, long)
INSTANCE("rope_i64_f16", rope, half, long)
IF_BFLOAT(INSTANCE("rope_i64_bf16", rope, bfloat, long))
