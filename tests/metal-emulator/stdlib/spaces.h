// A second stand-in, for the address-space check only: nothing is run. Here the keywords are clang's address_space
// attributes and vectors are clang's own, so that pointers and references to different memories are different types.
// Functions are declared loosely: what else this header gets wrong is ignored (src/spaces.rs), only errors about
// address spaces count.
#pragma once
#define EMU_NOSAN
#define EMU_DEVICE __attribute__((address_space(1)))
#define EMU_CONSTANT const __attribute__((address_space(2)))
#define EMU_THREADGROUP __attribute__((address_space(3)))
namespace msl {
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef short int16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long uint64_t;
typedef long int64_t;
typedef _Float16 half;
typedef half float16_t;
typedef __bf16 bfloat;
typedef bfloat bfloat16_t;
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
#define EMU_VT(t) \
  typedef vec<t, 2> t##2; \
  typedef vec<t, 3> t##3; \
  typedef vec<t, 4> t##4;
EMU_VT(char)
EMU_VT(uchar)
EMU_VT(short) EMU_VT(ushort) EMU_VT(int) EMU_VT(uint) EMU_VT(long) EMU_VT(ulong) EMU_VT(half) EMU_VT(float)
    EMU_VT(bfloat) EMU_VT(bool) template <class T, int N>
    struct packed_vec {
  T x, y, z, w;
  packed_vec();
  template <class... A> packed_vec(A...);
  operator vec<T, N>() const;
  T &operator[](int);
};
#define EMU_PT(t) \
  typedef packed_vec<t, 2> packed_##t##2; \
  typedef packed_vec<t, 3> packed_##t##3; \
  typedef packed_vec<t, 4> packed_##t##4;
EMU_PT(char)
EMU_PT(uchar)
EMU_PT(short) EMU_PT(ushort) EMU_PT(int) EMU_PT(uint) EMU_PT(half) EMU_PT(float)
    EMU_PT(bfloat) template <class T, int N, class... A>
    vec<T, N> emu_make(A...);
template <class T, int C, int R> struct matrix {
  vec<T, R> c[C];
  template <class... V> matrix(V...);
  vec<T, R> &operator[](int);
  const vec<T, R> &operator[](int) const;
};
typedef matrix<float, 4, 4> float4x4;
typedef matrix<half, 4, 4> half4x4;
typedef matrix<float, 2, 4> float2x4;
typedef matrix<half, 2, 4> half2x4;
template <class To, class From> To as_type(From);
half operator""h(long double);
half operator""h(unsigned long long);
bfloat operator"" bf(long double);
namespace metal {
template <class A, class B> struct is_same {
  static constexpr bool value = false;
};
template <class A> struct is_same<A, A> {
  static constexpr bool value = true;
};
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class X, class Y> struct conditional {
  typedef X type;
};
template <class X, class Y> struct conditional<false, X, Y> {
  typedef Y type;
};
template <bool B, class X, class Y> using conditional_t = typename conditional<B, X, Y>::type;
template <class T> struct numeric_limits {
  static constexpr T max() { return T(); }
  static constexpr T lowest() { return T(); }
  static constexpr T min() { return T(); }
  static constexpr T infinity() { return T(); }
  static constexpr T epsilon() { return T(); }
};
#define EMU_1(n) template <class T> T n(T);
#define EMU_2(n) template <class A, class B> auto n(A a, B b) -> decltype(a + b);
#define EMU_3(n) template <class A, class B, class C> auto n(A a, B b, C c) -> decltype(a + b);
EMU_1(exp)
EMU_1(exp2)
EMU_1(exp10) EMU_1(log) EMU_1(log2) EMU_1(log10) EMU_1(sin) EMU_1(cos) EMU_1(tan) EMU_1(sinpi) EMU_1(cospi) EMU_1(asin)
    EMU_1(acos) EMU_1(atan) EMU_1(sinh) EMU_1(cosh) EMU_1(tanh) EMU_1(sqrt) EMU_1(rsqrt) EMU_1(floor) EMU_1(ceil)
        EMU_1(trunc) EMU_1(round) EMU_1(rint) EMU_1(fabs) EMU_1(fract) EMU_1(sign) EMU_1(saturate) EMU_1(abs)
            EMU_1(normalize) EMU_1(popcount) EMU_1(clz) EMU_1(ctz) EMU_1(reverse_bits) EMU_2(pow) EMU_2(powr)
                EMU_2(atan2) EMU_2(fmod) EMU_2(fmax) EMU_2(fmin) EMU_2(copysign) EMU_2(step) EMU_2(divide) EMU_2(fdim)
                    EMU_2(max) EMU_2(min) EMU_2(absdiff) EMU_2(rotate) EMU_2(mulhi) EMU_2(ldexp) EMU_3(fma) EMU_3(mad)
                        EMU_3(clamp) EMU_3(mix) EMU_3(select) EMU_3(max3) EMU_3(min3)
                            EMU_3(extract_bits) template <class V>
                            auto dot(V a, V b) -> decltype(a[0] + a[0]);
template <class V> auto length(V a) -> decltype(a[0] + a[0]);
template <class V> auto length_squared(V a) -> decltype(a[0] + a[0]);
template <class T> bool isnan(T);
template <class T> bool isinf(T);
template <class T> bool isfinite(T);
template <class T> bool signbit(T);
template <class T> bool any(T);
template <class T> bool all(T);
float sincos(float, float &);
float modf(float, float &);
float frexp(float, int &);
float4 unpack_unorm4x8_to_float(uint);
namespace precise {
using namespace ::msl::metal;
}
namespace fast {
using namespace ::msl::metal;
}
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
#define EMU_S(n) template <class T, class... R> T n(T, R...);
EMU_S(simd_sum)
EMU_S(simd_product)
EMU_S(simd_max) EMU_S(simd_min) EMU_S(simd_and) EMU_S(simd_or) EMU_S(simd_xor) EMU_S(quad_sum) EMU_S(quad_product)
    EMU_S(quad_max) EMU_S(quad_min) EMU_S(simd_shuffle) EMU_S(simd_broadcast) EMU_S(simd_shuffle_xor)
        EMU_S(simd_shuffle_rotate_down) EMU_S(simd_shuffle_rotate_up) EMU_S(simd_shuffle_down) EMU_S(simd_shuffle_up)
            EMU_S(simd_shuffle_and_fill_down) EMU_S(simd_broadcast_first) EMU_S(simd_prefix_inclusive_sum)
                EMU_S(simd_prefix_exclusive_sum) EMU_S(quad_broadcast) EMU_S(quad_shuffle)
                    EMU_S(quad_shuffle_xor) bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();
struct simd_vote {
  explicit operator ulong() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
template <class T, int R, int C> struct simdgroup_matrix {
  simdgroup_matrix();
  explicit simdgroup_matrix(T);
  vec<T, 2> &thread_elements();
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int R, int C = R> simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
template <class T>
void simdgroup_load(simdgroup_matrix<T, 8, 8> &, EMU_DEVICE const T *, ulong = 8, ulong2 = ulong2(), bool = false);
template <class T>
void simdgroup_load(simdgroup_matrix<T, 8, 8> &, EMU_THREADGROUP const T *, ulong = 8, ulong2 = ulong2(), bool = false);
template <class T>
void simdgroup_store(simdgroup_matrix<T, 8, 8>, EMU_DEVICE T *, ulong = 8, ulong2 = ulong2(), bool = false);
template <class T>
void simdgroup_store(simdgroup_matrix<T, 8, 8>, EMU_THREADGROUP T *, ulong = 8, ulong2 = ulong2(), bool = false);
template <class D, class A, class B, class C> void simdgroup_multiply_accumulate(D &, const A &, const B &, const C &);
template <class D, class A, class B> void simdgroup_multiply(D &, const A &, const B &);
enum memory_order { memory_order_relaxed = 0 };
template <class T> struct atomic {
  T v;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;
typedef atomic<bool> atomic_bool;
#define EMU_AT(n) \
  template <class T, class V> T atomic_##n##_explicit(EMU_DEVICE volatile atomic<T> *, V, memory_order); \
  template <class T, class V> T atomic_##n##_explicit(EMU_THREADGROUP volatile atomic<T> *, V, memory_order);
EMU_AT(fetch_add)
EMU_AT(fetch_sub)
EMU_AT(fetch_max) EMU_AT(fetch_min) EMU_AT(fetch_and) EMU_AT(fetch_or) EMU_AT(fetch_xor) EMU_AT(exchange)
    EMU_AT(store) template <class T>
    T atomic_load_explicit(EMU_DEVICE const volatile atomic<T> *, memory_order);
template <class T> T atomic_load_explicit(EMU_THREADGROUP const volatile atomic<T> *, memory_order);
template <class T, class V>
bool atomic_compare_exchange_weak_explicit(EMU_DEVICE volatile atomic<T> *, T *, V, memory_order, memory_order);
template <class T, class V>
bool atomic_compare_exchange_weak_explicit(EMU_THREADGROUP volatile atomic<T> *, T *, V, memory_order, memory_order);
template <class T, unsigned I> struct emu_fc {
  constexpr emu_fc() {}
  operator T() const;
};
template <class T, unsigned I> bool is_function_constant_defined(const emu_fc<T, I> &);
}
}
#define EMU_TG(site, name, dims, ...) \
  typedef __VA_ARGS__ emu_tg_##site dims; \
  EMU_THREADGROUP emu_tg_##site &name = *(EMU_THREADGROUP emu_tg_##site *)0
#define device EMU_DEVICE
#define constant EMU_CONSTANT
#define threadgroup EMU_THREADGROUP
#define thread
#define kernel
#define METAL_FUNC inline
#define float2(...) ::msl::emu_make<float, 2>(__VA_ARGS__)
#define float3(...) ::msl::emu_make<float, 3>(__VA_ARGS__)
#define float4(...) ::msl::emu_make<float, 4>(__VA_ARGS__)
#define half2(...) ::msl::emu_make<::msl::half, 2>(__VA_ARGS__)
#define half4(...) ::msl::emu_make<::msl::half, 4>(__VA_ARGS__)
#define bfloat4(...) ::msl::emu_make<::msl::bfloat, 4>(__VA_ARGS__)
#define uint2(...) ::msl::emu_make<unsigned, 2>(__VA_ARGS__)
#define uint3(...) ::msl::emu_make<unsigned, 3>(__VA_ARGS__)
#define uint4(...) ::msl::emu_make<unsigned, 4>(__VA_ARGS__)
#define int2(...) ::msl::emu_make<int, 2>(__VA_ARGS__)
#define int4(...) ::msl::emu_make<int, 4>(__VA_ARGS__)
#define ushort2(...) ::msl::emu_make<unsigned short, 2>(__VA_ARGS__)
#define ushort4(...) ::msl::emu_make<unsigned short, 4>(__VA_ARGS__)
#define ulong2(...) ::msl::emu_make<unsigned long, 2>(__VA_ARGS__)
