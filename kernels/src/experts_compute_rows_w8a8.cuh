// The mainloop and the end of a segment with FP8 rows and many tokens: tokens are wgmma's M operand, weights its N.
//
// A warpgroup has 64 tokens and all 256 weight rows, in two products of 64 x 128 for every 128 k. A thread's sums belong to two
// tokens, and (W8A8) weights whose scales are the same for 128 rows (ExpertdLayerWeights.block_scales) give them two scales each, of gate
// and of up. So scaling takes one instruction a sum, where experts_compute_w8a8.cuh takes two and a load for every four. A
// warpgroup has all features that share a scale of h, and needs nothing of the other.
#pragma once

#include "experts_compute_rows.cuh"
#include "experts_compute_w8a8.cuh"

namespace expertd {

constexpr int HALF_ROWS = TALL_ROWS / 2; // weight rows of a product
// The ring is followed by each warpgroup's room for the row scales of a segment.
constexpr int ROW_SCALE_BYTES = TALL_ROWS * 4;
template <class Format> constexpr int FP8_ROW_STAGES = Format::WIDENS ? 3 : ROW_STAGES;
template <class Format> constexpr bool FIT_ROWS = FP8_ROW_STAGES<Format> * ROW_STAGE_BYTES<Format> + 2 * ROW_SCALE_BYTES <= Format::RING_BYTES && (FP8_ROW_STAGES<Format> + 1) * ROW_STAGE_BYTES<Format> > Format::RING_BYTES;
static_assert(FIT_ROWS<W8a8> && FIT_ROWS<W4a8Rows>, "what stages_for finds");

// Adds the products of 64 tokens with 128 weight rows to a half of `total`. Eights of columns are gate and up in turn, or all down.
template <int HALF>
__device__ __forceinline__ void add_scaled_rows(float (&total)[ROW_SUMS], float (&sums)[HALF_ROWS / 2], float2 tokens, float2 weights) {
    wgmma_pin(sums);
    const float first[2] = {tokens.x * weights.x, tokens.x * weights.y}, second[2] = {tokens.y * weights.x, tokens.y * weights.y};
#pragma unroll
    for (int j = 0; j < HALF_ROWS / 8; j++) {
        float* to = total + HALF * (HALF_ROWS / 2) + 4 * j;
        to[0] = fmaf(sums[4 * j], first[j % 2], to[0]);
        to[1] = fmaf(sums[4 * j + 1], first[j % 2], to[1]);
        to[2] = fmaf(sums[4 * j + 2], second[j % 2], to[2]);
        to[3] = fmaf(sums[4 * j + 3], second[j % 2], to[3]);
    }
}

// Starts to bring the row scales of a segment to shared memory: of gate and of up, or of down.
template <class Format>
__device__ __forceinline__ void copy_row_scales(const Block<Format>& block, const Segment& segment, uint32_t to) {
    const int thread = threadIdx.x % 128;
    const bool up = segment.phase == 0;
    const float* from = up ? block.layer.gate_up_scale + int64_t(segment.expert) * 2 * block.p.inter + segment.row / 2
                           : block.layer.down_scale + int64_t(segment.expert) * block.p.hidden + segment.row;
    if (thread < segment.rows) copy_4(to + thread * 4, from + thread);
    if (thread + 128 < segment.rows) copy_4(to + (thread + 128) * 4, from + (up ? block.p.inter : 128) + thread);
    copies_commit();
}

// gate_up: h of 64 tokens and 128 features, rounded to bf16, then quantised. A thread has 32 features of each of its two tokens,
// l / 4 and l / 4 + 8 of its warp's 16, and three others have the rest.
template <bool PLAIN, class Format>
__device__ __forceinline__ void store_h_rows(const Block<Format>& block, const Segment& segment, const float* weights, uint32_t scales,
                                             uint32_t staging, int first_token, const float (&sums)[ROW_SUMS]) {
    const ExpertdExpertsParams& p = block.p;
    const ExpertdLayerWeights& layer = block.layer;
    constexpr int EIGHTS = HALF_ROWS / 16; // of features, in a half
    const int thread = thread_here() % 128, warp = thread / 32, lane = thread % 32, pair = lane % 4, row = warp * 16 + lane / 4;
    const int feature = segment.row / 2, tokens = segment.tokens - first_token;
    const std::conditional_t<PLAIN, PlainActivation, Activation> activate(p);
    float in[2], out[2];
    token_factors<PLAIN>(p, weights + first_token + row, in, out);
    uint32_t packed[2][2 * EIGHTS]; // of each token, pairs of features
    uint32_t largest[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int o = 0; o < EIGHTS; o++) {
            const int64_t at = int64_t(segment.expert) * 2 * p.inter + feature + half * 64 + o * 8 + pair * 2;
            const uint32_t scale = scales + (half * 64 + o * 8 + pair * 2) * 4;
            const float2 gate_scale = load_shared_2f32(scale), up_scale = load_shared_2f32(scale + 128 * 4);
            float2 gate_bias = make_float2(0.0f, 0.0f), up_bias = gate_bias;
            if (!PLAIN && layer.gate_up_bias != nullptr) gate_bias = load_2f32(layer.gate_up_bias + at), up_bias = load_2f32(layer.gate_up_bias + at + p.inter);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int g = (half * EIGHTS + o) * 8 + 2 * i, u = g + 4;
                const float h0 = activate(biased<PLAIN>(sums[g] * gate_scale.x, in[i], gate_bias.x), biased<PLAIN>(sums[u] * up_scale.x, in[i], up_bias.x));
                const float h1 = activate(biased<PLAIN>(sums[g + 1] * gate_scale.y, in[i], gate_bias.y), biased<PLAIN>(sums[u + 1] * up_scale.y, in[i], up_bias.y));
                const uint32_t both = pack_bf16(h0 * out[i], h1 * out[i]);
                packed[i][half * EIGHTS + o] = both;
                asm("max.bf16x2 %0, %0, %1;" : "+r"(largest[i]) : "r"(both & 0x7FFF7FFFu));
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float most = lanes_max<4>(fmaxf(low_bf16(largest[i]), high_bf16(largest[i])));
        const GroupScale group = group_scale(most, p.power_of_two_scales != 0);
        const uint32_t token = row + 8 * i;
        if (pair == 0 && int(token) < tokens) {
            p.h_scales[int64_t(feature / BLOCK_K) * p.panel_rows + segment.panel_row + first_token + token] = group.scale;
        }
#pragma unroll
        for (int f = 0; f < 2 * EIGHTS; f++) {
            const uint16_t codes = pack_2_e4m3(low_bf16(packed[i][f]) * group.inverse, high_bf16(packed[i][f]) * group.inverse);
            const uint32_t byte = f * 8 + pair * 2;
            store_shared_2(staging + token * BLOCK_K + panel_byte(token, Format::PERMUTED ? w4a8_token_byte(byte) : byte), codes);
        }
    }
    __syncwarp();
    // Staged as it stands in the panel, whose rows here begin at a multiple of 8.
    uint8_t* panel = static_cast<uint8_t*>(p.h) + (int64_t(feature / BLOCK_K) * p.panel_rows + segment.panel_row + first_token) * BLOCK_K;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = warp * 16 + i * 4 + lane / 8, at = token * BLOCK_K + lane % 8 * 16;
        if (token < tokens) *reinterpret_cast<uint4*>(panel + at) = load_shared_16(staging + at);
    }
}

// A segment of more than ROW_TILE_LEAST and up to 128 tokens: the warpgroup has those from 64 times its number on.
template <class Format>
__device__ __forceinline__ void compute_rows(const Block<Format>& block, const Segment& at_first, const Cursor& slot, Cursor& stage,
                                             Counters& counters) {
    constexpr uint32_t HALF = HALF_ROWS * PANEL_ROW_BYTES / 16; // from the first 128 weight rows to the others, in descriptors
    const int warpgroup = uniform(threadIdx.x / 128), first_token = warpgroup * ROW_TOKENS;
    int panels = block.k_panels(at_first);
    const uint32_t scales = block.weight_ring + FP8_ROW_STAGES<Format> * ROW_STAGE_BYTES<Format> + warpgroup * ROW_SCALE_BYTES;
    named_sync<128>(STAGING_BARRIER + warpgroup); // every warp has read the scales of the segment before
    copy_row_scales(block, at_first, scales);
    const uint32_t a_first = wgmma_descriptor(block.token_ring + first_token * PANEL_ROW_BYTES);
    const uint32_t token_scales = (Format::UNIT_SCALE_BYTES != 0 ? TALL_ROWS * 4 : 0) + (first_token + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) * 4;
    float total[ROW_SUMS], sums[HALF_ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROW_SUMS; i++) total[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < HALF_ROWS / 2; i++) sums[i] = 0.0f;
#pragma unroll 1
    for (; panels > 0; panels--) {
        const uint32_t a = a_first + stage.slot * (ROW_TILE_TOKENS * PANEL_ROW_BYTES / 16);
        const uint32_t at = block.scale_stage(stage.slot);
        const uint32_t b = wgmma_descriptor(await_fp8(block, stage, counters));
        const float2 tokens = weight_scales(at + token_scales);
        float2 low = make_float2(1.0f, 1.0f), high = low;
        if constexpr (!Format::WIDENS) low = weight_scales(at), high = weight_scales(at + HALF_ROWS * 4);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < W8A8_STEPS; step++) WgmmaFp8<HALF_ROWS>::mma(sums, a + step * 2, b + step * 2, step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        add_scaled_rows<0>(total, sums, tokens, low);
        wgmma_pin(sums);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < W8A8_STEPS; step++) WgmmaFp8<HALF_ROWS>::mma(sums, a + step * 2, b + HALF + step * 2, step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(sums);
        __syncwarp(); // every lane has read its scales
        release_fp8(block, stage.slot, counters);
        stage.advance(FP8_ROW_STAGES<Format>);
        add_scaled_rows<1>(total, sums, tokens, high);
    }
    const Segment segment = uniform(block.shared.segments[slot.slot]); // read again: it would hold registers meanwhile
    if (segment.rows == 0) {
        copies_wait<0>();
        return;
    }
    const float* weights = block.shared.weights[slot.slot];
    const uint32_t staging = block.staging + warpgroup * STAGING_BYTES;
    barrier_wait(&block.shared.routing_full[slot.slot], slot.parity);
    copies_wait<0>();
    named_sync<128>(STAGING_BARRIER + warpgroup); // the scales are there, the staging area has been read
    if (segment.phase == 0) {
        plain_h(block) ? store_h_rows<true>(block, segment, weights, scales, staging, first_token, total)
                       : store_h_rows<false>(block, segment, weights, scales, staging, first_token, total);
    } else {
        block.layer.down_bias == nullptr ? store_y_rows<false>(block, segment, weights, scales, staging, first_token, total)
                                         : store_y_rows<true>(block, segment, weights, scales, staging, first_token, total);
    }
}

} // namespace expertd
