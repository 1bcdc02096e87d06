// From accumulators to memory: activation, routing weight and biases; h in panels, y in rows.
//
// In accumulators rows are features and columns are tokens; in memory tokens are rows. stmatrix transposes 8x8 blocks while it stores
// them to a staging area in shared memory, which each warpgroup has for 64 tokens at a time. They leave it in pieces of 64 or 128
// contiguous bytes.
#pragma once

#include <cmath>

#include "experts.h"
#include "experts_layout.cuh"
#include "experts_schedule.cuh"
#include "ptx.cuh"

namespace expertd {

constexpr int STAGING_TOKENS = 64;
constexpr int STAGING_BYTES = STAGING_TOKENS * 128; // size of one warpgroup's staging area
constexpr int STAGING_BARRIER = 1;                  // named barriers 1 to 3 guard the warpgroups' staging areas

// Packs two f32 as bf16, rounded to nearest even, with `low` in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// min and max that keep NaN, as the CPU code does.
__device__ __forceinline__ float at_most(float x, float limit) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
    return y;
}
__device__ __forceinline__ float at_least(float x, float limit) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
    return y;
}

// Takes two instructions of the special function unit. Subnormals need no extra code, because 1 is added to them.
__device__ __forceinline__ float sigmoid(float x) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return inverse;
}

// All activations as one formula, g * sigmoid(alpha * g) * (u + offset) with g and u clamped. It has no branches, so the compiler can
// overlap the latencies of many elements.
struct Activation {
    float alpha, limit, offset;

    __device__ __forceinline__ explicit Activation(const ExpertdExpertsParams& p)
        : alpha(p.activation == EXPERTD_SWIGLU_OAI ? p.alpha : 1.0f),
          limit(p.activation == EXPERTD_SWIGLU ? INFINITY : p.limit),
          offset(p.activation == EXPERTD_SWIGLU_OAI ? 1.0f : 0.0f) {}

    __device__ __forceinline__ float operator()(float gate, float up) const {
        gate = at_most(gate, limit);
        up = at_least(at_most(up, limit), -limit);
        return gate * sigmoid(alpha * gate) * (up + offset);
    }
};

// Arguments of a warpgroup's epilogue. The warpgroup computed `rows` weight rows, beginning at `row`.
struct Epilogue {
    const ExpertdExpertsParams& p;
    const ExpertdLayerWeights& layer;
    const Segment& segment;
    int row, rows;
    const float* weights; // routing weights of the segment's tokens, in shared memory
    uint32_t staging;     // shared-memory address of the warpgroup's staging area
    int barrier;          // named barrier of the warpgroup
};

// Factors of the accumulators of this thread's two rows (FP8, MXFP4).
__device__ __forceinline__ float2 row_scales(const Epilogue& e) {
    const int warp = thread_here() % 128 / 32, row = thread_here() % 32 / 4;
    if (warp * 16 >= e.rows) return make_float2(0.0f, 0.0f);
    if (e.segment.phase == 0) {
        const float* scale = e.layer.gate_up_scale + int64_t(e.segment.expert) * 2 * e.p.inter + e.row / 2 + warp * 8 + row;
        return make_float2(scale[0], scale[e.p.inter]);
    }
    const float* scale = e.layer.down_scale + int64_t(e.segment.expert) * e.p.hidden + e.row + warp * 16 + row;
    return make_float2(scale[0], scale[8]);
}

// Biases of the thread's two rows; zeros without biases.
__device__ __forceinline__ float2 row_biases(const Epilogue& e) {
    const int warp = thread_here() % 128 / 32, row = thread_here() % 32 / 4;
    const float* all = e.segment.phase == 0 ? e.layer.gate_up_bias : e.layer.down_bias;
    if (all == nullptr || warp * 16 >= e.rows) return make_float2(0.0f, 0.0f);
    if (e.segment.phase == 0) {
        const float* bias = all + int64_t(e.segment.expert) * 2 * e.p.inter + e.row / 2 + warp * 8 + row;
        return make_float2(bias[0], bias[e.p.inter]);
    }
    const float* bias = all + int64_t(e.segment.expert) * e.p.hidden + e.row + warp * 16 + row;
    return make_float2(bias[0], bias[8]);
}

// Brings the factors and biases of a segment's rows to L2, so that its end need not wait for memory.
__device__ __forceinline__ void prefetch_rows(const Epilogue& e) {
    const int warp = thread_here() % 128 / 32, row = thread_here() % 32 / 4;
    if (warp * 16 >= e.rows) return;
    const bool up = e.segment.phase == 0;
    const int64_t at = up ? int64_t(e.segment.expert) * 2 * e.p.inter + e.row / 2 + warp * 8 + row
                          : int64_t(e.segment.expert) * e.p.hidden + e.row + warp * 16 + row;
    const int64_t other = up ? e.p.inter : 8;
    const float *scales = up ? e.layer.gate_up_scale : e.layer.down_scale, *biases = up ? e.layer.gate_up_bias : e.layer.down_bias;
    prefetch_to_l2(scales + at);
    prefetch_to_l2(scales + at + other);
    if (biases != nullptr) prefetch_to_l2(biases + at), prefetch_to_l2(biases + at + other);
}

// Stores h after gate_up. 64 weight rows are 32 features of h; each warp's 16 rows are 8 features, one 16-byte chunk of a token.
template <int N> __device__ __forceinline__ void store_h(const Epilogue& e, const float2& biases, float (&d)[N / 2]) {
    const ExpertdExpertsParams& p = e.p;
    const int thread = thread_here() % 128, warp = thread / 32, lane = thread % 32, pair = lane % 4;
    const int feature = e.row / 2, tokens = e.segment.tokens;
    const Activation activate(p);
    const bool on_input = p.weight_on_input != 0;
    // The chunk of eight features that this thread stores of each token.
    const int stored = feature + thread % 4 * 8, stored_chunk = stored % PANEL_K / 8;
    uint16_t* panel = static_cast<uint16_t*>(p.h) + (int64_t(stored / PANEL_K) * p.panel_rows + e.segment.panel_row) * PANEL_K;
#pragma unroll
    for (int from = 0; from < N; from += STAGING_TOKENS) {
        if (from >= tokens) break;
        uint32_t packed[STAGING_TOKENS / 8];
#pragma unroll
        for (int o = 0; o < STAGING_TOKENS / 8; o++) {
            const int j = from / 8 + o;
            packed[o] = 0;
            if (j < N / 8) {
                const float2 w = *reinterpret_cast<const float2*>(e.weights + j * 8 + pair * 2);
                const float2 in = on_input ? w : make_float2(1.0f, 1.0f), out = on_input ? make_float2(1.0f, 1.0f) : w;
                const float h0 = activate(d[4 * j] * in.x + biases.x, d[4 * j + 2] * in.x + biases.y);
                const float h1 = activate(d[4 * j + 1] * in.y + biases.x, d[4 * j + 3] * in.y + biases.y);
                packed[o] = pack_bf16(h0 * out.x, h1 * out.y);
            }
        }
        named_sync<128>(e.barrier); // the staging area has been read
#pragma unroll
        for (int o = 0; o < STAGING_TOKENS / 8; o += 4) { // rows of 64 bytes, whose chunks are permuted to avoid bank conflicts
            if (from + o * 8 < N) {
                const int token = o * 8 + lane;
                store_transposed(e.staging + token * 64 + ((warp ^ (token / 2 % 4)) * 16), packed[o], packed[o + 1], packed[o + 2], packed[o + 3]);
            }
        }
        named_sync<128>(e.barrier);
#pragma unroll
        for (int i = 0; i < STAGING_TOKENS / 32; i++) {
            const int token = thread / 4 + i * 32, chunk = thread % 4;
            if (from + i * 32 < N && from + token < tokens && chunk * 16 < e.rows) {
                const uint4 v = load_shared_16(e.staging + token * 64 + ((chunk ^ (token / 2 % 4)) * 16));
                *reinterpret_cast<uint4*>(panel + (from + token) * PANEL_K + ((stored_chunk ^ (token % 8)) * 8)) = v;
            }
        }
    }
}

// Stores y after down. 64 weight rows are 64 features of y, 128 bytes of a token.
template <int N> __device__ __forceinline__ void store_y(const Epilogue& e, const float2& biases, float (&d)[N / 2]) {
    const ExpertdExpertsParams& p = e.p;
    const int thread = thread_here() % 128, warp = thread / 32, lane = thread % 32, pair = lane % 4;
    const int tokens = e.segment.tokens;
    const bool biased = e.layer.down_bias != nullptr;
    uint16_t* y = static_cast<uint16_t*>(p.y) + int64_t(e.segment.first) * p.hidden + e.row;
#pragma unroll
    for (int from = 0; from < N; from += STAGING_TOKENS) {
        if (from >= tokens) break;
        named_sync<128>(e.barrier); // the staging area has been read
#pragma unroll
        for (int o = 0; o < STAGING_TOKENS / 8; o += 2) {
            uint32_t packed[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int j = from / 8 + o + i;
                if (j < N / 8) {
                    float y0 = d[4 * j], y1 = d[4 * j + 1], y2 = d[4 * j + 2], y3 = d[4 * j + 3];
                    if (biased) {
                        float2 w = make_float2(1.0f, 1.0f);
                        if (!p.weight_on_input) w = *reinterpret_cast<const float2*>(e.weights + j * 8 + pair * 2);
                        y0 += w.x * biases.x, y1 += w.y * biases.x, y2 += w.x * biases.y, y3 += w.y * biases.y;
                    }
                    packed[2 * i] = pack_bf16(y0, y1);
                    packed[2 * i + 1] = pack_bf16(y2, y3);
                }
            }
            if (from + o * 8 < N) { // matrices: (tokens o, features low), (o, high), (o + 1, low), (o + 1, high)
                const int token = o * 8 + lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
                store_transposed(e.staging + token * 128 + ((chunk ^ (token % 8)) * 16), packed[0], packed[1], packed[2], packed[3]);
            }
        }
        named_sync<128>(e.barrier);
#pragma unroll
        for (int i = 0; i < STAGING_TOKENS / 16; i++) {
            const int token = thread / 8 + i * 16, chunk = thread % 8;
            if (from + i * 16 < N && from + token < tokens && chunk * 8 < e.rows) {
                const uint4 v = load_shared_16(e.staging + token * 128 + ((chunk ^ (token % 8)) * 16));
                *reinterpret_cast<uint4*>(y + int64_t(from + token) * p.hidden + chunk * 8) = v;
            }
        }
    }
}

} // namespace expertd
