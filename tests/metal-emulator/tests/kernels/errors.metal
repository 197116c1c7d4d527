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
  b[i] = exp(b[i]);  // EXP_OF_BFLOAT
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
}

#ifdef UNKNOWN_ATTRIBUTE
kernel void bad(device float* f [[buffer(0)]], uint i [[thread_position_in_gird]]) { f[i] = 0; }  // UNKNOWN_ATTRIBUTE
#endif
#ifdef BUFFER_NUMBER
kernel void bad(device float* f [[buffer(77)]], uint i [[thread_position_in_grid]]) { f[i] = 0; }  // BUFFER_NUMBER
#endif
