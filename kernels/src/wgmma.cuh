// wgmma m64nNk16, bf16 operands in shared memory (K-major, 128-byte swizzle), f32 accumulators.
//
// Accumulator fragment: thread t of the warpgroup (warp w = t / 32, lane l = t % 32) holds, for every group j of eight columns,
// d[4j + {0, 1}] = row 16w + l / 4, columns 8j + 2 (l % 4) + {0, 1}, and d[4j + {2, 3}] = the same columns, eight rows further down.
#pragma once

#include <cstdint>

namespace expertd {

// Low word of an operand tile's descriptor, which holds its address. The high word is constant: rows of 128 bytes, groups of 8 rows
// 1024 bytes apart, 128-byte swizzle.
__device__ __forceinline__ uint32_t wgmma_descriptor(uint32_t address) { return (1u << 16) | ((address & 0x3FFFF) >> 4); }

// Orders register and shared-memory accesses of the warpgroup before the next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of the accumulators across a wait.
template <int COUNT> __device__ __forceinline__ void wgmma_pin(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int COUNT> __device__ __forceinline__ void wgmma_pin(uint32_t (&a)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
    }
}

template <int N> struct Wgmma;

#define EXPERTD_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define EXPERTD_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define EXPERTD_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define EXPERTD_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define EXPERTD_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define EXPERTD_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define EXPERTD_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define EXPERTD_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define EXPERTD_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define EXPERTD_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define EXPERTD_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define EXPERTD_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define EXPERTD_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define EXPERTD_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define EXPERTD_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define EXPERTD_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define EXPERTD_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EXPERTD_D8(i) EXPERTD_D4(i), EXPERTD_D4(i + 4)
#define EXPERTD_D16(i) EXPERTD_D8(i), EXPERTD_D8(i + 8)
#define EXPERTD_D32(i) EXPERTD_D16(i), EXPERTD_D16(i + 16)

// d += a * b^T. REGISTERS is the list of accumulators; A and B are the operand numbers of the descriptors.
#define EXPERTD_WGMMA(N, REGISTERS, A, B, ...)                                                                         \
    template <> struct Wgmma<N> {                                                                                      \
        static __device__ __forceinline__ void mma(float (&d)[N / 2], uint32_t a, uint32_t b) {                        \
            asm volatile("{\n.reg .b64 a, b;\nmov.b64 a, {%" #A ", 0x40000040};\nmov.b64 b, {%" #B ", 0x40000040};\n"   \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, a, b, 1, 1, 1, 0, 0;\n}\n" \
                         : __VA_ARGS__                                                                                 \
                         : "r"(a), "r"(b));                                                                            \
        }                                                                                                              \
    }

EXPERTD_WGMMA(8, "%0, %1, %2, %3", 4, 5, EXPERTD_D4(0));
EXPERTD_WGMMA(16, EXPERTD_R0, 8, 9, EXPERTD_D8(0));
EXPERTD_WGMMA(32, EXPERTD_R0 ", " EXPERTD_R1, 16, 17, EXPERTD_D16(0));
EXPERTD_WGMMA(48, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2, 24, 25, EXPERTD_D16(0), EXPERTD_D8(16));
EXPERTD_WGMMA(64, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3, 32, 33, EXPERTD_D32(0));
EXPERTD_WGMMA(80, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4, 40, 41, EXPERTD_D32(0), EXPERTD_D8(32));
EXPERTD_WGMMA(96, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5, 48,
              49, EXPERTD_D32(0), EXPERTD_D16(32));
EXPERTD_WGMMA(112, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", "
              EXPERTD_R6, 56, 57, EXPERTD_D32(0), EXPERTD_D16(32), EXPERTD_D8(48));
EXPERTD_WGMMA(128, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", "
              EXPERTD_R6 ", " EXPERTD_R7, 64, 65, EXPERTD_D32(0), EXPERTD_D32(32));
EXPERTD_WGMMA(144, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", "
              EXPERTD_R6 ", " EXPERTD_R7 ", " EXPERTD_R8, 72, 73, EXPERTD_D32(0), EXPERTD_D32(32), EXPERTD_D8(64));
EXPERTD_WGMMA(160, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", "
              EXPERTD_R6 ", " EXPERTD_R7 ", " EXPERTD_R8 ", " EXPERTD_R9, 80, 81, EXPERTD_D32(0),
              EXPERTD_D32(32), EXPERTD_D16(64));
EXPERTD_WGMMA(176, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", "
              EXPERTD_R6 ", " EXPERTD_R7 ", " EXPERTD_R8 ", " EXPERTD_R9 ", " EXPERTD_R10, 88, 89, EXPERTD_D32(0),
              EXPERTD_D32(32), EXPERTD_D16(64), EXPERTD_D8(80));
EXPERTD_WGMMA(192, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", "
              EXPERTD_R6 ", " EXPERTD_R7 ", " EXPERTD_R8 ", " EXPERTD_R9 ", " EXPERTD_R10 ", " EXPERTD_R11, 96, 97,
              EXPERTD_D32(0), EXPERTD_D32(32), EXPERTD_D32(64));
EXPERTD_WGMMA(208, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", "
              EXPERTD_R6 ", " EXPERTD_R7 ", " EXPERTD_R8 ", " EXPERTD_R9 ", " EXPERTD_R10 ", " EXPERTD_R11 ", "
              EXPERTD_R12, 104, 105, EXPERTD_D32(0), EXPERTD_D32(32), EXPERTD_D32(64), EXPERTD_D8(96));
EXPERTD_WGMMA(224, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", "
              EXPERTD_R6 ", " EXPERTD_R7 ", " EXPERTD_R8 ", " EXPERTD_R9 ", " EXPERTD_R10 ", " EXPERTD_R11 ", "
              EXPERTD_R12 ", " EXPERTD_R13, 112, 113, EXPERTD_D32(0), EXPERTD_D32(32), EXPERTD_D32(64),
              EXPERTD_D16(96));
EXPERTD_WGMMA(240, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", "
              EXPERTD_R6 ", " EXPERTD_R7 ", " EXPERTD_R8 ", " EXPERTD_R9 ", " EXPERTD_R10 ", " EXPERTD_R11 ", "
              EXPERTD_R12 ", " EXPERTD_R13 ", " EXPERTD_R14, 120, 121, EXPERTD_D32(0), EXPERTD_D32(32),
              EXPERTD_D32(64), EXPERTD_D16(96), EXPERTD_D8(112));
EXPERTD_WGMMA(256, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", "
              EXPERTD_R6 ", " EXPERTD_R7 ", " EXPERTD_R8 ", " EXPERTD_R9 ", " EXPERTD_R10 ", " EXPERTD_R11 ", "
              EXPERTD_R12 ", " EXPERTD_R13 ", " EXPERTD_R14 ", " EXPERTD_R15, 128, 129, EXPERTD_D32(0),
              EXPERTD_D32(32), EXPERTD_D32(64), EXPERTD_D32(96));

// As Wgmma, with `a` in registers: a fragment of 16 k, laid out as in experts_layout.cuh. Overwrites d unless `add`.
template <int N> struct WgmmaRegisters;

#define EXPERTD_WGMMA_REGISTERS(N, REGISTERS, A0, A1, A2, A3, B, ADD, ...)                                             \
    template <> struct WgmmaRegisters<N> {                                                                             \
        static __device__ __forceinline__ void mma(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b, int add) {   \
            asm volatile("{\n.reg .b64 b;\n.reg .pred add;\nmov.b64 b, {%" #B ", 0x40000040};\nsetp.ne.b32 add, %" #ADD  \
                         ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, {%" #A0       \
                         ", %" #A1 ", %" #A2 ", %" #A3 "}, b, add, 1, 1, 0;\n}\n"                                      \
                         : __VA_ARGS__                                                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));                      \
        }                                                                                                              \
    }

EXPERTD_WGMMA_REGISTERS(8, "%0, %1, %2, %3", 4, 5, 6, 7, 8, 9, EXPERTD_D4(0));
EXPERTD_WGMMA_REGISTERS(16, EXPERTD_R0, 8, 9, 10, 11, 12, 13, EXPERTD_D8(0));
EXPERTD_WGMMA_REGISTERS(32, EXPERTD_R0 ", " EXPERTD_R1, 16, 17, 18, 19, 20, 21, EXPERTD_D16(0));
EXPERTD_WGMMA_REGISTERS(48, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2, 24, 25, 26, 27, 28, 29, EXPERTD_D16(0), EXPERTD_D8(16));
EXPERTD_WGMMA_REGISTERS(64, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3, 32, 33, 34, 35, 36, 37, EXPERTD_D32(0));
EXPERTD_WGMMA_REGISTERS(80, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4, 40, 41, 42, 43, 44, 45, EXPERTD_D32(0), EXPERTD_D8(32));
EXPERTD_WGMMA_REGISTERS(96, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5, 48,
                        49, 50, 51, 52, 53, EXPERTD_D32(0), EXPERTD_D16(32));
EXPERTD_WGMMA_REGISTERS(112, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", " EXPERTD_R6, 56,
                        57, 58, 59, 60, 61, EXPERTD_D32(0), EXPERTD_D16(32), EXPERTD_D8(48));
EXPERTD_WGMMA_REGISTERS(128, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", "
                        EXPERTD_R6 ", " EXPERTD_R7, 64, 65, 66, 67, 68, 69, EXPERTD_D32(0), EXPERTD_D32(32));

// As Wgmma, for e4m3 operands (m64nNk32), both in shared memory. Overwrites d unless `add`.
template <int N> struct WgmmaFp8;

#define EXPERTD_WGMMA_FP8(N, REGISTERS, A, B, ADD, ...)                                                                \
    template <> struct WgmmaFp8<N> {                                                                                   \
        static __device__ __forceinline__ void mma(float (&d)[N / 2], uint32_t a, uint32_t b, int add) {               \
            asm volatile("{\n.reg .b64 a, b;\n.reg .pred add;\nmov.b64 a, {%" #A ", 0x40000040};\nmov.b64 b, {%" #B \
                         ", 0x40000040};\nsetp.ne.b32 add, %" #ADD                                                    \
                         ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS                 \
                         "}, a, b, add, 1, 1;\n}\n"                                                                  \
                         : __VA_ARGS__                                                                                 \
                         : "r"(a), "r"(b), "r"(add));                                                                  \
        }                                                                                                              \
    }

EXPERTD_WGMMA_FP8(8, "%0, %1, %2, %3", 4, 5, 6, EXPERTD_D4(0));
EXPERTD_WGMMA_FP8(16, EXPERTD_R0, 8, 9, 10, EXPERTD_D8(0));
EXPERTD_WGMMA_FP8(32, EXPERTD_R0 ", " EXPERTD_R1, 16, 17, 18, EXPERTD_D16(0));
EXPERTD_WGMMA_FP8(48, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2, 24, 25, 26, EXPERTD_D16(0), EXPERTD_D8(16));
EXPERTD_WGMMA_FP8(64, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3, 32, 33, 34, EXPERTD_D32(0));
EXPERTD_WGMMA_FP8(80, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4, 40, 41, 42, EXPERTD_D32(0), EXPERTD_D8(32));
EXPERTD_WGMMA_FP8(96, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5, 48, 49, 50, EXPERTD_D32(0), EXPERTD_D16(32));
EXPERTD_WGMMA_FP8(128, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", " EXPERTD_R6 ", " EXPERTD_R7, 64, 65, 66, EXPERTD_D32(0), EXPERTD_D32(32));
EXPERTD_WGMMA_FP8(112, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", " EXPERTD_R6, 56, 57, 58, EXPERTD_D32(0), EXPERTD_D16(32), EXPERTD_D8(48));

// As WgmmaRegisters, for e4m3 operands (m64nNk32). Lane l's registers 2 h + i hold row l / 4 + 8 i and k 16 h + 4 (l % 4) to 16 h + 4 (l % 4) + 3.
template <int N> struct WgmmaFp8Registers;

#define EXPERTD_WGMMA_FP8_REGISTERS(N, REGISTERS, A0, A1, A2, A3, B, ADD, ...)                                         \
    template <> struct WgmmaFp8Registers<N> {                                                                          \
        static __device__ __forceinline__ void mma(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b, int add) {   \
            asm volatile("{\n.reg .b64 b;\n.reg .pred add;\nmov.b64 b, {%" #B ", 0x40000040};\nsetp.ne.b32 add, %" #ADD  \
                         ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS "}, {%" #A0       \
                         ", %" #A1 ", %" #A2 ", %" #A3 "}, b, add, 1, 1;\n}\n"                                         \
                         : __VA_ARGS__                                                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));                      \
        }                                                                                                              \
    }

EXPERTD_WGMMA_FP8_REGISTERS(8, "%0, %1, %2, %3", 4, 5, 6, 7, 8, 9, EXPERTD_D4(0));
EXPERTD_WGMMA_FP8_REGISTERS(16, EXPERTD_R0, 8, 9, 10, 11, 12, 13, EXPERTD_D8(0));
EXPERTD_WGMMA_FP8_REGISTERS(24, EXPERTD_R0 ", " "%8, %9, %10, %11", 12, 13, 14, 15, 16, 17, EXPERTD_D8(0), EXPERTD_D4(8));
EXPERTD_WGMMA_FP8_REGISTERS(32, EXPERTD_R0 ", " EXPERTD_R1, 16, 17, 18, 19, 20, 21, EXPERTD_D16(0));
EXPERTD_WGMMA_FP8_REGISTERS(48, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2, 24, 25, 26, 27, 28, 29, EXPERTD_D16(0), EXPERTD_D8(16));
EXPERTD_WGMMA_FP8_REGISTERS(64, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3, 32, 33, 34, 35, 36, 37, EXPERTD_D32(0));
EXPERTD_WGMMA_FP8_REGISTERS(72, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " "%32, %33, %34, %35", 36, 37, 38, 39, 40, 41, EXPERTD_D32(0), EXPERTD_D4(32));
EXPERTD_WGMMA_FP8_REGISTERS(80, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4, 40, 41, 42, 43, 44, 45, EXPERTD_D32(0), EXPERTD_D8(32));
EXPERTD_WGMMA_FP8_REGISTERS(88, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " "%40, %41, %42, %43", 44, 45, 46, 47, 48, 49, EXPERTD_D32(0), EXPERTD_D8(32), EXPERTD_D4(40));
EXPERTD_WGMMA_FP8_REGISTERS(96, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5, 48, 49, 50, 51, 52, 53, EXPERTD_D32(0), EXPERTD_D16(32));
EXPERTD_WGMMA_FP8_REGISTERS(104, EXPERTD_R0 ", " EXPERTD_R1 ", " EXPERTD_R2 ", " EXPERTD_R3 ", " EXPERTD_R4 ", " EXPERTD_R5 ", " "%48, %49, %50, %51", 52, 53, 54, 55, 56, 57, EXPERTD_D32(0), EXPERTD_D16(32), EXPERTD_D4(48));

#undef EXPERTD_R0
#undef EXPERTD_R1
#undef EXPERTD_R2
#undef EXPERTD_R3
#undef EXPERTD_R4
#undef EXPERTD_R5
#undef EXPERTD_R6
#undef EXPERTD_R7
#undef EXPERTD_R8
#undef EXPERTD_R9
#undef EXPERTD_R10
#undef EXPERTD_R11
#undef EXPERTD_R12
#undef EXPERTD_R13
#undef EXPERTD_R14
#undef EXPERTD_R15
#undef EXPERTD_D4
#undef EXPERTD_D8
#undef EXPERTD_D16
#undef EXPERTD_D32
#undef EXPERTD_WGMMA
#undef EXPERTD_WGMMA_REGISTERS
#undef EXPERTD_WGMMA_FP8
#undef EXPERTD_WGMMA_FP8_REGISTERS

} // namespace expertd
