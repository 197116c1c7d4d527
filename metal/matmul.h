// Shared by the matmul kernels: raw bits to f32 and back, so that bf16 needs no bfloat.
#pragma once
#include "common.h"

// What memory holds: 0 f32, 1 f16, 2 bf16. Scales and biases; a plain weight's values.
constant ushort X_TYPE [[function_constant(0)]];
constant ushort SCALE_TYPE [[function_constant(1)]];
constant ushort GROUP [[function_constant(2)]];

constant ushort SPLIT [[function_constant(3)]];  // simdgroups that share columns: 1, 2 or 4 of a threadgroup's 4

constant constexpr uint LANES = 32;
constant constexpr uint SIMDGROUPS = 4;

struct MatmulParams {
  uint rows, n, k, top;  // gathered: slot s is row s / top of x
};

inline float value_at(device const ushort *halves, uint i, ushort type) {
  if (type == 0) return reinterpret_cast<device const float *>(halves)[i];
  const ushort bits = halves[i];
  return type == 1 ? float(as_type<half>(bits)) : as_type<float>(uint(bits) << 16);
}

// Four values from element 4 * i on.
inline void load4(device const uint4 *x, uint i, ushort type, thread float *v) {
  if (type == 0) {
    const float4 f = as_type<float4>(x[i]);
#pragma unroll
    for (uint e = 0; e < 4; e++) v[e] = f[e];
  } else {
    const uint2 u = reinterpret_cast<device const uint2 *>(x)[i];
    if (type == 1) {
      const half4 h = as_type<half4>(u);
#pragma unroll
      for (uint e = 0; e < 4; e++) v[e] = float(h[e]);
    } else {
      v[0] = as_type<float>(u.x << 16);
      v[1] = as_type<float>(u.x & 0xffff0000u);
      v[2] = as_type<float>(u.y << 16);
      v[3] = as_type<float>(u.y & 0xffff0000u);
    }
  }
}

inline ushort bf16_bits(float v) {
  const uint u = as_type<uint>(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return ushort(u >> 16 | 0x40u);
  return ushort((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

// v as x's dtype holds it.
inline float rounded(float v) {
  if (X_TYPE == 0) return v;
  return X_TYPE == 1 ? float(half(v)) : as_type<float>(uint(bf16_bits(v)) << 16);
}

inline void store(device ushort *y, uint i, float v) {
  if (X_TYPE == 0) reinterpret_cast<device float *>(y)[i] = v;
  else if (X_TYPE == 1) reinterpret_cast<device half *>(y)[i] = half(v);
  else y[i] = bf16_bits(v);
}

// Sums each of V values over the 32 lanes (V a power of two). While more than one is left, the halves of the simdgroup swap half of them:
// V - 1 + (5 - log2 V) shuffles, and every value goes through the same tree (distance 16, 8, 4, 2, 1) whatever V is. On return
// lane l holds in v[0] the total of value l / (32 / V).
template <ushort V, ushort DISTANCE>
struct Fold {
  static inline void run(thread float *v, ushort lane) {
    const bool upper = (lane & DISTANCE) != 0;
#pragma unroll
    for (ushort i = 0; i < V / 2; i++) {
      const float low = v[i], high = v[i + V / 2];  // both first: `upper ? v[a] : v[b]` would become an index at run time
      v[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, DISTANCE);
    }
    Fold<V / 2, DISTANCE / 2>::run(v, lane);
  }
};
template <ushort DISTANCE>
struct Fold<1, DISTANCE> {
  static inline void run(thread float *v, ushort lane) {
    v[0] = v[0] + simd_shuffle_xor(v[0], DISTANCE);
    Fold<1, DISTANCE / 2>::run(v, lane);
  }
};
template <>
struct Fold<1, 0> {
  static inline void run(thread float *, ushort) {}
};

constexpr ushort power_of_two(ushort v) { return v <= 1 ? 1 : v <= 2 ? 2 : v <= 4 ? 4 : v <= 8 ? 8 : 16; }
