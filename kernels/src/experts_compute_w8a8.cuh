// The mainloop of a segment with FP8 weights and FP8 rows: both operands of wgmma in shared memory, sums over 128 k (or over 32,
// see below) multiplied with the scales of weight row and token in f32, and added up there.
//
// While one warpgroup scales its sums, the tensor cores work for the other.
//
// Tall segments: a warpgroup has twice 64 rows of up to 112 tokens, whose h it quantises in blocks of 128 features together with
// the other warpgroup. Narrow ones: 64 rows of up to 64 tokens; h then has a scale for the 32 features of one warpgroup, so
// that it need not meet the other, and each wgmma of 32 k has its own sums.
#pragma once

#include "experts_block.cuh"
#include "experts_compute.cuh"
#include "experts_epilogue_w8a8.cuh"
#include "wgmma.cuh"

namespace expertd {

constexpr int W8A8_STEPS = BLOCK_K / 32; // wgmmas of a k block

// Of the thread's two weight rows among 64.
__device__ __forceinline__ float2 weight_scales(uint32_t scales) {
    const uint32_t at = scales + (thread_here() % 128 / 32 * 16 + thread_here() % 32 / 4) * 4;
    return make_float2(load_shared_f32(at), load_shared_f32(at + 32));
}

// Multiplies a k block of 64 weight rows into `sums`, which are overwritten.
template <int N> __device__ __forceinline__ void multiply_w8a8(float (&sums)[N / 2], uint32_t a, uint32_t b) {
#pragma unroll
    for (int step = 0; step < W8A8_STEPS; step++) WgmmaFp8<N>::mma(sums, a + step * 2, b + step * 2, step > 0);
    wgmma_commit();
}

template <int N>
__device__ __forceinline__ void add_scaled(float (&total)[N / 2], float (&sums)[N / 2], float2 rows, uint32_t token_scales) {
    wgmma_pin(sums);
    const uint32_t at = token_scales + thread_here() % 4 * 8;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float2 tokens = load_shared_2f32(at + j * 32);
        total[4 * j] = fmaf(sums[4 * j], tokens.x * rows.x, total[4 * j]);
        total[4 * j + 1] = fmaf(sums[4 * j + 1], tokens.y * rows.x, total[4 * j + 1]);
        total[4 * j + 2] = fmaf(sums[4 * j + 2], tokens.x * rows.y, total[4 * j + 2]);
        total[4 * j + 3] = fmaf(sums[4 * j + 3], tokens.y * rows.y, total[4 * j + 3]);
    }
}

// A tall segment: the warpgroup has rows `from` to `from` + 127 of it.
template <int N>
__device__ __forceinline__ void compute_tall(const Block<W8a8>& block, const Segment& at_first, int from, const Cursor& slot,
                                             Cursor& stage, uint32_t& exchanges) {
    constexpr int SETS = N <= 80 ? 2 : 1; // of sums: with two, one is scaled while the other is filled
    float total[2][N / 2], sums[SETS][N / 2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) total[half][i] = 0.0f;
    }
#pragma unroll
    for (int set = 0; set < SETS; set++) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) sums[set][i] = 0.0f;
    }
#pragma unroll 1
    for (int panels = block.k_panels(at_first); panels > 0; panels--) {
        await_stage(block, stage);
        const uint32_t a = wgmma_descriptor(block.weight_stage(stage.slot) + from * PANEL_ROW_BYTES);
        const uint32_t b = wgmma_descriptor(block.token_stage(stage.slot));
        const uint32_t row_scales = block.scale_stage(stage.slot) + from * 4, token_scales = block.token_scales(stage.slot);
        constexpr uint32_t HALF = 64 * PANEL_ROW_BYTES / 16;
        wgmma_fence();
        multiply_w8a8<N>(sums[0], a, b);
        if constexpr (SETS == 2) {
            multiply_w8a8<N>(sums[1], a + HALF, b);
            wgmma_wait<1>();
            add_scaled<N>(total[0], sums[0], weight_scales(row_scales), token_scales);
            wgmma_wait<0>();
            add_scaled<N>(total[1], sums[1], weight_scales(row_scales + 64 * 4), token_scales);
        } else {
            wgmma_wait<0>();
            add_scaled<N>(total[0], sums[0], weight_scales(row_scales), token_scales);
            wgmma_pin(sums[0]);
            wgmma_fence();
            multiply_w8a8<N>(sums[0], a + HALF, b);
            wgmma_wait<0>();
            add_scaled<N>(total[1], sums[0], weight_scales(row_scales + 64 * 4), token_scales);
        }
        // The scales have been used, so they have been read, by every lane of the warp.
        wgmma_pin(total[0]);
        wgmma_pin(total[1]);
        __syncwarp();
        release_stage(block, stage.slot, 1);
        stage.advance(block.plan.stages);
    }
    const Segment segment = uniform(block.shared.segments[slot.slot]); // read again: it would hold registers meanwhile
    if (segment.phase == 0) {
        barrier_wait(&block.shared.routing_full[slot.slot], slot.parity);
        store_h_w8a8<N, 2>(block.p, block.layer, segment, from, block.shared.weights[slot.slot], block.staging,
                           block.maxima(0), block.maxima(1), exchanges, total);
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (from + half * 64 < segment.rows) finish_segment<N>(block, segment, from + half * 64, slot, total[half]);
        }
    }
}

// A narrow segment: up to 64 rows from `from` on, of a segment that the warpgroup shares with the other or has to itself.
template <int N>
__device__ __forceinline__ void compute_narrow(const Block<W8a8>& block, const Segment& segment, int from, bool shared_segment,
                                               const Cursor& slot, Cursor& stage, uint32_t& exchanges) {
    Shared& shared = block.shared;
    const int warpgroup = uniform(threadIdx.x / 128);
    float total[1][N / 2], sums[W8A8_STEPS][N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        total[0][i] = 0.0f;
#pragma unroll
        for (int step = 0; step < W8A8_STEPS; step++) sums[step][i] = 0.0f;
    }
    const int panels = block.k_panels(segment), per_stage = block.per_stage(segment), arrivals = shared_segment ? 1 : 2;
    const int weight_step = segment.rows * PANEL_ROW_BYTES / 16, token_step = round_up_8(segment.tokens) * PANEL_ROW_BYTES / 16;
    const bool by_step = block.scales_per_token(segment) != 1;
    const int row_scale_step = segment.rows * 4, token_scale_step = round_up_8(segment.tokens) * (by_step ? 16 : 4);
    uint32_t a = 0, b = 0, row_scales = 0, token_scales = 0;
    int in_stage = 0;
#pragma unroll 1
    for (int panel = 0; panel < panels; panel++) {
        if (in_stage == 0) {
            await_stage(block, stage);
            a = wgmma_descriptor(block.weight_stage(stage.slot) + from * PANEL_ROW_BYTES);
            b = wgmma_descriptor(block.token_stage(stage.slot));
            row_scales = block.scale_stage(stage.slot) + from * 4;
            token_scales = block.token_scales(stage.slot);
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < W8A8_STEPS; step++) WgmmaFp8<N>::mma(sums[step], a + step * 2, b + step * 2, 0);
        wgmma_commit();
        const float2 rows = weight_scales(row_scales);
        wgmma_wait<0>();
#pragma unroll
        for (int step = 0; step < W8A8_STEPS; step++) wgmma_pin(sums[step]);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const int token = j * 8 + thread_here() % 4 * 2;
            float scaled[4];
            if (by_step) {
                const float4 s0 = load_shared_4f32(token_scales + token * 16), s1 = load_shared_4f32(token_scales + token * 16 + 16);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float4 s = i % 2 == 0 ? s0 : s1;
                    scaled[i] = fmaf(sums[3][4 * j + i], s.w,
                                     fmaf(sums[2][4 * j + i], s.z, fmaf(sums[1][4 * j + i], s.y, sums[0][4 * j + i] * s.x)));
                }
            } else {
                const float2 s = load_shared_2f32(token_scales + token * 4);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scaled[i] = ((sums[0][4 * j + i] + sums[1][4 * j + i]) + (sums[2][4 * j + i] + sums[3][4 * j + i])) * (i % 2 == 0 ? s.x : s.y);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) total[0][4 * j + i] = fmaf(scaled[i], i < 2 ? rows.x : rows.y, total[0][4 * j + i]);
        }
        wgmma_pin(total[0]);
        a += weight_step;
        b += token_step;
        row_scales += row_scale_step;
        token_scales += token_scale_step;
        if (++in_stage == per_stage || panel + 1 == panels) {
            __syncwarp(); // every lane has read its scales
            release_stage(block, stage.slot, arrivals);
            in_stage = 0;
            stage.advance(block.plan.stages);
        }
    }
    // Everything has arrived: the other warpgroup may wait for its own.
    if (!shared_segment && arrives_for_warp()) barrier_arrive(&shared.turn[warpgroup]);
    if (segment.phase == 0) {
        barrier_wait(&shared.routing_full[slot.slot], slot.parity);
        store_h_w8a8<N, 1>(block.p, block.layer, segment, from, shared.weights[slot.slot], block.staging, block.maxima(0), block.maxima(1), exchanges, total);
    } else {
        finish_segment<N>(block, segment, from, slot, total[0]);
    }
}

} // namespace expertd
