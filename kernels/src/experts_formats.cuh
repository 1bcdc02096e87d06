// The device formats of expert weights, and the widening of those that are no bf16 to wgmma's bf16 fragments. (W8A8 multiplies FP8 weights
// without widening: experts_compute_w8a8.cuh.)
//
// Widening is exact: the bits of an e4m3 or e2m1 code become a bf16 value whose exponent is too low by a constant (subnormal codes
// become subnormals of bf16), which is then multiplied by a power of two or, in NVFP4, by a scale. NaN codes need no care here, because packing makes the scale
// of their row NaN (experts_pack_narrow.cu). The scales of FP8 multiply sums over 128 k, in f32. The scales of INT4 do
// so with sums over 32 k, for few tokens; for many they multiply the elements, and each product is rounded to bf16 once.
#pragma once

#include "experts_layout.cuh"
#include "ptx.cuh"

namespace expertd {

// The threads of a block: `CONSUMERS` warpgroups that compute, one that widens weights in shared memory if `WIDENER` is not zero, and
// one that brings data, with their registers per thread. Together the registers are those that the block has at its start.
template <int CONSUMERS, int CONSUMER, int PRODUCER, int WIDENER = 0> struct Threads {
    static constexpr bool WIDENS = WIDENER != 0;
    static constexpr int AT_START = 65536 / (128 * (CONSUMERS + WIDENS + 1)) / 8 * 8;
    static_assert(CONSUMERS * CONSUMER + WIDENER + PRODUCER <= (CONSUMERS + WIDENS + 1) * AT_START && CONSUMER % 8 == 0 && PRODUCER % 8 == 0 && WIDENER % 8 == 0);
    static constexpr int CONSUMER_REGISTERS = CONSUMER;
    static constexpr int PRODUCER_REGISTERS = PRODUCER;
    static constexpr int WIDENER_REGISTERS = WIDENER;
    static constexpr int GROUPS = CONSUMERS;
    static constexpr int THREADS = 128 * (GROUPS + WIDENS + 1);
    static constexpr int CONSUMER_WARPS = 4 * GROUPS;
    static constexpr int WIDENER_WARPS = WIDENS ? 4 : 0;
    static constexpr int WEIGHT_WARP = CONSUMER_WARPS + WIDENER_WARPS;
    static constexpr int TOKEN_WARP = WEIGHT_WARP + 1;
    static constexpr int COPY_WARP = WEIGHT_WARP + 2;            // the first of two
    static constexpr int TILE_ROWS = 64 * GROUPS;                // weight rows of a usual segment
    static constexpr int WIDENED_BLOCKS = WIDENS ? 3 : 0;                        // k blocks of widened weights, of 256 rows each
    static constexpr int WIDENED_BYTES = WIDENED_BLOCKS * 256 * BLOCK_K;
    static constexpr int RING_BYTES = (216 - 8 * GROUPS) * 1024 - WIDENED_BYTES; // each consumer has a staging area of 8 KB besides
};

struct Bf16 : Threads<2, 208, 88> {
    static constexpr int UNIT_BYTES = UNIT_ROWS * PANEL_ROW_BYTES; // bytes of 16 rows of one k block
    static constexpr int UNIT_SCALE_BYTES = 0;                     // bytes of the scales of 16 rows, where scales follow all rows of a k block
    static constexpr int PANEL_ELEMENTS = PANEL_K;                 // elements of k in a panel of x and h
    static constexpr int BLOCK_PANELS = 1;                         // panels of a k block
    static constexpr int MAX_TOKENS = 256;                         // widest token tile
    static constexpr bool ROW_SCALES = false;                      // whether the sums of a row are multiplied by a factor
    static constexpr bool THREADS_READ = false;                    // whether threads read stages, and not only the tensor cores
    static constexpr int SCALE_STAGE_BYTES = 0;                    // bytes of the scales of a stage
    static constexpr bool SHARED_SEGMENTS = false;                 // whether the warpgroups share every segment, low ones too
    static constexpr bool TOKEN_ROWS = true; // whether many tokens are wgmma's M (experts_compute_rows.cuh)
    static constexpr bool HALVES = true; // whether a warpgroup may compute twice 64 weight rows: tall segments, pairs in turn
    static constexpr bool FEW_TOKENS_ALONE = false; // whether a warp multiplies few tokens by itself (experts_compute_few.cuh)
};

__device__ __forceinline__ uint32_t rotate_right(uint32_t x, int by) { return __funnelshift_r(x, x, by); }

__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
    uint32_t product;
#ifdef EXPERTD_PORTABLE // the same bits, on sm_80
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000));
#else
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#endif
    return product;
}

// A register with the low, or the high, 16 bits of `x` in both halves.
__device__ __forceinline__ uint32_t low_half_twice(uint32_t x) {
    uint32_t y;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}" : "=r"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ uint32_t high_half_twice(uint32_t x) {
    uint32_t y;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}" : "=r"(y) : "r"(x));
    return y;
}

// The bits of `a` where `mask` is set and of `b` elsewhere, in one instruction.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(y) : "r"(mask), "r"(a), "r"(b));
    return y;
}

// (a & mask) | bits, in one instruction.
__device__ __forceinline__ uint32_t mask_or(uint32_t a, uint32_t mask, uint32_t bits) {
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(a), "r"(mask), "r"(bits));
    return y;
}

struct Fp8 : Threads<2, 208, 88> {
    static constexpr int UNIT_BYTES = FP8_UNIT_BYTES;
    static constexpr int UNIT_SCALE_BYTES = 0;
    static constexpr int PANEL_ELEMENTS = PANEL_K;
    static constexpr int BLOCK_PANELS = 2;
    static constexpr bool ROW_SCALES = true;
    static constexpr bool THREADS_READ = true;
    static constexpr int SCALE_STAGE_BYTES = 0;
    static constexpr bool SHARED_SEGMENTS = false;
    static constexpr int MAX_TOKENS = 128; // the sums of a k block and those of all k blocks share the registers
    static constexpr bool TOKEN_ROWS = false;
    static constexpr bool HALVES = false;
    static constexpr bool FEW_TOKENS_ALONE = false;
    static constexpr bool SCALED_SUMS = true;
    static constexpr int CHUNK_STEPS = 2; // number of wgmma steps (16 k) in a lane's 16 bytes

    using Scales = float2; // scales of the lane's rows l / 4 and l / 4 + 8

    // `unit` is a shared-memory address.
    static __device__ __forceinline__ Scales load_scales(uint32_t unit, int lane) {
        const uint2 v = load_shared_8(unit + FP8_ELEMENT_BYTES + lane / 4 * 8);
        return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
    }

    // Puts the bits of a word in the places of bf16's, which gives 2^-120 of the values, and multiplies both pairs.
    static __device__ __forceinline__ void widen_word(uint32_t word, uint32_t& even, uint32_t& odd, uint32_t of_even, uint32_t of_odd) {
        const uint32_t low = (rotate_right(word, 4) & 0x87808780) | ((word << 4) & 0x00700070);
        even = multiply_bf16(word & 0x87F087F0, of_even);
        odd = multiply_bf16(low, of_odd);
    }
    static __device__ __forceinline__ void widen_word(uint32_t word, uint32_t& even, uint32_t& odd) {
        constexpr uint32_t POWER = 0x7B807B80; // 2^120 in bf16, twice
        widen_word(word, even, odd, POWER, POWER);
    }
    // Widens a chunk of a k block to the fragments of its steps.
    static __device__ __forceinline__ void widen(const uint4& words, const Scales&, int, uint32_t (*a)[4]) {
        widen_word(words.x, a[0][0], a[0][1]);
        widen_word(words.y, a[0][2], a[0][3]);
        widen_word(words.z, a[1][0], a[1][1]);
        widen_word(words.w, a[1][2], a[1][3]);
    }
};

// What formats have in common whose elements are multiplied by their scales when they are widened, if not noted otherwise.
template <int CONSUMERS, int CONSUMER, int PRODUCER> struct Widened : Threads<CONSUMERS, CONSUMER, PRODUCER> {
    static constexpr int UNIT_SCALE_BYTES = 0;
    static constexpr int PANEL_ELEMENTS = PANEL_K;
    static constexpr int BLOCK_PANELS = 2;
    static constexpr bool ROW_SCALES = true;
    static constexpr bool THREADS_READ = true;
    static constexpr int SCALE_STAGE_BYTES = 0;
    static constexpr bool SHARED_SEGMENTS = true;
    static constexpr int MAX_TOKENS = 128;
    static constexpr bool TOKEN_ROWS = false;
    static constexpr bool HALVES = false;
    static constexpr bool FEW_TOKENS_ALONE = true;
    static constexpr bool SCALED_SUMS = false;
    static constexpr bool SCALED_GROUPS = false; // whether scales of 32 k multiply sums if a warp multiplies few tokens by itself
};

// Three consumers: widening is bound by the latency of instructions, which more warps hide (docs/measurements/gpu-experts.md).
struct FourBits : Widened<3, 144, 80> {
    static constexpr int CHUNK_STEPS = 4;
};

struct Mxfp4 : FourBits {
    static constexpr int UNIT_BYTES = MXFP4_UNIT_BYTES;

    using Scales = uint2; // four multipliers of row l / 4 and four of row l / 4 + 8 (mxfp4_scale_place)

    static __device__ __forceinline__ uint32_t scale_place(int lane) { return MXFP4_ELEMENT_BYTES + lane / 4 * 8; }
    // `at`: address of the unit plus scale_place.
    static __device__ __forceinline__ Scales load_scales_at(uint32_t at, int) { return load_shared_8(at); }
    static __device__ __forceinline__ Scales load_scales(uint32_t unit, int lane) { return load_scales_at(unit + scale_place(lane), lane); }

    // Multipliers i and i + 1 of the four, for even i, as bf16.
    static __device__ __forceinline__ uint32_t two_multipliers(uint32_t four, int i) { return (i < 2 ? four : rotate_right(four, 8)) & 0x7F807F80; }
    // Multiplier `i` of the four, twice, as bf16. A multiplication takes half of a register without an instruction.
    static __device__ __forceinline__ uint32_t multiplier(uint32_t four, int i) {
        const uint32_t two = two_multipliers(four, i);
        return i % 2 == 0 ? low_half_twice(two) : high_half_twice(two);
    }
    // Multiplier `i` of the four.
    static __device__ __forceinline__ float block_scale(uint32_t four, int i) {
        const uint32_t two = two_multipliers(four, i);
        return __uint_as_float(i % 2 == 0 ? two << 16 : two & 0xFFFF0000);
    }
    // Puts the bits of 32 k in the places of bf16's: the elements' values times 2^-126, subnormal ones included. The two words hold two steps.
    static __device__ __forceinline__ void place_block(uint32_t first, uint32_t second, uint32_t (&a)[4], uint32_t (&b)[4]) {
        constexpr uint32_t PLACES = 0x81C081C0;
        const uint32_t third = select_bits(MXFP4_LEFT, first, rotate_right(second, 32 - MXFP4_LEFT_ROTATION));
        a[0] = first & PLACES;
        a[1] = rotate_right(first, 4) & PLACES;
        a[2] = (first << 6) & PLACES;
        a[3] = second & PLACES;
        b[0] = rotate_right(second, 4) & PLACES;
        b[1] = (second << 6) & PLACES;
        b[2] = rotate_right(third, 8) & PLACES;
        b[3] = (third << 2) & PLACES;
    }
    // Widens 32 k.
    static __device__ __forceinline__ void widen_block(uint32_t first, uint32_t second, uint32_t low, uint32_t high,
                                                       uint32_t (&a)[4], uint32_t (&b)[4]) {
        place_block(first, second, a, b);
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = multiply_bf16(a[i], i % 2 == 0 ? low : high), b[i] = multiply_bf16(b[i], i % 2 == 0 ? low : high);
    }
    static __device__ __forceinline__ void widen(const uint4& words, const Scales& scales, int chunk, uint32_t (*a)[4]) {
        widen_block(words.x, words.y, multiplier(scales.x, 2 * chunk), multiplier(scales.y, 2 * chunk), a[0], a[1]);
        widen_block(words.z, words.w, multiplier(scales.x, 2 * chunk + 1), multiplier(scales.y, 2 * chunk + 1), a[2], a[3]);
    }
};

// a b + c, rounded once.
__device__ __forceinline__ uint32_t multiply_add_bf16(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// NVFP4. Elements are in the order of MXFP4's, and each step of 16 k has a scale of its own.
struct Nvfp4 : FourBits {
    static constexpr int UNIT_BYTES = NVFP4_UNIT_BYTES;

    using Scales = uint4; // two words of row l / 4 and two of row l / 4 + 8 (nvfp4_scales)

    static __device__ __forceinline__ uint32_t scale_place(int lane) { return MXFP4_ELEMENT_BYTES + lane / 4 * 16; }
    static __device__ __forceinline__ Scales load_scales_at(uint32_t at, int) { return load_shared_16(at); }
    static __device__ __forceinline__ Scales load_scales(uint32_t unit, int lane) { return load_scales_at(unit + scale_place(lane), lane); }

    // The scale of step `s` of a panel, twice, as bf16.
    static __device__ __forceinline__ uint32_t scale_twice(uint32_t four, int s) {
        const uint32_t two = mask_or(s % 2 == 0 ? four : rotate_right(four, 8), NVFP4_SCALE_BITS, NVFP4_SCALE_REST);
        return s < 2 ? low_half_twice(two) : high_half_twice(two);
    }
    static __device__ __forceinline__ void widen(const uint4& words, const Scales& scales, int chunk, uint32_t (*a)[4]) {
        const uint32_t low = chunk == 0 ? scales.x : scales.y, high = chunk == 0 ? scales.z : scales.w;
        uint32_t steps[4][4];
        Mxfp4::place_block(words.x, words.y, steps[0], steps[1]);
        Mxfp4::place_block(words.z, words.w, steps[2], steps[3]);
#pragma unroll
        for (int s = 0; s < CHUNK_STEPS; s++) {
#pragma unroll
            for (int pair = 0; pair < 4; pair++) a[s][pair] = multiply_bf16(steps[s][pair], scale_twice(pair % 2 == 0 ? low : high, s));
        }
    }
};

// MXFP8. Elements are in the order of FP8's, and the exponents in that of MXFP4's.
struct Mxfp8 : Widened<2, 208, 88> {
    static constexpr int UNIT_BYTES = MXFP8_UNIT_BYTES;
    static constexpr int CHUNK_STEPS = 2;

    using Scales = uint2;

    static __device__ __forceinline__ uint32_t scale_place(int lane) { return FP8_ELEMENT_BYTES + lane / 4 * 8; }
    static __device__ __forceinline__ Scales load_scales_at(uint32_t at, int) { return load_shared_8(at); }
    static __device__ __forceinline__ Scales load_scales(uint32_t unit, int lane) { return load_scales_at(unit + scale_place(lane), lane); }

    // A chunk is 32 k.
    static __device__ __forceinline__ void widen(const uint4& words, const Scales& scales, int chunk, uint32_t (*a)[4]) {
        const uint32_t low = Mxfp4::multiplier(scales.x, chunk), high = Mxfp4::multiplier(scales.y, chunk);
        Fp8::widen_word(words.x, a[0][0], a[0][1], low, high);
        Fp8::widen_word(words.y, a[0][2], a[0][3], low, high);
        Fp8::widen_word(words.z, a[1][0], a[1][1], low, high);
        Fp8::widen_word(words.w, a[1][2], a[1][3], low, high);
    }
};

// Element `half` of two f16.
__device__ __forceinline__ float half_of(uint32_t two, int half) {
    float value;
    if (half == 0) asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(value) : "r"(two));
    else asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}" : "=f"(value) : "r"(two));
    return value;
}

// Two f16 in bf16, each as the sum of its first eight significant bits and of the three that follow.
struct HalvesInParts {
    uint32_t coarse, fine;
    __device__ __forceinline__ explicit HalvesInParts(uint32_t two) {
        const float low = half_of(two, 0), high = half_of(two, 1);
        coarse = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632); // cuts the three bits off
        const float low_rest = low - __uint_as_float(coarse << 16), high_rest = high - __uint_as_float(coarse & 0xFFFF0000);
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(fine) : "f"(high_rest), "f"(low_rest));
    }
};

// INT4. The bits of an element are a subnormal bf16, or a normal one with the lowest exponent if an upper bit is set: its integer times
// 2^-129 or 2^-133, which one instruction multiplies by 2^127 and subtracts the zero point from. That leaves 2^-2 of elements of row l / 4
// and 2^-6 of those of row l / 4 + 8; the scales of rows contain the rest. ZEROS: zero points are in memory.
template <bool ZEROS> struct Int4Of : FourBits {
    static constexpr int UNIT_BYTES = ZEROS ? INT4_ZEROS_UNIT_BYTES : INT4_UNIT_BYTES;
    static constexpr bool SCALED_GROUPS = true;

    struct Scales {
        uint4 scales; // four of row l / 4, then four of row l / 4 + 8
        uint2 zeros;  // likewise, a byte for each, if ZEROS
    };
    static __device__ __forceinline__ uint32_t scale_place(int lane) { return INT4_ELEMENT_BYTES + lane / 4 * 16; }
    static __device__ __forceinline__ Scales load_scales_at(uint32_t at, int lane) {
        Scales loaded{load_shared_16(at), {}};
        if constexpr (ZEROS) {
            const uint32_t both = __float_as_uint(load_shared_f32(at + (INT4_ZEROS - INT4_ELEMENT_BYTES) - lane / 4 * 12));
            loaded.zeros = make_uint2(both & 0x0F0F0F0F, both >> 4 & 0x0F0F0F0F);
        }
        return loaded;
    }
    static __device__ __forceinline__ Scales load_scales(uint32_t unit, int lane) { return load_scales_at(unit + scale_place(lane), lane); }

    // The scale of group `g` of one of the lane's rows, given the scales of the row.
    static __device__ __forceinline__ float group_scale(uint32_t first, uint32_t last, int g) { return half_of(g < 2 ? first : last, g % 2); }
    // Minus the zero point of group `g` of row l / 4 (or `further`, the one eight further), times the row's power of two, twice.
    static __device__ __forceinline__ uint32_t minus_zero(const Scales& scales, bool further, int g) {
        static_assert(INT4_MIDDLE == 8, "-2 and -1/8");
        if constexpr (!ZEROS) return further ? 0xBE00BE00 : 0xC000C000;
        const uint32_t and_128 = __byte_perm(further ? scales.zeros.y : scales.zeros.x, 0x43434343, 0x4040 + 0x0101 * g);
        return further ? multiply_add_bf16(and_128, 0xBC80BC80, 0x40004000)  // 2 - (128 + zero) / 64
                       : multiply_add_bf16(and_128, 0xBE80BE80, 0x42004200); // 32 - (128 + zero) / 4
    }
    // Fragments of a step of group `g`: the elements minus their zero points, times their rows' powers of two.
    static __device__ __forceinline__ void integers(uint32_t word, const Scales& scales, int g, uint32_t (&a)[4]) {
        constexpr uint32_t POWER = 0x7F007F00; // 2^127 in bf16, twice
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            const uint32_t bits = (pair < 2 ? word : word >> 8) & (pair % 2 == 0 ? 0x00F000F0 : 0x000F000F);
            a[pair] = multiply_add_bf16(bits, POWER, minus_zero(scales, pair % 2 != 0, g));
        }
    }
    static __device__ __forceinline__ void widen(const uint4& words, const Scales& scales, int chunk, uint32_t (*a)[4]) {
        const uint32_t of[4] = {words.x, words.y, words.z, words.w};
        // Of two groups. An element has at most four significant bits, so its product with the fine part of a scale is exact.
        const HalvesInParts low(chunk == 0 ? scales.scales.x : scales.scales.y), high(chunk == 0 ? scales.scales.z : scales.scales.w);
#pragma unroll
        for (int s = 0; s < CHUNK_STEPS; s++) {
            integers(of[s], scales, 2 * chunk + s / 2, a[s]);
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                const HalvesInParts& two = pair % 2 == 0 ? low : high;
                const uint32_t coarse = s / 2 == 0 ? low_half_twice(two.coarse) : high_half_twice(two.coarse);
                const uint32_t fine = s / 2 == 0 ? low_half_twice(two.fine) : high_half_twice(two.fine);
                a[s][pair] = multiply_add_bf16(a[s][pair], coarse, multiply_bf16(a[s][pair], fine));
            }
        }
    }
};
using Int4 = Int4Of<false>;
using Int4Zeros = Int4Of<true>;

// FP8 weights that the tensor cores multiply with FP8 rows. Sums over 128 k are scaled in f32 before they are added up. All segments
// are tall, because 256 rows of gate and up are 128 features of h, which share a scale.
struct W8a8 : Threads<2, 224, 56> {
    static constexpr int UNIT_BYTES = UNIT_ROWS * BLOCK_K;
    static constexpr int UNIT_SCALE_BYTES = UNIT_ROWS * 4;
    static constexpr int PANEL_ELEMENTS = BLOCK_K;
    static constexpr int BLOCK_PANELS = 1;
    static constexpr int MAX_TOKENS = 112; // the sums of 128 rows and those of one k block of 64 rows share the registers
    static constexpr bool TOKEN_ROWS = true;
    static constexpr bool HALVES = false;
    static constexpr bool FEW_TOKENS_ALONE = false;
    static constexpr bool ROW_SCALES = true;
    static constexpr bool THREADS_READ = true;
    static constexpr int SCALE_STAGE_BYTES = 1536; // scales of 256 weight rows, then of up to 128 tokens
    static constexpr bool SHARED_SEGMENTS = true;
    static constexpr bool PERMUTED = false; // whether elements of x and h are in the order of w4a8_token_byte
    static constexpr bool TURNS = true; // whether the warpgroups take turns with the tensor cores
};

// MXFP4 weights that are widened to e4m3 and multiplied with FP8 rows.
template <class Roles> struct Fp8FromMxfp4 : Roles {
    static constexpr int UNIT_BYTES = W4A8_UNIT_BYTES;
    static constexpr int UNIT_SCALE_BYTES = 0;
    static constexpr int PANEL_ELEMENTS = BLOCK_K;
    static constexpr int BLOCK_PANELS = 1;
    static constexpr bool HALVES = false;
    static constexpr bool FEW_TOKENS_ALONE = false;
    static constexpr bool ROW_SCALES = true;
    static constexpr bool THREADS_READ = true;
    static constexpr int SCALE_STAGE_BYTES = 512; // scales of up to 128 tokens
    static constexpr bool SHARED_SEGMENTS = true;
    static constexpr bool PERMUTED = true;
};

// Widened in registers. Segments are as in W8A8 with weights as wgmma's M.
struct W4a8 : Fp8FromMxfp4<Threads<2, 224, 56>> {
    static constexpr int MAX_TOKENS = 104;
    static constexpr bool TOKEN_ROWS = false;
    static constexpr bool TURNS = false;
};

// For many tokens, which are wgmma's M operand: a warpgroup widens weights in shared memory, where wgmma reads them as in W8A8.
struct W4a8Rows : Fp8FromMxfp4<Threads<2, 208, 48, 48>> {
    static constexpr int MAX_TOKENS = 128;
    static constexpr bool TOKEN_ROWS = true;
    static constexpr bool TURNS = true;
};

// Loads a lane's chunk of a unit. The chunks of a k block are 512 bytes apart in the unit.
__device__ __forceinline__ uint4 load_chunk(uint32_t unit, int chunk, int lane) {
    return load_shared_16(unit + chunk * 512 + lane * 16);
}

} // namespace expertd
