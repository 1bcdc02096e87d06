// The mainloop of a segment with MXFP4 weights and FP8 rows. A warp widens its 16 rows from shared memory to e4m3 in registers, from which
// wgmma reads them. Sums over 128 k are multiplied by the scales of tokens, and added up, in f32; a row's largest scale is a factor of
// the row, and its other scales are part of the e4m3 codes.
//
// A warpgroup computes twice 64 weight rows of up to 104 tokens. While the tensor cores multiply one 64, the other is widened. Nothing
// is under way where the loop ends, because ptxas would serialise wgmmas whose A registers are written meanwhile.
#pragma once

#include "experts_compute_narrow.cuh"
#include "experts_compute_w8a8.cuh"

namespace expertd {

// Sets of sums: with two, one is scaled while the other is filled.
template <int N> constexpr int W4A8_SETS = N <= 64 ? 2 : 1;

// A lane's words of a k block of 64 rows, as they are in shared memory.
struct W4a8Words {
    uint4 chunk[2];
    uint32_t shifts; // of its two rows, a byte each

    // The lane's chunk and its shifts are at these addresses.
    __device__ __forceinline__ void load(uint32_t first_chunk, uint32_t of_shifts) {
        shifts = load_shared_2(of_shifts);
        chunk[0] = load_shared_16(first_chunk);
        chunk[1] = load_shared_16(first_chunk + 512);
    }
};

// e4m3 codes of the magnitudes of e2m1. Lane d holds them for a scale of 2^-d times the largest of the row: times 2^(6 - d), rounded
// to nearest even.
struct W4a8Magnitudes {
    uint32_t low, high; // 0, 0.5, 1, 1.5; 2, 3, 4, 6

    __device__ __forceinline__ W4a8Magnitudes() {
        const float scale = __uint_as_float((127 + W4A8_HEADROOM - thread_here() % 32) << 23);
        low = pack_e4m3(0.0f, 0.5f * scale, scale, 1.5f * scale);
        high = pack_e4m3(2.0f * scale, 3.0f * scale, 4.0f * scale, 6.0f * scale);
    }

    // Fragments of the four steps of a k block.
    __device__ __forceinline__ void widen(const W4a8Words& words, uint32_t (&a)[W8A8_STEPS][4]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t shift = words.shifts >> (8 * i); // shfl takes the lowest five bits
            const uint32_t first = __shfl_sync(0xffffffff, low, shift), second = __shfl_sync(0xffffffff, high, shift);
#pragma unroll
            for (int s = 0; s < W8A8_STEPS; s++) {
                const uint4& chunk = words.chunk[s / 2];
                const uint32_t word = s % 2 == 0 ? (i == 0 ? chunk.x : chunk.y) : (i == 0 ? chunk.z : chunk.w);
                const uint32_t numbers = word & 0x77777777;
                a[s][i] = mask_or(word, 0x80808080, select_bytes(first, second, numbers));
                a[s][2 + i] = mask_or(word << 4, 0x80808080, select_bytes(first, second, numbers >> 16));
            }
        }
        wgmma_pin(a);
    }
};

// Multiplies a k block of 64 weight rows and overwrites `sums`.
template <int N> __device__ __forceinline__ void multiply_w4a8(float (&sums)[N / 2], const uint32_t (&a)[W8A8_STEPS][4], uint32_t b) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < W8A8_STEPS; step++) WgmmaFp8Registers<N>::mma(sums, a[step], b + step * 2, step > 0);
    wgmma_commit();
}

// The mainloop and epilogue of one segment in one warpgroup, which computes weight rows `from` to `from` + 127.
template <int N>
__device__ __forceinline__ void compute_w4a8(const Block<W4a8>& block, const Segment& at_first, int from, const Cursor& slot,
                                             Cursor& stage, Counters& counters) {
    if (from >= at_first.rows) { // of a last strip of down
        for (int panels = block.k_panels(at_first); panels > 0; panels--) {
            await_stage(block, stage);
            release_stage(block, stage.slot, 1);
            stage.advance(block.plan.stages);
        }
        return;
    }
    constexpr int SETS = W4A8_SETS<N>;
#pragma unroll
    for (int half = 0; half < 2; half++) prefetch_rows(epilogue_of(block, at_first, from + half * 64, slot));
    const W4a8Magnitudes magnitudes;
    const uint32_t token_place = ScalePlaces().token * 4, lane = thread_here() % 32;
    const uint32_t first_unit = block.weight_ring + unit_of_warp<W4a8>(at_first, from);
    const uint32_t to_second = unit_of_warp<W4a8>(at_first, from + 64) - unit_of_warp<W4a8>(at_first, from); // the same in every lane
    const uint32_t chunk_place = first_unit + lane * 16, shift_place = first_unit + W4A8_SHIFTS + lane * 2;
    constexpr uint32_t STAGE = TALL_ROWS / UNIT_ROWS * W4A8_UNIT_BYTES; // bytes of a stage's weights
    // Only narrow tiles are paced.
    const auto await_weights = [&] {
        if constexpr (N <= LOW_SEGMENT_TOKENS) await_stage(block, stage);
        else barrier_wait(&block.shared.full[stage.slot], stage.parity);
    };
    float total[2][N / 2], sums[SETS][N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) total[0][i] = total[1][i] = sums[0][i] = sums[SETS - 1][i] = 0.0f;
    uint32_t a[2][W8A8_STEPS][4];
    W4a8Words words[2];
    await_weights();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        words[half].load(chunk_place + stage.slot * STAGE + half * to_second, shift_place + stage.slot * STAGE + half * to_second);
    }
    magnitudes.widen(words[0], a[0]);
    uint32_t scales_before = block.token_scales(stage.slot) + token_place; // of the product that is not yet added; the first one is zeros
    int before = -1; // its stage
#pragma unroll 1
    for (int panels = block.k_panels(at_first); panels > 0; panels--) {
        const int here = stage.slot;
        const uint32_t tokens = wgmma_descriptor(block.token_stage(here));
        const uint32_t scales = block.token_scales(here) + token_place;
        multiply_w4a8<N>(sums[0], a[0], tokens);
        magnitudes.widen(words[1], a[1]);
        if constexpr (SETS == 2) {
            TokenScales<N> of_before(scales_before);
            add_scaled_tokens<N>(total[1], sums[1], of_before);
            __syncwarp(); // every lane has read its operands
            if (before >= 0) release_stage(block, before, 1);
        }
        TokenScales<N> first(scales);
        wgmma_wait<0>();
        wgmma_pin(sums[0]);
        if constexpr (SETS == 1) {
            add_scaled_tokens<N>(total[0], sums[0], first);
            wgmma_pin(sums[0]);
        }
        multiply_w4a8<N>(sums[SETS - 1], a[1], tokens);
        stage.advance(block.plan.stages);
        if (panels > 1) await_weights();
        // After the last k block this loads the last one again, and the words are not used.
        const uint32_t next = (panels > 1 ? stage.slot : here) * STAGE;
#pragma unroll
        for (int half = 0; half < 2; half++) words[half].load(chunk_place + next + half * to_second, shift_place + next + half * to_second);
        if constexpr (SETS == 2) add_scaled_tokens<N>(total[0], sums[0], first);
        magnitudes.widen(words[0], a[0]);
        TokenScales<N> second(scales);
        wgmma_wait<0>();
        wgmma_pin(sums[SETS - 1]);
        if constexpr (SETS == 1) {
            add_scaled_tokens<N>(total[1], sums[0], second);
            wgmma_pin(sums[0]);
            wgmma_pin(total[1]);
            __syncwarp(); // every lane has read its operands
            release_stage(block, here, 1);
        }
        before = here, scales_before = scales;
    }
    if constexpr (SETS == 2) {
        TokenScales<N> of_before(scales_before);
        add_scaled_tokens<N>(total[1], sums[1], of_before);
        __syncwarp();
        release_stage(block, before, 1);
    }
    const Segment segment = uniform(block.shared.segments[slot.slot]); // read again, because keeping it would occupy registers
    RowFactors factors;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const Epilogue epilogue = epilogue_of(block, segment, from + half * 64, slot);
        factors.scales[half] = row_scales(epilogue), factors.biases[half] = row_biases(epilogue);
    }
    if (segment.phase == 0) {
        barrier_wait(&block.shared.routing_full[slot.slot], slot.parity);
        store_h_w8a8<true, N>(block.p, block.layer, segment, from, block.shared.weights[slot.slot], block.staging,
                              block.maxima(0), block.maxima(1), counters.exchanges, total, factors);
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (from + half * 64 < segment.rows) {
                finish_segment<N>(block, segment, from + half * 64, slot, factors.scales[half], factors.biases[half], total[half]);
            }
        }
    }
}

} // namespace expertd
