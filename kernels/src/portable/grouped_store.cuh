// How a warp of the grouped product stores its sums. Sums and memory are tokens by features.
#pragma once

#include "../experts_epilogue.cuh"
#include "grouped_tiles.cuh"

namespace expertd {

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

// Stores h or y of a warp's units from `unit` on, of `units` of the matrix, and its tokens from `first_token` on. PLAIN: there are no biases
// and, in h, the activation is SwiGLU and the routing weight scales its result.
template <class Shape, int PHASE, bool PLAIN>
__device__ __forceinline__ void store_tile(const ExpertdExpertsParams& p, const ExpertdLayerWeights& layer, const GroupedTile& tile, int unit, int units,
                                           int first_token, int pairs, const float (&sums)[Shape::UNITS][Shape::PAIRS][2][4]) {
    constexpr int UNITS = Shape::UNITS, PAIRS = Shape::PAIRS;
    constexpr int TOGETHER = UNITS < 4 && PAIRS % 3 == 0 ? 3 : 1; // pairs without a branch between them, whose latencies overlap
    const int lane = threadIdx.x % 32, row = lane / 4, feature = lane % 4 * 2, here = min(UNITS, units - unit);
    if (here <= 0) return;
    const bool on_input = !PLAIN && p.weight_on_input != 0;
    const Activation activate(p);
    constexpr int ROW_FEATURES = PHASE == 0 ? 8 : UNIT_ROWS; // of a unit in a row of h or y
    const int further = PHASE == 0 ? p.inter : 8;
    const float* biases = PLAIN ? nullptr : PHASE == 0 ? layer.gate_up_bias : layer.down_bias;
    const float* scales = PHASE == 0 ? layer.gate_up_scale : layer.down_scale;
    const bool weighted = PHASE == 0 || biases != nullptr; // whether the routing weights matter
    float weight[PAIRS][2];
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const int token = first_token + pair * 16 + t * 8 + row;
            weight[pair][t] = weighted && pair < pairs && token < tile.tokens ? __ldg(p.row_weight + tile.first + token) : 0.0f;
        }
    }
    float scale[UNITS][2][2], bias[UNITS][2][2]; // of the lane's two features of the first and of the second eight rows
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int64_t at = feature + int64_t(tile.expert) * (PHASE == 0 ? 2 * p.inter : p.hidden) + (unit + u) * ROW_FEATURES;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scale[u][i / 2][i % 2] = 1.0f, bias[u][i / 2][i % 2] = 0.0f;
            if (u >= here) continue;
            if constexpr (Shape::Format::ROW_SCALES) scale[u][i / 2][i % 2] = __ldg(scales + at + i / 2 * further + i % 2);
            if (biases != nullptr) bias[u][i / 2][i % 2] = __ldg(biases + at + i / 2 * further + i % 2);
        }
    }
    const int64_t row_bytes = int64_t(PHASE == 0 ? p.inter : p.hidden) * 2;
    char* const to = static_cast<char*>(PHASE == 0 ? p.h : p.y) + (tile.first + first_token + row) * row_bytes + unit * ROW_FEATURES * 2;
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        if (pair % TOGETHER == 0 && pair >= pairs) break;
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const bool there = pair < pairs && first_token + pair * 16 + t * 8 + row < tile.tokens;
            const float by = weight[pair][t], in = on_input ? by : 1.0f, out = on_input ? 1.0f : by;
            uint32_t words[PHASE == 0 ? UNITS : 2 * UNITS];
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                float of[2][2];
#pragma unroll
                for (int i = 0; i < 4; i++) of[i / 2][i % 2] = sums[u][pair][i / 2][2 * t + i % 2] * scale[u][i / 2][i % 2];
                if constexpr (PHASE == 0) {
                    float h[2];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        if constexpr (PLAIN) h[i] = of[0][i] * sigmoid(of[0][i]) * of[1][i] * out;
                        else h[i] = activate(of[0][i] * in + bias[u][0][i], of[1][i] * in + bias[u][1][i]) * out;
                    }
                    words[u] = pack_bf16(h[0], h[1]);
                } else {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        if constexpr (!PLAIN) of[half][0] += out * bias[u][half][0], of[half][1] += out * bias[u][half][1];
                        words[2 * u + half] = pack_bf16(of[half][0], of[half][1]);
                    }
                }
            }
            store_pieces(words, to + (pair * 16 + t * 8) * row_bytes, PHASE == 0 ? here : 2 * here, there);
        }
    }
}

} // namespace expertd
