// What differs between formats in experts_few_kernel: the bytes of units, how a lane loads its part of the rows, and the product of a
// unit with them.
//
// A k block is the part of k that a unit of weights spans: 64 k in bf16, 128 k in the other formats. Lane l of a consumer multiplies row
// l / 4 of mma's A with column l / 4 of B, which is a token; q = l % 4.
//
// A format has
//   Ahead  the lane's part of a k block of its token as it is in memory, which is loaded an item ahead
//   Row    the same as operands
//   Unit   the lane's part of a unit's k block as it is in shared memory
#pragma once

#include "experts.h"
#include "experts_formats.cuh"
#include "experts_quantise.cuh"
#include "mma.cuh"

namespace expertd {

// A lane's token of a segment.
struct FewSource {
    const char* row = nullptr;
    int panels = 0;     // panels of 64 k of the row; 0: there is no token
    bool codes = false; // the row is e4m3 with scales behind it, and not bf16
};

// bf16. Weights are panels in wgmma's swizzle. A lane takes the 16-byte chunks q and 4 + q of its weight rows and of its token. Each chunk
// is its k of two steps of mma: which k a step has does not matter, as long as both operands agree. A's row r is the unit's row
// r / 2 + 4 (r % 2), so that eight lanes read from all banks of shared memory.
struct FewBf16 {
    static constexpr int BLOCK_PANELS = 1; // panels of 64 k in a k block
    static constexpr int UNIT_BYTES = UNIT_ROWS * PANEL_ROW_BYTES;
    static constexpr int UNIT_SCALE_BYTES = 0; // bytes of a unit's scales, if scales follow all rows of a k block
    static constexpr int CHUNK_UNITS = 2;      // units of a k block that one bulk copy brings
    static constexpr bool ROW_SCALES = false;  // whether the sums of a row are multiplied by a factor

    // The row of a unit's eight rows of gate or up (or of either half, in down) that a lane has sums of.
    static __device__ __forceinline__ int row(int lane) { return lane / 8 + 4 * (lane / 4 % 2); }
    // Distance from a unit to the lane's first bytes.
    static __device__ __forceinline__ uint32_t place(int lane) { return row(lane) * PANEL_ROW_BYTES + (lane % 4 ^ row(lane)) * 16; }

    struct Ahead {
        uint4 low, high;
        __device__ __forceinline__ void load(const FewSource& source, int block) {
            low = high = make_uint4(0, 0, 0, 0);
            if (block >= source.panels) return;
            const uint4* from = reinterpret_cast<const uint4*>(source.row + int64_t(block) * PANEL_ROW_BYTES) + threadIdx.x % 4;
            low = __ldcg(from), high = __ldcg(from + 4);
        }
    };
    struct Row {
        uint4 low, high;
        __device__ __forceinline__ Row(const Ahead& ahead, const FewSource&, bool) : low(ahead.low), high(ahead.high) {}
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

// MXFP4 and FP8 with bf16 products: weights are in the order of mma's fragments, so a lane needs 4 bytes of every 16 of its token.
template <class Format> struct FewNarrow {
    static constexpr int BLOCK_PANELS = 2;
    static constexpr int UNIT_BYTES = Format::UNIT_BYTES;
    static constexpr int UNIT_SCALE_BYTES = 0;
    static constexpr int CHUNK_UNITS = Format::SCALED_SUMS ? 2 : 4;
    static constexpr bool ROW_SCALES = true;
    static constexpr int STEPS = BLOCK_K / 16;

    static __device__ __forceinline__ int row(int lane) { return lane / 4; }
    static __device__ __forceinline__ uint32_t place(int) { return 0; }

    struct Ahead {
        uint32_t words[STEPS][2];
        __device__ __forceinline__ void load(const FewSource& source, int block) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(source.row + int64_t(block) * (2 * BLOCK_K)) + threadIdx.x % 4;
#pragma unroll
            for (int panel = 0; panel < 2; panel++) {
                const bool there = 2 * block + panel < source.panels;
#pragma unroll
                for (int s = panel * STEPS / 2; s < (panel + 1) * STEPS / 2; s++) {
                    words[s][0] = there ? __ldcg(from + 8 * s) : 0;
                    words[s][1] = there ? __ldcg(from + 8 * s + 4) : 0;
                }
            }
        }
    };
    struct Row {
        uint32_t words[STEPS][2];
        __device__ __forceinline__ Row(const Ahead& ahead, const FewSource&, bool) {
#pragma unroll
            for (int s = 0; s < STEPS; s++) words[s][0] = ahead.words[s][0], words[s][1] = ahead.words[s][1];
        }
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
        // Steps go to two sums in turn, so that a product need not wait for the one before it.
        __device__ __forceinline__ void multiply(float (&sums)[4], const Row& row) const {
            float part[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) part[0][i] = Format::SCALED_SUMS ? 0.0f : sums[i], part[1][i] = 0.0f;
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
            if constexpr (Format::SCALED_SUMS) {
#pragma unroll
                for (int i = 0; i < 4; i++) sums[i] = fmaf(part[0][i] + part[1][i], i < 2 ? scales.x : scales.y, sums[i]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) sums[i] = part[0][i] + part[1][i];
            }
        }
    };
};
using FewMxfp4 = FewNarrow<Mxfp4>;
using FewFp8 = FewNarrow<Fp8>;

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
    static constexpr bool ROW_SCALES = true;

    static __device__ __forceinline__ int row(int lane) { return FewBf16::row(lane); }
    static __device__ __forceinline__ uint32_t place(int lane) { return FewBf16::place(lane); }

    struct Ahead {
        uint4 chunk[4]; // e4m3: chunks q and 4 + q, and two that are not used; bf16: the elements of these two chunks
        float scale;    // e4m3
        __device__ __forceinline__ void load(const FewSource& source, int block) {
            const int q = threadIdx.x % 4;
            const bool low = 2 * block < source.panels, high = 2 * block + 1 < source.panels;
            const uint4 zero = make_uint4(0, 0, 0, 0);
            chunk[2] = chunk[3] = zero;
            scale = 0.0f;
            if (source.codes) {
                const uint4* from = reinterpret_cast<const uint4*>(source.row + int64_t(block) * BLOCK_K) + q;
                chunk[0] = low ? __ldcg(from) : zero, chunk[1] = high ? __ldcg(from + 4) : zero;
                if (low) scale = __ldcg(reinterpret_cast<const float*>(source.row + source.panels * PANEL_K) + block);
            } else {
                const uint4* from = reinterpret_cast<const uint4*>(source.row + int64_t(block) * (2 * BLOCK_K)) + 2 * q;
                chunk[0] = low ? __ldcg(from) : zero, chunk[1] = low ? __ldcg(from + 1) : zero;
                chunk[2] = high ? __ldcg(from + 8) : zero, chunk[3] = high ? __ldcg(from + 9) : zero;
            }
        }
    };
    struct Row {
        uint4 low, high; // codes
        float2 scale;    // scales of the tokens of the lane's sums
        __device__ __forceinline__ Row(const Ahead& ahead, const FewSource& source, bool power_of_two) : low(ahead.chunk[0]), high(ahead.chunk[1]) {
            float own = ahead.scale;
            if (!source.codes) {
                const float largest = fmaxf(fmaxf(largest_of(ahead.chunk[0]), largest_of(ahead.chunk[1])),
                                            fmaxf(largest_of(ahead.chunk[2]), largest_of(ahead.chunk[3])));
                const GroupScale group = group_scale(lanes_max<4>(largest), power_of_two);
                const uint2 codes[4] = {quantise(ahead.chunk[0], group.inverse), quantise(ahead.chunk[1], group.inverse),
                                        quantise(ahead.chunk[2], group.inverse), quantise(ahead.chunk[3], group.inverse)};
                low = make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y);
                high = make_uint4(codes[2].x, codes[2].y, codes[3].x, codes[3].y);
                own = group.scale;
            }
            const int token = threadIdx.x % 4 * 2; // four lanes have a token
            scale = make_float2(__shfl_sync(0xffffffff, own, token * 4), __shfl_sync(0xffffffff, own, token * 4 + 4));
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
