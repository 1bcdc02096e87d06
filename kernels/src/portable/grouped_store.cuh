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
template <class Shape, int PHASE>
__device__ __forceinline__ void store_tile(const ExpertdExpertsParams& p, const ExpertdLayerWeights& layer, const GroupedTile& tile, int unit, int units,
                                           int first_token, int columns, const float (&sums)[Shape::UNITS][Shape::COLUMNS][4]) {
    constexpr int UNITS = Shape::UNITS, COLUMNS = Shape::COLUMNS;
    constexpr int TOGETHER = COLUMNS % 3 == 0 ? 3 : COLUMNS % 4 == 0 ? 4 : 2; // columns without a branch between them, whose latencies overlap
    static_assert(COLUMNS % TOGETHER == 0);
    const int lane = threadIdx.x % 32, feature = lane / 4, pair = lane % 4 * 2, here = min(UNITS, units - unit);
    if (here <= 0) return;
    const bool on_input = p.weight_on_input != 0;
    const Activation activate(p);
    constexpr int ROW_FEATURES = PHASE == 0 ? 8 : UNIT_ROWS; // of a unit in a row of h or y
    const int further = PHASE == 0 ? p.inter : 8;
    const float* biases = PHASE == 0 ? layer.gate_up_bias : layer.down_bias;
    const float* scales = PHASE == 0 ? layer.gate_up_scale : layer.down_scale;
    const bool weighted = PHASE == 0 || biases != nullptr; // whether the routing weights matter
    float weight[COLUMNS][2];
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const int token = first_token + column * 8 + pair + t;
            weight[column][t] = weighted && column < columns && token < tile.tokens ? __ldg(p.row_weight + tile.first + token) : 0.0f;
        }
    }
    float2 scale[UNITS], bias[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        scale[u] = make_float2(1.0f, 1.0f), bias[u] = make_float2(0.0f, 0.0f);
        if (u >= here) continue;
        const int64_t at = feature + int64_t(tile.expert) * (PHASE == 0 ? 2 * p.inter : p.hidden) + (unit + u) * ROW_FEATURES;
        if constexpr (Shape::Format::ROW_SCALES) scale[u] = make_float2(__ldg(scales + at), __ldg(scales + at + further));
        if (biases != nullptr) bias[u] = make_float2(__ldg(biases + at), __ldg(biases + at + further));
    }
    const int64_t row_bytes = int64_t(PHASE == 0 ? p.inter : p.hidden) * 2;
    char* const to = static_cast<char*>(PHASE == 0 ? p.h : p.y) + (tile.first + first_token + feature) * row_bytes + unit * ROW_FEATURES * 2;
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        if (column % TOGETHER == 0 && column >= columns) break;
        // After the transposition a lane has features of token l / 4.
        const bool there = column < columns && first_token + column * 8 + feature < tile.tokens;
        const float(&by)[2] = weight[column];
        uint32_t words[PHASE == 0 ? UNITS : 2 * UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const float(&of)[4] = sums[u][column];
            const float low[2] = {of[0] * scale[u].x, of[1] * scale[u].x}, high[2] = {of[2] * scale[u].y, of[3] * scale[u].y};
            if constexpr (PHASE == 0) {
                float h[2];
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    const float in = on_input ? by[t] : 1.0f, out = on_input ? 1.0f : by[t];
                    h[t] = activate(low[t] * in + bias[u].x, high[t] * in + bias[u].y) * out;
                }
                words[u] = transposed(pack_bf16(h[0], h[1]));
            } else {
                const float of_bias[2] = {on_input ? 1.0f : by[0], on_input ? 1.0f : by[1]};
                words[2 * u] = transposed(pack_bf16(low[0] + of_bias[0] * bias[u].x, low[1] + of_bias[1] * bias[u].x));
                words[2 * u + 1] = transposed(pack_bf16(high[0] + of_bias[0] * bias[u].y, high[1] + of_bias[1] * bias[u].y));
            }
        }
        store_pieces(words, to + column * 8 * row_bytes, PHASE == 0 ? here : 2 * here, there);
    }
}

} // namespace expertd
