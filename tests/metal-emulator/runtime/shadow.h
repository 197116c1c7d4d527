// Checked mode: every load and store of a kernel comes here (the calls are what -fsanitize=thread inserts). It must lie
// inside a buffer or threadgroup memory, be aligned, and be ordered after every conflicting access by a barrier that
// fences that memory.
//
// A shadow cell per byte for the last write and one for the last reads: who and when. "When" counts the threadgroup's
// barriers and the simdgroup's barriers, for threadgroup and device memory apart: so wrong mem_flags show as a race.
#pragma once
#include "worker.h"

typedef uint64_t
    Cell;  // threadgroup + 1: 20 bits | thread: 12 | barriers: 17 | simdgroup barriers: 14 | atomic: 1; 0 = never
constexpr unsigned SEVERAL_IN_SIMDGROUP = 2048, SEVERAL = 4095,
                   ANY_GROUP = 0xfffff;  // readers; the former plus the simdgroup's number
constexpr unsigned BARRIERS = 0x1ffff, SIMD_BARRIERS = 0x3fff;
static inline Cell cell(unsigned group1, unsigned thread, unsigned barriers, unsigned simd_barriers, bool atomic) {
  return Cell(group1) << 44 | Cell(thread) << 32 | Cell(barriers & BARRIERS) << 15 |
         Cell(simd_barriers & SIMD_BARRIERS) << 1 | (atomic ? 1 : 0);
}
static inline unsigned cell_group1(Cell c) { return unsigned(c >> 44); }
static inline unsigned cell_thread(Cell c) { return unsigned(c >> 32) & 0xfff; }
static inline unsigned cell_barriers(Cell c) { return unsigned(c >> 15) & BARRIERS; }
static inline unsigned cell_simd_barriers(Cell c) { return unsigned(c >> 1) & SIMD_BARRIERS; }
static inline unsigned cell_simdgroup(Cell c) {
  unsigned t = cell_thread(c);
  return t < 1024 ? t / 32 : t - SEVERAL_IN_SIMDGROUP;
}

// Does access c happen before an access with stamp `now`?
static inline bool ordered(Cell c, Cell now, const Thread *t) {
  if (cell_group1(c) != cell_group1(now)) return false;
  if (cell_thread(c) == t->tid) return true;
  if (cell_barriers(c) != cell_barriers(now)) return true;
  return cell_thread(c) != SEVERAL && cell_simdgroup(c) == t->sg && cell_simd_barriers(c) != cell_simd_barriers(now);
}

static const char *who(Cell c, char *s, size_t n) {
  unsigned t = cell_thread(c);
  if (cell_group1(c) == ANY_GROUP)
    snprintf(s, n, "threads of several threadgroups");
  else if (t < 1024)
    snprintf(s, n, "thread %u of threadgroup %u", t, cell_group1(c) - 1);
  else
    snprintf(s, n, "several threads of threadgroup %u", cell_group1(c) - 1);
  return s;
}
static const char *name_of(const emu_region *r, char *s) {
  if (r->kind == EMU_THREADGROUP) return "threadgroup memory";
  snprintf(s, 32, "buffer(%d)", r->index);
  return s;
}

static emu_region *find_region(Worker *w, uintptr_t a) {
  emu_region *r = w->last;
  if (r && a >= r->lo && a < r->hi) return r;
  if (a >= w->tg.lo && a < w->tg.hi) return w->last = &w->tg;
  emu_launch *l = w->launch;
  for (uint64_t i = 0; i < l->nregions; i++)
    if (a >= l->regions[i].lo && a < l->regions[i].hi) return w->last = &l->regions[i];
  return nullptr;
}

static void outside(Worker *w, Thread *t, uintptr_t a, size_t n, int write, uintptr_t pc) {
  char verb[24];  // n 0: a crash, whose width nobody knows
  snprintf(verb, sizeof verb, n ? "%zu-byte %s" : "%.0zu%s", n, write == 2 ? "access" : write ? "write" : "read");
  emu_launch *l = w->launch;
  uintptr_t stacks = (uintptr_t)w->stacks;
  if (a - stacks < EMU_MAX_THREADS * EMU_STACK)
    return fault(w, t, EMU_F_BOUNDS, {pc}, true, "%s of another thread's private memory", verb);
  if (a < 4096) return fault(w, t, EMU_F_BINDING, {pc}, true, "%s through a null pointer (buffer not bound?)", verb);
  const emu_region *best = nullptr;
  size_t distance = 1 << 20;
  for (uint64_t i = 0; i <= l->nregions; i++) {
    const emu_region *r = i < l->nregions ? &l->regions[i] : &w->tg;
    size_t d = a >= r->hi ? a - r->hi : r->lo - a;
    if (d < distance) {
      distance = d;
      best = r;
    }
  }
  char name[32];
  if (best)
    fault(w, t, EMU_F_BOUNDS, {pc}, true, "out-of-bounds %s: %zu bytes %s %s (%zu bytes long)", verb, distance,
          a >= best->hi ? "past the end of" : "before the start of", name_of(best, name), size_t(best->hi - best->lo));
  else
    fault(w, t, EMU_F_BOUNDS, {pc}, true, "out-of-bounds %s at a wild address", verb);
}

// Threadgroup memory is several variables with gaps between them.
static bool inside_variable(Worker *w, size_t at, size_t n) {
  auto in = [&](unsigned i) { return at - w->variables[i].at < w->variables[i].size && at + n <= w->variables[i].at + w->variables[i].size; };
  if (in(w->last_variable)) return true;
  for (unsigned i = 0; i < w->nvariables; i++)
    if (in(i)) {
      w->last_variable = i;
      return true;
    }
  return false;
}
static void outside_variable(Worker *w, Thread *t, size_t at, size_t n, bool write, uintptr_t pc) {
  const char *verb = write ? "write" : "read";
  const TgVariable *best = w->variables;
  size_t distance = ~size_t(0);
  bool before = false;
  for (unsigned i = 0; i < w->nvariables; i++) {
    const TgVariable &v = w->variables[i];
    size_t d = at < v.at ? v.at - at : at - (at < v.at + v.size ? at : v.at + v.size);
    if (d < distance) {
      distance = d;
      best = &v;
      before = at < v.at;
    }
  }
  fault(w, t, EMU_F_BOUNDS, {pc}, true, "out-of-bounds %zu-byte %s: %zu bytes %s a threadgroup variable (%zu bytes long)", n, verb,
        distance, before ? "before the start of" : "past the end of", best->size);
}

// When a thread's plain and atomic accesses follow each other without a barrier, the plain one is what others collide with.
static inline Cell merged(Cell before, Cell me) { return (before ^ me) == 1 ? me & ~Cell(1) : me; }

// Bytes [i, e) of a region with shadow cells.
static void check_order(Worker *w, Thread *t, emu_region *R, size_t i, size_t e, bool write, bool atomic,
                        uintptr_t pc) {
  bool tg = R->kind == EMU_THREADGROUP;
  SimdGroup &g = w->sg[t->sg];
  Cell me = cell(w->gid + 1, t->tid, tg ? w->ep_tg : w->ep_dev, tg ? g.ep_tg : g.ep_dev, atomic);
  char name[32], by[64];
  uint32_t at = uint32_t(pc - (uintptr_t)&__ehdr_start);
  for (; i < e; i++) {
    Cell cw = R->w[i], cr = R->r[i];
    if (cr == me && cw == me) continue;
    if (tg) {  // what an earlier threadgroup left counts for nothing
      if (cw && cell_group1(cw) != w->gid + 1) R->w[i] = cw = 0;
      if (cr && cell_group1(cr) != w->gid + 1) R->r[i] = cr = 0;
    }
    bool late_write = cw && !ordered(cw, me, t) && !(atomic && (cw & 1));
    if (write) {
      if (late_write)
        fault(w, t, EMU_F_RACE, {pc, {}, R->wpc[i]}, false, "data race on %s: write, after an unordered write by %s",
              name_of(R, name), who(cw, by, sizeof by));
      else if (cr && !ordered(cr, me, t) && !(atomic && (cr & 1)))
        fault(w, t, EMU_F_RACE, {pc, {}, R->rpc[i]}, false, "data race on %s: write, after an unordered read by %s",
              name_of(R, name), who(cr, by, sizeof by));
      R->w[i] = merged(cw, me);
      R->wpc[i] = at;
    } else {
      if (!cw && (tg || R->kind == EMU_WRITE))
        fault(w, t, EMU_F_UNINITIALISED, {pc}, false, "read of uninitialised %s", name_of(R, name));
      else if (late_write)
        fault(w, t, EMU_F_RACE, {pc, {}, R->wpc[i]}, false, "data race on %s: read, after an unordered write by %s",
              name_of(R, name), who(cw, by, sizeof by));
      if (cr && cr != me && !ordered(cr, me, t)) {  // one cell for several readers: the widest that covers them
        bool same_group = cell_group1(cr) == w->gid + 1;
        bool same_sg = same_group && cell_thread(cr) != SEVERAL && cell_simdgroup(cr) == t->sg;
        R->r[i] = cell(same_group ? w->gid + 1 : ANY_GROUP, same_sg ? SEVERAL_IN_SIMDGROUP + t->sg : SEVERAL,
                       cell_barriers(me), cell_simd_barriers(me), atomic && (cr & 1));
      } else
        R->r[i] = merged(cr, me);
      R->rpc[i] = at;
    }
  }
}

static void check(uintptr_t a, size_t n, bool write, bool atomic, bool aligned, uintptr_t pc) {
  Thread *t = self();
  if ((a ^ (uintptr_t)t) < EMU_STACK) return;  // its own stack
  Worker *w = t->worker;
  w->accesses++;
  emu_region *R = find_region(w, a);
  char name[32];
  if (!R) {
    // constants of the compiled module itself: neither buffer nor stack, and only ever read
    if (!write && a - (uintptr_t)&__ehdr_start < (64u << 20)) return;
    return outside(w, t, a, n, write, pc);
  }
  const char *verb = write ? "write" : "read";
  if (a + n > R->hi)
    return fault(w, t, EMU_F_BOUNDS, {pc}, true, "out-of-bounds %zu-byte %s crosses the end of %s (%zu bytes long)", n,
                 verb, name_of(R, name), size_t(R->hi - R->lo));
  if (R == &w->tg && !inside_variable(w, a - R->lo, n)) return outside_variable(w, t, a - R->lo, n, write, pc);
  if (aligned && (a & (n - 1)))
    fault(w, t, EMU_F_MISALIGNED, {pc}, false, "misaligned %zu-byte %s in %s", n, verb, name_of(R, name));
  if (write && R->kind == EMU_READ)
    return fault(w, t, EMU_F_READ_ONLY, {pc}, true, "write to %s, which is bound for reading", name_of(R, name));
  if (R->kind != EMU_READ) check_order(w, t, R, a - R->lo, a - R->lo + n, write, atomic, pc);
}
