// Switching between the threads of a threadgroup: each has a stack of its own and runs until it has to wait.
#pragma once
#include "abi.h"
#include <string.h>

// Saves the registers that a call preserves, stores the stack pointer in *save and goes on at `load`.
extern "C" __attribute__((visibility("hidden"))) void emu_switch(void **save, void *load);
extern "C" __attribute__((visibility("hidden"))) void emu_boot();

#if defined(__x86_64__)
// The last jump goes through a register and not `ret`: a return address that differs from the call's is never
// predicted.
asm(R"(
.text
.hidden emu_switch
.globl emu_switch
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi); movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  popq %rcx
  jmpq *%rcx
.hidden emu_boot
.globl emu_boot
emu_boot:
  movq %r12,%rdi; callq *%r13; ud2
)");
static void *emu_first_frame(char *top, void (*fn)(void *), void *arg) {
  void **s = (void **)top;
  *--s = nullptr;
  *--s = nullptr;            // alignment
  *--s = (void *)&emu_boot;  // where the first switch jumps
  *--s = nullptr;
  *--s = nullptr;  // rbp, rbx
  *--s = arg;
  *--s = (void *)fn;  // r12, r13
  *--s = nullptr;
  *--s = nullptr;  // r14, r15
  return s;
}
#elif defined(__aarch64__)
asm(R"(
.text
.hidden emu_switch
.globl emu_switch
emu_switch:
  sub sp, sp, #176
  stp x19,x20,[sp]; stp x21,x22,[sp,#16]; stp x23,x24,[sp,#32]; stp x25,x26,[sp,#48]; stp x27,x28,[sp,#64]; stp x29,x30,[sp,#80]
  stp d8,d9,[sp,#96]; stp d10,d11,[sp,#112]; stp d12,d13,[sp,#128]; stp d14,d15,[sp,#144]
  mov x9, sp; str x9,[x0]; mov sp, x1
  ldp x19,x20,[sp]; ldp x21,x22,[sp,#16]; ldp x23,x24,[sp,#32]; ldp x25,x26,[sp,#48]; ldp x27,x28,[sp,#64]; ldp x29,x30,[sp,#80]
  ldp d8,d9,[sp,#96]; ldp d10,d11,[sp,#112]; ldp d12,d13,[sp,#128]; ldp d14,d15,[sp,#144]
  add sp, sp, #176
  br x30
.hidden emu_boot
.globl emu_boot
emu_boot:
  mov x0, x19; blr x20; brk #0
)");
static void *emu_first_frame(char *top, void (*fn)(void *), void *arg) {
  void **s = (void **)(top - 176);
  memset(s, 0, 176);
  s[0] = arg;
  s[1] = (void *)fn;
  s[11] = (void *)&emu_boot;
  return s;
}
#endif
