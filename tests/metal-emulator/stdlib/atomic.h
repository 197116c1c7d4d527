// Relaxed atomics and function constants. Included inside namespace msl::metal.
enum memory_order { memory_order_relaxed = 0 };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
template <class T> struct atomic {
  T v;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;
typedef atomic<bool> atomic_bool;
template <class T, class F> EMU_NOSAN inline T emu_update(atomic<T> *p, F f) {
  emu_atomic(p, sizeof(T), 1);
  T old, next;
  __atomic_load(&p->v, &old, 0);
  do { next = f(old); } while (!__atomic_compare_exchange(&p->v, &old, &next, true, 0, 0));
  return old;
}
#define EMU_AT(name, expr) \
  template <class T> EMU_INLINE T atomic_##name##_explicit(volatile atomic<T> *p, emu_same_t<T> b, memory_order) { \
    return emu_update((atomic<T> *)p, [b](T a) EMU_NOSAN { return T(expr); }); \
  }
EMU_AT(fetch_add, a + b)
EMU_AT(fetch_sub, a - b)
EMU_AT(fetch_max, (a < b ? b : a)) EMU_AT(fetch_min, (b < a ? b : a)) EMU_AT(fetch_and, a &b) EMU_AT(fetch_or, a | b)
    EMU_AT(fetch_xor, a ^ b) EMU_AT(exchange, ((void)a, b))
#undef EMU_AT
        template <class T>
        EMU_NOSAN inline T atomic_load_explicit(const volatile atomic<T> *p, memory_order) {
  emu_atomic((void *)p, sizeof(T), 0);
  T r;
  __atomic_load((T *)&p->v, &r, 0);
  return r;
}
template <class T> EMU_NOSAN inline void atomic_store_explicit(volatile atomic<T> *p, emu_same_t<T> v, memory_order) {
  emu_atomic((void *)p, sizeof(T), 1);
  __atomic_store((T *)&p->v, &v, 0);
}
template <class T>
EMU_NOSAN inline bool atomic_compare_exchange_weak_explicit(volatile atomic<T> *p, T *expected, emu_same_t<T> d,
                                                            memory_order, memory_order) {
  emu_atomic((void *)p, sizeof(T), 1);
  return __atomic_compare_exchange((T *)&p->v, expected, &d, false, 0, 0);
}

template <class T> EMU_NOSAN inline T emu_constant_value(unsigned i) {
  const emu_constant &c = emu_self()->launch->constants[i];
  if (!c.set) emu_fail(EMU_F_BINDING, "a function constant was not given a value", emu_site{});
  T v;
  __builtin_memcpy(&v, &c.bits, sizeof v);
  return v;
}
template <class T, unsigned I> struct emu_fc {
  EMU_NOSAN operator T() const { return emu_constant_value<T>(I); }
};
template <class T, unsigned I> EMU_NOSAN inline bool is_function_constant_defined(const emu_fc<T, I> &) {
  return emu_self()->launch->constants[I].set;
}
