// The runtime that every compiled kernel library carries: entry points for Rust (emu_run_groups, emu_worker_*) and for
// kernels.
#include "schedule.h"
#include "shadow.h"
#include <stdlib.h>
#include <sys/mman.h>
#define EXPORT extern "C" __attribute__((visibility("default")))
#define PC ((uintptr_t)__builtin_return_address(0))

// ---- for Rust ----
// Memory that one operating-system thread needs to run threadgroups; the same for every library, so Rust keeps a pool
// of them.
constexpr size_t CRASH_STACK = 64 << 10;
EXPORT Worker *emu_worker_new() {
  size_t stacks = EMU_MAX_THREADS * EMU_STACK, cells = EMU_TG_SPACE * 2 * (sizeof(Cell) + 4), guard = 1 << 20;
  size_t len = stacks + EMU_STACK + CRASH_STACK + sizeof(Worker) + 4096 + 2 * guard + EMU_TG_SPACE + cells;
  char *m = (char *)mmap(nullptr, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return nullptr;
  char *at = (char *)(((uintptr_t)m + EMU_STACK - 1) & ~(EMU_STACK - 1));
  Worker *w = (Worker *)(at + stacks + CRASH_STACK);
  w->crash_stack = (char *)w - 64;
  w->map = m;
  w->map_len = len;
  w->stacks = at;
  w->arena = (char *)(((uintptr_t)(w + 1) + 4095) & ~uintptr_t(4095)) + guard;
  Cell *c = (Cell *)(w->arena + EMU_TG_SPACE + guard);
  uint32_t *pcs = (uint32_t *)(c + 2 * EMU_TG_SPACE);
  w->tg = emu_region{(uintptr_t)w->arena, (uintptr_t)w->arena, EMU_THREADGROUP, 0, c, c + EMU_TG_SPACE, pcs,
                     pcs + EMU_TG_SPACE};
  // the pages around threadgroup memory and the lowest of each stack are out of bounds
  mprotect(w->arena - guard, guard, PROT_NONE);
  mprotect(w->arena + EMU_TG_SPACE, guard, PROT_NONE);
  for (unsigned i = 0; i < EMU_MAX_THREADS; i++) mprotect(at + i * EMU_STACK, 4096, PROT_NONE);
  return w;
}
EXPORT void emu_worker_free(Worker *w) { munmap(w->map, w->map_len); }

// Runs threadgroups first .. last - 1. Several workers may do so for one launch at once, unless it is checked.
EXPORT void emu_run_groups(emu_launch *l, Worker *w, uint64_t first, uint64_t last) {
  w->launch = l;
  w->accesses = w->switches = 0;
  w->current = nullptr;
  if (l->checked) memset(w->tg.w, 0, EMU_TG_SPACE * 2 * sizeof(Cell));  // threadgroup numbers start again
  for (uint64_t g = first; g < last && !l->abort; g++) run_group(w, uint32_t(g));
  __atomic_fetch_add(&l->accesses, w->accesses, __ATOMIC_RELAXED);
  __atomic_fetch_add(&l->switches, w->switches, __ATOMIC_RELAXED);
}

// Where Rust's signal handler sends a kernel that crashed, on the crash stack: a fault like the others. `kind` as for
// signals.
EXPORT void emu_crash(Worker *w, uintptr_t address, uintptr_t pc, int kind, int write) {
  Thread *t = w->current;
  uintptr_t block = (uintptr_t)t & ~(EMU_STACK - 1);
  if (kind == 0 && address - block < 4096)
    fault(w, t, EMU_F_STACK, {pc}, true, "private memory overflow: a thread's stack holds %zu KiB here",
          (EMU_STACK - 4096 - EMU_CONTROL) >> 10);
  else if (kind == 0 && find_region(w, address)) {
    char name[32];
    fault(w, t, EMU_F_READ_ONLY, {pc}, true, "write to %s, which is bound for reading",
          name_of(find_region(w, address), name));
  } else if (kind == 0)
    outside(w, t, address, 0, write, pc);
  else if (kind == 1)
    fault(w, t, EMU_F_ARITHMETIC, {pc}, true, "integer division by zero");
  else
    fault(w, t, EMU_F_ARITHMETIC, {pc}, true, "undefined behaviour: the compiler left a trap here");
  __builtin_trap();
}
// For the handler: the crash stack, or null when no kernel runs on this worker.
EXPORT void *emu_crash_stack(Worker *w) { return w->current ? w->crash_stack : nullptr; }

// ---- for kernels ----
extern "C" {
uint32_t emu_simd_wait(const char *op, emu_site at) {
  Thread *t = self();
  arrive(t->worker, t, WAIT_SIMD, op, at);
  return t->active;
}
void emu_barrier(unsigned flags, int simdgroup, emu_site at) {
  Thread *t = self();
  t->flags = flags;
  arrive(t->worker, t, simdgroup ? WAIT_SIMDGROUP_BARRIER : WAIT_BARRIER,
         simdgroup ? "simdgroup_barrier" : "threadgroup_barrier", at);
}
void *emu_tg_variable(unsigned site, size_t size, size_t align, const char *name, const emu_site &site_at) {
  Thread *t = self();
  Worker *w = t->worker;
  for (unsigned i = 0; i < w->nvariables; i++)
    if (w->variables[i].site == site) return w->arena + w->variables[i].at;
  size_t a = align < 16 ? 16 : align, at = (w->tg_used + a - 1) & ~(a - 1);
  if (at + size > EMU_TG_LIMIT)
    fault(w, t, EMU_F_MEMORY, {0, site_at}, true, "threadgroup memory over 32 KiB: %zu bytes with variable %s",
          at + size, name);
  if (w->nvariables == 64) fault(w, t, EMU_F_MEMORY, {0, site_at}, true, "more than 64 threadgroup variables");
  return w->arena + place(w, site, size, a).at;
}
void emu_atomic(void *p, unsigned n, int write) {
  if (self()->launch->checked) check((uintptr_t)p, n, write, true, true, PC);
}
void emu_fail(int kind, const char *text, emu_site at) {
  Thread *t = self();
  fault(t->worker, t, kind, {PC, at}, true, "%s", text);
}
const void *emu_bind(int i, size_t at_least) {
  Thread *t = self();
  const emu_launch *l = t->launch;
  if (i < 0 || i > 31 || !l->buf[i]) {
    if (at_least) fault(t->worker, t, EMU_F_BINDING, {}, true, "buffer(%d) is not bound", i);
    return nullptr;  // a pointer may stay unbound as long as nobody follows it
  }
  if (l->len[i] < at_least)
    fault(t->worker, t, EMU_F_BINDING, {}, true, "buffer(%d) holds %llu bytes, the kernel's parameter type %zu", i,
          (unsigned long long)l->len[i], at_least);
  return l->buf[i];
}

// ---- what -fsanitize=thread calls ----
#define ACCESS(n) \
  void __tsan_read##n(void *p) { check((uintptr_t)p, n, false, false, true, PC); } \
  void __tsan_write##n(void *p) { check((uintptr_t)p, n, true, false, true, PC); } \
  void __tsan_unaligned_read##n(void *p) { check((uintptr_t)p, n, false, false, false, PC); } \
  void __tsan_unaligned_write##n(void *p) { check((uintptr_t)p, n, true, false, false, PC); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16) void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
void *__tsan_memcpy(void *d, const void *s, size_t n) {
  if (n) {
    check((uintptr_t)s, n, false, false, false, PC);
    check((uintptr_t)d, n, true, false, false, PC);
  }
  return memcpy(d, s, n);
}
void *__tsan_memmove(void *d, const void *s, size_t n) {
  if (n) {
    check((uintptr_t)s, n, false, false, false, PC);
    check((uintptr_t)d, n, true, false, false, PC);
  }
  return memmove(d, s, n);
}
void *__tsan_memset(void *d, int c, size_t n) {
  if (n) check((uintptr_t)d, n, true, false, false, PC);
  return memset(d, c, n);
}

// ---- what -fsanitize=bounds,shift,integer-divide-by-zero,alignment calls ----
struct Place {
  const char *file;
  uint32_t line, col;
};
static void arithmetic(int kind, const Place *p, const char *text, uintptr_t pc, bool fatal) {
  Thread *t = self();
  fault(t->worker, t, kind, {pc, {p->file, int(p->line), int(p->col)}}, fatal, "%s", text);
}
void __ubsan_handle_out_of_bounds(Place *p, uintptr_t) {
  arithmetic(EMU_F_BOUNDS, p, "array index out of bounds", PC, true);
}
void __ubsan_handle_shift_out_of_bounds(Place *p, uintptr_t, uintptr_t) {
  arithmetic(EMU_F_ARITHMETIC, p, "shift by the type's width or more", PC, false);
}
void __ubsan_handle_divrem_overflow(Place *p, uintptr_t, uintptr_t) {
  arithmetic(EMU_F_ARITHMETIC, p, "integer division by zero", PC, true);
}
void __ubsan_handle_alignment_assumption(Place *p, uintptr_t, uintptr_t, uintptr_t) {
  arithmetic(EMU_F_MISALIGNED, p, "an address that is not aligned as the code says", PC, false);
}
void __ubsan_handle_type_mismatch_v1(Place *p, uintptr_t at) {
  if (at < 4096) return;  // null: the access itself is reported
  arithmetic(EMU_F_MISALIGNED, p, "access through a pointer that is not aligned to its type", PC, false);
}
}
