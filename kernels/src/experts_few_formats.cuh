// What differs between formats in experts_few_kernel: the bytes of units and rows, how a lane takes its part of both from shared memory, and
// their product.
//
// A k block is the part of k that a unit of weights spans: 64 k in bf16, 128 k in the other formats. Lane l of a consumer multiplies row
// l / 4 of mma's A with column l / 4 of B, which is a token; q = l % 4.
//
// A format has
//   Row    the lane's part of a k block of its token, as operands
//   Unit   the lane's part of a unit's k block as it is in shared memory
#pragma once

#include "experts.h"
#include "experts_formats.cuh"
#include "experts_quantise.cuh"
#include "mma.cuh"

namespace expertd {

// bf16. Weights are panels in wgmma's swizzle. A lane takes the 16-byte chunks q and 4 + q of its weight rows and of its token. Each chunk
// is its k of two steps of mma: which k a step has does not matter, as long as both operands agree. A's row r is the unit's row
// r / 2 + 4 (r % 2), so that eight lanes read from all banks of shared memory.
struct FewBf16 {
    static constexpr int BLOCK_PANELS = 1; // panels of 64 k in a k block
    static constexpr int UNIT_BYTES = UNIT_ROWS * PANEL_ROW_BYTES;
    static constexpr int UNIT_SCALE_BYTES = 0; // bytes of a unit's scales, if scales follow all rows of a k block
    static constexpr int CHUNK_UNITS = 2;      // units of a k block that one bulk copy brings
    static constexpr int ROW_SLOTS = 2;        // slots of a consumer for the rows of an item
    static constexpr int ROW_STRIDE = 192;     // distance of tokens in a slot, without bank conflicts
    static constexpr int ROW_SCALE = 0;        // place of a token's scale in the slot, if rows may be codes with scales
    static constexpr bool ROW_SCALES = false;  // whether the sums of a weight row are multiplied by its scale
    static constexpr bool IN_TWOS = false;     // whether the format multiplies the units of a chunk by itself

    // The row of a unit's eight rows of gate or up (or of either half, in down) that a lane has sums of.
    static __device__ __forceinline__ int row(int lane) { return lane / 8 + 4 * (lane / 4 % 2); }
    // Distance from a unit to the lane's first bytes.
    static __device__ __forceinline__ uint32_t place(int lane) { return row(lane) * PANEL_ROW_BYTES + (lane % 4 ^ row(lane)) * 16; }

    struct Row {
        uint4 low, high;
        __device__ __forceinline__ Row(uint32_t rows, bool, bool) {
            const uint32_t at = rows + threadIdx.x % 32 / 4 * ROW_STRIDE + threadIdx.x % 4 * 16;
            low = load_shared_16(at), high = load_shared_16(at + 64);
        }
    };
    struct Unit {
        uint4 low, low_8, high, high_8; // chunks q and 4 + q of the lane's row and of the row eight further
        __device__ __forceinline__ void load(uint32_t at, uint32_t) {
            low = load_shared_16(at), low_8 = load_shared_16(at + 8 * PANEL_ROW_BYTES);
            high = load_shared_16(at ^ 64), high_8 = load_shared_16((at ^ 64) + 8 * PANEL_ROW_BYTES);
        }
        __device__ __forceinline__ void multiply(float (&sums)[4], const Row& row) const {
            const uint32_t a[4][4] = {{low.x, low_8.x, low.y, low_8.y}, {low.z, low_8.z, low.w, low_8.w},
                                      {high.x, high_8.x, high.y, high_8.y}, {high.z, high_8.z, high.w, high_8.w}};
            mma_16x8x16(sums, a[0], row.low.x, row.low.y);
            mma_16x8x16(sums, a[1], row.low.z, row.low.w);
            mma_16x8x16(sums, a[2], row.high.x, row.high.y);
            mma_16x8x16(sums, a[3], row.high.z, row.high.w);
        }
    };
};

// FP8 with bf16 products, and MXFP4. Weights are in the order of mma's fragments.
template <class Format> struct FewNarrow {
    static constexpr int BLOCK_PANELS = 2;
    static constexpr int UNIT_BYTES = Format::UNIT_BYTES;
    static constexpr int UNIT_SCALE_BYTES = 0;
    static constexpr int CHUNK_UNITS = Format::SCALED_SUMS ? 2 : 8;
    static constexpr int ROW_SLOTS = Format::SCALED_SUMS ? 1 : 2;
    static constexpr int ROW_STRIDE = 272;
    static constexpr int ROW_SCALE = 0;
    static constexpr bool ROW_SCALES = true;
    static constexpr bool IN_TWOS = false;
    // MXFP4 weights are multiplied as Mxfp4::place_block leaves them, which is 2^-126 of their value. Rows are multiplied by 2^48 first, so that
    // sums are not subnormal. Elements above 2^80 become infinite, and sums of elements below 2^-48 lose precision.
    static constexpr uint32_t ROW_FACTOR = 0x57805780; // 2^48 in bf16, twice
    static constexpr float SUM_FACTOR = Format::SCALED_SUMS ? 1.0f : 1.0f / (1ull << 48);
    static constexpr int STEPS = BLOCK_K / 16;

    static __device__ __forceinline__ int row(int lane) { return lane / 4; }
    static __device__ __forceinline__ uint32_t place(int) { return 0; }

    static __device__ __forceinline__ void load_row(uint32_t (&words)[STEPS][2], uint32_t rows) {
        const int lane = threadIdx.x % 32; // gives the address of token l % 8, chunk l / 8 of 32 k
        const uint32_t at = rows + lane % 8 * ROW_STRIDE + lane / 8 * 16;
#pragma unroll
        for (int s = 0; s < STEPS; s += 2) {
            const uint4 two = load_matrices(at + s * 32);
            words[s][0] = two.x, words[s][1] = two.y, words[s + 1][0] = two.z, words[s + 1][1] = two.w;
        }
    }

    struct Row {
        uint32_t words[STEPS][2];
        __device__ __forceinline__ Row(uint32_t rows, bool, bool) {
            load_row(words, rows);
            if constexpr (!Format::SCALED_SUMS) {
#pragma unroll
                for (int s = 0; s < STEPS; s++) words[s][0] = multiply_bf16(words[s][0], ROW_FACTOR), words[s][1] = multiply_bf16(words[s][1], ROW_FACTOR);
            }
        }
    };
    // The row without a factor.
    struct PlainRow {
        uint32_t words[STEPS][2];
        __device__ __forceinline__ PlainRow(uint32_t rows, bool, bool) { load_row(words, rows); }
    };
    struct Unit {
        static constexpr int CHUNKS = STEPS / Format::CHUNK_STEPS;
        uint4 chunk[CHUNKS];
        typename Format::Scales scales;
        __device__ __forceinline__ void load(uint32_t at, uint32_t) {
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) chunk[c] = load_chunk(at, c, lane);
            scales = Format::load_scales(at, lane);
        }
        __device__ __forceinline__ void multiply(float (&sums)[4], const Row& row) const {
            if constexpr (Format::SCALED_SUMS) {
                // Steps go to two sums in turn, so that a product need not wait for the one before it.
                float part[2][4] = {};
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) {
                    uint32_t a[Format::CHUNK_STEPS][4];
                    Format::widen(chunk[c], scales, c, a);
#pragma unroll
                    for (int s = 0; s < Format::CHUNK_STEPS; s++) {
                        const int step = c * Format::CHUNK_STEPS + s;
                        mma_16x8x16(part[step % 2], a[s], row.words[step][0], row.words[step][1]);
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; i++) sums[i] = fmaf(part[0][i] + part[1][i], i < 2 ? scales.x : scales.y, sums[i]);
            } else {
#pragma unroll
                for (int b = 0; b < BLOCK_K / 32; b++) {
                    uint32_t a[2][4];
                    Format::place_block(b % 2 == 0 ? chunk[b / 2].x : chunk[b / 2].z, b % 2 == 0 ? chunk[b / 2].y : chunk[b / 2].w, a[0], a[1]);
                    float part[4] = {};
                    mma_16x8x16(part, a[0], row.words[2 * b][0], row.words[2 * b][1]);
                    mma_16x8x16(part, a[1], row.words[2 * b + 1][0], row.words[2 * b + 1][1]);
                    const float low = Format::block_scale(scales.x, b), high = Format::block_scale(scales.y, b);
#pragma unroll
                    for (int i = 0; i < 4; i++) sums[i] = fmaf(part[i], i < 2 ? low : high, sums[i]);
                }
            }
        }
    };
};
using FewMxfp4 = FewNarrow<Mxfp4>;
using FewFp8 = FewNarrow<Fp8>;

// NVFP4 and MXFP8: elements are multiplied by their scales when they are widened, which is exact.
template <class Format> struct FewWidened : FewNarrow<Format> {
    static constexpr int CHUNK_UNITS = 4608 / Format::UNIT_BYTES;  // four in NVFP4, two in MXFP8
    static constexpr int ROW_SLOTS = CHUNK_UNITS > 2 ? 2 : 1;      // items of more chunks leave room for one
    static constexpr float SUM_FACTOR = 1.0f;

    using Row = typename FewNarrow<Format>::PlainRow;
    struct Unit : FewNarrow<Format>::Unit {
        // Steps go to two sums in turn, so that a product need not wait for the one before it.
        __device__ __forceinline__ void multiply(float (&sums)[4], const Row& row) const {
            float part[4] = {};
#pragma unroll
            for (int c = 0; c < this->CHUNKS; c++) {
                uint32_t a[Format::CHUNK_STEPS][4];
                Format::widen(this->chunk[c], this->scales, c, a);
#pragma unroll
                for (int s = 0; s < Format::CHUNK_STEPS; s++) {
                    const int step = c * Format::CHUNK_STEPS + s;
                    mma_16x8x16(step % 2 == 0 ? sums : part, a[s], row.words[step][0], row.words[step][1]);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) sums[i] += part[i];
        }
    };
};
using FewNvfp4 = FewWidened<Nvfp4>;
using FewMxfp8 = FewWidened<Mxfp8>;

// INT4. Scales multiply sums over 32 k. Units are multiplied in twos, because the products of one alone wait for each other.
template <bool ZEROS> struct FewInt4Of : FewNarrow<Int4Of<ZEROS>> {
    using Format = Int4Of<ZEROS>;
    static constexpr int CHUNK_UNITS = 4;
    static constexpr float SUM_FACTOR = 1.0f;
    static constexpr bool IN_TWOS = true;

    using Row = typename FewNarrow<Format>::PlainRow;

    // Adds the products of the units at `at`, of which `units` are there. Elements are loaded two units ahead, in halves; if the number
    // of units is odd, the last one has a neighbour whose sums are not used. The warp arrives at `empty`, if there is one, after the last load.
    static __device__ __forceinline__ void multiply_all(float (*sums)[4], const Row& row, uint32_t at, int units, uint64_t* empty) {
        const int lane = threadIdx.x % 32;
        uint4 chunk[2][2]; // by unit and panel
#pragma unroll
        for (int i = 0; i < 4; i++) chunk[i % 2][i / 2] = load_chunk(at + i % 2 * Format::UNIT_BYTES, i / 2, lane);
#pragma unroll
        for (int u = 0; u < CHUNK_UNITS; u += 2, at += 2 * Format::UNIT_BYTES) {
            if (u >= units) break;
            const bool more = u + 2 < CHUNK_UNITS && u + 2 < units;
            typename Format::Scales scales[2];
#pragma unroll
            for (int i = 0; i < 2; i++) scales[i] = Format::load_scales(at + i * Format::UNIT_BYTES, lane);
#pragma unroll
            for (int g = 0; g < INT4_GROUPS; g++) {
                uint32_t a[2][2][4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint4& words = chunk[i][g / 2];
                    Format::integers(g % 2 == 0 ? words.x : words.z, scales[i], g, a[i][0]);
                    Format::integers(g % 2 == 0 ? words.y : words.w, scales[i], g, a[i][1]);
                }
                if (g % 2 == 1 && more) {
#pragma unroll
                    for (int i = 0; i < 2; i++) chunk[i][g / 2] = load_chunk(at + (2 + i) * Format::UNIT_BYTES, g / 2, lane);
                }
                if (g == INT4_GROUPS - 1 && !more) {
                    __syncwarp(); // all lanes have read the slot
                    if (empty != nullptr && arrives_for_warp()) barrier_arrive(empty);
                }
                float part[2][4] = {};
#pragma unroll
                for (int s = 0; s < 2; s++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) mma_16x8x16(part[i], a[i][s], row.words[2 * g + s][0], row.words[2 * g + s][1]);
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint4& of = scales[i].scales;
                    const float low = Format::group_scale(of.x, of.y, g), high = Format::group_scale(of.z, of.w, g);
#pragma unroll
                    for (int j = 0; j < 4; j++) sums[u + i][j] = fmaf(part[i][j], j < 2 ? low : high, sums[u + i][j]);
                }
            }
        }
    }
};
using FewInt4 = FewInt4Of<false>;
using FewInt4Zeros = FewInt4Of<true>;

__device__ __forceinline__ uint32_t widen_2_e4m3(uint16_t codes) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    return halves;
}

// W8A8. Rows of weights and of tokens have 128 bytes for a k block, so a lane's chunks are those of bf16. Hopper's mma has no FP8
// operands: codes are widened to f16, which is exact, a word for each step. The scales of a unit's rows come in a copy of their own.
//
// h is bf16 in memory, because 128 of its features, which share a scale, may be computed by several blocks. It is quantised where it is
// read, and so are rows of x that come in bf16.
struct FewW8a8 {
    static constexpr int BLOCK_PANELS = 2;
    static constexpr int UNIT_BYTES = W8a8::UNIT_BYTES;
    static constexpr int UNIT_SCALE_BYTES = W8a8::UNIT_SCALE_BYTES;
    static constexpr int CHUNK_UNITS = 2;
    static constexpr int ROW_SLOTS = 1;
    static constexpr int ROW_STRIDE = 272;
    static constexpr int ROW_SCALE = 256;
    static constexpr bool ROW_SCALES = true;
    static constexpr bool IN_TWOS = false;
    static constexpr float SUM_FACTOR = 1.0f;

    static __device__ __forceinline__ int row(int lane) { return FewBf16::row(lane); }
    static __device__ __forceinline__ uint32_t place(int lane) { return FewBf16::place(lane); }

    struct Row {
        uint4 low, high; // codes
        float2 scale;    // scales of the tokens of the lane's sums
        __device__ __forceinline__ Row(uint32_t rows, bool codes, bool power_of_two) {
            const int q = threadIdx.x % 4;
            const uint32_t at = rows + threadIdx.x % 32 / 4 * ROW_STRIDE;
            float own; // scale of the lane's token
            if (codes) {
                low = load_shared_16(at + q * 16), high = load_shared_16(at + 64 + q * 16);
                own = load_shared_f32(at + ROW_SCALE);
            } else {
                const uint4 elements[4] = {load_shared_16(at + q * 32), load_shared_16(at + q * 32 + 16), load_shared_16(at + 128 + q * 32),
                                           load_shared_16(at + 128 + q * 32 + 16)};
                const float largest = fmaxf(fmaxf(largest_of(elements[0]), largest_of(elements[1])),
                                            fmaxf(largest_of(elements[2]), largest_of(elements[3])));
                const GroupScale group = group_scale(lanes_max<4>(largest), power_of_two);
                const uint2 of[4] = {quantise(elements[0], group.inverse), quantise(elements[1], group.inverse),
                                     quantise(elements[2], group.inverse), quantise(elements[3], group.inverse)};
                low = make_uint4(of[0].x, of[0].y, of[1].x, of[1].y), high = make_uint4(of[2].x, of[2].y, of[3].x, of[3].y);
                own = group.scale;
            }
            const int first = q * 2 * 4; // four lanes have a token
            scale = make_float2(__shfl_sync(0xffffffff, own, first), __shfl_sync(0xffffffff, own, first + 4));
        }
    };
    struct Unit {
        FewBf16::Unit codes;
        float2 scales; // of the lane's row and of the row eight further
        __device__ __forceinline__ void load(uint32_t at, uint32_t scales_at) {
            codes.load(at, 0);
            const uint32_t from = scales_at + row(threadIdx.x % 32) * 4;
            scales = make_float2(load_shared_f32(from), load_shared_f32(from + 32));
        }
        static __device__ __forceinline__ void step(float (&sums)[4], uint32_t a, uint32_t a_8, uint32_t b) {
            const uint32_t weights[4] = {widen_2_e4m3(uint16_t(a)), widen_2_e4m3(uint16_t(a_8)), widen_2_e4m3(uint16_t(a >> 16)),
                                         widen_2_e4m3(uint16_t(a_8 >> 16))};
            mma_f16_16x8x16(sums, weights, widen_2_e4m3(uint16_t(b)), widen_2_e4m3(uint16_t(b >> 16)));
        }
        __device__ __forceinline__ void multiply(float (&sums)[4], const Row& row) const {
            float part[2][4] = {};
            step(part[0], codes.low.x, codes.low_8.x, row.low.x), step(part[1], codes.low.y, codes.low_8.y, row.low.y);
            step(part[0], codes.low.z, codes.low_8.z, row.low.z), step(part[1], codes.low.w, codes.low_8.w, row.low.w);
            step(part[0], codes.high.x, codes.high_8.x, row.high.x), step(part[1], codes.high.y, codes.high_8.y, row.high.y);
            step(part[0], codes.high.z, codes.high_8.z, row.high.z), step(part[1], codes.high.w, codes.high_8.w, row.high.w);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float scale = (i < 2 ? scales.x : scales.y) * (i % 2 == 0 ? row.scale.x : row.scale.y);
                sums[i] = fmaf(part[0][i] + part[1][i], scale, sums[i]);
            }
        }
    };
};

} // namespace expertd
