// From accumulators to h in e4m3 with scales: activation, routing weight and biases as in experts_epilogue.cuh, then rounding to
// bf16, then quantisation.
//
// A warpgroup computes 64 features of each token, from two halves of 64 weight rows. Both warpgroups together compute 128 features,
// which share a scale, so they exchange the largest magnitudes once for every 64 tokens.
#pragma once

#include "experts_epilogue.cuh"
#include "experts_formats.cuh"
#include "experts_quantise.cuh"

namespace expertd {

constexpr int MAXIMA_BARRIER = 8; // named barrier: both warpgroups have written their maxima
constexpr int TURN_BARRIER = 9;   // named barriers 9 and 10: the turns of the first and the second warpgroup

// The largest magnitudes of up to 64 tokens, which the warpgroups exchange. There are two sets, used in turn: before one is written
// again, both warpgroups have passed the barrier for the other.
struct Maxima {
    float of[2][STAGING_TOKENS];
};

// The factors and biases of a thread's rows of gate and up in both halves.
struct RowFactors {
    float2 scales[2], biases[2];
    static constexpr bool HELD = true;
};
struct NoRowFactors { // they are loaded where they are used
    static constexpr bool HELD = false;
};

// Quantises and stores h. `from` is the warpgroup's first weight row in the segment; `sums` [half][N / 2] are the sums of 64 weight
// rows each; `even` and `odd` are the two sets of maxima; `exchanges` counts the exchanges of maxima. PERMUTED: in the order of
// w4a8_token_byte.
template <bool PERMUTED, int N, class Factors>
__device__ __forceinline__ void store_h_w8a8(const ExpertdExpertsParams& p, const ExpertdLayerWeights& layer, const Segment& segment,
                                             int from, const float* weights, uint32_t staging, Maxima& even, Maxima& odd,
                                             uint32_t& exchanges, float (&sums)[2][N / 2], const Factors& factors) {
    constexpr int CHUNKS = 8;                             // chunks of 8 features per token
    constexpr int PASSES = STAGING_TOKENS * CHUNKS / 128; // chunks of 64 tokens that a thread quantises
    const int thread = thread_here() % 128, warp = thread / 32, lane = thread % 32, pair = lane % 4;
    const int warpgroup = __shfl_sync(0xffffffff, thread_here() / 128, 0), barrier = STAGING_BARRIER + warpgroup;
    const int feature = (segment.row + from) / 2, tokens = segment.tokens;
    const uint32_t own_staging = staging + warpgroup * STAGING_BYTES;
    const Activation activate(p);
    const bool on_input = p.weight_on_input != 0;
    // The chunk of eight features that this thread quantises of each token.
    const int chunk = thread % CHUNKS, stored = feature + chunk * 8;
    uint8_t* panel = static_cast<uint8_t*>(p.h) + (int64_t(stored / BLOCK_K) * p.panel_rows + segment.panel_row) * BLOCK_K;
    const int64_t scale_row = int64_t(feature / BLOCK_K) * p.panel_rows + segment.panel_row;
#pragma unroll
    for (int first = 0; first < N; first += STAGING_TOKENS) {
        if (first >= tokens) break;
        named_sync<128>(barrier); // the staging area has been read
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t row = int64_t(segment.expert) * 2 * p.inter + feature + half * 32 + warp * 8 + lane / 4;
            float gate_scale, up_scale, gate_bias = 0.0f, up_bias = 0.0f;
            if constexpr (Factors::HELD) {
                gate_scale = factors.scales[half].x, up_scale = factors.scales[half].y;
                gate_bias = factors.biases[half].x, up_bias = factors.biases[half].y;
            } else {
                gate_scale = layer.gate_up_scale[row], up_scale = layer.gate_up_scale[row + p.inter];
                if (layer.gate_up_bias != nullptr) gate_bias = layer.gate_up_bias[row], up_bias = layer.gate_up_bias[row + p.inter];
            }
            const float(&d)[N / 2] = sums[half];
            uint32_t packed[STAGING_TOKENS / 8];
#pragma unroll
            for (int o = 0; o < STAGING_TOKENS / 8; o++) {
                const int j = first / 8 + o;
                packed[o] = 0;
                if (j < N / 8) {
                    const float2 w = *reinterpret_cast<const float2*>(weights + j * 8 + pair * 2);
                    const float2 in = on_input ? w : make_float2(1.0f, 1.0f), out = on_input ? make_float2(1.0f, 1.0f) : w;
                    const float h0 = activate(d[4 * j] * gate_scale * in.x + gate_bias, d[4 * j + 2] * up_scale * in.x + up_bias);
                    const float h1 = activate(d[4 * j + 1] * gate_scale * in.y + gate_bias, d[4 * j + 3] * up_scale * in.y + up_bias);
                    packed[o] = pack_bf16(h0 * out.x, h1 * out.y);
                }
            }
#pragma unroll
            for (int o = 0; o < STAGING_TOKENS / 8; o += 4) { // a token's chunks, permuted to avoid bank conflicts
                if (first + o * 8 < N) {
                    const int token = o * 8 + lane, at = half * 4 + warp;
                    const int place = at ^ (token % 8);
                    store_transposed(own_staging + token * (CHUNKS * 16) + place * 16, packed[o], packed[o + 1], packed[o + 2], packed[o + 3]);
                }
            }
        }
        named_sync<128>(barrier);
        uint4 v[PASSES];
        float largest[PASSES];
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const int token = thread / CHUNKS + i * (128 / CHUNKS);
            v[i] = make_uint4(0, 0, 0, 0);
            if (first + token < tokens) {
                const int place = chunk ^ (token % 8);
                v[i] = load_shared_16(own_staging + token * (CHUNKS * 16) + place * 16);
            }
            largest[i] = lanes_max<CHUNKS>(largest_of(v[i]));
        }
        Maxima& all = exchanges++ % 2 == 0 ? even : odd;
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            if (chunk == 0) all.of[warpgroup][thread / CHUNKS + i * (128 / CHUNKS)] = largest[i];
        }
        named_sync<256>(MAXIMA_BARRIER);
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            largest[i] = fmaxf(largest[i], all.of[1 - warpgroup][thread / CHUNKS + i * (128 / CHUNKS)]);
        }
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const int token = thread / CHUNKS + i * (128 / CHUNKS);
            if (first + token >= tokens) continue;
            const GroupScale group = group_scale(largest[i], p.power_of_two_scales != 0);
            const uint32_t row = first + token;
            const uint2 codes = quantise(v[i], group.inverse);
            if constexpr (PERMUTED) {
                const uint32_t words[2] = {codes.x, codes.y};
                store_permuted(panel + row * BLOCK_K, row, stored % BLOCK_K, words);
            } else {
                *reinterpret_cast<uint2*>(panel + row * BLOCK_K + panel_byte(row, stored % BLOCK_K)) = codes;
            }
            if (chunk == 0 && warpgroup == 0) p.h_scales[scale_row + row] = group.scale;
        }
    }
}

} // namespace expertd
