// The runtime that every compiled kernel library carries: entry points for Rust (emu_run_groups, emu_worker_*) and for kernels.
#include "schedule.h"
#include "shadow.h"
#include <stdlib.h>
#include <sys/mman.h>
#define EXPORT extern "C" __attribute__((visibility("default")))
#define PC ((uintptr_t)__builtin_return_address(0))

// ---- for Rust ----
// Memory that one operating-system thread needs to run threadgroups; the same for every library, so Rust keeps a pool of them.
EXPORT Worker *emu_worker_new() {
  size_t stacks = EMU_MAX_THREADS * EMU_STACK, cells = EMU_TG_LIMIT * 2 * sizeof(Cell), guard = 1 << 20;
  size_t len = stacks + EMU_STACK + sizeof(Worker) + 4096 + 2 * guard + EMU_TG_LIMIT + cells;
  char *m = (char *)mmap(nullptr, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return nullptr;
  char *at = (char *)(((uintptr_t)m + EMU_STACK - 1) & ~(EMU_STACK - 1));
  Worker *w = (Worker *)(at + stacks);
  w->map = m; w->map_len = len; w->stacks = at;
  w->arena = (char *)(((uintptr_t)(w + 1) + 4095) & ~uintptr_t(4095)) + guard;
  Cell *c = (Cell *)(w->arena + EMU_TG_LIMIT + guard);
  w->tg = emu_region{(uintptr_t)w->arena, (uintptr_t)w->arena, EMU_THREADGROUP, 0, c, c + EMU_TG_LIMIT};
  return w;
}
EXPORT void emu_worker_free(Worker *w) { munmap(w->map, w->map_len); }

// Runs threadgroups first .. last - 1. Several workers may do so for one launch at once, unless it is checked.
EXPORT void emu_run_groups(emu_launch *l, Worker *w, uint64_t first, uint64_t last) {
  w->launch = l; w->accesses = w->switches = 0; w->current = nullptr;
  if (l->checked) memset(w->tg.w, 0, EMU_TG_LIMIT * 2 * sizeof(Cell));   // threadgroup numbers start again
  for (uint64_t g = first; g < last && !l->abort; g++) run_group(w, uint32_t(g));
  __atomic_fetch_add(&l->accesses, w->accesses, __ATOMIC_RELAXED);
  __atomic_fetch_add(&l->switches, w->switches, __ATOMIC_RELAXED);
}

// ---- for kernels ----
extern "C" {
uint32_t emu_simd_wait(const char *op, int line, int col) {
  Thread *t = self();
  arrive(t->worker, t, WAIT_SIMD, op, line, col);
  return t->active;
}
void emu_barrier(unsigned flags, int simdgroup, int line, int col) {
  Thread *t = self();
  t->flags = flags;
  arrive(t->worker, t, simdgroup ? WAIT_SIMDGROUP_BARRIER : WAIT_BARRIER, simdgroup ? "simdgroup_barrier" : "threadgroup_barrier", line, col);
}
void *emu_tg_variable(unsigned site, size_t size, size_t align, const char *name, int line) {
  Thread *t = self();
  Worker *w = t->worker;
  for (unsigned i = 0; i < w->nvariables; i++) if (w->variables[i].site == site) return w->arena + w->variables[i].at;
  size_t a = align < 16 ? 16 : align, at = (w->tg_used + a - 1) & ~(a - 1);
  if (at + size > EMU_TG_LIMIT) fault(w, t, EMU_F_MEMORY, 0, line, true, "threadgroup memory over 32 KiB: %zu bytes with variable %s", at + size, name);
  if (w->nvariables == 64) fault(w, t, EMU_F_MEMORY, 0, line, true, "more than 64 threadgroup variables");
  w->variables[w->nvariables++] = {site, at};
  w->tg_used = at + size;
  w->tg.hi = w->tg.lo + w->tg_used;
  return w->arena + at;
}
void emu_atomic(void *p, unsigned n, int write) { if (self()->launch->checked) check((uintptr_t)p, n, write, true, true, PC); }
void emu_fail(int kind, const char *text, int line) { Thread *t = self(); fault(t->worker, t, kind, PC, line, true, "%s", text); }
const void *emu_bind(int i, size_t at_least) {
  Thread *t = self();
  const emu_launch *l = t->launch;
  if (i < 0 || i > 31 || !l->buf[i]) {
    if (at_least) fault(t->worker, t, EMU_F_BINDING, 0, 0, true, "buffer(%d) is not bound", i);
    return nullptr;                                      // a pointer may stay unbound as long as nobody follows it
  }
  if (l->len[i] < at_least) fault(t->worker, t, EMU_F_BINDING, 0, 0, true, "buffer(%d) holds %llu bytes, the kernel's parameter type %zu", i, (unsigned long long)l->len[i], at_least);
  return l->buf[i];
}

// ---- what -fsanitize=thread calls ----
#define ACCESS(n) \
  void __tsan_read##n(void *p) { check((uintptr_t)p, n, false, false, true, PC); } \
  void __tsan_write##n(void *p) { check((uintptr_t)p, n, true, false, true, PC); } \
  void __tsan_unaligned_read##n(void *p) { check((uintptr_t)p, n, false, false, false, PC); } \
  void __tsan_unaligned_write##n(void *p) { check((uintptr_t)p, n, true, false, false, PC); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
void *__tsan_memcpy(void *d, const void *s, size_t n) {
  if (n) { check((uintptr_t)s, n, false, false, false, PC); check((uintptr_t)d, n, true, false, false, PC); }
  return memcpy(d, s, n);
}
void *__tsan_memmove(void *d, const void *s, size_t n) {
  if (n) { check((uintptr_t)s, n, false, false, false, PC); check((uintptr_t)d, n, true, false, false, PC); }
  return memmove(d, s, n);
}
void *__tsan_memset(void *d, int c, size_t n) {
  if (n) check((uintptr_t)d, n, true, false, false, PC);
  return memset(d, c, n);
}

// ---- what -fsanitize=bounds,shift,integer-divide-by-zero,alignment calls ----
struct Place { const char *file; uint32_t line, col; };
static void arithmetic(int kind, const Place *p, const char *text, uintptr_t pc, bool fatal) { Thread *t = self(); fault(t->worker, t, kind, pc, int(p->line), fatal, "%s", text); }
void __ubsan_handle_out_of_bounds(Place *p, uintptr_t) { arithmetic(EMU_F_BOUNDS, p, "array index out of bounds", PC, true); }
void __ubsan_handle_shift_out_of_bounds(Place *p, uintptr_t, uintptr_t) { arithmetic(EMU_F_ARITHMETIC, p, "shift by the type's width or more", PC, false); }
void __ubsan_handle_divrem_overflow(Place *p, uintptr_t, uintptr_t) { arithmetic(EMU_F_ARITHMETIC, p, "integer division by zero", PC, true); }
void __ubsan_handle_type_mismatch_v1(Place *p, uintptr_t at) {
  if (at < 4096) return;                                 // null: the access itself is reported
  arithmetic(EMU_F_MISALIGNED, p, "access through a pointer that is not aligned to its type", PC, false);
}
}
