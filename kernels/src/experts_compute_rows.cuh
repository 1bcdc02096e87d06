// What segments with many tokens have in common in all formats: tokens are wgmma's M operand, weights its N.
//
// A warpgroup has 64 tokens and all weight rows of the segment, so a warp has all features of its 16 tokens. It stages and stores them
// without the other warps.
#pragma once

#include "experts_block.cuh"
#include "experts_epilogue.cuh"

namespace expertd {

constexpr int ROW_TOKENS = 64;          // of a warpgroup
constexpr int ROW_SUMS = TALL_ROWS / 2; // sums of a thread, of its tokens l / 4 and l / 4 + 8
constexpr int ROW_STAGES = 4;           // of the ring

// Takes part in the ring while the other warpgroup computes a segment of at most 64 tokens.
template <class Format> __device__ __forceinline__ void skip_rows(const Block<Format>& block, int panels, Cursor& stage) {
    for (; panels > 0; panels--) {
        barrier_wait(&block.shared.full[stage.slot], stage.parity);
        __syncwarp();
        release_stage(block, stage.slot, 1);
        stage.advance(ROW_STAGES);
    }
}

// Of two neighbouring columns.
__device__ __forceinline__ float2 load_2f32(const float* from) { return __ldg(reinterpret_cast<const float2*>(from)); }

// Stages eight eights of features of a warp's 16 tokens: `pairs` holds two features of each eight for the lane's tokens l / 4 and
// l / 4 + 8. Chunks are permuted as in a panel.
__device__ __forceinline__ void stage_rows(uint32_t staging, const uint32_t (&pairs)[2][8]) {
    const int lane = thread_here() % 32, token = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int o = 0; o < 8; o += 2) {
        store_matrices(staging + token * 128 + (((o + lane / 16) ^ (token % 8)) * 16), pairs[0][o], pairs[1][o], pairs[0][o + 1], pairs[1][o + 1]);
    }
    __syncwarp();
}

// down: y of 64 tokens and up to 256 features, 64 features at a time. `scales` is the shared-memory address of the segment's row
// scales, if the format has them.
template <class Format>
__device__ __forceinline__ void store_y_rows(const Block<Format>& block, const Segment& segment, const float* weights, uint32_t scales,
                                             uint32_t staging, int first_token, const float (&sums)[ROW_SUMS]) {
    const ExpertdExpertsParams& p = block.p;
    const float* bias = block.layer.down_bias;
    const int thread = thread_here() % 128, warp = thread / 32, lane = thread % 32, pair = lane % 4, row = warp * 16 + lane / 4;
    const int tokens = segment.tokens - first_token;
    const float low = p.weight_on_input ? 1.0f : weights[first_token + row], high = p.weight_on_input ? 1.0f : weights[first_token + row + 8];
    uint16_t* y = static_cast<uint16_t*>(p.y) + int64_t(segment.first + first_token) * p.hidden + segment.row;
#pragma unroll
    for (int pass = 0; pass < TALL_ROWS / 64; pass++) {
        if (pass * 64 >= segment.rows) break;
        uint32_t packed[2][8];
#pragma unroll
        for (int o = 0; o < 8; o++) {
            const int j = (pass * 8 + o) * 4;
            float2 of = make_float2(0.0f, 0.0f);
            if (bias != nullptr) of = load_2f32(bias + int64_t(segment.expert) * p.hidden + segment.row + pass * 64 + o * 8 + pair * 2);
            float2 scale = make_float2(1.0f, 1.0f);
            if constexpr (Format::ROW_SCALES) scale = load_shared_2f32(scales + (pass * 64 + o * 8 + pair * 2) * 4);
            packed[0][o] = pack_bf16(fmaf(low, of.x, sums[j] * scale.x), fmaf(low, of.y, sums[j + 1] * scale.y));
            packed[1][o] = pack_bf16(fmaf(high, of.x, sums[j + 2] * scale.x), fmaf(high, of.y, sums[j + 3] * scale.y));
        }
        if (pass > 0) __syncwarp(); // the staging area has been read
        stage_rows(staging + warp * 16 * 128, packed);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = warp * 16 + i * 4 + lane / 8, chunk = lane % 8;
            if (token < tokens) {
                const uint4 v = load_shared_16(staging + token * 128 + ((chunk ^ (token % 8)) * 16));
                *reinterpret_cast<uint4*>(y + int64_t(token) * p.hidden + pass * 64 + chunk * 8) = v;
            }
        }
    }
}

} // namespace expertd
