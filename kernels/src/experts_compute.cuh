// The mainloop of a segment with bf16 weights, where wgmma reads both operands from shared memory; and the end of a segment in all
// formats.
#pragma once

#include "experts_block.cuh"
#include "experts_epilogue.cuh"
#include "wgmma.cuh"

namespace expertd {

template <class Format>
__device__ __forceinline__ Epilogue epilogue_of(const Block<Format>& block, const Segment& segment, int from, const Cursor& slot) {
    const int warpgroup = uniform(threadIdx.x / 128);
    return Epilogue{block.p,
                    block.layer,
                    segment,
                    segment.row + from,
                    min(64, segment.rows - from),
                    block.shared.weights[slot.slot],
                    block.staging + warpgroup * STAGING_BYTES,
                    STAGING_BARRIER + warpgroup};
}

// Ends a segment: scales rows if the format has row scales, then stores h or y (experts_epilogue.cuh). `scales` and `biases` are
// those of the thread's two rows.
template <int N, class Format>
__device__ __forceinline__ void finish_segment(const Block<Format>& block, const Segment& segment, int from, const Cursor& slot,
                                               const float2& scales, const float2& biases, float (&d)[N / 2]) {
    const Epilogue epilogue = epilogue_of(block, segment, from, slot);
    if constexpr (Format::ROW_SCALES) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) d[i] *= i % 4 < 2 ? scales.x : scales.y;
    }
    barrier_wait(&block.shared.routing_full[slot.slot], slot.parity);
    if (segment.phase == 0) {
        store_h<N>(epilogue, biases, d);
    } else {
        store_y<N>(epilogue, biases, d);
    }
}

// finish_segment that loads scales and biases itself.
template <int N, class Format>
__device__ __forceinline__ void finish_segment(const Block<Format>& block, const Segment& segment, int from, const Cursor& slot,
                                               float (&d)[N / 2]) {
    const Epilogue epilogue = epilogue_of(block, segment, from, slot);
    float2 scales{};
    if constexpr (Format::ROW_SCALES) scales = row_scales(epilogue);
    const float2 biases = row_biases(epilogue);
    finish_segment<N>(block, segment, from, slot, scales, biases, d);
}

// Number of accumulators that successive steps of k use in turn, added up at the end. Narrow wgmmas take less time than the latency
// of their accumulator, so one accumulator would leave the tensor cores idle.
template <int N> constexpr int CHAINS_OF = N <= 32 ? 4 : N <= 64 ? 2 : 1;

// The mainloop and epilogue of one segment in one warpgroup, with tokens padded to N. The warpgroup computes up to HALVES * 64 weight
// rows beginning at `from`, of a segment that it shares with the other warpgroup or computes alone.
template <int N, int HALVES>
__device__ __forceinline__ void compute(const Block<Bf16>& block, const Segment& segment, int from, bool shared_segment,
                                        const Cursor& slot, Cursor& stage) {
    Shared& shared = block.shared;
    const int warpgroup = uniform(threadIdx.x / 128);
    const int panels = block.k_panels(segment), per_stage = block.per_stage(segment);
    const int weight_step = segment.rows * PANEL_ROW_BYTES, token_step = round_up_8(segment.tokens) * PANEL_ROW_BYTES;

    constexpr int CHAINS = CHAINS_OF<N * HALVES>;
    float sums[HALVES * CHAINS][N / 2];
#pragma unroll
    for (int c = 0; c < HALVES * CHAINS; c++) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) sums[c][i] = 0.0f; // also ends the lifetime of registers between segments
    }
    uint32_t a = 0, b = 0;
    int in_stage = 0, previous = -1;
    for (int panel = 0; panel < panels; panel++) {
        if (in_stage == 0) {
            await_stage(block, stage);
            // A warpgroup always reads 64 weight rows. If the segment has fewer, the data after them only affects accumulator
            // rows that are not stored. The same holds for token columns.
            a = wgmma_descriptor(block.weight_stage(stage.slot) + from * PANEL_ROW_BYTES);
            b = wgmma_descriptor(block.token_stage(stage.slot));
        }
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PANEL_K / 16; k++) {
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                Wgmma<N>::mma(sums[half * CHAINS + k % CHAINS], a + half * (64 * PANEL_ROW_BYTES / 16) + k * 2, b + k * 2);
            }
        }
        wgmma_commit();
        a += weight_step / 16;
        b += token_step / 16;
        if (previous >= 0) {
            wgmma_wait<1>();
            release_stage(block, previous, shared_segment ? 1 : 2);
        }
        previous = -1;
        if (++in_stage == per_stage || panel + 1 == panels) {
            previous = stage.slot;
            in_stage = 0;
            stage.advance(block.plan.stages);
        }
    }
    // All operands have arrived, so the other warpgroup may wait for those of its own segment.
    if (!shared_segment && arrives_for_warp()) barrier_arrive(&shared.turn[warpgroup]);
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < HALVES * CHAINS; c++) wgmma_pin(sums[c]);
    release_stage(block, previous, shared_segment ? 1 : 2);
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        if (HALVES == 2 && from + half * 64 >= segment.rows) break;
        float (&d)[N / 2] = sums[half * CHAINS];
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            if constexpr (CHAINS == 4) sums[half * CHAINS + 1][i] += sums[half * CHAINS + 3][i], d[i] += sums[half * CHAINS + 2][i];
            if constexpr (CHAINS >= 2) d[i] += sums[half * CHAINS + 1][i];
        }
        finish_segment<N>(block, segment, from + half * 64, slot, d);
    }
}

} // namespace expertd
