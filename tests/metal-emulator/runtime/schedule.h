// Who runs next. Inside a simdgroup the processor goes from lane to lane; the last lane to arrive at a collective
// operation settles it and goes on. A simdgroup whose lanes all wait at a threadgroup barrier, or have returned, yields
// to the next one.
#pragma once
#include "worker.h"

// Values are left in one bank and read from the other, so that the fastest lane can be one operation ahead.
static void point_to_banks(SimdGroup &g, Thread *t) {
  t->bank = &g.bank[g.parity ^ 1];
  t->settled = &g.bank[g.parity];
}

// Releases the lanes in `who` except `me`, which goes on by itself.
static void release(Worker *w, SimdGroup &g, unsigned who, Thread *me) {
  for (unsigned m = who; m; m &= m - 1) {
    Thread *t = thread_of(w, g.lo + __builtin_ctz(m));
    t->active = who;
    t->state = RUN;
    point_to_banks(g, t);
  }
  for (unsigned m = g.present & ~who; m; m &= m - 1) point_to_banks(g, thread_of(w, g.lo + __builtin_ctz(m)));
  g.arrived = 0;
  g.mixed = false;
  g.ready = who & ~(me ? 1u << me->lane : 0);
}

static bool same_site(const Thread *a, const Thread *b) {
  return a->at.line == b->at.line && a->at.col == b->at.col && a->op == b->op && a->state == b->state;
}

// All lanes wait or are gone. True: `me` (or, without `me`, a lane now marked ready) can go on.
static bool settle(Worker *w, SimdGroup &g, Thread *me) {
  if (!g.arrived) return false;
  Thread *lead = thread_of(w, g.lo + __builtin_ctz(g.arrived));
  unsigned who = g.arrived;
  if (g.mixed) {  // lanes at different operations: the first in the source goes first
    who = 0;
    for (unsigned m = g.arrived; m; m &= m - 1) {
      Thread *t = thread_of(w, g.lo + __builtin_ctz(m));
      if (t->at.line < lead->at.line || (t->at.line == lead->at.line && t->at.col < lead->at.col)) lead = t;
    }
    for (unsigned m = g.arrived; m; m &= m - 1) {
      Thread *t = thread_of(w, g.lo + __builtin_ctz(m));
      if (same_site(t, lead)) {
        who |= 1u << t->lane;
        continue;
      }
      if (!(w->launch->flags & 1)) {
        fault(w, lead, EMU_F_SIMD_DIVERGENCE, {0, lead->at}, true,
              "simdgroup divergence: this lane waits at %s, lane %u at %s (line %d)", lead->op, t->lane, t->op,
              t->at.line);
        return false;
      }
    }
  }
  if (lead->state == WAIT_SIMDGROUP_BARRIER) {
    if (who != g.present) {
      fault(w, lead, EMU_F_BARRIER, {0, lead->at}, true,
            "barrier divergence: simdgroup_barrier not reached by all lanes (reached by mask %08x)", who);
      return false;
    }
    if (lead->flags & 2) g.ep_tg++;
    if (lead->flags & 1) g.ep_dev++;
  } else {
    g.parity ^= 1;
    g.bank[g.parity].ready = 0;
  }
  unsigned left = g.arrived & ~who;
  bool mine = me && (who >> me->lane & 1);
  release(w, g, who, mine ? me : nullptr);
  g.arrived = left;
  if (left) {  // they stay, and so must the values that they left
    memcpy(g.bank[g.parity ^ 1].data, g.bank[g.parity].data, sizeof g.bank[0].data);
    Thread *first = thread_of(w, g.lo + __builtin_ctz(left));
    for (unsigned m = left; m; m &= m - 1) g.mixed |= !same_site(first, thread_of(w, g.lo + __builtin_ctz(m)));
  }
  return mine;
}

// The current thread cannot go on by itself: run another lane of its simdgroup, or leave to the scheduler.
static void yield_from(Worker *w, Thread *me) {
  SimdGroup &g = w->sg[me->sg];
  w->switches++;
  if (!g.ready && settle(w, g, me->state == DONE ? nullptr : me)) return;
  if (w->launch->abort || !g.ready) {
    w->current = nullptr;
    emu_switch(&me->sp, w->scheduler_sp);
    return;
  }
  Thread *next = thread_of(w, g.lo + __builtin_ctz(g.ready));
  g.ready &= g.ready - 1;
  if (next == me) return;
  w->current = next;
  emu_switch(&me->sp, next->sp);
}

static void arrive(Worker *w, Thread *t, State state, const char *op, emu_site at) {
  SimdGroup &g = w->sg[t->sg];
  t->op = op;
  t->at = at;
  t->state = state;
  if (state != WAIT_BARRIER) {
    if (g.arrived) {
      const Thread *o = thread_of(w, g.lo + __builtin_ctz(g.arrived));
      g.mixed |= !same_site(t, o);
    }
    g.arrived |= 1u << t->lane;
  }
  yield_from(w, t);
}

static void thread_main(void *p) {
  Thread *t = (Thread *)p;
  const emu_kernel *k = t->launch->kernel;
  k->entry(k->params);
  t->state = DONE;
  t->worker->sg[t->sg].done |= 1u << t->lane;
  yield_from(t->worker, t);
  __builtin_trap();
}

static void start_group(Worker *w, uint32_t index) {
  emu_launch &l = *w->launch;
  auto least = [](uint32_t a, uint32_t b) { return a < b ? a : b; };
  emu_u3 group{index % l.groups.x, index / l.groups.x % l.groups.y, index / l.groups.x / l.groups.y};
  emu_u3 base{group.x * l.tg.x, group.y * l.tg.y, group.z * l.tg.z};
  emu_u3 size{least(l.tg.x, l.grid.x - base.x), least(l.tg.y, l.grid.y - base.y), least(l.tg.z, l.grid.z - base.z)};
  unsigned n = size.x * size.y * size.z, nsg = (n + 31) / 32;
  w->gid = index;
  w->ep_tg = w->ep_dev = 1;
  w->threads = n;
  w->simdgroups = nsg;
  w->nvariables = w->last_variable = 0;
  w->tg_used = 0;
  w->tg.hi = w->tg.lo;
  w->last = nullptr;
  if (!l.checked) memset(w->arena, 0xff, EMU_TG_LIMIT);  // NaNs, so that a read before a write shows
  for (int i = 0; i < 32; i++) {
    w->tgmem[i] = nullptr;
    if (l.tgmem[i]) {
      w->tgmem[i] = w->arena + place(w, EMU_DYNAMIC, l.tgmem[i], 16).at;
    }
  }
  for (unsigned s = 0; s < nsg; s++) {
    SimdGroup &g = w->sg[s];
    g.lo = s * 32;
    g.present = n - g.lo >= 32 ? ~0u : (1u << (n - g.lo)) - 1;
    g.ready = g.present;
    g.arrived = g.done = g.parity = 0;
    g.mixed = false;
    g.ep_tg = g.ep_dev = 1;
  }
  for (unsigned i = 0; i < n; i++) {
    Thread *t = thread_of(w, i);
    t->worker = w;
    t->state = RUN;
    t->tid = i;
    t->lane = i % 32;
    t->sg = i / 32;
    point_to_banks(w->sg[i / 32], t);
    t->launch = w->launch;
    t->tgmem = w->tgmem;
    emu_ctx &c = t->ctx;
    c.thread_position_in_threadgroup = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    c.thread_position_in_grid = {base.x + c.thread_position_in_threadgroup.x,
                                 base.y + c.thread_position_in_threadgroup.y,
                                 base.z + c.thread_position_in_threadgroup.z};
    c.threadgroup_position_in_grid = group;
    c.threads_per_threadgroup = size;
    c.dispatch_threads_per_threadgroup = l.tg;
    c.threadgroups_per_grid = l.groups;
    c.threads_per_grid = l.grid;
    c.thread_index_in_threadgroup = i;
    c.thread_index_in_simdgroup = i % 32;
    c.simdgroup_index_in_threadgroup = i / 32;
    c.threads_per_simdgroup = 32;
    c.simdgroups_per_threadgroup = nsg;
    c.thread_index_in_quadgroup = i % 4;
    c.quadgroup_index_in_threadgroup = i / 4;
    t->sp = emu_first_frame((char *)t, thread_main, t);
  }
}

// Runs simdgroup s until every lane waits at a threadgroup barrier or has returned. False: the launch was aborted.
static bool run_simdgroup(Worker *w, unsigned s) {
  SimdGroup &g = w->sg[s];
  for (;;) {
    if (!g.ready) settle(w, g, nullptr);
    if (w->launch->abort) return false;
    if (!g.ready) return true;
    Thread *t = thread_of(w, g.lo + __builtin_ctz(g.ready));
    g.ready &= g.ready - 1;
    w->current = t;
    emu_switch(&w->scheduler_sp, t->sp);
    w->current = nullptr;
  }
}

static bool run_group(Worker *w, uint32_t index) {
  start_group(w, index);
  emu_launch &l = *w->launch;
  unsigned order[EMU_MAX_THREADS / 32];
  for (unsigned i = 0; i < w->simdgroups; i++) order[i] = i;
  uint32_t rng = l.seed * 2654435761u + index + 1;
  for (;;) {
    if (l.seed)
      for (unsigned i = w->simdgroups; i > 1; i--) {
        rng = rng * 1664525u + 1013904223u;
        unsigned j = (rng >> 8) % i, o = order[i - 1];
        order[i - 1] = order[j];
        order[j] = o;
      }
    for (unsigned i = 0; i < w->simdgroups; i++)
      if (!run_simdgroup(w, order[i])) return false;
    Thread *wait = nullptr, *other = nullptr, *gone = nullptr;
    for (unsigned i = 0; i < w->threads; i++) {
      Thread *t = thread_of(w, i);
      if (t->state == DONE)
        gone = t;
      else if (!wait)
        wait = t;
      else if (t->at.line != wait->at.line || t->at.col != wait->at.col)
        other = t;
    }
    if (!wait) break;
    if (gone) {
      fault(w, wait, EMU_F_BARRIER, {0, wait->at}, true,
            "barrier divergence: this thread waits at threadgroup_barrier, thread %u has returned", gone->tid);
      return false;
    }
    if (other) {
      fault(w, wait, EMU_F_BARRIER, {0, wait->at}, true,
            "barrier divergence: this thread waits at threadgroup_barrier, thread %u at the one in line %d", other->tid,
            other->at.line);
      return false;
    }
    if (wait->flags & 2) w->ep_tg++;
    if (wait->flags & 1) w->ep_dev++;
    for (unsigned i = 0; i < w->threads; i++) thread_of(w, i)->state = RUN;
    for (unsigned s = 0; s < w->simdgroups; s++) w->sg[s].ready = w->sg[s].present;
  }
  uint64_t used = w->tg_used;
  if (used > l.tg_bytes) l.tg_bytes = used;
  return true;
}
