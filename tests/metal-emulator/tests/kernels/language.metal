// What the stand-in must do as MSL does. Every kernel writes results that tests/language.rs computes by itself.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

kernel void simd_operations(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_index_in_simdgroup]]) {
  const float v = x[i];
  device float* o = y + i;
  o[0] = simd_sum(v);
  o[32] = simd_max(v);
  o[64] = simd_min(v);
  o[96] = simd_product(1.0f + v * 0.01f);
  o[128] = simd_prefix_inclusive_sum(v);
  o[160] = simd_prefix_exclusive_sum(v);
  o[192] = simd_shuffle(v, ushort(31 - i));
  o[224] = simd_shuffle_xor(v, 5);
  o[256] = simd_broadcast(v, 7);
  o[288] = simd_broadcast_first(v);
  const float down = simd_shuffle_down(v, 3), up = simd_shuffle_up(v, 3);
  o[320] = i < 29 ? down : -1.0f;
  o[352] = i >= 3 ? up : -1.0f;
  o[384] = simd_shuffle_rotate_down(v, 3);
  o[416] = simd_shuffle_rotate_up(v, 3);
  o[448] = quad_sum(v);
  o[480] = quad_broadcast(v, 2);
  o[512] = float(uint(ulong(simd_ballot(v > 0.0f))) & 0xffffu);
  o[544] = float(simd_any(v > 100.0f)) + 2.0f * float(simd_all(v > -100.0f));
  o[576] = float(simd_or(i)) + float(simd_and(i | 64u)) + float(simd_xor(i));
}

// Lanes that take no part in a reduction do not count.
kernel void simd_some_lanes(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_index_in_simdgroup]]) {
  y[i] = -1;
  if (i % 3 == 0) y[i] = simd_sum(x[i]);
}

template <typename T>
kernel void matrices(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device float* y [[buffer(2)]]) {
  simdgroup_matrix<T, 8, 8> ma, mb, mt;
  simdgroup_load(ma, a, 10, ulong2(2, 1));   // stride 10, from column 2, row 1
  simdgroup_load(mb, b, 8);
  simdgroup_load(mt, b, 8, ulong2(0, 0), true);
  simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f), d;
  simdgroup_multiply_accumulate(c, ma, mb, c);
  simdgroup_store(c, y, 8);
  simdgroup_multiply(d, ma, mt);
  simdgroup_store(d, y + 64, 8, ulong2(0, 0), true);
  simdgroup_float8x8 e(2.0f);
  simdgroup_store(e, y + 128, 8);
}
template [[host_name("matrices_f32")]] kernel void matrices<float>(device const float*, device const float*, device float*);
template [[host_name("matrices_f16")]] [[kernel]] decltype(matrices<half>) matrices<half>;
template [[host_name("matrices_bf16")]] [[kernel]] decltype(matrices<bfloat>) matrices<bfloat>;

// Rounding: each operation on half and bfloat rounds to its own type.
kernel void rounding(device const float2* x [[buffer(0)]], device half* h [[buffer(1)]], device bfloat* b [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  const half p = half(x[i].x), q = half(x[i].y);
  h[4 * i] = p * q + p;
  h[4 * i + 1] = p / q;
  h[4 * i + 2] = fma(p, q, p);
  h[4 * i + 3] = half(float(p) * 3.0f);
  const bfloat r = bfloat(x[i].x), s = bfloat(x[i].y);
  b[4 * i] = r * s + r;
  b[4 * i + 1] = r / s;
  b[4 * i + 2] = bfloat(r * 2.5f);
  b[4 * i + 3] = as_type<bfloat>(ushort(as_type<ushort>(s) ^ 0x8000));
}

struct Positions { uint v[16]; };
kernel void positions(device Positions* p [[buffer(0)]], uint3 grid [[thread_position_in_grid]], uint3 in_group [[thread_position_in_threadgroup]],
                      uint3 group [[threadgroup_position_in_grid]], ushort3 size [[threads_per_threadgroup]], uint3 groups [[threadgroups_per_grid]],
                      uint3 all [[threads_per_grid]], uint index [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
                      ushort sg [[simdgroup_index_in_threadgroup]], uint nsg [[simdgroups_per_threadgroup]], uint width [[threads_per_simdgroup]]) {
  device Positions& o = p[grid.x + all.x * (grid.y + all.y * grid.z)];
  const uint values[16] = {grid.x, grid.y, grid.z, in_group.x, in_group.y, in_group.z, group.x, group.y, group.z, size.x, size.y, groups.x, index, uint(lane), uint(sg), nsg * width};
  for (uint k = 0; k < 16; k++) o.v[k] = values[k];
}

constant bool flag [[function_constant(0)]];
constant uint count [[function_constant(1)]];
constant float scale [[function_constant(2)]];
constant ushort small [[function_constant(700)]];
static constexpr constant int3 steps = {1, 2, 4};
constant uint twice = 2 * count;
constant bool given = is_function_constant_defined(scale);
kernel void constants(device float* y [[buffer(0)]], device const float* extra [[buffer(1), function_constant(flag)]]) {
  y[0] = flag ? extra[0] : -1.0f;
  y[1] = count;
  y[2] = twice;
  y[3] = given ? scale : 0.5f;
  y[4] = small + steps.z - steps[2];
}

kernel void vectors(device float* y [[buffer(0)]]) {
  float4 v = float4(1, 2, 3, 4);
  v.yz = v.zy;                                   // 1 3 2 4
  v.w += 1;                                      // 1 3 2 5
  const float3 t(v.xy, 7.0f);
  const half4 h = half4(v) * half(0.5h);
  const int3 n = {1, -2, 3};
  const uint2 u = as_type<uint2>(ulong(0x0000000500000007ul));
  packed_float3 p = packed_float3(t);
  const bool4 less = v < float4(2.5f);
  y[0] = v.x; y[1] = v.y; y[2] = v.z; y[3] = v.w;
  y[4] = dot(v, float4(1)); y[5] = t.z + t[0]; y[6] = float(h.w); y[7] = float(abs(n.y)) + n.z;
  y[8] = u.x + 10 * u.y; y[9] = p[1]; y[10] = float(any(less)) + 2 * float(all(less)); y[11] = select(1.0f, 2.0f, less.x);
  y[12] = max(v.xy, float2(2)).x; y[13] = clamp(v.w, 0.0f, 4.0f); y[14] = length(float2(3, 4)); y[15] = float((v * 2 - 1).z);
  vec<float, 2> g = 3.0f;
  y[16] = g.x + g.y; y[17] = float(sizeof(float3)) + float(sizeof(packed_float3)); y[18] = float(popcount(0xf0f0u)); y[19] = fract(2.75f);
}

// Legal, and no fault: what a checker that looks too hard would complain about.
kernel void legal(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], device atomic_uint* total [[buffer(2)]], threadgroup float* extra [[threadgroup(0)]],
                  uint i [[thread_index_in_threadgroup]], uint n [[threads_per_threadgroup]], uint g [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]], uint tg [[threadgroup_position_in_grid]]) {
  threadgroup float tile[64], other[64];
  threadgroup atomic_uint hits;
  if (i == 0) atomic_store_explicit(&hits, 0u, memory_order_relaxed);
  tile[i] = x[g];
  tile[i] += 1;                                  // its own element again
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float a = tile[n - 1 - i] + tile[0];           // many readers
  atomic_fetch_add_explicit(&hits, 1u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  tile[n - 1 - i] = a;                           // refill after a barrier
  other[i] = a;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const uint left = (i / 32) * 32 + (lane ^ 1);
  a += left < n ? other[left] : 0.0f;            // from the same simdgroup, after its barrier
  extra[i] = a;
  if (i == 0) atomic_fetch_add_explicit(total, atomic_load_explicit(&hits, memory_order_relaxed), memory_order_relaxed);
  if (lane >= 8) { y[g] = a; return; }           // early, where no barrier follows
  y[g] = a + 0.0f * simd_sum(a);                 // among the lanes that are left
}

// More of it: 64 threads as 8 x 4 x 2 in one threadgroup.
struct Padded { uchar tag; float value; };
kernel void legal_corners(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], device uchar* bytes [[buffer(2)]],
                          device atomic_uint* count [[buffer(3)]], uint3 at [[thread_position_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup float full[8192 - 128];            // with the others 32 KiB, to the byte
  threadgroup Padded pairs[64];
  const uint i = at.x + 8 * (at.y + 4 * at.z);
  bytes[i] = uchar(i);                           // neighbours of one word, by different threads
  full[i] = x[i];
  pairs[i].tag = 1;                              // the bytes between are never set
  pairs[i].value = x[i];
  for (uint k = 0; k < 3; k++) {
    if (k == 2) break;                           // by all threads
    threadgroup_barrier(mem_flags::mem_threadgroup);
    full[64 + 64 * k + i] = full[63 - i + 64 * k];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  const Padded other = pairs[63 - i];
  float a = full[128 + i] + other.value + float(bytes[63 - i]);
  a += simd_shuffle_down(0.0f * a, 1) < 0 ? 1.0f : 0.0f;  // past the edge: undefined, and not used as a number
  switch (sg) {
    case 0: a += 0.0f * simd_sum(a); break;      // each simdgroup its own
    default: a += 0.0f * simd_max(a); break;
  }
  if (lane % 2) a += 0.0f * simd_shuffle_xor(a, 2);  // among the odd lanes
  atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);
  atomic_fetch_max_explicit(count + 1, i, memory_order_relaxed);
  const uint wrapped = (i + 0xfffffffeu) & 63u;  // unsigned numbers wrap
  device float4* quads = (device float4*)y;
  if (i < 16) quads[i] = float4(0);
  threadgroup_barrier(mem_flags::mem_device);
  y[wrapped] = a;
}

kernel void nothing(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i == 0) y[0] = 1;
}

// Legal though rare: lanes at different simd operations meet again.
kernel void divergent(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_index_in_simdgroup]]) {
  float a = 0;
  if (i >= 16) a = simd_sum(x[i]);
  for (uint k = 0; k < i % 3; k++) a += simd_max(x[i]);
  y[i] = a + simd_sum(1.0f);
}

namespace inner {
namespace deeper {
inline float twice(thread const float& v) { return 2 * v; }
[[kernel, host_name("renamed")]] void original(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  const float v = float(i);
  y[i] = twice(v);
}
template <typename T> [[kernel]] void made(device T* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = T(i); }
template [[host_name("made_f32")]] [[kernel]] decltype(made<float>) made<float>;
}
}

// A sum that starts nowhere.
kernel void never_set(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  float sum[2];
  for (uint k = 0; k < i; k++) sum[k & 1] += x[k];
  y[i] = sum[0] + sum[1];
}
