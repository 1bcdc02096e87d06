// What differs between formats in the grouped product: the bytes of a unit in a stage, how the warps of a block share a tile, and how a lane
// gets its fragments of weights.
//
// A stage holds 64 k: one panel of bf16, or half of a unit's elements with all its scales. Weights are mma's A, so the fragments of units
// are those that experts_layout.cuh describes.
#pragma once

#include "../experts_formats.cuh"
#include "../experts_layout.cuh"
#include "../mma.cuh"
#include "grouped_tiles.cuh"

namespace expertd {

// bf16 from shared memory, by ldmatrix. Four warps share 64 rows, each with 32 tokens.
struct GroupedBf16 {
    static constexpr int UNIT_BYTES = UNIT_ROWS * PANEL_ROW_BYTES; // of a unit in memory, and
    static constexpr int STAGE_UNIT_BYTES = UNIT_BYTES;            // of its part in a stage
    static constexpr int BLOCK_PANELS = 1;                         // panels of a unit
    static constexpr int ROW_WARPS = 2;                            // parts of a tile's rows; the other warps share its tokens
    static constexpr int STAGES = 3;
    static constexpr int STEPS = 1; // steps of 16 k whose fragments are made together
    static constexpr bool ROW_SCALES = false;

    // Distance from a unit in memory to piece `piece` (16 bytes) of its part in a stage.
    static __device__ __forceinline__ int piece_source(int piece, int) { return piece * 16; }

    struct Scales {};
    static __device__ __forceinline__ Scales load_scales(uint32_t) { return {}; }
    // Fragments of step `step` of the unit at `unit`.
    static __device__ __forceinline__ void load(uint32_t unit, const Scales&, int, int step, uint32_t (*a)[4]) {
        const int lane = threadIdx.x % 32, row = lane % 16, chunk = 2 * step + lane / 16;
        const uint4 of = load_matrices(unit + row * PANEL_ROW_BYTES + ((chunk ^ (row % 8)) * 16));
        a[0][0] = of.x, a[0][1] = of.y, a[0][2] = of.z, a[0][3] = of.w;
    }
};

// FP8, MXFP4 and INT4 in fragment order. Each warp has 16 rows and all tokens, so that every element is widened once.
template <class Format, int ELEMENT_BYTES> struct GroupedNarrow {
    static constexpr int UNIT_BYTES = Format::UNIT_BYTES;
    static constexpr int HALF_BYTES = ELEMENT_BYTES / 2;
    static constexpr int STAGE_UNIT_BYTES = HALF_BYTES + UNIT_BYTES - ELEMENT_BYTES;
    static constexpr int BLOCK_PANELS = 2;
    static constexpr int ROW_WARPS = 8;
    static constexpr int STAGES = 96 * 1024 / (GROUPED_ROWS / UNIT_ROWS * STAGE_UNIT_BYTES + GROUPED_TOKENS * PANEL_ROW_BYTES);
    static constexpr int STEPS = Format::CHUNK_STEPS;
    static constexpr bool ROW_SCALES = true;

    static __device__ __forceinline__ int piece_source(int piece, int half) {
        constexpr int OF_ELEMENTS = HALF_BYTES / 16;
        return piece < OF_ELEMENTS ? half * HALF_BYTES + piece * 16 : ELEMENT_BYTES + (piece - OF_ELEMENTS) * 16;
    }

    using Scales = typename Format::Scales;
    // Format::load_scales expects the scales behind all elements of a unit.
    static __device__ __forceinline__ Scales load_scales(uint32_t unit) {
        return Format::load_scales(unit + HALF_BYTES - ELEMENT_BYTES, threadIdx.x % 32);
    }
    // Fragments of the steps from `step` on, of half `half` of the unit.
    static __device__ __forceinline__ void load(uint32_t unit, const Scales& scales, int half, int step, uint32_t (*a)[4]) {
        const uint4 words = load_chunk(unit, step / STEPS, threadIdx.x % 32);
        if constexpr (Format::SCALED_SUMS) {
            Format::widen(words, scales, 0, a);
            // The scales of FP8 are factors of elements here, which are rounded once to bf16.
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
#pragma unroll
                for (int pair = 0; pair < 4; pair++) {
                    const float scale = pair % 2 == 0 ? scales.x : scales.y;
                    a[s][pair] = pack_bf16(__uint_as_float(a[s][pair] << 16) * scale, __uint_as_float(a[s][pair] & 0xFFFF0000u) * scale);
                }
            }
        } else {
            Format::widen(words, scales, half, a);
        }
    }
};

using GroupedFp8 = GroupedNarrow<Fp8, FP8_ELEMENT_BYTES>;
using GroupedMxfp4 = GroupedNarrow<Mxfp4, MXFP4_ELEMENT_BYTES>;
using GroupedInt4 = GroupedNarrow<Int4, INT4_ELEMENT_BYTES>;
using GroupedInt4Zeros = GroupedNarrow<Int4Zeros, INT4_ELEMENT_BYTES>;

} // namespace expertd
