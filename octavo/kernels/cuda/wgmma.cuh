// SM90's asynchronous products of 64 rows by WIDTH columns, both operands E4M3 in shared memory in rows of 128 bytes,
// swizzled (PTX ISA, wgmma.mma_async, matrix descriptors of K-major operands with 128-byte swizzling).
//
// A source that includes this defines WIDTH (224, 128, 112 or 64) first. Its shared memory begins on a multiple of 1024.
#pragma once
#include "device.cuh"

#ifndef OCTAVO_HOST

// The thread's ordinary writes to shared memory, before what the tensor cores read after the next barrier.
DEVICE void order_for_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What the thread has in registers, before the tensor cores take them over.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void end_of_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all but the last `later` groups of products are done.
template <int later>
DEVICE void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(later) : "memory");
}

// Groups of 8 rows lie 1024 bytes apart; the distance along K has no meaning within a row.
DEVICE unsigned long long descriptor_of(const u8* rows) {
    const u32 address = u32(__cvta_generic_to_shared(rows));
    return (address & 0x3FFFFu) >> 4 | 1ull << 16 | 1024ull >> 4 << 32 | 1ull << 62;
}

#define TEN(t) \
    "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define EIGHT_OF(c, i) \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define HALF_OF(c, i) EIGHT_OF(c, i), EIGHT_OF(c, i + 8), EIGHT_OF(c, i + 16), EIGHT_OF(c, i + 24)
// The numbers of the sums' registers, of both descriptors and of the predicate, and the sums.
#if WIDTH == 224
#define NUMBERS TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) "%110, %111}, %112, %113"
#define PREDICATE "%114"
#define SUMS(c) HALF_OF(c, 0), HALF_OF(c, 32), HALF_OF(c, 64), EIGHT_OF(c, 96), EIGHT_OF(c, 104)
#elif WIDTH == 128
#define NUMBERS TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60, %61, %62, %63}, %64, %65"
#define PREDICATE "%66"
#define SUMS(c) HALF_OF(c, 0), HALF_OF(c, 32)
#elif WIDTH == 112
#define NUMBERS TEN() TEN(1) TEN(2) TEN(3) TEN(4) "%50, %51, %52, %53, %54, %55}, %56, %57"
#define PREDICATE "%58"
#define SUMS(c) HALF_OF(c, 0), EIGHT_OF(c, 32), EIGHT_OF(c, 40), EIGHT_OF(c, 48)
#elif WIDTH == 64
#define NUMBERS TEN() TEN(1) TEN(2) "%30, %31}, %32, %33"
#define PREDICATE "%34"
#define SUMS(c) HALF_OF(c, 0)
#endif

// c = a b^T, + c where `accumulate`; a 64 rows, b WIDTH rows, 32 bytes of each from where they point.
DEVICE void multiply_codes(float (&c)[WIDTH / 2], const u8* a, const u8* b, bool accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, " PREDICATE ", 0; wgmma.mma_async.sync.aligned.m64n" TEXT(WIDTH)
                     "k32.f32.e4m3.e4m3 {" NUMBERS ", p, 1, 1;}"
                 : SUMS(c)
                 : "l"(descriptor_of(a)), "l"(descriptor_of(b)), "r"(int(accumulate)));
}

#endif
