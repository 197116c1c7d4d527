// The state of one operating-system thread that runs threadgroups, and how faults are recorded.
#pragma once
#include "fiber.h"
#include <stdarg.h>
#include <stdio.h>

constexpr size_t EMU_TG_LIMIT = 32768;  // Metal's limit for threadgroup memory
constexpr size_t EMU_TG_SPACE = 65536;  // and room for the gaps that checked mode leaves between variables
constexpr size_t EMU_TG_GAP = 256;
constexpr unsigned EMU_MAX_THREADS = 1024;

enum State { RUN, WAIT_SIMD, WAIT_SIMDGROUP_BARRIER, WAIT_BARRIER, DONE };
struct Worker;
struct Thread : emu_thread {  // at the top of its stack block
  Worker *worker;
  void *sp;
  State state;
  unsigned tid, sg, active, flags;
  const char *op;
  emu_site at;
};
static_assert(sizeof(Thread) <= EMU_CONTROL, "control block too large");

struct SimdGroup {
  emu_bank bank[2];
  unsigned lo, present;            // first thread, mask of lanes that exist
  unsigned ready;                  // lanes that can run and do not run now
  unsigned arrived, done, parity;  // lanes at a simd operation; lanes that have returned
  bool mixed;                      // they are not all at the same one
  unsigned ep_tg, ep_dev;          // simdgroup barriers so far, by the memory they fence
};
struct TgVariable {
  unsigned site;
  size_t at, size;
};
constexpr unsigned EMU_DYNAMIC = ~0u;  // the site of [[threadgroup(i)]] memory
struct Worker {
  emu_launch *launch;
  char *stacks;  // EMU_MAX_THREADS blocks
  void *scheduler_sp;
  Thread *current;
  unsigned threads, simdgroups;
  SimdGroup sg[EMU_MAX_THREADS / 32];
  emu_region tg;  // threadgroup memory in use
  size_t tg_used;  // as Metal counts
  TgVariable variables[64];
  unsigned nvariables, last_variable;
  void *tgmem[32];
  unsigned gid, ep_tg, ep_dev;  // threadgroup, barriers so far by the memory they fence
  emu_region *last;             // region of the previous access
  uint64_t accesses, switches;
  char *arena;        // threadgroup memory, guard space on both sides
  char *crash_stack;  // its top: where a crash is turned into a fault
  void *map;
  size_t map_len;
};

static inline Thread *thread_of(Worker *w, unsigned tid) {
  return (Thread *)(w->stacks + tid * EMU_STACK + EMU_STACK - EMU_CONTROL);
}
// Room in threadgroup memory; in checked mode a gap follows, so that an index past a variable does not land in the next.
static TgVariable &place(Worker *w, unsigned site, size_t size, size_t align) {
  size_t at = 0;
  if (w->nvariables) {
    const TgVariable &before = w->variables[w->nvariables - 1];
    at = before.at + before.size + (w->launch->checked ? EMU_TG_GAP : 0);
  }
  at = (at + align - 1) & ~(align - 1);
  w->tg_used = ((w->tg_used + align - 1) & ~(align - 1)) + size;
  w->tg.hi = w->tg.lo + at + size;
  return w->variables[w->nvariables++] = {site, at, size};
}
static inline Thread *self() { return (Thread *)emu_self(); }
extern "C" const char __ehdr_start __attribute__((visibility("hidden")));  // start of this shared library

// The return addresses of the calls that led here, as far as the thread's own stack shows them.
static void callers(Thread *t, uint64_t *pcs, unsigned n) {
  uintptr_t *frame = (uintptr_t *)__builtin_frame_address(0), base = (uintptr_t)&__ehdr_start;
  for (unsigned i = 0; i < n; i++) {
    if (((uintptr_t)frame ^ (uintptr_t)t) >= EMU_STACK || (uintptr_t)frame >= (uintptr_t)t || ((uintptr_t)frame & 7))
      return;
    pcs[i] = frame[1] - base;
    uintptr_t *next = (uintptr_t *)frame[0];
    if (next <= frame) return;
    frame = next;
  }
}

// Records a fault once per place. A fatal one ends the launch: control leaves the thread for good.
struct Where {
  uintptr_t pc;
  emu_site at;
  uint32_t earlier;
};
static void fault(Worker *w, Thread *t, int kind, Where where, bool fatal, const char *format, ...) {
  emu_launch *l = w->launch;
  emu_fault f;
  memset(&f, 0, sizeof f);
  f.kind = kind;
  f.site = where.at;
  f.earlier = where.earlier;
  if (where.pc) f.pcs[0] = where.pc - (uintptr_t)&__ehdr_start;
  if (t) {
    callers(t, f.pcs + (where.pc ? 1 : 0), 7);
    f.has_thread = 1;
    f.thread = t->ctx.thread_position_in_threadgroup;
    f.group = t->ctx.threadgroup_position_in_grid;
    f.simdgroup = t->sg;
    f.lane = t->lane;
  }
  va_list a;
  va_start(a, format);
  vsnprintf(f.text, sizeof f.text, format, a);
  va_end(a);
  while (__atomic_exchange_n(&l->lock, 1, __ATOMIC_ACQUIRE)) {}
  bool again = false;
  unsigned of_kind = 0;  // at most three of a kind: the next kind may say more
  for (unsigned i = 0; i < l->nfaults; i++) {
    const emu_fault &o = l->faults[i];
    again |= o.kind == kind && ++of_kind == 3;
    again |= where.pc ? o.pcs[0] == f.pcs[0] && o.kind == kind : !strcmp(o.text, f.text);
  }
  if (!again && l->nfaults < 8) {
    l->faults[l->nfaults] = f;
    l->nfaults++;
  }
  if (fatal) l->abort = 1;
  __atomic_store_n(&l->lock, 0, __ATOMIC_RELEASE);
  if (fatal && w->current) {
    void *nowhere;
    w->current = nullptr;
    emu_switch(&nowhere, w->scheduler_sp);
  }
}
