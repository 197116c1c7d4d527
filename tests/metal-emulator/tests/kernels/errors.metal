// One compile error per macro; the line carries the macro's name.
#include <metal_stdlib>
using namespace metal;

kernel void errors(device bfloat* b [[buffer(0)]], device float* f [[buffer(1)]], device half* h [[buffer(2)]], uint i [[thread_position_in_grid]]) {
#ifdef FLOAT_TO_BFLOAT
  b[i] = f[i];  // FLOAT_TO_BFLOAT
#endif
#ifdef PRODUCT_TO_BFLOAT
  b[i] = b[i] * f[i];  // PRODUCT_TO_BFLOAT
#endif
#ifdef LITERAL_TO_BFLOAT
  bfloat x = 1.0f;  // LITERAL_TO_BFLOAT
  b[i] = x;
#endif
#ifdef HALF_TO_BFLOAT
  b[i] = h[i];  // HALF_TO_BFLOAT
#endif
#ifdef BFLOAT_TO_HALF
  h[i] = b[i];  // BFLOAT_TO_HALF
#endif
#ifdef HALF_AND_BFLOAT
  f[i] = h[i] * b[i];  // HALF_AND_BFLOAT
#endif
#ifdef EXP_OF_BFLOAT
  b[i] = exp(b[i]);  // a float, as in MSL // EXP_OF_BFLOAT
#endif
#ifdef WRITE_TO_INPUT
  device const float* in = f;
  in[i] = 1;  // WRITE_TO_INPUT
#endif
#ifdef UNKNOWN_NAME
  f[i] = nothing(i);  // UNKNOWN_NAME
#endif
#ifdef AS_TYPE_SIZE
  f[i] = as_type<float>(ushort(i));  // AS_TYPE_SIZE
#endif
#ifdef INITIALISED_TILE
  threadgroup float tile[4] = {0};  // INITIALISED_TILE
  f[i] = tile[0];
#endif
  // legal, all of it
  f[i] = b[i];
  const bfloat y = bfloat(f[i]) * b[i] + 2;
  b[i] = static_cast<bfloat>(f[i] * b[i]);
  b[i] = bfloat(exp(float(y)));
  h[i] = half(float(b[i]));
  h[i] = half(b[i]);
  b[i] = bfloat(h[i]);
  f[i] = i > 3 ? b[i] : 0.0f;
  b[i] += y;
  f[i] = exp(b[i]) + max(f[i], float(b[i])) + pow(b[i], y) + fma(b[i], 2.0f, f[i]);
}

#ifdef UNKNOWN_ATTRIBUTE
kernel void bad(device float* f [[buffer(0)]], uint i [[thread_position_in_gird]]) { f[i] = 0; }  // UNKNOWN_ATTRIBUTE
#endif
#ifdef BUFFER_NUMBER
kernel void bad(device float* f [[buffer(77)]], uint i [[thread_position_in_grid]]) { f[i] = 0; }  // BUFFER_NUMBER
#endif

// ---- address spaces ----
inline float first(thread const float* p) { return p[0]; }
inline float first_of_device(device const float* p) { return p[0]; }
template <typename T> inline void store(threadgroup T* to, T v) { to[0] = v; }
struct Pair { float a, b; };
inline float both(Pair p) { return p.a + p.b; }
constant float table[4] = {1, 2, 3, 4};
#ifdef PARAMETER_WITHOUT_SPACE
inline float no_space(const float* p) { return p[0]; }  // PARAMETER_WITHOUT_SPACE
#endif
#ifdef REFERENCE_WITHOUT_SPACE
template <typename T> inline void no_space(T& v, uint n) { v += n; }  // REFERENCE_WITHOUT_SPACE
#endif
kernel void spaces(device float* f [[buffer(0)]], constant Pair& c [[buffer(1)]], device Pair* d [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[32];
  threadgroup Pair pairs[32];
  float own[2] = {1, 2};
#ifdef LOCAL_WITHOUT_SPACE
  const float* p = own;  // LOCAL_WITHOUT_SPACE
#endif
#ifdef DEVICE_AS_THREAD
  own[0] = first(f);  // DEVICE_AS_THREAD
#endif
#ifdef THREAD_AS_DEVICE
  own[0] = first_of_device(own);  // THREAD_AS_DEVICE
#endif
#ifdef TILE_AS_DEVICE
  device float* q = tile;  // TILE_AS_DEVICE
  q[0] = 1;
#endif
#ifdef DEVICE_AS_TILE
  store(f, 1.0f);  // DEVICE_AS_TILE
#endif
#ifdef CONSTANT_AS_DEVICE
  device const float* q = &c.a;  // CONSTANT_AS_DEVICE
  own[0] = q[0];
#endif
#ifdef MATRIX_FROM_THREAD
  simdgroup_float8x8 m;
  simdgroup_load(m, own, 8);  // MATRIX_FROM_THREAD
#endif
  // legal, all of it
  thread const float* mine = own;
  threadgroup float* theirs = tile + i;
  store(theirs, table[i & 3] + mine[1]);
  const Pair copy = c;
  Pair other = d[i];
  other.a += both(c) + both(d[i]) + copy.b;
  d[i] = other;
  pairs[i] = other;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  device const float4* wide = reinterpret_cast<device const float4*>(f);
  f[i] = first(own) + first_of_device(f) + tile[31 - i] + pairs[31 - i].a + float4(wide[0]).x;
}
