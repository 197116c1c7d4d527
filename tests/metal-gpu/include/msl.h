// The metal_stdlib stand-in of tests/metal-emulator for NVIDIA GPUs: types and math from there, simdgroups and barriers from PTX.
#pragma once
#include <stddef.h>
#include <stdint.h>
#define EMU_DEV __attribute__((device))
#define EMU_NOSAN
#define EMU_INLINE inline __attribute__((always_inline))
#define EMU_HERE int at_ = 0

enum {
  EMU_P_BUFFER, EMU_P_TGMEM, EMU_P_TPIG, EMU_P_TPITG, EMU_P_TGPIG, EMU_P_TPTG, EMU_P_DTPTG, EMU_P_TGPG, EMU_P_TPG, EMU_P_TIITG,
  EMU_P_TIISG, EMU_P_SGIITG, EMU_P_TPSG, EMU_P_SGPTG, EMU_P_TIIQG, EMU_P_QGIITG
};
struct emu_param {
  int kind, index;
};
struct emu_u3 {
  uint32_t x, y, z;
};
// What a launch tells a kernel.
struct emu_gpu {
  void *buffers[32];
  uint32_t tgmem[8];
  uint32_t grid[3];  // threads, where they are not whole threadgroups; else 0
};
EMU_DEV uint64_t emu_constants[64];
extern "C" __attribute__((shared)) __attribute__((aligned(16))) unsigned char emu_dynamic[];

#pragma clang force_cuda_host_device begin
inline emu_u3 emu_tid() { return {(uint32_t)__nvvm_read_ptx_sreg_tid_x(), (uint32_t)__nvvm_read_ptx_sreg_tid_y(), (uint32_t)__nvvm_read_ptx_sreg_tid_z()}; }
inline emu_u3 emu_block() { return {(uint32_t)__nvvm_read_ptx_sreg_ctaid_x(), (uint32_t)__nvvm_read_ptx_sreg_ctaid_y(), (uint32_t)__nvvm_read_ptx_sreg_ctaid_z()}; }
inline emu_u3 emu_size() { return {(uint32_t)__nvvm_read_ptx_sreg_ntid_x(), (uint32_t)__nvvm_read_ptx_sreg_ntid_y(), (uint32_t)__nvvm_read_ptx_sreg_ntid_z()}; }
inline emu_u3 emu_blocks() { return {(uint32_t)__nvvm_read_ptx_sreg_nctaid_x(), (uint32_t)__nvvm_read_ptx_sreg_nctaid_y(), (uint32_t)__nvvm_read_ptx_sreg_nctaid_z()}; }
inline uint32_t emu_linear() {
  emu_u3 t = emu_tid(), s = emu_size();
  return t.x + s.x * (t.y + s.y * t.z);
}
namespace msl {
#include "scalar.h"
#include "swizzle.h"
#include "vector.h"
namespace metal {
#include "math.h"
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8 };
EMU_INLINE mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
EMU_INLINE void threadgroup_barrier(mem_flags) { __nvvm_bar_sync(0); }
EMU_INLINE void simdgroup_barrier(mem_flags) { __nvvm_bar_warp_sync(0xffffffffu); }

template <class T, class F> EMU_INLINE T emu_words(T x, F f) {
  static_assert(sizeof(T) % 4 == 0 || sizeof(T) < 4, "");
  int w[(sizeof(T) + 3) / 4] = {0};
  __builtin_memcpy(w, &x, sizeof x);
  for (unsigned i = 0; i < sizeof w / 4; i++) w[i] = f(w[i]);
  __builtin_memcpy(&x, w, sizeof x);
  return x;
}
template <class T> EMU_INLINE T simd_shuffle(T x, ushort a) { return emu_words(x, [=](int w) { return __nvvm_shfl_sync_idx_i32(0xffffffffu, w, a, 31); }); }
template <class T> EMU_INLINE T simd_broadcast(T x, ushort a) { return simd_shuffle(x, a); }
template <class T> EMU_INLINE T simd_broadcast_first(T x) { return simd_shuffle(x, 0); }
template <class T> EMU_INLINE T simd_shuffle_xor(T x, ushort a) { return emu_words(x, [=](int w) { return __nvvm_shfl_sync_bfly_i32(0xffffffffu, w, a, 31); }); }
template <class T> EMU_INLINE T simd_shuffle_down(T x, ushort a) { return emu_words(x, [=](int w) { return __nvvm_shfl_sync_down_i32(0xffffffffu, w, a, 31); }); }
template <class T> EMU_INLINE T simd_shuffle_up(T x, ushort a) { return emu_words(x, [=](int w) { return __nvvm_shfl_sync_up_i32(0xffffffffu, w, a, 0); }); }
// The emulator's tree.
#define EMU_REDUCTION(name, expr) \
  template <class T> EMU_INLINE T simd_##name(T x) { \
    for (ushort off = 16; off; off /= 2) { T a = x, b = simd_shuffle_down(x, off); x = T(expr); } \
    return simd_shuffle(x, 0); \
  }
EMU_REDUCTION(sum, a + b) EMU_REDUCTION(product, a * b) EMU_REDUCTION(max, max(a, b)) EMU_REDUCTION(min, min(a, b))
EMU_REDUCTION(and, a & b) EMU_REDUCTION(or, a | b) EMU_REDUCTION(xor, a ^ b)
#undef EMU_REDUCTION
EMU_INLINE bool simd_any(bool c) { return simd_or(uint(c)) != 0; }
EMU_INLINE bool simd_all(bool c) { return simd_and(uint(c)) != 0; }

// 8x8 matrices in the emulator's layout, multiplied by shuffles in its order.
template <class T, int R, int C> struct simdgroup_matrix {
  vec<T, 2> emu_te;
  simdgroup_matrix() = default;
  EMU_INLINE explicit simdgroup_matrix(T diagonal) {
    uint r, c;
    place(r, c);
    emu_te = vec<T, 2>(T(0));
    if (r == c) emu_te.x = diagonal;
    if (r == c + 1) emu_te.y = diagonal;
  }
  EMU_INLINE vec<T, 2> &thread_elements() { return emu_te; }
  EMU_INLINE const vec<T, 2> &thread_elements() const { return emu_te; }
  static EMU_INLINE void place(uint &r, uint &c) {
    uint lane = emu_linear() % 32, q = lane / 4;
    r = (q & 4) + (lane / 2) % 4;
    c = (q & 2) * 2 + (lane % 2) * 2;
  }
};
EMU_INLINE uint emu_lane_of(uint r, uint c) { return (c >> 1 & 1) | (r & 3) << 1 | (c >> 2 & 1) << 3 | (r >> 2 & 1) << 4; }
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int R, int C = R> EMU_INLINE simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(emu_same_t<T> v) {
  simdgroup_matrix<T, R, C> m;
  m.emu_te = vec<T, 2>(v);
  return m;
}
template <class T, int R, int C> EMU_INLINE void simdgroup_load(simdgroup_matrix<T, R, C> &d, const T *src, ulong ld = C, ulong2 origin = ulong2(0ul), bool transpose = false) {
  uint r, c;
  d.place(r, c);
  for (uint j = 0; j < 2; j++) {
    ulong y = transpose ? c + j : r, x = transpose ? r : c + j;
    d.emu_te[j] = src[(origin.y + y) * ld + origin.x + x];
  }
}
template <class T, int R, int C> EMU_INLINE void simdgroup_store(const simdgroup_matrix<T, R, C> &d, T *dst, ulong ld = C, ulong2 origin = ulong2(0ul), bool transpose = false) {
  uint r, c;
  d.place(r, c);
  for (uint j = 0; j < 2; j++) {
    ulong y = transpose ? c + j : r, x = transpose ? r : c + j;
    dst[(origin.y + y) * ld + origin.x + x] = d.emu_te[j];
  }
}
template <class TD, class TA, class TB, class TC> EMU_INLINE void simdgroup_multiply_accumulate(
    simdgroup_matrix<TD, 8, 8> &d, const simdgroup_matrix<TA, 8, 8> &a, const simdgroup_matrix<TB, 8, 8> &b, const simdgroup_matrix<TC, 8, 8> &c) {
  uint r, k;
  d.place(r, k);
  const float a0 = float(a.emu_te.emu_e[0]), a1 = float(a.emu_te.emu_e[1]);
  const float b0 = float(b.emu_te.emu_e[0]), b1 = float(b.emu_te.emu_e[1]);
  float x = float(c.emu_te.emu_e[0]), y = float(c.emu_te.emu_e[1]);
  for (uint i = 0; i < 8; i++) {
    const ushort from = ushort(emu_lane_of(r, i));
    const float even = simd_shuffle(a0, from), odd = simd_shuffle(a1, from);
    const float v = i % 2 ? odd : even;
    const ushort row = ushort(emu_lane_of(i, k));
    x = __builtin_fmaf(v, simd_shuffle(b0, row), x);
    y = __builtin_fmaf(v, simd_shuffle(b1, row), y);
  }
  d.emu_te.emu_e[0] = TD(x);
  d.emu_te.emu_e[1] = TD(y);
}
template <class TD, class TA, class TB> EMU_INLINE void simdgroup_multiply(simdgroup_matrix<TD, 8, 8> &d, const simdgroup_matrix<TA, 8, 8> &a, const simdgroup_matrix<TB, 8, 8> &b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<TD, 8, 8>(TD(0)));
}
template <class T, unsigned I> struct emu_fc {
  constexpr emu_fc() {}
  EMU_INLINE operator T() const {
    uint64_t bits = emu_constants[I];
    T v;
    __builtin_memcpy(&v, &bits, sizeof v);
    return v;
  }
};
}

inline emu_u3 emu_builtin(int kind, const emu_gpu &g) {
  emu_u3 t = emu_tid(), b = emu_block(), s = emu_size(), n = emu_blocks();
  uint32_t linear = emu_linear(), threads = s.x * s.y * s.z;
  switch (kind) {
    case EMU_P_TPIG: return {b.x * s.x + t.x, b.y * s.y + t.y, b.z * s.z + t.z};
    case EMU_P_TPITG: return t;
    case EMU_P_TGPIG: return b;
    case EMU_P_TPTG: case EMU_P_DTPTG: return s;
    case EMU_P_TGPG: return n;
    case EMU_P_TPG: return g.grid[0] ? emu_u3{g.grid[0], g.grid[1], g.grid[2]} : emu_u3{n.x * s.x, n.y * s.y, n.z * s.z};
    case EMU_P_TIITG: return {linear, 0, 0};
    case EMU_P_TIISG: return {linear % 32, 0, 0};
    case EMU_P_SGIITG: return {linear / 32, 0, 0};
    case EMU_P_TPSG: return {32, 0, 0};
    case EMU_P_SGPTG: return {(threads + 31) / 32, 0, 0};
    case EMU_P_TIIQG: return {linear % 4, 0, 0};
    case EMU_P_QGIITG: return {linear / 4, 0, 0};
  }
  return {0, 0, 0};
}
template <class A> struct emu_arg;
template <class T> struct emu_arg<T *> {
  static T *get(emu_param p, const emu_gpu &g) { return p.kind == EMU_P_TGMEM ? (T *)(emu_dynamic + g.tgmem[p.index]) : (T *)g.buffers[p.index]; }
};
template <class T> struct emu_arg<T &> {
  static T &get(emu_param p, const emu_gpu &g) { return *(T *)g.buffers[p.index]; }
};
#define EMU_PLACE(t) \
  template <> struct emu_arg<t> { static t get(emu_param p, const emu_gpu &g) { return t(emu_builtin(p.kind, g).x); } }; \
  template <> struct emu_arg<vec<t, 2>> { static vec<t, 2> get(emu_param p, const emu_gpu &g) { emu_u3 u = emu_builtin(p.kind, g); return vec<t, 2>(u.x, u.y); } }; \
  template <> struct emu_arg<vec<t, 3>> { static vec<t, 3> get(emu_param p, const emu_gpu &g) { emu_u3 u = emu_builtin(p.kind, g); return vec<t, 3>(u.x, u.y, u.z); } };
EMU_PLACE(uint) EMU_PLACE(ushort)
#undef EMU_PLACE
template <int... I> struct emu_seq {};
template <int N, int... I> struct emu_count : emu_count<N - 1, N - 1, I...> {};
template <int... I> struct emu_count<0, I...> { typedef emu_seq<I...> type; };
template <class F> struct emu_call;
template <class... A> struct emu_call<void (*)(A...)> {
  template <int... I> static EMU_INLINE void go(void (*f)(A...), const emu_param *p, const emu_gpu &g, emu_seq<I...>) { f(emu_arg<A>::get(p[I], g)...); }
  static EMU_INLINE void run(void (*f)(A...), const emu_param *p, const emu_gpu &g) { go(f, p, g, typename emu_count<sizeof...(A)>::type()); }
};
// Threads past a grid that is no whole number of threadgroups do nothing.
inline bool emu_outside(const emu_gpu &g) {
  emu_u3 t = emu_tid(), b = emu_block(), s = emu_size();
  return g.grid[0] && (b.x * s.x + t.x >= g.grid[0] || b.y * s.y + t.y >= g.grid[1] || b.z * s.z + t.z >= g.grid[2]);
}
}
#define EMU_TG(site, name, dims, ...) \
  typedef __VA_ARGS__ emu_tg_##site dims; \
  static __attribute__((shared)) emu_tg_##site name
#define device
#define threadgroup
#define thread
#define constant const
#define kernel inline
#define METAL_FUNC inline
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
