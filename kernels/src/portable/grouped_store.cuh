// How a warp of the grouped product stores its sums. Sums are features by tokens, memory is tokens by features.
#pragma once

#include "../experts_epilogue.cuh"
#include "grouped_tiles.cuh"

namespace expertd {

// Transposes an 8x8 matrix of 16-bit elements that a warp holds in fragments.
__device__ __forceinline__ uint32_t transposed(uint32_t fragment) {
    uint32_t result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
    return result;
}

// Exchanges words between lanes whose numbers differ in bit BIT, so that the bit of the lane and the one of the word change places.
template <int BIT> __device__ __forceinline__ void exchange(uint32_t& word, uint32_t& further) {
    const bool upper = (threadIdx.x & BIT) != 0;
    const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? word : further, BIT);
    if (upper) word = other;
    else further = other;
}

// Stores PIECES pieces of 16 bytes of each of eight tokens, of which lane l has word l % 4 of token l / 4. `to` is the first piece of the
// lane's token, and `pieces` the number of those that are there.
template <int PIECES> __device__ __forceinline__ void store_pieces(uint32_t (&words)[PIECES], char* to, int pieces, bool there) {
    const int q = threadIdx.x % 4;
    if constexpr (PIECES % 4 == 0) {
#pragma unroll
        for (int i = 0; i < PIECES; i += 4) {
            exchange<1>(words[i], words[i + 1]), exchange<1>(words[i + 2], words[i + 3]);
            exchange<2>(words[i], words[i + 2]), exchange<2>(words[i + 1], words[i + 3]);
            if (there && i + q < pieces) *reinterpret_cast<uint4*>(to + (i + q) * 16) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
        }
    } else {
        static_assert(PIECES == 2);
        exchange<1>(words[0], words[1]); // words 2 (q / 2) and the next one of piece q % 2
        if (there && q % 2 < pieces) *reinterpret_cast<uint2*>(to + q % 2 * 16 + q / 2 * 8) = make_uint2(words[0], words[1]);
    }
}

// Stores h or y of a warp's units from `unit` on, of `units` of the matrix, and its tokens from `first_token` on.
template <class Shape, int PAIRS>
__device__ __forceinline__ void store_tile(const ExpertdExpertsParams& p, const ExpertdLayerWeights& layer, int phase, const GroupedTile& tile, int unit,
                                           int units, int first_token, const float (&sums)[Shape::UNITS][2 * Shape::PAIRS][4]) {
    constexpr int UNITS = Shape::UNITS;
    const int lane = threadIdx.x % 32, feature = lane / 4, pair = lane % 4 * 2, here = min(UNITS, units - unit);
    if (here <= 0) return;
    const bool on_input = p.weight_on_input != 0;
    const Activation activate(p);
    const int further = phase == 0 ? p.inter : 8;
    const float* biases = phase == 0 ? layer.gate_up_bias : layer.down_bias;
    const float* scales = phase == 0 ? layer.gate_up_scale : layer.down_scale;
    float2 scale[UNITS], bias[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        scale[u] = make_float2(1.0f, 1.0f), bias[u] = make_float2(0.0f, 0.0f);
        if (u >= here) continue;
        const int64_t at = feature + (phase == 0 ? int64_t(tile.expert) * 2 * p.inter + (unit + u) * 8 : int64_t(tile.expert) * p.hidden + (unit + u) * UNIT_ROWS);
        if constexpr (Shape::Format::ROW_SCALES) scale[u] = make_float2(__ldg(scales + at), __ldg(scales + at + further));
        if (biases != nullptr) bias[u] = make_float2(__ldg(biases + at), __ldg(biases + at + further));
    }
#pragma unroll
    for (int column = 0; column < 2 * PAIRS; column++) {
        const int token = first_token + column * 8;
        if (token >= tile.tokens) break;
        float weight[2];
#pragma unroll
        for (int t = 0; t < 2; t++) weight[t] = token + pair + t < tile.tokens ? __ldg(p.row_weight + tile.first + token + pair + t) : 0.0f;
        const bool there = token + feature < tile.tokens; // after the transposition a lane has features of token l / 4
        const int64_t assignment = tile.first + token + feature;
        uint32_t words[2 * UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const float(&of)[4] = sums[u][column];
            const float low[2] = {of[0] * scale[u].x, of[1] * scale[u].x}, high[2] = {of[2] * scale[u].y, of[3] * scale[u].y};
            if (phase == 0) {
                float h[2];
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    const float in = on_input ? weight[t] : 1.0f, out = on_input ? 1.0f : weight[t];
                    h[t] = activate(low[t] * in + bias[u].x, high[t] * in + bias[u].y) * out;
                }
                words[u] = transposed(pack_bf16(h[0], h[1]));
            } else {
                const float by[2] = {on_input ? 1.0f : weight[0], on_input ? 1.0f : weight[1]};
                words[2 * u] = transposed(pack_bf16(low[0] + by[0] * bias[u].x, low[1] + by[1] * bias[u].x));
                words[2 * u + 1] = transposed(pack_bf16(high[0] + by[0] * bias[u].y, high[1] + by[1] * bias[u].y));
            }
        }
        if (phase == 0) {
            uint32_t half[UNITS];
#pragma unroll
            for (int u = 0; u < UNITS; u++) half[u] = words[u];
            store_pieces<UNITS>(half, static_cast<char*>(p.h) + (assignment * p.inter + unit * 8) * 2, here, there);
        } else {
            store_pieces<2 * UNITS>(words, static_cast<char*>(p.y) + (assignment * p.hidden + unit * UNIT_ROWS) * 2, 2 * here, there);
        }
    }
}

} // namespace expertd
