// The mainloop and the end of a segment with bf16 weights and many tokens: tokens are wgmma's M operand, weights its N.
//
// A warpgroup has 64 tokens and all 256 weight rows, in one product for every 64 k.
#pragma once

#include "experts_compute_rows.cuh"
#include "wgmma.cuh"

namespace expertd {

static_assert(Bf16::RING_BYTES / (stage_weight_bytes<Bf16>(TALL_ROWS) + ROW_TILE_TOKENS * PANEL_ROW_BYTES) == ROW_STAGES, "what stages_for finds");

// gate_up: h of 64 tokens and 128 features, which are two panels.
template <bool PLAIN>
__device__ __forceinline__ void store_h_rows(const Block<Bf16>& block, const Segment& segment, const float* weights, uint32_t staging,
                                             int first_token, const float (&sums)[ROW_SUMS]) {
    const ExpertdExpertsParams& p = block.p;
    const float* bias = block.layer.gate_up_bias;
    const int thread = thread_here() % 128, warp = thread / 32, lane = thread % 32, pair = lane % 4, row = warp * 16 + lane / 4;
    const int feature = segment.row / 2, tokens = segment.tokens - first_token;
    const std::conditional_t<PLAIN, PlainActivation, Activation> activate(p);
    float in[2], out[2];
    token_factors<PLAIN>(p, weights + first_token + row, in, out);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (half * 128 >= segment.rows) break;
        uint32_t packed[2][8];
#pragma unroll
        for (int o = 0; o < 8; o++) {
            float2 gate_bias = make_float2(0.0f, 0.0f), up_bias = gate_bias;
            if (!PLAIN && bias != nullptr) {
                const float* at = bias + int64_t(segment.expert) * 2 * p.inter + feature + half * 64 + o * 8 + pair * 2;
                gate_bias = load_2f32(at), up_bias = load_2f32(at + p.inter);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int g = (half * 8 + o) * 8 + 2 * i, u = g + 4;
                const float h0 = activate(biased<PLAIN>(sums[g], in[i], gate_bias.x), biased<PLAIN>(sums[u], in[i], up_bias.x));
                const float h1 = activate(biased<PLAIN>(sums[g + 1], in[i], gate_bias.y), biased<PLAIN>(sums[u + 1], in[i], up_bias.y));
                packed[i][o] = pack_bf16(h0 * out[i], h1 * out[i]);
            }
        }
        if (half > 0) __syncwarp(); // the staging area has been read
        stage_rows(staging + warp * 16 * 128, packed);
        // Staged as it stands in the panel, whose rows here begin at a multiple of 8.
        char* panel = static_cast<char*>(p.h) + (int64_t(feature / PANEL_K + half) * p.panel_rows + segment.panel_row + first_token) * 128;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = warp * 16 + i * 4 + lane / 8, at = token * 128 + lane % 8 * 16;
            if (token < tokens) *reinterpret_cast<uint4*>(panel + at) = load_shared_16(staging + at);
        }
    }
}

// A segment of more than 64 and up to 128 tokens: the warpgroup has those from 64 times its number on.
__device__ __forceinline__ void compute_rows(const Block<Bf16>& block, const Segment& segment, const Cursor& slot, Cursor& stage) {
    const int warpgroup = uniform(threadIdx.x / 128), first_token = warpgroup * ROW_TOKENS;
    int panels = block.k_panels(segment);
    const uint32_t a_first = wgmma_descriptor(block.token_ring + first_token * PANEL_ROW_BYTES), b_first = wgmma_descriptor(block.weight_ring);
    float sums[ROW_SUMS];
#pragma unroll
    for (int i = 0; i < ROW_SUMS; i++) sums[i] = 0.0f;
    int previous = -1;
#pragma unroll 1
    for (; panels > 0; panels--) {
        const uint32_t a = a_first + stage.slot * (ROW_TILE_TOKENS * PANEL_ROW_BYTES / 16);
        const uint32_t b = b_first + stage.slot * (TALL_ROWS * PANEL_ROW_BYTES / 16);
        barrier_wait(&block.shared.full[stage.slot], stage.parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PANEL_K / 16; k++) Wgmma<TALL_ROWS>::mma(sums, a + k * 2, b + k * 2);
        wgmma_commit();
        if (previous >= 0) {
            wgmma_wait<1>();
            release_stage(block, previous, 1);
        }
        previous = stage.slot;
        stage.advance(ROW_STAGES);
    }
    wgmma_wait<0>();
    wgmma_pin(sums);
    release_stage(block, previous, 1);
    if (segment.rows == 0) return;
    const float* weights = block.shared.weights[slot.slot];
    const uint32_t staging = block.staging + warpgroup * STAGING_BYTES;
    barrier_wait(&block.shared.routing_full[slot.slot], slot.parity);
    named_sync<128>(STAGING_BARRIER + warpgroup); // the staging area has been read
    if (segment.phase == 0) {
        plain_h(block) ? store_h_rows<true>(block, segment, weights, staging, first_token, sums)
                       : store_h_rows<false>(block, segment, weights, staging, first_token, sums);
    } else {
        block.layer.down_bias == nullptr ? store_y_rows<false>(block, segment, weights, 0, staging, first_token, sums)
                                         : store_y_rows<true>(block, segment, weights, 0, staging, first_token, sums);
    }
}

} // namespace expertd
