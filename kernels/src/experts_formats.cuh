// The device formats of expert weights, and the widening of FP8 and MXFP4 to wgmma's bf16 fragments. (W8A8 multiplies FP8 weights
// without widening: experts_compute_w8a8.cuh.)
//
// Widening is exact: the bits of an e4m3 or e2m1 code become a bf16 value whose exponent is too low by a constant (subnormal codes
// become subnormals of bf16), which is then multiplied by a power of two. NaN codes need no care here, because packing makes the scale
// of their row NaN (experts_pack_narrow.cu). The scales of FP8 multiply sums over 128 k, in f32.
#pragma once

#include "experts_layout.cuh"
#include "ptx.cuh"

namespace expertd {

// Registers per thread of the 256 threads that compute and of the 128 others. Together they are those of 384 threads with 168 each.
template <int CONSUMER, int PRODUCER> struct Registers {
    static_assert(2 * CONSUMER + PRODUCER <= 3 * 168 && CONSUMER % 8 == 0 && PRODUCER % 8 == 0);
    static constexpr int CONSUMER_REGISTERS = CONSUMER;
    static constexpr int PRODUCER_REGISTERS = PRODUCER;
};

struct Bf16 : Registers<208, 88> {
    static constexpr int UNIT_BYTES = UNIT_ROWS * PANEL_ROW_BYTES; // bytes of 16 rows of one k block
    static constexpr int UNIT_SCALE_BYTES = 0;                     // bytes of the scales of 16 rows, where scales follow all rows of a k block
    static constexpr int PANEL_ELEMENTS = PANEL_K;                 // elements of k in a panel of x and h
    static constexpr int BLOCK_PANELS = 1;                         // panels of a k block
    static constexpr int MAX_TOKENS = 256;                         // widest token tile
    static constexpr bool ROW_SCALES = false;                      // whether the sums of a row are multiplied by a factor
    static constexpr bool THREADS_READ = false;                    // whether threads read stages, and not only the tensor cores
    static constexpr int SCALE_STAGE_BYTES = 0;                    // bytes of the scales of a stage
    static constexpr bool SHARED_SEGMENTS = false;                 // whether the warpgroups share every segment, low ones too
    static constexpr bool HALVES = true; // whether a warpgroup may compute twice 64 weight rows: tall segments, pairs in turn
};

__device__ __forceinline__ uint32_t rotate_right(uint32_t x, int by) { return __funnelshift_r(x, x, by); }

__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

struct Fp8 : Registers<208, 88> {
    static constexpr int UNIT_BYTES = FP8_UNIT_BYTES;
    static constexpr int UNIT_SCALE_BYTES = 0;
    static constexpr int PANEL_ELEMENTS = PANEL_K;
    static constexpr int BLOCK_PANELS = 2;
    static constexpr bool ROW_SCALES = true;
    static constexpr bool THREADS_READ = true;
    static constexpr int SCALE_STAGE_BYTES = 0;
    static constexpr bool SHARED_SEGMENTS = false;
    static constexpr int MAX_TOKENS = 128; // the sums of a k block and those of all k blocks share the registers
    static constexpr bool HALVES = false;
    static constexpr bool SCALED_SUMS = true;
    static constexpr int CHUNK_STEPS = 2; // number of wgmma steps (16 k) in a lane's 16 bytes

    using Scales = float2; // scales of the lane's rows l / 4 and l / 4 + 8

    // `unit` is a shared-memory address.
    static __device__ __forceinline__ Scales load_scales(uint32_t unit, int lane) {
        const uint2 v = load_shared_8(unit + FP8_ELEMENT_BYTES + lane / 4 * 8);
        return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
    }

    static __device__ __forceinline__ void widen_word(uint32_t word, uint32_t& even, uint32_t& odd) {
        constexpr uint32_t POWER = 0x7B807B80; // 2^120 in bf16, twice
        const uint32_t low = (rotate_right(word, 4) & 0x87808780) | ((word << 4) & 0x00700070);
        even = multiply_bf16(word & 0x87F087F0, POWER);
        odd = multiply_bf16(low, POWER);
    }
    // Widens a chunk of a k block to the fragments of its steps.
    static __device__ __forceinline__ void widen(const uint4& words, const Scales&, int, uint32_t (*a)[4]) {
        widen_word(words.x, a[0][0], a[0][1]);
        widen_word(words.y, a[0][2], a[0][3]);
        widen_word(words.z, a[1][0], a[1][1]);
        widen_word(words.w, a[1][2], a[1][3]);
    }
};

struct Mxfp4 : Registers<208, 88> {
    static constexpr int UNIT_BYTES = MXFP4_UNIT_BYTES;
    static constexpr int UNIT_SCALE_BYTES = 0;
    static constexpr int PANEL_ELEMENTS = PANEL_K;
    static constexpr int BLOCK_PANELS = 2;
    static constexpr bool ROW_SCALES = true;
    static constexpr bool THREADS_READ = true;
    static constexpr int SCALE_STAGE_BYTES = 0;
    static constexpr bool SHARED_SEGMENTS = false;
    static constexpr int MAX_TOKENS = 128;
    static constexpr bool HALVES = false;
    static constexpr bool SCALED_SUMS = false;
    static constexpr int CHUNK_STEPS = 4;

    using Scales = uint2; // four multipliers of row l / 4 and four of row l / 4 + 8

    static __device__ __forceinline__ Scales load_scales(uint32_t unit, int lane) {
        return load_shared_8(unit + MXFP4_ELEMENT_BYTES + lane / 4 * 8);
    }

    // Multiplier `i` of the four, twice, as bf16.
    static __device__ __forceinline__ uint32_t multiplier(uint32_t four, int i) {
        return __byte_perm(four, 0, 0x4440 + i) * 0x00800080u;
    }
    // Widens 32 k: the two words hold two steps.
    static __device__ __forceinline__ void widen_block(uint32_t first, uint32_t second, uint32_t low, uint32_t high,
                                                       uint32_t (&a)[4], uint32_t (&b)[4]) {
        constexpr uint32_t PLACES = 0x81C081C0;
        const uint32_t third = (first & MXFP4_LEFT) | (rotate_right(second, 32 - MXFP4_LEFT_ROTATION) & ~MXFP4_LEFT);
        a[0] = multiply_bf16(first & PLACES, low);
        a[1] = multiply_bf16(rotate_right(first, 4) & PLACES, high);
        a[2] = multiply_bf16(rotate_right(first, 10) & PLACES, low);
        a[3] = multiply_bf16(second & PLACES, high);
        b[0] = multiply_bf16(rotate_right(second, 4) & PLACES, low);
        b[1] = multiply_bf16(rotate_right(second, 10) & PLACES, high);
        b[2] = multiply_bf16(rotate_right(third, 8) & PLACES, low);
        b[3] = multiply_bf16(rotate_right(third, 14) & PLACES, high);
    }
    static __device__ __forceinline__ void widen(const uint4& words, const Scales& scales, int chunk, uint32_t (*a)[4]) {
        widen_block(words.x, words.y, multiplier(scales.x, 2 * chunk), multiplier(scales.y, 2 * chunk), a[0], a[1]);
        widen_block(words.z, words.w, multiplier(scales.x, 2 * chunk + 1), multiplier(scales.y, 2 * chunk + 1), a[2], a[3]);
    }
};

// FP8 weights that the tensor cores multiply with FP8 rows. Sums over 128 k are scaled in f32 before they are added up. All segments
// are tall, because 256 rows of gate and up are 128 features of h, which share a scale.
struct W8a8 : Registers<224, 56> {
    static constexpr int UNIT_BYTES = UNIT_ROWS * BLOCK_K;
    static constexpr int UNIT_SCALE_BYTES = UNIT_ROWS * 4;
    static constexpr int PANEL_ELEMENTS = BLOCK_K;
    static constexpr int BLOCK_PANELS = 1;
    static constexpr int MAX_TOKENS = 112; // the sums of 128 rows and those of one k block of 64 rows share the registers
    static constexpr bool HALVES = false;
    static constexpr bool ROW_SCALES = true;
    static constexpr bool THREADS_READ = true;
    static constexpr int SCALE_STAGE_BYTES = 1536; // scales of 256 weight rows, then of up to 128 tokens
    static constexpr bool SHARED_SEGMENTS = true;
};

// Loads a lane's chunk of a unit. The chunks of a k block are 512 bytes apart in the unit.
__device__ __forceinline__ uint4 load_chunk(uint32_t unit, int chunk, int lane) {
    return load_shared_16(unit + chunk * 512 + lane * 16);
}

} // namespace expertd
