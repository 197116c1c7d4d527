// Barriers and the operations of a simdgroup (32 lanes) and a quadgroup. Included inside namespace msl::metal.
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
EMU_INLINE mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
EMU_INLINE void threadgroup_barrier(mem_flags f, EMU_HERE) { emu_barrier(uint(f), 0, at_); }
EMU_INLINE void simdgroup_barrier(mem_flags f, EMU_HERE) { emu_barrier(uint(f), 1, at_); }

// A collective operation: each lane leaves its value and waits for the others (told apart by source position).
template <class T> struct emu_lanes {
  emu_bank *bank;
  uint active, lane;
  EMU_INLINE bool on(uint i) const { return i < 32 && (active >> i & 1); }
  EMU_NOSAN T at(uint i) const {
    T v;
    __builtin_memcpy(&v, bank->data + i * sizeof(T), sizeof v);
    return v;
  }
};
template <class T> EMU_NOSAN inline emu_lanes<T> emu_gather(T x, const char *op, emu_site at) {
  static_assert(sizeof(T) <= 32, "simd operations take values of at most 32 bytes");
  emu_thread *t = emu_self();
  __builtin_memcpy(t->bank->data + t->lane * sizeof(T), &x, sizeof x);
  uint active = emu_simd_wait(op, at);
  return {t->settled, active, t->lane};
}
template <class T> EMU_NOSAN inline T emu_pick(const emu_lanes<T> &l, uint from, const char *text, emu_site at) {
  if (!l.on(from)) emu_fail(EMU_F_INACTIVE, text, at);
  return l.at(from);
}
// Pairwise tree over lanes base .. base + width - 1, whose inactive lanes take no part. v is used up.
template <class T, class F> EMU_NOSAN inline T emu_tree(T *v, uint active, uint width, F f) {
  if (active == 0xffffffffu && width == 32) {
    for (uint off = 16; off; off /= 2)
      for (uint i = 0; i < off; i++) v[i] = f(v[i], v[i + off]);
    return v[0];
  }
  for (uint off = width / 2; off; off /= 2)
    for (uint i = 0; i < off; i++) {
      bool a = active >> i & 1, b = active >> (i + off) & 1;
      if (a && b)
        v[i] = f(v[i], v[i + off]);
      else if (b) {
        v[i] = v[i + off];
        active |= 1u << i;
      }
    }
  return v[0];
}
// The first lane to go on works for all.
template <class T, class F> EMU_NOSAN inline T emu_reduce(T x, const char *op, emu_site at, F f) {
  emu_lanes<T> l = emu_gather(x, op, at);
  if (!l.bank->ready) {
    T v[32];
    __builtin_memcpy(v, l.bank->data, sizeof v);
    T r = emu_tree(v, l.active, 32, f);
    __builtin_memcpy(l.bank->result, &r, sizeof r);
    l.bank->ready = 1;
  }
  T r;
  __builtin_memcpy(&r, l.bank->result, sizeof r);
  return r;
}
template <class T, class F> EMU_NOSAN inline T emu_quad_reduce(T x, const char *op, emu_site at, F f) {
  emu_lanes<T> l = emu_gather(x, op, at);
  T v[4];
  uint base = l.lane & ~3u;
  for (uint i = 0; i < 4; i++) v[i] = l.at(base + i);
  return emu_tree(v, l.active >> base & 15, 4, f);
}
#define EMU_REDUCTION(name, expr) \
  template <class T> EMU_INLINE T simd_##name(T x, EMU_HERE) { \
    return emu_reduce(x, "simd_" #name, at_, [](T a, T b) EMU_NOSAN { return T(expr); }); \
  } \
  template <class T> EMU_INLINE T quad_##name(T x, EMU_HERE) { \
    return emu_quad_reduce(x, "quad_" #name, at_, [](T a, T b) EMU_NOSAN { return T(expr); }); \
  }
EMU_REDUCTION(sum, a + b)
EMU_REDUCTION(product, a *b)
EMU_REDUCTION(max, max(a, b)) EMU_REDUCTION(min, min(a, b)) EMU_REDUCTION(and, a &b) EMU_REDUCTION(or, a | b)
    EMU_REDUCTION(xor, a ^ b)
#undef EMU_REDUCTION

#define EMU_INACTIVE(n) n " reads a lane that is inactive or outside 0..31"
#define EMU_SHUFFLE(name, from) \
  template <class T> EMU_INLINE T name(T x, ushort a, EMU_HERE) { \
    auto l = emu_gather(x, #name, at_); \
    return emu_pick(l, from, EMU_INACTIVE(#name), at_); \
  }
        EMU_SHUFFLE(simd_shuffle, a) EMU_SHUFFLE(simd_broadcast, a) EMU_SHUFFLE(simd_shuffle_xor, (l.lane ^ a))
            EMU_SHUFFLE(simd_shuffle_rotate_down, ((l.lane + a) & 31))
                EMU_SHUFFLE(simd_shuffle_rotate_up, ((l.lane - a) & 31))
                    EMU_SHUFFLE(quad_broadcast, ((l.lane & ~3u) + (a & 3u)))
                        EMU_SHUFFLE(quad_shuffle, ((l.lane & ~3u) + (a & 3u)))
                            EMU_SHUFFLE(quad_shuffle_xor, (l.lane ^ (a & 3u)))
#undef EMU_SHUFFLE
    // Past the edge the result is undefined in MSL: all bits set here, a NaN.
    template <class T>
    EMU_INLINE T emu_poison() {
  T p;
  __builtin_memset(&p, 0xff, sizeof p);
  return p;
}
template <class T> EMU_INLINE T simd_shuffle_down(T x, ushort d, EMU_HERE) {
  auto l = emu_gather(x, "simd_shuffle_down", at_);
  return l.lane + d < 32 ? emu_pick(l, l.lane + d, EMU_INACTIVE("simd_shuffle_down"), at_) : emu_poison<T>();
}
template <class T> EMU_INLINE T simd_shuffle_up(T x, ushort d, EMU_HERE) {
  auto l = emu_gather(x, "simd_shuffle_up", at_);
  return l.lane >= d ? emu_pick(l, l.lane - d, EMU_INACTIVE("simd_shuffle_up"), at_) : emu_poison<T>();
}
template <class T> EMU_INLINE T simd_shuffle_and_fill_down(T x, T fill, ushort d, EMU_HERE) {
  auto l = emu_gather(x, "simd_shuffle_and_fill_down", at_);
  auto f = emu_gather(fill, "simd_shuffle_and_fill_down", at_);
  return l.lane + d < 32 ? emu_pick(l, l.lane + d, EMU_INACTIVE("simd_shuffle_and_fill_down"), at_)
                         : f.at(l.lane + d - 32);
}
template <class T> EMU_INLINE T simd_broadcast_first(T x, EMU_HERE) {
  auto l = emu_gather(x, "simd_broadcast_first", at_);
  return l.at(uint(__builtin_ctz(l.active)));
}
template <class T> EMU_INLINE T simd_prefix_inclusive_sum(T x, EMU_HERE) {
  auto l = emu_gather(x, "simd_prefix_inclusive_sum", at_);
  T s = T(0);
  for (uint i = 0; i <= l.lane; i++)
    if (l.on(i)) s = s + l.at(i);
  return s;
}
template <class T> EMU_INLINE T simd_prefix_exclusive_sum(T x, EMU_HERE) {
  auto l = emu_gather(x, "simd_prefix_exclusive_sum", at_);
  T s = T(0);
  for (uint i = 0; i < l.lane; i++)
    if (l.on(i)) s = s + l.at(i);
  return s;
}
EMU_INLINE bool simd_any(bool c, EMU_HERE) {
  auto l = emu_gather(c, "simd_any", at_);
  bool r = false;
  for (uint i = 0; i < 32; i++) r |= l.on(i) && l.at(i);
  return r;
}
EMU_INLINE bool simd_all(bool c, EMU_HERE) {
  auto l = emu_gather(c, "simd_all", at_);
  bool r = true;
  for (uint i = 0; i < 32; i++) r &= !l.on(i) || l.at(i);
  return r;
}
struct simd_vote {
  ulong m, active;
  explicit operator ulong() const { return m; }
  bool all() const { return m == active; }
  bool any() const { return m != 0; }
};
EMU_INLINE simd_vote simd_ballot(bool c, EMU_HERE) {
  auto l = emu_gather(c, "simd_ballot", at_);
  ulong m = 0;
  for (uint i = 0; i < 32; i++)
    if (l.on(i) && l.at(i)) m |= 1ul << i;
  return simd_vote{m, l.active};
}
EMU_INLINE simd_vote simd_active_threads_mask(EMU_HERE) {
  auto l = emu_gather(0, "simd_active_threads_mask", at_);
  return simd_vote{l.active, l.active};
}
EMU_INLINE bool simd_is_first(EMU_HERE) {
  auto l = emu_gather(0, "simd_is_first", at_);
  return uint(__builtin_ctz(l.active)) == l.lane;
}
