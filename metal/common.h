// Shared by all kernels: dtypes and f32 functions written out, so that every compiler gives the same bits.
// Build with fast math off: it would reorder sums, and then a row's bits would depend on the compiler's mood.
#pragma once
#include <metal_stdlib>
using namespace metal;

// bfloat needs MSL 3.1 (macOS 14). Older systems get the other kernels of a file.
#if defined(__METAL_VERSION__) && __METAL_VERSION__ < 310
#define IF_BFLOAT(...)
#else
#define IF_BFLOAT(...) __VA_ARGS__
#endif

// One instance of a template under its host name.
#define INSTANCE(host, function, ...) \
  template [[host_name(host)]] [[kernel]] decltype(function<__VA_ARGS__>) function<__VA_ARGS__>;
#define INSTANCES(host, function) \
  INSTANCE(host "_f32", function, float) \
  INSTANCE(host "_f16", function, half) \
  IF_BFLOAT(INSTANCE(host "_bf16", function, bfloat))

// e^x to 2 ulp for x in -87...88; below it is 0 to within 1e-38, NaN stays NaN. The CPU path has the same code.
inline float exp_f32(float x) {
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = fma(x, 1.44269504088896340736f, round);
  const float n = shifted - round;
  float r = fma(n, -0.6933594f, x);
  r = fma(n, 2.1219444e-4f, r);
  float p = fma(r, 1.9875691e-4f, 1.3981999e-3f);
  p = fma(p, r, 8.333452e-3f);
  p = fma(p, r, 4.1665796e-2f);
  p = fma(p, r, 1.6666665e-1f);
  p = fma(p, r, 0.5f);
  p = fma(p, r * r, r) + 1.0f;
  const uint power = as_type<uint>(shifted) - as_type<uint>(round);
  return p * as_type<float>((power + 127u) << 23);
}

inline float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }
inline float silu_f32(float x) { return x / (1.0f + exp_f32(-x)); }

// sin and cos of x with an error below 1.2e-7 for |x| < 2^21. pi/2 in three parts: the first step is exact.
inline void sincos_f32(float x, thread float &sine, thread float &cosine) {
  const float n = rint(x * 0.63661977236758134308f);
  float r = fma(n, -1.5707963705062866f, x);
  r = fma(n, 4.371138828673793e-08f, r);
  r = fma(n, 1.7151245100058819e-15f, r);
  const float z = r * r;
  float s = fma(z, -1.9515295891e-4f, 8.3321608736e-3f);
  s = fma(s, z, -1.6666654611e-1f);
  s = fma(s * z, r, r);
  float c = fma(z, 2.443315711809948e-5f, -1.388731625493765e-3f);
  c = fma(c, z, 4.166664568298827e-2f);
  c = fma(c * z, z, fma(z, -0.5f, 1.0f));
  const int quadrant = int(n);
  const float a = (quadrant & 1) ? c : s, b = (quadrant & 1) ? s : c;
  sine = (quadrant & 2) ? -a : a;
  cosine = ((quadrant + 1) & 2) ? -b : b;
}
