// Scalar types. Included inside namespace msl.
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef half float16_t;

template <bool B> struct emu_ok {};
template <> struct emu_ok<true> {
  typedef int t;
};
template <class A, class B> struct emu_is {
  static constexpr bool v = false;
};
template <class A> struct emu_is<A, A> {
  static constexpr bool v = true;
};
template <class T> struct emu_int {
  static constexpr bool v = false;
};
#define EMU_I(t) \
  template <> struct emu_int<t> { \
    static constexpr bool v = true; \
  };
EMU_I(bool)
EMU_I(char)
EMU_I(signed char) EMU_I(uchar) EMU_I(short) EMU_I(ushort) EMU_I(int) EMU_I(uint) EMU_I(long) EMU_I(ulong)
    EMU_I(long long) EMU_I(unsigned long long)
#undef EMU_I
        template <class T>
        using emu_if_int = typename emu_ok<emu_int<T>::v>::t;
template <class T> using emu_if_half = typename emu_ok<emu_is<T, half>::v>::t;

// bfloat as Apple's compiler has it (Metal Shading Language specification, 2.1): it converts implicitly only to a type
// of greater rank. So bfloat to float is implicit, and float to bfloat, half to bfloat and bfloat to half are not.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  static constexpr EMU_INLINE uint16_t nearest(float f) {
    uint32_t u = __builtin_bit_cast(uint32_t, f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  constexpr EMU_INLINE explicit bfloat(float f) : bits(nearest(f)) {}
  constexpr EMU_INLINE explicit bfloat(half f) : bits(nearest(float(f))) {}
  template <class I, emu_if_int<I> = 0> constexpr EMU_INLINE bfloat(I f) : bits(nearest(float(f))) {}
  constexpr EMU_INLINE operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
  constexpr EMU_INLINE explicit operator half() const { return half(float(*this)); }
  template <class H, emu_if_half<H> = 0> operator H() const = delete;  // implicit: an error here as there
  constexpr EMU_INLINE bfloat operator-() const {
    bfloat r = *this;
    r.bits ^= 0x8000;
    return r;
  }
#define EMU_BF(op) \
  friend constexpr EMU_INLINE bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); } \
  template <class I, emu_if_int<I> = 0> friend constexpr EMU_INLINE bfloat operator op(bfloat a, I b) { \
    return a op bfloat(b); \
  } \
  template <class I, emu_if_int<I> = 0> friend constexpr EMU_INLINE bfloat operator op(I a, bfloat b) { \
    return bfloat(a) op b; \
  } \
  template <class H, emu_if_half<H> = 0> friend bfloat operator op(bfloat a, H b) = delete; \
  template <class H, emu_if_half<H> = 0> friend bfloat operator op(H a, bfloat b) = delete; \
  EMU_INLINE bfloat &operator op##=(bfloat b) { \
    *this = *this op b; \
    return *this; \
  }
  EMU_BF(+) EMU_BF(-) EMU_BF(*) EMU_BF(/)
#undef EMU_BF
};
typedef bfloat bfloat16_t;

template <class To, class From> constexpr EMU_INLINE To as_type(const From &f) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the two types differ in size");
  if constexpr (__is_trivially_copyable(To) && __is_trivially_copyable(From)) {
    return __builtin_bit_cast(To, f);
  } else {
    To t;
    __builtin_memcpy((void *)&t, (const void *)&f, sizeof t);
    return t;
  }
}
constexpr EMU_INLINE half operator""h(long double v) { return half(v); }
constexpr EMU_INLINE half operator""h(unsigned long long v) { return half(v); }
constexpr EMU_INLINE bfloat operator"" bf(long double v) { return bfloat(float(v)); }
