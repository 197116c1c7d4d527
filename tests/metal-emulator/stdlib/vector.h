// vec<T, N>, its operators, packed vectors. EMU_SWIZZLES_N comes from src/swizzle.rs. Included inside namespace msl.
template <class T, int N> struct vec;
template <class T> struct emu_same {
  typedef T type;
};
template <class T> using emu_same_t = typename emu_same<T>::type;
#ifdef EMU_CHECKED  // a copy that is no plain memory copy: the compiler then checks the address against the type
#define EMU_VEC_COPY \
  EMU_INLINE vec(const vec &o) { __builtin_memcpy(emu_e, o.emu_e, sizeof emu_e); } \
  EMU_INLINE vec &operator=(const vec &o) { \
    __builtin_memcpy(emu_e, o.emu_e, sizeof emu_e); \
    return *this; \
  }
#else
#define EMU_VEC_COPY
#endif
#define EMU_VEC_COMMON(N) \
  typedef T scalar; \
  vec() = default; \
  EMU_VEC_COPY \
  constexpr EMU_INLINE T &operator[](int i) { return emu_e[i]; } \
  constexpr EMU_INLINE const T &operator[](int i) const { return emu_e[i]; } \
  constexpr EMU_INLINE vec(T s) : emu_e{} { \
    for (int i = 0; i < N; i++) emu_e[i] = s; \
  } \
  template <class U> constexpr EMU_INLINE explicit vec(U s) : emu_e{} { \
    for (int i = 0; i < N; i++) emu_e[i] = static_cast<T>(s); \
  } \
  template <class U> constexpr EMU_INLINE explicit vec(const vec<U, N> &o) : emu_e{} { \
    for (int i = 0; i < N; i++) emu_e[i] = static_cast<T>(o[i]); \
  } \
  template <class A, class B, class... R> constexpr EMU_INLINE vec(A a, B b, R... r) : emu_e{} { \
    int i = 0; \
    put_(i, a); \
    put_(i, b); \
    (put_(i, r), ...); \
  } \
\
 private: \
  template <class U, int M> constexpr EMU_INLINE void put_(int &i, const vec<U, M> &v) { \
    for (int k = 0; k < M; k++) emu_e[i++] = static_cast<T>(v[k]); \
  } \
  template <class U> constexpr EMU_INLINE void put_(int &i, U v) { emu_e[i++] = static_cast<T>(v); } \
\
 public: \
  EMU_SWIZZLES_##N
template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    T emu_e[2];
    struct {
      T x, y;
    };
  };
  EMU_VEC_COMMON(2)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    T emu_e[3];
    struct {
      T x, y, z;
    };
  };
  EMU_VEC_COMMON(3)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    T emu_e[4];
    struct {
      T x, y, z, w;
    };
  };
  EMU_VEC_COMMON(4)
};
#define EMU_VT(t) \
  typedef vec<t, 2> t##2; \
  typedef vec<t, 3> t##3; \
  typedef vec<t, 4> t##4;
EMU_VT(bool)
EMU_VT(char)
EMU_VT(uchar) EMU_VT(short) EMU_VT(ushort) EMU_VT(int) EMU_VT(uint) EMU_VT(long) EMU_VT(ulong) EMU_VT(half)
    EMU_VT(float) EMU_VT(bfloat)
#undef EMU_VT
#define EMU_BIN(op) \
  template <class T, int N> EMU_INLINE vec<T, N> operator op(vec<T, N> a, vec<T, N> b) { \
    for (int i = 0; i < N; i++) a[i] = a[i] op b[i]; \
    return a; \
  } \
  template <class T, int N> EMU_INLINE vec<T, N> operator op(vec<T, N> a, emu_same_t<T> b) { \
    for (int i = 0; i < N; i++) a[i] = a[i] op b; \
    return a; \
  } \
  template <class T, int N> EMU_INLINE vec<T, N> operator op(emu_same_t<T> a, vec<T, N> b) { \
    for (int i = 0; i < N; i++) b[i] = a op b[i]; \
    return b; \
  } \
  template <class T, int N> EMU_INLINE vec<T, N> &operator op##=(vec<T, N> &a, vec<T, N> b) { \
    a = a op b; \
    return a; \
  } \
  template <class T, int N> EMU_INLINE vec<T, N> &operator op##=(vec<T, N> &a, emu_same_t<T> b) { \
    a = a op b; \
    return a; \
  }
        EMU_BIN(+) EMU_BIN(-) EMU_BIN(*) EMU_BIN(/) EMU_BIN(%) EMU_BIN(&) EMU_BIN(|) EMU_BIN(^) EMU_BIN(<<) EMU_BIN(>>)
#undef EMU_BIN
#define EMU_CMP(op) \
  template <class T, int N> EMU_INLINE vec<bool, N> operator op(vec<T, N> a, vec<T, N> b) { \
    vec<bool, N> r; \
    for (int i = 0; i < N; i++) r[i] = a[i] op b[i]; \
    return r; \
  } \
  template <class T, int N> EMU_INLINE vec<bool, N> operator op(vec<T, N> a, emu_same_t<T> b) { \
    vec<bool, N> r; \
    for (int i = 0; i < N; i++) r[i] = a[i] op b; \
    return r; \
  } \
  template <class T, int N> EMU_INLINE vec<bool, N> operator op(emu_same_t<T> a, vec<T, N> b) { \
    vec<bool, N> r; \
    for (int i = 0; i < N; i++) r[i] = a op b[i]; \
    return r; \
  }
            EMU_CMP(<) EMU_CMP(<=) EMU_CMP(>) EMU_CMP(>=) EMU_CMP(==) EMU_CMP(!=)
#undef EMU_CMP
                template <class T, int N>
                EMU_INLINE vec<T, N> operator-(vec<T, N> a) {
  for (int i = 0; i < N; i++) a[i] = -a[i];
  return a;
}
template <class T, int N> EMU_INLINE vec<T, N> operator~(vec<T, N> a) {
  for (int i = 0; i < N; i++) a[i] = ~a[i];
  return a;
}
template <int N> EMU_INLINE vec<bool, N> operator!(vec<bool, N> a) {
  for (int i = 0; i < N; i++) a[i] = !a[i];
  return a;
}
template <int N> EMU_INLINE vec<bool, N> operator&&(vec<bool, N> a, vec<bool, N> b) {
  for (int i = 0; i < N; i++) a[i] = a[i] & b[i];
  return a;
}
template <int N> EMU_INLINE vec<bool, N> operator||(vec<bool, N> a, vec<bool, N> b) {
  for (int i = 0; i < N; i++) a[i] = a[i] | b[i];
  return a;
}

template <class T, int N> struct packed_vec;
#define EMU_PACKED_COMMON(N) \
  packed_vec() = default; \
  EMU_INLINE packed_vec(vec<T, N> o) { \
    for (int i = 0; i < N; i++) v[i] = o[i]; \
  } \
  template <class A, class B, class... R> \
  EMU_INLINE packed_vec(A a, B b, R... r) : packed_vec(vec<T, N>(a, b, r...)) {} \
  EMU_INLINE operator vec<T, N>() const { \
    vec<T, N> r; \
    for (int i = 0; i < N; i++) r[i] = v[i]; \
    return r; \
  } \
  EMU_INLINE T &operator[](int i) { return v[i]; } \
  EMU_INLINE const T &operator[](int i) const { return v[i]; }
template <class T> struct packed_vec<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
  };
  EMU_PACKED_COMMON(2)
};
template <class T> struct packed_vec<T, 3> {
  union {
    T v[3];
    struct {
      T x, y, z;
    };
  };
  EMU_PACKED_COMMON(3)
};
template <class T> struct packed_vec<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
  };
  EMU_PACKED_COMMON(4)
};
#undef EMU_PACKED_COMMON
#define EMU_PT(t) \
  typedef packed_vec<t, 2> packed_##t##2; \
  typedef packed_vec<t, 3> packed_##t##3; \
  typedef packed_vec<t, 4> packed_##t##4;
EMU_PT(char)
EMU_PT(uchar)
EMU_PT(short) EMU_PT(ushort) EMU_PT(int) EMU_PT(uint) EMU_PT(half) EMU_PT(float) EMU_PT(bfloat)
#undef EMU_PT

    // matrix<T, C, R>: C columns of R elements.
    template <class T, int C, int R>
    struct matrix {
  vec<T, R> columns[C];
  matrix() = default;
  EMU_INLINE explicit matrix(T diagonal) {
    for (int c = 0; c < C; c++)
      for (int r = 0; r < R; r++) columns[c][r] = c == r ? diagonal : T(0);
  }
  template <class... V> EMU_INLINE matrix(vec<T, R> first, V... rest) : columns{first, vec<T, R>(rest)...} {}
  EMU_INLINE vec<T, R> &operator[](int c) { return columns[c]; }
  EMU_INLINE const vec<T, R> &operator[](int c) const { return columns[c]; }
};
template <class T, int C, int R> EMU_INLINE vec<T, R> operator*(const matrix<T, C, R> &m, vec<T, C> v) {
  vec<T, R> s = m[0] * v[0];
  for (int c = 1; c < C; c++) s = s + m[c] * v[c];
  return s;
}
template <class T, int C, int R> EMU_INLINE matrix<T, C, R> operator*(matrix<T, C, R> m, emu_same_t<T> s) {
  for (int c = 0; c < C; c++) m[c] = m[c] * s;
  return m;
}
#define EMU_MT(t) \
  typedef matrix<t, 2, 2> t##2x2; \
  typedef matrix<t, 2, 4> t##2x4; \
  typedef matrix<t, 3, 3> t##3x3; \
  typedef matrix<t, 4, 2> t##4x2; \
  typedef matrix<t, 4, 4> t##4x4;
EMU_MT(float) EMU_MT(half)
#undef EMU_MT
