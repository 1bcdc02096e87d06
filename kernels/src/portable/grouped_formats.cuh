// What differs between formats in the grouped product: the bytes of a unit in a stage, and how a lane gets its fragments of weights.
//
// A stage holds 64 k: one panel of bf16, or half of the elements of units, then all their scales. Weights are mma's B, so the fragments of eight
// rows of a unit are half of those that experts_layout.cuh describes.
#pragma once

#include "../experts_formats.cuh"
#include "../experts_layout.cuh"
#include "../mma.cuh"
#include "grouped_tiles.cuh"

namespace expertd {

// bf16 from shared memory, by ldmatrix.
struct GroupedBf16 {
    static constexpr int UNIT_BYTES = UNIT_ROWS * PANEL_ROW_BYTES; // of a unit in memory
    static constexpr int ELEMENT_BYTES = UNIT_BYTES;               // of its elements in a stage
    static constexpr int SCALE_BYTES = 0;                          // of its scales, in memory behind all its elements
    static constexpr int BLOCK_PANELS = 1;                         // panels of a unit
    static constexpr bool ROW_SCALES = false;

    // A warp's units in a stage.
    template <int UNITS> struct Weights {
        uint32_t at;
        __device__ __forceinline__ void load(uint32_t units, uint32_t, int) {
            const int lane = threadIdx.x % 32;
            at = units + (lane / 16 * 8 + lane % 8) * PANEL_ROW_BYTES + ((lane / 8 % 2 ^ lane % 8) * 16);
        }
        __device__ __forceinline__ void fragment(int step, int u, uint32_t (&a)[4]) {
            const uint4 of = load_matrices((at ^ (step * 32)) + u * UNIT_BYTES);
            a[0] = of.x, a[2] = of.y, a[1] = of.z, a[3] = of.w;
        }
    };
};

// The scale of FP8 as the sum of two bf16, each twice.
struct ScaleInParts {
    uint32_t coarse, fine;
    __device__ __forceinline__ void set(float scale) {
        const uint32_t upper = __float_as_uint(scale) & 0xFFFF0000;
        const float rest = scale - __uint_as_float(upper);
        coarse = __byte_perm(upper, 0, 0x3232);
        fine = pack_bf16(rest, rest);
    }
    __device__ __forceinline__ uint32_t times(uint32_t elements) const { return multiply_add_bf16(elements, coarse, multiply_bf16(elements, fine)); }
};

// Formats in fragment order.
template <class Format, int BYTES> struct GroupedNarrow {
    static constexpr int UNIT_BYTES = Format::UNIT_BYTES;
    static constexpr int ELEMENT_BYTES = BYTES / 2;
    static constexpr int SCALE_BYTES = UNIT_BYTES - BYTES;
    static constexpr int BLOCK_PANELS = 2;
    static constexpr bool ROW_SCALES = true;

    template <int UNITS> struct Weights {
        static constexpr int STEPS = Format::CHUNK_STEPS;
        uint32_t units;
        int half;
        uint4 words[UNITS];
        typename Format::Scales scales[UNITS];
        ScaleInParts low[UNITS], high[UNITS]; // of FP8

        __device__ __forceinline__ void load(uint32_t at, uint32_t scales_at, int of) {
            units = at, half = of;
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                // Format::load_scales expects the scales behind all elements of a unit.
                scales[u] = Format::load_scales(scales_at + u * SCALE_BYTES - BYTES, threadIdx.x % 32);
                if constexpr (Format::SCALED_SUMS) low[u].set(scales[u].x), high[u].set(scales[u].y);
            }
        }
        __device__ __forceinline__ void fragment(int step, int u, uint32_t (&a)[4]) {
            if (step % STEPS == 0) words[u] = load_chunk(units + u * ELEMENT_BYTES, step / STEPS, threadIdx.x % 32);
            uint32_t all[STEPS][4]; // of which one step is used
            Format::widen(words[u], scales[u], STEPS == 4 ? half : 2 * half + step / STEPS, all);
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                a[pair] = all[step % STEPS][pair];
                // The scales of FP8 are factors of elements here.
                if constexpr (Format::SCALED_SUMS) a[pair] = (pair % 2 == 0 ? low : high)[u].times(a[pair]);
            }
        }
    };
};

using GroupedFp8 = GroupedNarrow<Fp8, FP8_ELEMENT_BYTES>;
using GroupedMxfp4 = GroupedNarrow<Mxfp4, MXFP4_ELEMENT_BYTES>;
using GroupedInt4 = GroupedNarrow<Int4, INT4_ELEMENT_BYTES>;
using GroupedInt4Zeros = GroupedNarrow<Int4Zeros, INT4_ELEMENT_BYTES>;
using GroupedNvfp4 = GroupedNarrow<Nvfp4, MXFP4_ELEMENT_BYTES>;
using GroupedMxfp8 = GroupedNarrow<Mxfp8, FP8_ELEMENT_BYTES>;

} // namespace expertd
