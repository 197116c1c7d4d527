// Rows of a weight as embeddings: the numbers of the tokens in, their rows out, in x's dtype. On the device, so that a pass does not begin
// with a read-back.
//
// One thread a value: 5,120 columns of 4 bits are 3 KB in and 10 KB out a row; a launch, whatever the rows: c(16) is 1. A dozen
// registers, no threadgroup memory, full occupancy.
#include "matmul.h"

constant ushort BITS [[function_constant(4)]];  // 0: a plain weight

struct EmbedParams {
  uint k;
};

// scale * code + bias: of 16-bit scales the product is exact, so that fma has the CPU's bits.
template <typename T>
[[kernel]] void embed(
    device const uint *ids [[buffer(0)]],
    device const uint *codes [[buffer(1)]],     // [n, k * BITS / 32], or the plain weight [n, k]
    device const ushort *scales [[buffer(2)]],  // [n, k / GROUP]
    device const ushort *biases [[buffer(3)]],
    device T *y [[buffer(4)]],                  // [rows, k]
    constant EmbedParams &p [[buffer(5)]],
    uint2 id [[thread_position_in_grid]]) {
  const uint row = ids[id.y], column = id.x;
  float v;
  if (BITS == 0) {
    v = value_at(reinterpret_cast<device const ushort *>(codes), row * p.k + column, SCALE_TYPE);
  } else {
    const uint at = column * BITS, shift = at % 32;
    device const uint *words = codes + row * (p.k / 32 * BITS) + at / 32;
    uint code = words[0] >> shift;
    if (shift + BITS > 32) code |= words[1] << (32 - shift);
    const uint group = row * (p.k / GROUP) + column / GROUP;
    v = fma(value_at(scales, group, SCALE_TYPE), float(code & ((1u << BITS) - 1)), value_at(biases, group, SCALE_TYPE));
  }
  y[id.y * p.k + column] = T(v);
}
INSTANCES("embed", embed)
