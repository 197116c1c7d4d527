// One mistake per kernel. The line where it must be reported carries the kernel's name after "FAULT".
// All take: buffer(0) 64 floats to read, buffer(1) 64 floats of output. 64 threads in one threadgroup unless the test says otherwise.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

#define ARGS device const float* in [[buffer(0)]], device float* out [[buffer(1)]], uint i [[thread_index_in_threadgroup]], \
             uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]], uint gid [[thread_position_in_grid]], \
             uint tg [[threadgroup_position_in_grid]]

// ---- races ----
kernel void race_no_barrier(ARGS) {
  threadgroup float tile[64];
  tile[63 - i] = in[i];
  out[i] = tile[i];  // FAULT race_no_barrier
}
kernel void race_refill(ARGS) {
  threadgroup float tile[64];
  float sum = 0;
  for (uint k = 0; k < 2; k++) {
    tile[i] = in[i] + k;  // FAULT race_refill
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += tile[63 - i];
  }
  out[i] = sum;
}
kernel void race_device_fence(ARGS) {
  threadgroup float tile[64];
  tile[i] = in[i];
  threadgroup_barrier(mem_flags::mem_device);  // the wrong fence
  out[i] = tile[63 - i];  // FAULT race_device_fence
}
kernel void race_threadgroup_fence(ARGS) {
  out[i] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the wrong fence
  const float other = out[63 - i];  // FAULT race_threadgroup_fence
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = other;
}
kernel void race_no_fence(ARGS) {
  threadgroup float tile[64];
  tile[i] = in[i];
  threadgroup_barrier(mem_flags::mem_none);
  out[i] = tile[63 - i];  // FAULT race_no_fence
}
kernel void race_simdgroup_barrier(ARGS) {
  threadgroup float tile[64];
  tile[i] = in[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);  // too narrow: the value comes from the other simdgroup
  out[i] = tile[63 - i];  // FAULT race_simdgroup_barrier
}
kernel void race_within_simdgroup(ARGS) {
  threadgroup float tile[64];
  tile[i] = in[i];
  out[i] = tile[i ^ 1];  // FAULT race_within_simdgroup
}
kernel void race_one_address(ARGS) {
  if (i < 2) out[0] = in[i];  // FAULT race_one_address
}
kernel void race_between_threadgroups(ARGS) {
  out[i] = in[i] + tg;  // FAULT race_between_threadgroups
}
kernel void race_plain_and_atomic(ARGS) {
  threadgroup atomic_uint n;
  if (i == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);
  out[i] = float(*(threadgroup uint*)&n);  // FAULT race_plain_and_atomic
}
kernel void race_tile_store(ARGS) {
  threadgroup float tile[64];
  simdgroup_matrix<float, 8, 8> m = make_filled_simdgroup_matrix<float, 8, 8>(float(sg));
  simdgroup_store(m, tile, 8);  // FAULT race_tile_store
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[i];
}
kernel void race_device_simdgroups(ARGS) {
  if (sg == 0) {
    out[i] = in[i];
    out[i + 32] = in[i];
  }
  simdgroup_barrier(mem_flags::mem_device);
  if (sg == 1 && out[i] < 0) out[i] = 0;  // FAULT race_device_simdgroups
}
kernel void race_overlap(ARGS) {
  device packed_float3* p = (device packed_float3*)(out + (i & 31) * 2);  // every third number is the next thread's too
  if (i < 21) *p = packed_float3(in[i]);  // FAULT race_overlap
  if (i >= 43) out[i] = 0;
}
kernel void race_atomic_start(ARGS) {
  threadgroup atomic_uint n;
  if (i == 0) *(threadgroup uint*)&n = 0;
  atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);  // FAULT race_atomic_start
  out[i] = in[i];
}
kernel void race_matrix_device(ARGS) {
  simdgroup_matrix<float, 8, 8> m = make_filled_simdgroup_matrix<float, 8, 8>(float(sg));
  simdgroup_store(m, out, 8);  // FAULT race_matrix_device
}
kernel void race_behind_uniform_branch(ARGS) {
  threadgroup float tile[64];
  tile[i] = in[i];
  if (in[0] > 1000.0f) threadgroup_barrier(mem_flags::mem_threadgroup);  // never
  out[i] = tile[(i + 32) & 63];  // FAULT race_behind_uniform_branch
}

// ---- divergence ----
kernel void barrier_in_branch(ARGS) {
  if (sg == 0) threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT barrier_in_branch
  out[i] = in[i];
}
kernel void barrier_after_return(ARGS) {
  if (i >= 40) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT barrier_after_return
  out[i] = in[i];
}
kernel void barrier_two_places(ARGS) {
  if (sg == 0) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT barrier_two_places
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[i] = in[i];
}
kernel void barrier_of_simdgroup(ARGS) {
  if (lane < 16) simdgroup_barrier(mem_flags::mem_threadgroup);  // FAULT barrier_of_simdgroup
  out[i] = in[i];
}
kernel void barrier_trip_counts(ARGS) {
  for (uint k = 0; k <= sg; k++) threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT barrier_trip_counts
  out[i] = in[i];
}
kernel void simd_two_places(ARGS) {
  float v = in[i];
  if (lane < 16) {
    v = simd_sum(v);  // FAULT simd_two_places
  } else {
    v = simd_max(v);
  }
  out[i] = v;
}
kernel void barrier_lane_trip_counts(ARGS) {
  for (uint k = 0; k < i % 3; k++) threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT barrier_lane_trip_counts
  out[i] = in[i];
}
kernel void barrier_break(ARGS) {
  for (uint k = 0; k < 4; k++) {
    if (k == sg + 1) break;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT barrier_break
  }
  out[i] = in[i];
}

// ---- bounds ----
kernel void bounds_read(ARGS) {
  out[i] = in[i + 1];  // FAULT bounds_read
}
kernel void bounds_write(ARGS) {
  out[i + 1] = in[i];  // FAULT bounds_write
  if (i == 0) out[0] = 0;
}
kernel void bounds_before(ARGS) {
  out[i] = in[int(i) - 1];  // FAULT bounds_before
}
kernel void bounds_far(ARGS) {
  out[i] = in[i + (1u << 30)];  // FAULT bounds_far
}
kernel void bounds_crossing(ARGS) {
  device const packed_float3* p = (device const packed_float3*)in;
  const float3 v = p[i / 3];  // 21 whole ones: number 21 crosses the end // FAULT bounds_crossing
  out[i] = v.z;
}
kernel void bounds_threadgroup(ARGS) {
  threadgroup float tile[32];
  threadgroup float* p = tile;
  p[i] = in[i];  // FAULT bounds_threadgroup
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = p[63 - i];
}
kernel void bounds_threadgroup_index(ARGS) {
  threadgroup float tile[32];
  threadgroup float after[64];
  tile[i] = in[i];  // lands in the next variable // FAULT bounds_threadgroup_index
  after[i] = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[0] + after[i];
}
kernel void bounds_private(ARGS) {
  float v[4];
  for (uint k = 0; k < 4; k++) v[k] = in[k];
  out[i] = v[i & 7];  // FAULT bounds_private
}
static float neighbour(threadgroup const float* p, uint i) {
  return p[i + 1];  // FAULT bounds_threadgroup_next
}
kernel void bounds_threadgroup_next(ARGS) {
  threadgroup float tile[64], after[64];
  tile[i] = in[i];
  after[i] = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = neighbour(tile, i) + after[i];  // thread 63: after[0]
}
kernel void bounds_threadgroup_before(ARGS) {
  threadgroup float before[64], tile[64];
  threadgroup float* p = tile;
  before[i] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  p[int(i) - 1] = in[i];  // FAULT bounds_threadgroup_before
  out[i] = before[i];
}
kernel void bounds_overflow(ARGS) {
  out[i] = in[int(i * 0x10000000u)];  // 32 bits are not enough // FAULT bounds_overflow
}
kernel void bounds_matrix(ARGS) {
  simdgroup_matrix<float, 8, 8> m;
  simdgroup_load(m, in, 9);  // the last row ends at 71 // FAULT bounds_matrix
  out[i] = m.thread_elements()[0];
}

// ---- values and addresses ----
kernel void uninitialised_tile(ARGS) {
  threadgroup float tile[64];
  if (i < 60) tile[i] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[i];  // FAULT uninitialised_tile
}
kernel void uninitialised_output(ARGS) {
  out[i] += in[i];  // FAULT uninitialised_output
}
kernel void uninitialised_from_other_group(ARGS) {
  threadgroup float tile[64];
  if (tg == 0) tile[i] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[gid] = tile[i];  // FAULT uninitialised_from_other_group
}
kernel void misaligned_scalar(ARGS) {
  out[i] = *(device const float*)((device const uchar*)in + i);  // FAULT misaligned_scalar
}
kernel void misaligned_vector(ARGS) {
  const float4 v = *(device const float4*)(in + (i & 31));  // FAULT misaligned_vector
  out[i] = v.x + v.y + v.z + v.w;
}
kernel void misaligned_half(ARGS) {
  const half2 v = *(device const half2*)((device const half*)in + i);  // FAULT misaligned_half
  out[i] = float(v.x) + float(v.y);
}
kernel void misaligned_tile(ARGS) {
  threadgroup float tile[72];
  tile[i] = in[i];
  if (i < 8) tile[64 + i] = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float4 v = *(threadgroup const float4*)(tile + i);  // FAULT misaligned_tile
  out[i] = v.x + v.y + v.z + v.w;
}
kernel void uninitialised_component(ARGS) {
  threadgroup float4 tile[64];
  tile[i].xyz = float3(in[i]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float4 v = tile[63 - i];  // FAULT uninitialised_component
  out[i] = dot(v, v);
}
kernel void uninitialised_matrix(ARGS) {
  threadgroup float tile[64];
  if (i < 56) tile[i] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<float, 8, 8> m;
  simdgroup_load(m, tile, 8);  // FAULT uninitialised_matrix
  out[i] = m.thread_elements()[0];
}
kernel void unwritten_half(ARGS) {
  ((device half*)out)[2 * i] = half(in[i]);
}
kernel void read_only(ARGS) {
  ((device float*)in)[i] = 1;  // FAULT read_only
  out[i] = 0;
}
kernel void unwritten(ARGS) {
  if (i != 17) out[i] = in[i];
}
kernel void memory_static(ARGS) {
  threadgroup float big[8192];
  threadgroup float one[1];  // FAULT memory_static
  big[i] = in[i];
  one[0] = 0;
  out[i] = big[i];
}
kernel void memory_dynamic(ARGS, threadgroup float* extra [[threadgroup(0)]]) {
  threadgroup float big[4096];  // FAULT memory_dynamic
  big[i] = in[i];
  extra[i] = big[i];
  out[i] = extra[i];
}
kernel void shift_width(ARGS) {
  out[i] = float(1u << i);  // FAULT shift_width
}
kernel void divide_by_zero(ARGS) {
  out[i] = float(100u / i);  // FAULT divide_by_zero
}
static uint deep(uint n) {
  volatile uint pad[64];
  pad[n % 64] = n;
  return n == 0 ? 0 : deep(n - 1) + pad[n % 64];
}
kernel void stack_overflow(ARGS) {
  out[i] = float(deep(100000 + i));
}

// ---- simdgroups ----
kernel void inactive_shuffle(ARGS) {
  float v = in[i];
  if (lane < 20) v += simd_shuffle_xor(v, 16);  // FAULT inactive_shuffle
  out[i] = v;
}
kernel void inactive_range(ARGS) {
  out[i] = simd_shuffle(in[i], ushort(lane + 1));  // FAULT inactive_range
}
kernel void inactive_returned(ARGS) {
  out[i] = in[i];
  if (lane == 31) return;
  out[i] = simd_broadcast(in[i], 31);  // FAULT inactive_returned
}
kernel void inactive_matrix(ARGS) {
  simdgroup_matrix<float, 8, 8> m = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  if (lane < 31) simdgroup_multiply_accumulate(m, m, m, m);  // FAULT inactive_matrix
  out[i] = m.thread_elements()[0];
}
kernel void inactive_load(ARGS) {
  simdgroup_matrix<float, 8, 8> m = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  if (lane != 3) simdgroup_load(m, in, 8);  // FAULT inactive_load
  out[i] = m.thread_elements()[0];
}
kernel void inactive_past(ARGS) {
  out[i] = simd_shuffle_xor(in[i], 32);  // FAULT inactive_past
}
kernel void inactive_quad(ARGS) {
  float v = in[i];
  if (lane % 4 != 3) v += quad_shuffle_xor(v, 1);  // lane 2 asks lane 3 // FAULT inactive_quad
  out[i] = v;
}

// ---- bindings ----
struct Params { uint a, b, c, d; };
constant uint factor [[function_constant(3)]];
kernel void binding_small(ARGS, constant Params& p [[buffer(2)]]) { out[i] = in[i] + p.d; }
kernel void binding_missing(ARGS, constant uint& n [[buffer(2)]]) { out[i] = in[i] + n; }
kernel void binding_null(ARGS, device const float* more [[buffer(2)]]) {
  out[i] = in[i] + more[i];  // FAULT binding_null
}
kernel void binding_optional(ARGS, device const float* more [[buffer(2)]]) {
  out[i] = in[i];
  if (in[0] > 1000.0f) out[i] += more[i];  // never: a buffer that nobody touches may be missing
}
kernel void binding_constant(ARGS) {
  out[i] = in[i] * factor;  // FAULT binding_constant
}
[[kernel, max_total_threads_per_threadgroup(32)]] void binding_threads(ARGS) { out[i] = in[i]; }
