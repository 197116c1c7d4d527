// What a compiled kernel and the runtime share. Plain C structures: Rust mirrors some of them (src/ffi.rs).
#pragma once
#include <stddef.h>
#include <stdint.h>

extern "C" {
struct emu_u3 {
  uint32_t x, y, z;
};

// Everything a thread can ask about its place, in the order of the EMU_P_ numbers below.
struct emu_ctx {
  emu_u3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid, threads_per_threadgroup,
      dispatch_threads_per_threadgroup, threadgroups_per_grid, threads_per_grid;
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup,
      threads_per_simdgroup, simdgroups_per_threadgroup, thread_index_in_quadgroup, quadgroup_index_in_threadgroup;
};
enum {
  EMU_P_BUFFER,
  EMU_P_TGMEM,
  EMU_P_TPIG,
  EMU_P_TPITG,
  EMU_P_TGPIG,
  EMU_P_TPTG,
  EMU_P_DTPTG,
  EMU_P_TGPG,
  EMU_P_TPG,
  EMU_P_TIITG,
  EMU_P_TIISG,
  EMU_P_SGIITG,
  EMU_P_TPSG,
  EMU_P_SGPTG,
  EMU_P_TIIQG,
  EMU_P_QGIITG
};
struct emu_param {
  int kind, index;
};
struct emu_kernel {
  const char *name;
  void (*entry)(const emu_param *);
  const emu_param *params;
  uint32_t nparams;
  uint32_t max_threads;  // max_total_threads_per_threadgroup, 0 where the kernel does not say
};
// A place in the source. As a default argument it is the caller's: EMU_HERE in msl.h.
struct emu_site {
  const char *file;
  int line, col;
};
struct emu_fault {
  int32_t kind;
  emu_site site;     // where the caller knew it
  uint64_t pcs[8];   // offsets in the shared library, innermost call first
  uint64_t earlier;  // the other access of a race, 0 if unknown
  uint32_t has_thread, simdgroup, lane;
  emu_u3 thread, group;
  char text[320];
};
struct emu_constant {
  uint64_t bits;
  uint32_t set, size;
};
struct emu_region {
  uintptr_t lo, hi;
  int32_t kind, index;  // kind: EMU_READ ...
  uint64_t *w, *r;      // shadow: last write and last reads of each byte (checked mode)
  uint32_t *wpc, *rpc;  // and where they were, as offsets in the shared library
};
enum { EMU_READ, EMU_WRITE, EMU_READ_WRITE, EMU_THREADGROUP };
struct emu_launch {
  const emu_kernel *kernel;
  emu_region *regions;
  uint64_t nregions;
  void *buf[32];
  uint64_t len[32];    // bytes from buf[i] to the end of its buffer
  uint64_t tgmem[32];  // lengths of dynamic threadgroup memory
  emu_constant constants[64];
  emu_u3 groups, grid, tg;
  uint32_t checked, seed, flags;  // flags 1: divergent simd operations are allowed
  volatile uint32_t abort, nfaults, lock;
  emu_fault faults[8];
  uint64_t accesses, switches;
  uint64_t tg_bytes;
};

// A collective operation's meeting place: lanes leave values in `data`; the first to go on may leave what all need in
// `result`.
struct alignas(64) emu_bank {
  unsigned char data[1024];
  alignas(64) unsigned char result[256];
  uint32_t ready;
};
// The part of a thread's control block that inlined code reads. It lies at the top of the thread's own stack block.
struct emu_thread {
  emu_ctx ctx;
  emu_bank *bank, *settled;
  uint32_t lane, pad;
  const emu_launch *launch;
  void *const *tgmem;
};

uint32_t emu_simd_wait(const char *op, emu_site at);  // returns the mask of lanes that took part
void emu_barrier(unsigned flags, int simdgroup, emu_site at);
void *emu_tg_variable(unsigned site, size_t size, size_t align, const char *name, const emu_site &at);
void emu_atomic(void *p, unsigned size, int write);
void emu_fail(int kind, const char *text, emu_site at);  // does not return
const void *emu_bind(int index, size_t at_least);
}
enum {
  EMU_F_RACE = 1,
  EMU_F_BARRIER,
  EMU_F_SIMD_DIVERGENCE,
  EMU_F_BOUNDS,
  EMU_F_UNINITIALISED,
  EMU_F_MISALIGNED,
  EMU_F_MEMORY,
  EMU_F_INACTIVE,
  EMU_F_BINDING,
  EMU_F_READ_ONLY,
  EMU_F_STACK,
  EMU_F_ARITHMETIC
};

constexpr uintptr_t EMU_STACK = 128 << 10;  // one block per thread, aligned to its size
constexpr uintptr_t EMU_CONTROL = 1024;     // bytes at its top for the control block
inline __attribute__((always_inline, no_sanitize("thread"))) emu_thread *emu_self() {
  uintptr_t sp;
#if defined(__x86_64__)
  asm("mov %%rsp, %0" : "=r"(sp));
#elif defined(__aarch64__)
  asm("mov %0, sp" : "=r"(sp));
#else
#error "the emulator knows x86-64 and aarch64"
#endif
  return (emu_thread *)((sp & ~(EMU_STACK - 1)) + EMU_STACK - EMU_CONTROL);
}
