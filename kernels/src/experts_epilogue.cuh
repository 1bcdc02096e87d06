// From accumulators to memory: activation, routing weight and biases; h in panels, y in rows.
//
// Accumulator rows are features and columns are tokens, memory wants tokens in rows: 8x8 blocks are transposed in
// registers (movmatrix), nothing passes through shared memory. The row orders of experts_layout.cuh are chosen for this.
#pragma once

#include <cuda_bf16.h>

#include "experts.h"
#include "experts_layout.cuh"
#include "experts_ptx.cuh"
#include "experts_schedule.cuh"

namespace expertd {

// min and clamp that keep NaN, as the CPU path does.
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }
__device__ __forceinline__ float at_least(float x, float limit) { return x < limit ? limit : x; }

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__device__ __forceinline__ float activate(const ExpertdExpertsParams& p, float gate, float up) {
    if (p.activation == EXPERTD_SWIGLU) return gate * sigmoid(gate) * up;
    gate = at_most(gate, p.limit);
    up = at_least(at_most(up, p.limit), -p.limit);
    if (p.activation == EXPERTD_SWIGLU_CLAMPED) return gate * sigmoid(gate) * up;
    return gate * sigmoid(p.alpha * gate) * (up + 1.0f);
}

// gate_up: `row` is the first weight row of this warp's sixteen (eight of gate, eight of up: eight features of h).
template <int N>
__device__ __forceinline__ void store_h(const ExpertdExpertsParams& p, const ExpertdLayerWeights& layer,
                                        const Segment& segment, int row, const float* weights, float (&d)[N / 2]) {
    const int lane = threadIdx.x % 32, octet_row = lane / 4, pair = lane % 4;
    const int feature = row / 2;
    float gate_bias = 0.0f, up_bias = 0.0f;
    if (layer.gate_up_bias != nullptr) {
        const float* bias = layer.gate_up_bias + int64_t(segment.expert) * 2 * p.inter + feature + octet_row;
        gate_bias = bias[0];
        up_bias = bias[p.inter];
    }
    // Rows of a token tile start at a multiple of 8, so octet_row is the row number modulo 8 that the swizzle wants.
    const int chunk = (feature % PANEL_K / 8) ^ octet_row;
    __nv_bfloat16* h = static_cast<__nv_bfloat16*>(p.h) +
                       (int64_t(feature / PANEL_K) * p.h_rows + segment.h_row + octet_row) * PANEL_K + chunk * 8 + pair * 2;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        if (j * 8 >= segment.tokens) break;
        const float2 w = *reinterpret_cast<const float2*>(weights + j * 8 + pair * 2);
        float g0 = d[4 * j], g1 = d[4 * j + 1], u0 = d[4 * j + 2], u1 = d[4 * j + 3];
        if (p.weight_on_input) {
            g0 *= w.x, u0 *= w.x, g1 *= w.y, u1 *= w.y;
        }
        float h0 = activate(p, g0 + gate_bias, u0 + up_bias), h1 = activate(p, g1 + gate_bias, u1 + up_bias);
        if (!p.weight_on_input) {
            h0 *= w.x, h1 *= w.y;
        }
        *reinterpret_cast<uint32_t*>(h + int64_t(j) * 8 * PANEL_K) = transpose_8x8(pack_bf16(h0, h1));
    }
}

// down: `row` is the first weight row of this warp's sixteen, and the first of its sixteen output features.
template <int N>
__device__ __forceinline__ void store_y(const ExpertdExpertsParams& p, const ExpertdLayerWeights& layer,
                                        const Segment& segment, int row, const float* weights, float (&d)[N / 2]) {
    const int lane = threadIdx.x % 32, octet_row = lane / 4, pair = lane % 4;
    float bias_low = 0.0f, bias_high = 0.0f;
    const bool biased = layer.down_bias != nullptr;
    if (biased) {
        const float* bias = layer.down_bias + int64_t(segment.expert) * p.hidden;
        bias_low = bias[down_feature(row + octet_row)];
        bias_high = bias[down_feature(row + octet_row + 8)];
    }
    __nv_bfloat16* y = static_cast<__nv_bfloat16*>(p.y) + int64_t(segment.first + octet_row) * p.hidden + row + pair * 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        if (j * 8 >= segment.tokens) break;
        float y0 = d[4 * j], y1 = d[4 * j + 1], y2 = d[4 * j + 2], y3 = d[4 * j + 3];
        if (biased) {
            float2 w = make_float2(1.0f, 1.0f);
            if (!p.weight_on_input) w = *reinterpret_cast<const float2*>(weights + j * 8 + pair * 2);
            y0 += w.x * bias_low, y1 += w.y * bias_low, y2 += w.x * bias_high, y3 += w.y * bias_high;
        }
        uint2 four;
        four.x = transpose_8x8(pack_bf16(y0, y1));
        four.y = transpose_8x8(pack_bf16(y2, y3));
        if (j * 8 + octet_row < segment.tokens) *reinterpret_cast<uint2*>(y + int64_t(j) * 8 * p.hidden) = four;
    }
}

} // namespace expertd
