// What segments with many tokens have in common in all formats: tokens are wgmma's M operand, weights its N.
//
// A warpgroup has 64 tokens and all weight rows of the segment, so a warp has all features of its 16 tokens. It stages and stores them
// without the other warps.
#pragma once

#include <type_traits>

#include "experts_block.cuh"
#include "experts_epilogue.cuh"

namespace expertd {

constexpr int ROW_TOKENS = 64;          // of a warpgroup
constexpr int ROW_SUMS = TALL_ROWS / 2; // sums of a thread, of its tokens l / 4 and l / 4 + 8
constexpr int ROW_STAGES = 4;           // of the ring
static_assert(ROW_TILE_LEAST >= ROW_TOKENS, "both warpgroups have tokens");

// Whether h needs neither biases nor clamps nor a routing weight on the input, as in most models. The end of a segment then takes half
// of the instructions.
template <class Format> __device__ __forceinline__ bool plain_h(const Block<Format>& block) {
    return block.p.activation == EXPERTD_SWIGLU && block.p.weight_on_input == 0 && block.layer.gate_up_bias == nullptr;
}

// Activation for plain_h(), with the same result.
struct PlainActivation {
    __device__ __forceinline__ explicit PlainActivation(const ExpertdExpertsParams&) {}
    __device__ __forceinline__ float operator()(float gate, float up) const { return gate * sigmoid(gate) * up; }
};

// The factors of gate and up, and of h, for a thread's two tokens. `weights` are the routing weights from its first token on.
template <bool PLAIN>
__device__ __forceinline__ void token_factors(const ExpertdExpertsParams& p, const float* weights, float (&in)[2], float (&out)[2]) {
    const bool on_input = !PLAIN && p.weight_on_input != 0;
#pragma unroll
    for (int i = 0; i < 2; i++) in[i] = on_input ? weights[8 * i] : 1.0f, out[i] = on_input ? 1.0f : weights[8 * i];
}

// A sum of gate or up with its factor and bias.
template <bool PLAIN> __device__ __forceinline__ float biased(float sum, float factor, float bias) { return PLAIN ? sum : sum * factor + bias; }

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
// scales, if the format has them. `BIASED`: down has biases.
template <bool BIASED, class Format>
__device__ __forceinline__ void store_y_rows(const Block<Format>& block, const Segment& segment, const float* weights, uint32_t scales,
                                             uint32_t staging, int first_token, const float (&sums)[ROW_SUMS]) {
    const ExpertdExpertsParams& p = block.p;
    const float* bias = block.layer.down_bias;
    const int thread = thread_here() % 128, warp = thread / 32, lane = thread % 32, pair = lane % 4, row = warp * 16 + lane / 4;
    const int tokens = segment.tokens - first_token;
    const float low = !BIASED || p.weight_on_input ? 1.0f : weights[first_token + row], high = !BIASED || p.weight_on_input ? 1.0f : weights[first_token + row + 8];
    uint16_t* y = static_cast<uint16_t*>(p.y) + int64_t(segment.first + first_token) * p.hidden + segment.row;
#pragma unroll
    for (int pass = 0; pass < TALL_ROWS / 64; pass++) {
        if (pass * 64 >= segment.rows) break;
        uint32_t packed[2][8];
#pragma unroll
        for (int o = 0; o < 8; o++) {
            const int j = (pass * 8 + o) * 4;
            float2 of = make_float2(0.0f, 0.0f);
            if (BIASED) of = load_2f32(bias + int64_t(segment.expert) * p.hidden + segment.row + pass * 64 + o * 8 + pair * 2);
            float2 scale = make_float2(1.0f, 1.0f);
            if constexpr (Format::ROW_SCALES) scale = load_shared_2f32(scales + (pass * 64 + o * 8 + pair * 2) * 4);
            float of_low[2] = {sums[j] * scale.x, sums[j + 1] * scale.y}, of_high[2] = {sums[j + 2] * scale.x, sums[j + 3] * scale.y};
            if (BIASED) {
                of_low[0] = fmaf(low, of.x, of_low[0]), of_low[1] = fmaf(low, of.y, of_low[1]);
                of_high[0] = fmaf(high, of.x, of_high[0]), of_high[1] = fmaf(high, of.y, of_high[1]);
            }
            packed[0][o] = pack_bf16(of_low[0], of_low[1]);
            packed[1][o] = pack_bf16(of_high[0], of_high[1]);
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
