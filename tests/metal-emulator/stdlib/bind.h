// From a launch to a kernel's arguments: the translator gives the order of attributes, the types come from the function
// itself. Included inside namespace msl.
template <class A> struct emu_arg;
template <class T> struct emu_arg<T *> {
  static EMU_NOSAN T *get(emu_param p) {
    return p.kind == EMU_P_TGMEM ? (T *)emu_self()->tgmem[p.index] : (T *)emu_bind(p.index, 0);
  }
};
template <class T> struct emu_arg<T &> {
  static EMU_NOSAN T &get(emu_param p) { return *(T *)emu_bind(p.index, sizeof(T)); }
};
EMU_NOSAN inline emu_u3 emu_builtin(int kind) {
  const emu_ctx &c = emu_self()->ctx;
  switch (kind) {
    case EMU_P_TPIG:
      return c.thread_position_in_grid;
    case EMU_P_TPITG:
      return c.thread_position_in_threadgroup;
    case EMU_P_TGPIG:
      return c.threadgroup_position_in_grid;
    case EMU_P_TPTG:
      return c.threads_per_threadgroup;
    case EMU_P_DTPTG:
      return c.dispatch_threads_per_threadgroup;
    case EMU_P_TGPG:
      return c.threadgroups_per_grid;
    case EMU_P_TPG:
      return c.threads_per_grid;
    case EMU_P_TIITG:
      return {c.thread_index_in_threadgroup, 0, 0};
    case EMU_P_TIISG:
      return {c.thread_index_in_simdgroup, 0, 0};
    case EMU_P_SGIITG:
      return {c.simdgroup_index_in_threadgroup, 0, 0};
    case EMU_P_TPSG:
      return {c.threads_per_simdgroup, 0, 0};
    case EMU_P_SGPTG:
      return {c.simdgroups_per_threadgroup, 0, 0};
    case EMU_P_TIIQG:
      return {c.thread_index_in_quadgroup, 0, 0};
    case EMU_P_QGIITG:
      return {c.quadgroup_index_in_threadgroup, 0, 0};
  }
  return {0, 0, 0};
}
#define EMU_PLACE(t) \
  template <> struct emu_arg<t> { \
    static EMU_NOSAN t get(emu_param p) { return t(emu_builtin(p.kind).x); } \
  }; \
  template <> struct emu_arg<vec<t, 2>> { \
    static EMU_NOSAN vec<t, 2> get(emu_param p) { \
      emu_u3 u = emu_builtin(p.kind); \
      return vec<t, 2>(u.x, u.y); \
    } \
  }; \
  template <> struct emu_arg<vec<t, 3>> { \
    static EMU_NOSAN vec<t, 3> get(emu_param p) { \
      emu_u3 u = emu_builtin(p.kind); \
      return vec<t, 3>(u.x, u.y, u.z); \
    } \
  };
EMU_PLACE(uint)
EMU_PLACE(ushort)
#undef EMU_PLACE
template <int... I> struct emu_seq {};
template <int N, int... I> struct emu_count : emu_count<N - 1, N - 1, I...> {};
template <int... I> struct emu_count<0, I...> {
  typedef emu_seq<I...> type;
};
template <class F> struct emu_call;
template <class... A> struct emu_call<void (*)(A...)> {
  static constexpr int arity = sizeof...(A);
  template <int... I> static EMU_NOSAN void go(void (*f)(A...), const emu_param *p, emu_seq<I...>) {
    f(emu_arg<A>::get(p[I])...);
  }
  static EMU_NOSAN void run(void (*f)(A...), const emu_param *p) { go(f, p, typename emu_count<arity>::type()); }
};
template <auto F> EMU_NOSAN void emu_entry(const emu_param *p) { emu_call<decltype(F)>::run(F, p); }
