/* Forwarders that know no signatures. Stub i puts the address of record i into a scratch register and jumps
 * to the common part, which counts, looks whether failures are armed, and jumps on: registers and stack are
 * what the caller left, so any signature passes, and the driver returns straight to the caller.
 *
 * struct record { void *target; struct slot *slot; }          (16 bytes, see interpose.c)
 * struct slot   { uint64_t count; uint32_t armed; ... }
 */
#include "layout.h"

#if defined(__x86_64__)

    .text
    .hidden kina_interpose_records
    .hidden kina_interpose_bind
    .hidden kina_interpose_decide
    .hidden kina_interpose_stubs
    .hidden kina_interpose_lazy
    .globl kina_interpose_stubs
    .globl kina_interpose_lazy

    /* Everything an argument may travel in: six integer registers, eight vector registers, al (the number of
     * vector registers of a variadic call). r11 holds the record. r10 (static chain) is no argument in C. */
    .macro SAVE
    pushq %rbp
    movq %rsp, %rbp
    andq $-16, %rsp
    subq $192, %rsp
    movq %rdi, 0(%rsp)
    movq %rsi, 8(%rsp)
    movq %rdx, 16(%rsp)
    movq %rcx, 24(%rsp)
    movq %r8, 32(%rsp)
    movq %r9, 40(%rsp)
    movq %rax, 48(%rsp)
    movq %r11, 56(%rsp)
    movaps %xmm0, 64(%rsp)
    movaps %xmm1, 80(%rsp)
    movaps %xmm2, 96(%rsp)
    movaps %xmm3, 112(%rsp)
    movaps %xmm4, 128(%rsp)
    movaps %xmm5, 144(%rsp)
    movaps %xmm6, 160(%rsp)
    movaps %xmm7, 176(%rsp)
    .endm

    .macro RESTORE
    movq 0(%rsp), %rdi
    movq 8(%rsp), %rsi
    movq 16(%rsp), %rdx
    movq 24(%rsp), %rcx
    movq 32(%rsp), %r8
    movq 40(%rsp), %r9
    movq 48(%rsp), %rax
    movq 56(%rsp), %r11
    movaps 64(%rsp), %xmm0
    movaps 80(%rsp), %xmm1
    movaps 96(%rsp), %xmm2
    movaps 112(%rsp), %xmm3
    movaps 128(%rsp), %xmm4
    movaps 144(%rsp), %xmm5
    movaps 160(%rsp), %xmm6
    movaps 176(%rsp), %xmm7
    leave
    .endm

    .balign 64
common:
    movq RECORD_SLOT(%r11), %r10
    lock incq SLOT_COUNT(%r10)
    cmpl $0, SLOT_ARMED(%r10)
    jne 1f
    jmp *RECORD_TARGET(%r11)
1:  SAVE
    movq %r11, %rdi
    call kina_interpose_decide
    testq %rax, %rax
    js 2f
    leave                          /* a code to return: rax holds it */
    ret
2:  RESTORE
    jmp *RECORD_TARGET(%r11)

    /* The first target of an exported name: find the real one, then go on there. */
    .balign 16
kina_interpose_lazy:
    SAVE
    movq %r11, %rdi
    call kina_interpose_bind
    movq %rax, 56(%rsp)
    RESTORE
    jmp *%r11

    .balign 16
kina_interpose_stubs:
    .set i, 0
    .rept STUBS
    .balign STUB_BYTES
    endbr64
    leaq kina_interpose_records + i * RECORD_BYTES(%rip), %r11
    jmp common
    .set i, i + 1
    .endr

#elif defined(__aarch64__)

    .text
    .hidden kina_interpose_records
    .hidden kina_interpose_bind
    .hidden kina_interpose_decide
    .hidden kina_interpose_stubs
    .hidden kina_interpose_lazy
    .globl kina_interpose_stubs
    .globl kina_interpose_lazy

    /* x0-x7 and q0-q7 carry arguments, x8 the address of a large result; x9-x15 are free; x16: the record. */
    .macro SAVE
    stp x29, x30, [sp, #-224]!
    mov x29, sp
    stp x0, x1, [sp, #16]
    stp x2, x3, [sp, #32]
    stp x4, x5, [sp, #48]
    stp x6, x7, [sp, #64]
    stp x8, x16, [sp, #80]
    stp q0, q1, [sp, #96]
    stp q2, q3, [sp, #128]
    stp q4, q5, [sp, #160]
    stp q6, q7, [sp, #192]
    .endm

    .macro RESTORE
    ldp x0, x1, [sp, #16]
    ldp x2, x3, [sp, #32]
    ldp x4, x5, [sp, #48]
    ldp x6, x7, [sp, #64]
    ldp x8, x16, [sp, #80]
    ldp q0, q1, [sp, #96]
    ldp q2, q3, [sp, #128]
    ldp q4, q5, [sp, #160]
    ldp q6, q7, [sp, #192]
    ldp x29, x30, [sp], #224
    .endm

    .balign 64
common:
    ldr x17, [x16, #RECORD_SLOT]
1:  ldxr x9, [x17]
    add x9, x9, #1
    stxr w10, x9, [x17]
    cbnz w10, 1b
    ldr w9, [x17, #SLOT_ARMED]
    cbnz w9, 2f
    ldr x17, [x16, #RECORD_TARGET]
    br x17
2:  SAVE
    mov x0, x16
    bl kina_interpose_decide
    tbnz x0, #63, 3f
    ldp x29, x30, [sp], #224
    ret
3:  RESTORE
    ldr x17, [x16, #RECORD_TARGET]
    br x17

    .balign 16
kina_interpose_lazy:
    SAVE
    mov x0, x16
    bl kina_interpose_bind
    mov x17, x0
    RESTORE
    br x17

    .balign 16
kina_interpose_stubs:
    .set i, 0
    .rept STUBS
    .balign STUB_BYTES
    adrp x16, kina_interpose_records + i * RECORD_BYTES
    add x16, x16, :lo12:kina_interpose_records + i * RECORD_BYTES
    b common
    .set i, i + 1
    .endr

#else
#error "the interposer has stubs for x86-64 and aarch64 only"
#endif

    /* The names of the real library, as so many labels into the block of stubs. */
#define EXPORT(index, name)                                                                                  \
    .globl name;                                                                                             \
    .type name, STT_FUNC;                                                                                    \
    .set name, kina_interpose_stubs + index * STUB_BYTES;
#include "exports.inc"

    .section .note.GNU-stack, "", %progbits
