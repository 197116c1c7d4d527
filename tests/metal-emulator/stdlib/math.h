// Type traits, limits, math, integer and relational functions. Included inside namespace msl::metal.
using ::msl::as_type;
using ::msl::bfloat;
using ::msl::half;
using ::msl::matrix;
using ::msl::packed_vec;
using ::msl::uchar;
using ::msl::uint;
using ::msl::ulong;
using ::msl::ushort;
using ::msl::vec;
template <class T, T V> struct integral_constant {
  static constexpr T value = V;
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
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
template <class T> struct is_integral : integral_constant<bool, emu_int<T>::v> {};
template <class T> constexpr bool is_integral_v = is_integral<T>::value;
template <class T>
struct is_floating_point : integral_constant<bool, is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>> {
};
template <class T> constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T> struct remove_reference {
  typedef T type;
};
template <class T> struct remove_reference<T &> {
  typedef T type;
};
template <class T> struct remove_const {
  typedef T type;
};
template <class T> struct remove_const<const T> {
  typedef T type;
};
template <class T> struct remove_cv : remove_const<T> {};
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> struct vec_elements {
  static constexpr int value = 1;
};
template <class T, int N> struct vec_elements<vec<T, N>> {
  static constexpr int value = N;
};

template <class T> struct numeric_limits {
  static constexpr T max() { return T(-1) > T(0) ? T(-1) : T((1ull << (8 * sizeof(T) - 1)) - 1); }
  static constexpr T lowest() { return T(-1) > T(0) ? T(0) : T(-max() - 1); }
  static constexpr T min() { return lowest(); }
};
template <> struct numeric_limits<float> {
  static constexpr float max() { return __FLT_MAX__; }
  static constexpr float lowest() { return -__FLT_MAX__; }
  static constexpr float min() { return __FLT_MIN__; }
  static constexpr float infinity() { return __builtin_inff(); }
  static constexpr float epsilon() { return __FLT_EPSILON__; }
  static constexpr float quiet_NaN() { return __builtin_nanf(""); }
};
template <> struct numeric_limits<half> {
  static constexpr half max() { return half(65504.0f); }
  static constexpr half lowest() { return half(-65504.0f); }
  static constexpr half min() { return half(6.103515625e-5f); }
  static constexpr half infinity() { return half(__builtin_inff()); }
  static constexpr half epsilon() { return half(9.765625e-4f); }
};
template <> struct numeric_limits<bfloat> {
  static constexpr bfloat max() { return bfloat(3.3895313892515355e38f); }
  static constexpr bfloat lowest() { return bfloat(-3.3895313892515355e38f); }
  static constexpr bfloat min() { return bfloat(__FLT_MIN__); }
  static constexpr bfloat infinity() { return bfloat(__builtin_inff()); }
  static constexpr bfloat epsilon() { return bfloat(7.8125e-3f); }
};

// ---- floating point: float and half; vectors map. A bfloat argument becomes float and the result must be cast back,
// as in MSL ----
#define EMU_F1(name, expr) \
  EMU_INLINE float name(float x) { return expr; } \
  EMU_INLINE half name(half h) { \
    float x = float(h); \
    return half(expr); \
  } \
  EMU_INLINE float name(bfloat b) { return name(float(b)); } \
  template <class T, int N> EMU_INLINE vec<T, N> name(vec<T, N> v) { \
    for (int i = 0; i < N; i++) v[i] = T(name(v[i])); \
    return v; \
  }
EMU_F1(exp, __builtin_expf(x))
EMU_F1(exp2, __builtin_exp2f(x))
EMU_F1(exp10, __builtin_powf(10.0f, x)) EMU_F1(log, __builtin_logf(x)) EMU_F1(log2, __builtin_log2f(x))
    EMU_F1(log10, __builtin_log10f(x)) EMU_F1(sin, __builtin_sinf(x)) EMU_F1(cos, __builtin_cosf(x))
        EMU_F1(tan, __builtin_tanf(x)) EMU_F1(sinpi, __builtin_sinf(3.14159265358979323846f * x))
            EMU_F1(cospi, __builtin_cosf(3.14159265358979323846f * x)) EMU_F1(asin, __builtin_asinf(x))
                EMU_F1(acos, __builtin_acosf(x)) EMU_F1(atan, __builtin_atanf(x)) EMU_F1(sinh, __builtin_sinhf(x))
                    EMU_F1(cosh, __builtin_coshf(x)) EMU_F1(tanh, __builtin_tanhf(x)) EMU_F1(sqrt, __builtin_sqrtf(x))
                        EMU_F1(rsqrt, (1.0f / __builtin_sqrtf(x))) EMU_F1(floor, __builtin_floorf(x))
                            EMU_F1(ceil, __builtin_ceilf(x)) EMU_F1(trunc, __builtin_truncf(x))
                                EMU_F1(round, __builtin_roundf(x)) EMU_F1(rint, __builtin_rintf(x))
                                    EMU_F1(fabs, __builtin_fabsf(x)) EMU_F1(fract, (x - __builtin_floorf(x)))
                                        EMU_F1(sign, (x > 0   ? 1.0f
                                                      : x < 0 ? -1.0f
                                                              : 0.0f)) EMU_F1(saturate, (x < 0   ? 0.0f
                                                                                         : x > 1 ? 1.0f
                                                                                                 : x))
#undef EMU_F1
#define EMU_F2(name, expr) \
  EMU_INLINE float name(float x, float y) { return expr; } \
  EMU_INLINE half name(half a, half b) { \
    float x = float(a), y = float(b); \
    return half(expr); \
  } \
  EMU_INLINE float name(bfloat a, bfloat b) { return name(float(a), float(b)); } \
  template <class T, int N> EMU_INLINE vec<T, N> name(vec<T, N> a, vec<T, N> b) { \
    for (int i = 0; i < N; i++) a[i] = T(name(a[i], b[i])); \
    return a; \
  }
                                            EMU_F2(pow, __builtin_powf(x, y)) EMU_F2(powr, __builtin_powf(x, y))
                                                EMU_F2(atan2, __builtin_atan2f(x, y))
                                                    EMU_F2(fmod, __builtin_fmodf(x, y))
                                                        EMU_F2(fmax, __builtin_fmaxf(x, y))
                                                            EMU_F2(fmin, __builtin_fminf(x, y))
                                                                EMU_F2(copysign, __builtin_copysignf(x, y))
                                                                    EMU_F2(step, (y < x ? 0.0f : 1.0f))
                                                                        EMU_F2(divide, (x / y))
                                                                            EMU_F2(fdim, (x > y ? x - y : 0.0f))
#undef EMU_F2
                                                                                EMU_INLINE
    float fma(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
EMU_INLINE half fma(half a, half b, half c) { return half(__builtin_fma(double(a), double(b), double(c))); }
EMU_INLINE bfloat fma(bfloat a, bfloat b, bfloat c) { return bfloat(__builtin_fmaf(float(a), float(b), float(c))); }
template <class T, int N> EMU_INLINE vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (int i = 0; i < N; i++) a[i] = fma(a[i], b[i], c[i]);
  return a;
}
template <class T> EMU_INLINE T mad(T a, T b, T c) { return fma(a, b, c); }
EMU_INLINE float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
EMU_INLINE float frexp(float x, int &e) { return __builtin_frexpf(x, &e); }
EMU_INLINE float modf(float x, float &whole) {
  whole = __builtin_truncf(x);
  return x - whole;
}
EMU_INLINE float sincos(float x, float &c) {
  c = __builtin_cosf(x);
  return __builtin_sinf(x);
}
EMU_INLINE float nextafter(float x, float y) { return __builtin_nextafterf(x, y); }
#define EMU_C1(name, expr) \
  EMU_INLINE bool name(float x) { return expr; } \
  template <class T, int N> EMU_INLINE vec<bool, N> name(vec<T, N> v) { \
    vec<bool, N> r; \
    for (int i = 0; i < N; i++) r[i] = name(v[i]); \
    return r; \
  }
EMU_C1(isnan, (x != x))
EMU_C1(isinf, (__builtin_fabsf(x) == __builtin_inff()))
EMU_C1(isfinite, (__builtin_fabsf(x) < __builtin_inff())) EMU_C1(signbit, (__builtin_bit_cast(int, x) < 0))
#undef EMU_C1

// ---- min, max, clamp, abs, select ----
#define EMU_MM(t) \
  constexpr EMU_INLINE t max(t a, t b) { return a < b ? b : a; } \
  constexpr EMU_INLINE t min(t a, t b) { return b < a ? b : a; } \
  constexpr EMU_INLINE t clamp(t x, t lo, t hi) { return x < lo ? lo : hi < x ? hi : x; }
    EMU_MM(char) EMU_MM(uchar) EMU_MM(short) EMU_MM(ushort) EMU_MM(int) EMU_MM(uint) EMU_MM(long) EMU_MM(ulong)
        EMU_MM(bfloat)
#undef EMU_MM
            EMU_INLINE float max(float a, float b) {
  return __builtin_fmaxf(a, b);
}
EMU_INLINE float min(float a, float b) { return __builtin_fminf(a, b); }
EMU_INLINE float clamp(float x, float lo, float hi) { return min(max(x, lo), hi); }
EMU_INLINE half max(half a, half b) { return half(__builtin_fmaxf(float(a), float(b))); }
EMU_INLINE half min(half a, half b) { return half(__builtin_fminf(float(a), float(b))); }
EMU_INLINE half clamp(half x, half lo, half hi) { return min(max(x, lo), hi); }
#define EMU_V2(name) \
  template <class T, int N> EMU_INLINE vec<T, N> name(vec<T, N> a, vec<T, N> b) { \
    for (int i = 0; i < N; i++) a[i] = name(a[i], b[i]); \
    return a; \
  } \
  template <class T, int N> EMU_INLINE vec<T, N> name(vec<T, N> a, emu_same_t<T> b) { \
    for (int i = 0; i < N; i++) a[i] = name(a[i], b); \
    return a; \
  }
EMU_V2(max)
EMU_V2(min)
#undef EMU_V2
template <class T, int N> EMU_INLINE vec<T, N> clamp(vec<T, N> a, vec<T, N> l, vec<T, N> h) {
  return min(max(a, l), h);
}
template <class T, int N> EMU_INLINE vec<T, N> clamp(vec<T, N> a, emu_same_t<T> l, emu_same_t<T> h) {
  return min(max(a, l), h);
}
template <class T> EMU_INLINE T max3(T a, T b, T c) { return max(max(a, b), c); }
template <class T> EMU_INLINE T min3(T a, T b, T c) { return min(min(a, b), c); }
EMU_INLINE uint abs(int x) { return x < 0 ? 0u - uint(x) : uint(x); }
EMU_INLINE float abs(float x) { return __builtin_fabsf(x); }
EMU_INLINE half abs(half x) { return half(__builtin_fabsf(float(x))); }
EMU_INLINE bfloat abs(bfloat x) {
  x.bits &= 0x7fff;
  return x;
}
template <class T, int N> EMU_INLINE vec<T, N> abs(vec<T, N> a) {
  for (int i = 0; i < N; i++) a[i] = T(abs(a[i]));
  return a;
}
EMU_INLINE uint absdiff(uint a, uint b) { return a < b ? b - a : a - b; }
EMU_INLINE float mix(float a, float b, float t) { return a + (b - a) * t; }
template <class T, int N> EMU_INLINE vec<T, N> mix(vec<T, N> a, vec<T, N> b, vec<T, N> t) { return a + (b - a) * t; }
template <class T, int N> EMU_INLINE vec<T, N> mix(vec<T, N> a, vec<T, N> b, emu_same_t<T> t) {
  return a + (b - a) * t;
}
template <class T> EMU_INLINE T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> EMU_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  for (int i = 0; i < N; i++) a[i] = c[i] ? b[i] : a[i];
  return a;
}
template <class T, int N> EMU_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T s = a[0] * b[0];
  for (int i = 1; i < N; i++) s = s + a[i] * b[i];
  return s;
}
template <class T, int N> EMU_INLINE T length_squared(vec<T, N> a) { return dot(a, a); }
template <class T, int N> EMU_INLINE T length(vec<T, N> a) { return sqrt(dot(a, a)); }
template <class T, int N> EMU_INLINE vec<T, N> normalize(vec<T, N> a) { return a * rsqrt(dot(a, a)); }
template <int N> EMU_INLINE bool any(vec<bool, N> a) {
  bool r = false;
  for (int i = 0; i < N; i++) r |= a[i];
  return r;
}
template <int N> EMU_INLINE bool all(vec<bool, N> a) {
  bool r = true;
  for (int i = 0; i < N; i++) r &= a[i];
  return r;
}
EMU_INLINE bool any(bool a) { return a; }
EMU_INLINE bool all(bool a) { return a; }

// ---- integers ----
EMU_INLINE uint popcount(uint x) { return uint(__builtin_popcount(x)); }
EMU_INLINE ulong popcount(ulong x) { return ulong(__builtin_popcountl(x)); }
EMU_INLINE uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32u; }
EMU_INLINE uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32u; }
EMU_INLINE uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
EMU_INLINE uint rotate(uint x, uint n) {
  n &= 31;
  return n ? (x << n) | (x >> (32 - n)) : x;
}
EMU_INLINE uint extract_bits(uint x, uint off, uint n) {
  return n == 0 ? 0 : (x >> off) & (n == 32 ? ~0u : (1u << n) - 1);
}
EMU_INLINE int extract_bits(int x, uint off, uint n) { return n == 0 ? 0 : int(uint(x) << (32 - n - off)) >> (32 - n); }
EMU_INLINE uint insert_bits(uint base, uint v, uint off, uint n) {
  uint m = (n == 32 ? ~0u : (1u << n) - 1) << off;
  return (base & ~m) | ((v << off) & m);
}
EMU_INLINE uint mulhi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
EMU_INLINE int mulhi(int a, int b) { return int((long(a) * b) >> 32); }
EMU_INLINE float4 unpack_unorm4x8_to_float(uint v) {
  return float4(float(v & 255), float((v >> 8) & 255), float((v >> 16) & 255), float(v >> 24)) / 255.0f;
}
namespace precise {
using namespace ::msl::metal;
}
namespace fast {
using namespace ::msl::metal;
}
