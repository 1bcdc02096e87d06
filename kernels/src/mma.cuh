// mma m16n8k16 of one warp, bf16 or f16 operands in registers, f32 accumulators, and the load of its second operand from shared memory.
//
// Fragments are those of wgmma (wgmma.cuh, experts_layout.cuh), for 16 rows and 8 columns. Of the second operand, which has a column
// for every token, lane l holds token l / 4, k = 2 (l % 4) + {0, 1} and the same + 8.
#pragma once

#include <cstdint>

namespace expertd {

// d[0..3] += a * b.
__device__ __forceinline__ void mma_16x8x16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with operands in f16.
__device__ __forceinline__ void mma_f16_16x8x16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8x8 matrices of 16-bit elements. Lane 8m + r gives the address of row r (16 bytes) of matrix m; lane l gets the elements
// 2 (l % 4) + {0, 1} of row l / 4 of each.
__device__ __forceinline__ uint4 load_matrices(uint32_t address) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

} // namespace expertd
