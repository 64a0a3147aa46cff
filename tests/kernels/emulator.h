// CUDA's thread model on the host, one block at a time: each CUDA thread is a fiber that runs until it waits.
// Enough for the package's kernels: barriers, warp-wide mma and shuffles, the instructions of device.cuh.
#pragma once
#define OCTAVO_HOST
typedef long long i64;
#include <math.h>  // the C headers: those of C++ would take most of the time it takes to compile a kernel
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

struct uint4 { uint32_t x, y, z, w; };
struct uint2 { uint32_t x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct dim3 { int x = 1, y = 1, z = 1; };
static dim3 blockIdx, threadIdx, gridDim;

namespace emulator {
const int MAX_THREADS = 1024, STACK = 128 << 10;
struct Barrier { int need, arrived; uint64_t generation; };
struct Fiber { ucontext_t context; bool done; };
static Fiber fibers[MAX_THREADS];
static char* stacks;
static ucontext_t scheduler;
static bool progress;  // since the last round some thread ended or passed a barrier
static Barrier block_barrier, warp_barriers[MAX_THREADS / 32];
// Asynchronous copies of each thread, in groups.
struct Copy { void* to; const void* from; size_t bytes; };
struct Copies { Copy waiting[64]; int size, groups, ends[16]; };
static Copies copies[MAX_THREADS];
static void (*call)(void*);
static void* kernel;

static void yield() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }
static void wait(Barrier& barrier) {
    const uint64_t mine = barrier.generation;
    if (++barrier.arrived == barrier.need) {
        barrier.arrived = 0; ++barrier.generation; progress = true;
        return;
    }
    while (barrier.generation == mine) yield();
}
static void entry() { call(kernel); progress = fibers[threadIdx.x].done = true; yield(); }

// 0, or 1 where threads wait for each other for ever.
static int run_block(int threads) {
    block_barrier = {threads, 0, 0};
    for (Barrier& barrier : warp_barriers) barrier = {32, 0, 0};
    for (int i = 0; i < threads; ++i) {
        fibers[i].done = false;
        copies[i].size = copies[i].groups = 0;
        ucontext_t& context = fibers[i].context;
        getcontext(&context);
        context.uc_stack.ss_sp = stacks + size_t(i) * STACK;
        context.uc_stack.ss_size = STACK;
        makecontext(&context, entry, 0);
    }
    // Last thread first: code that needs a barrier and lacks it must not be saved by the order of threads.
    for (int left = threads; left > 0; ) {
        progress = false;
        for (int i = threads - 1; i >= 0; --i) {
            if (fibers[i].done) continue;
            threadIdx.x = i;
            swapcontext(&scheduler, &fibers[i].context);
            left -= fibers[i].done;
        }
        if (!progress) return 1;
    }
    return 0;
}

template <class Kernel>
static int launch(dim3 grid, int threads, Kernel body) {
    kernel = &body;
    call = [](void* self) { (*static_cast<Kernel*>(self))(); };
    gridDim = grid;
    // For this launch alone: every kernel is a library of its own, and hundreds of them stay loaded.
    stacks = static_cast<char*>(malloc(size_t(threads) * STACK));
    int deadlock = 0;
    for (int z = 0; z < grid.z; ++z)
        for (int y = 0; y < grid.y; ++y)
            for (int x = 0; x < grid.x && !deadlock; ++x) {
                blockIdx.x = x; blockIdx.y = y; blockIdx.z = z;
                deadlock = run_block(threads);
            }
    free(stacks);
    return deadlock;
}

struct Exchange { uint32_t a[32][4], b[32][2]; float value[32]; const uint16_t* rows[32]; };
static Exchange exchanges[MAX_THREADS / 32];
}  // namespace emulator

#define KERNEL(threads, blocks) extern "C" void
#define DEVICE static inline
#define SHARED static
#define DYNAMIC_SHARED(name) alignas(1024) static uint4 name[(227 << 10) / 16]

static void __syncthreads() { emulator::wait(emulator::block_barrier); }
static void wait_for_previous_kernel() {}
static void end_of_previous_kernel() {}
static void start_of_next_kernel() {}
static void prefetch(const void* address) { *static_cast<const volatile char*>(address); }
static void sync_warp() { emulator::wait(emulator::warp_barriers[threadIdx.x / 32]); }

static float broadcast(float value, int lane) {
    emulator::Exchange& shared = emulator::exchanges[threadIdx.x / 32];
    shared.value[threadIdx.x % 32] = value;
    sync_warp();
    const float other = shared.value[lane];
    sync_warp();
    return other;
}
static float exchange(float value, int mask) { return broadcast(value, threadIdx.x % 32 ^ mask); }

static inline uint32_t bits_of_float(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
static inline float float_of_bits(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }

static uint32_t largest_of_warp(uint32_t value) {
    for (int mask = 16; mask > 0; mask /= 2) {
        const uint32_t other = bits_of_float(exchange(float_of_bits(value), mask));
        if (other > value) value = other;
    }
    return value;
}

// Nothing arrives before it is waited for, and what was there is gone at once.
static void copy_later(void* to, const void* from, size_t bytes) {
    emulator::Copies& mine = emulator::copies[threadIdx.x];
    if (mine.size == 64) abort();
    memset(to, 0xFF, bytes);  // NaN
    mine.waiting[mine.size++] = {to, from, bytes};
}
static inline void copy_later(uint4* to, const void* from) { copy_later(to, from, 16); }
static inline void copy_later(uint2* to, const void* from) { copy_later(to, from, 8); }
static inline void copy_later(void* to, const void* from, bool inside) { copy_later(to, inside ? from : nullptr, size_t(16)); }
static void end_of_copies() {
    emulator::Copies& mine = emulator::copies[threadIdx.x];
    if (mine.groups == 16) abort();
    mine.ends[mine.groups++] = mine.size;
}
template <int later>
static void wait_for_copies() {
    emulator::Copies& mine = emulator::copies[threadIdx.x];
    const int done = mine.groups - later;
    if (done <= 0) return;
    const int end = mine.ends[done - 1];
    for (int i = 0; i < end; ++i) {
        const emulator::Copy& copy = mine.waiting[i];
        if (copy.from) memcpy(copy.to, copy.from, copy.bytes);
        else memset(copy.to, 0, copy.bytes);
    }
    memmove(mine.waiting, mine.waiting + end, (mine.size - end) * sizeof(emulator::Copy));
    for (int i = 0; i < later; ++i) mine.ends[i] = mine.ends[done + i] - end;
    mine.size -= end, mine.groups = later;
}

static inline uint4 load_once(const void* address) { uint4 v; memcpy(&v, address, 16); return v; }
static inline uint4 load_shared_by_all(const void* address) { return load_once(address); }
static inline float rounded_product(float a, float b) { return a * b; }

static inline float exp2_approximately(float x) { return exp2f(x); }
static inline float reciprocal_approximately(float x) { return 1.0f / x; }

static inline uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = uint64_t(high) << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> (selector >> (4 * i) & 7) * 8 & 0xFF) << (8 * i);
    return result;
}

static inline float float_of_bf16(uint32_t bits) { return float_of_bits(bits << 16); }
static inline float float_of_fp16(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                : exponent ? ldexp(1024.0f + fraction, exponent - 25) : ldexp(float(fraction), -24);
    return bits & 0x8000 ? -value : value;
}
static inline uint16_t bf16_of_float(float value) {
    const uint32_t bits = bits_of_float(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static inline uint16_t fp16_of_float(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint16_t sign = bits >> 16 & 0x8000;
    const float magnitude = fabs(value);
    if (isnan(value)) return 0x7FFF;
    if (magnitude >= 65520.0f) return sign | 0x7C00;
    if (magnitude < ldexp(1.0f, -14)) return sign | uint16_t(nearbyint(ldexp(magnitude, 24)));
    const uint32_t body = bits_of_float(magnitude);
    return sign | uint16_t((body + 0xFFF + (body >> 13 & 1) - (112u << 23)) >> 13);
}
static inline uint32_t bf16x2_of_floats(float low, float high) { return bf16_of_float(low) | uint32_t(bf16_of_float(high)) << 16; }
static inline uint32_t fp16x2_of_floats(float low, float high) { return fp16_of_float(low) | uint32_t(fp16_of_float(high)) << 16; }
static inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    uint32_t result = 0;
    for (int i = 0; i < 2; ++i)
        result |= uint32_t(bf16_of_float(float_of_bf16(a >> 16 * i & 0xFFFF) * float_of_bf16(b >> 16 * i & 0xFFFF))) << 16 * i;
    return result;
}

// PTX ISA, fragments of mma.m16n8k16: a row (g, g + 8), k (2t, 2t + 1 and + 8); b column g, same k; c rows, columns 2t.
template <float (*value)(uint32_t)>
static void mma_any(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    emulator::Exchange& shared = emulator::exchanges[threadIdx.x / 32];
    memcpy(shared.a[lane], a, 16);
    memcpy(shared.b[lane], b, 8);
    sync_warp();
    for (int out = 0; out < 4; ++out) {
        const int row = g + 8 * (out / 2), column = 2 * t + out % 2;
        float total = 0;
        for (int k = 0; k < 16; ++k) {
            const int owner = k % 8 / 2, upper = k / 8, half = k % 2;
            const uint32_t left = shared.a[row % 8 * 4 + owner][row / 8 + 2 * upper] >> 16 * half & 0xFFFF;
            const uint32_t right = shared.b[column * 4 + owner][upper] >> 16 * half & 0xFFFF;
            total += value(left) * value(right);
        }
        c[out] += total;
    }
    sync_warp();
}
static uint32_t transpose_8x8(uint32_t pair) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    emulator::Exchange& shared = emulator::exchanges[threadIdx.x / 32];
    shared.a[lane][0] = pair;
    sync_warp();
    uint32_t result = 0;
    for (int i = 0; i < 2; ++i) result |= (shared.a[(2 * t + i) * 4 + g / 2][0] >> 16 * (g % 2) & 0xFFFF) << 16 * i;
    sync_warp();
    return result;
}
static void load_any(uint32_t (&to)[4], const void* row, bool turned) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    emulator::Exchange& shared = emulator::exchanges[threadIdx.x / 32];
    shared.rows[lane] = static_cast<const uint16_t*>(row);
    sync_warp();
    for (int i = 0; i < 4; ++i) {
        const uint16_t* const* rows = shared.rows + 8 * i;
        to[i] = turned ? rows[2 * t][g] | uint32_t(rows[2 * t + 1][g]) << 16
                       : rows[g][2 * t] | uint32_t(rows[g][2 * t + 1]) << 16;
    }
    sync_warp();
}
static inline void load_matrices(uint32_t (&to)[4], const void* row) { load_any(to, row, false); }
static inline void load_turned_matrices(uint32_t (&to)[4], const void* row) { load_any(to, row, true); }
static float fp16_value(uint32_t bits) { return float_of_fp16(uint16_t(bits)); }
static inline void mma_fp16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_any<fp16_value>(c, a, b); }
static inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_any<float_of_bf16>(c, a, b); }

// wgmma of E4M3 operands in swizzled rows of 128 bytes. A product is computed when it is waited for: whatever was written
// over its operands before that shows.
namespace emulator {
struct Product { float* sums; int columns; const uint8_t *a, *b; bool accumulate; };
struct Products { Product waiting[16]; int size, groups, ends[4]; };
static Products products[MAX_THREADS];
static float code_value(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float value = (code & 127) == 127 ? NAN : exponent ? ldexp(8.0f + fraction, exponent - 10) : ldexp(float(fraction), -9);
    return code & 128 ? -value : value;
}
static float swizzled_value(const uint8_t* rows, int row, int k) {
    const uintptr_t at = uintptr_t(rows) + row * 128 + k;
    return code_value(*reinterpret_cast<const uint8_t*>(at ^ (at >> 7 & 7) << 4));
}
static void multiply(const Product& p) {
    const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16 + lane / 4;
    for (int i = 0; i < p.columns / 2; ++i) {
        const int row = first + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float total = p.accumulate ? p.sums[i] : 0.0f;
        for (int k = 0; k < 32; ++k) total += swizzled_value(p.a, row, k) * swizzled_value(p.b, column, k);
        p.sums[i] = total;
    }
}
}  // namespace emulator
static void order_for_tensor_cores() {}
static void begin_products() {}
template <int half>
static void multiply_codes(float (&sums)[half], const unsigned char* a, const unsigned char* b, bool accumulate) {
    emulator::Products& mine = emulator::products[threadIdx.x];
    if (mine.size == 16) abort();
    mine.waiting[mine.size++] = {sums, 2 * half, a, b, accumulate};
}
static void end_of_products() {
    emulator::Products& mine = emulator::products[threadIdx.x];
    if (mine.groups == 4) abort();
    mine.ends[mine.groups++] = mine.size;
}
template <int later>
static void wait_for_products() {
    emulator::Products& mine = emulator::products[threadIdx.x];
    const int done = mine.groups - later;
    if (done <= 0) return;
    const int end = mine.ends[done - 1];
    for (int i = 0; i < end; ++i) emulator::multiply(mine.waiting[i]);
    memmove(mine.waiting, mine.waiting + end, (mine.size - end) * sizeof(emulator::Product));
    for (int i = 0; i < later; ++i) mine.ends[i] = mine.ends[done + i] - end;
    mine.size -= end, mine.groups = later;
}
