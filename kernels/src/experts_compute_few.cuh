// The mainloop of a segment with weights of 4 bits and few tokens. A warp multiplies its 16 rows by itself, with mma instead of wgmma: it
// needs no descriptors, no wait for a whole warpgroup, and no fragments that outlive a product, so a k block takes about half as many
// instructions as in experts_compute_narrow.cuh. The fragments of m16n8k16 are those of wgmma, so the layout of weights and the end of
// a segment are the same.
#pragma once

#include "experts_compute_narrow.cuh"
#include "mma.cuh"

namespace expertd {

// The weights of a warp's k block in registers, as they are in shared memory.
template <class Format> struct FewWeights {
    static constexpr int CHUNKS = BLOCK_STEPS / Format::CHUNK_STEPS;
    uint4 chunk[CHUNKS];
    typename Format::Scales scales;
};

// The fragments of up to N tokens of a k block.
template <int N> struct FewTokens {
    uint4 part[BLOCK_K / 32][N / 8]; // two steps of 16 k each

    // `panel`: the address that the lane gives for the first panel's first 32 k; `second`: distance of the second panel.
    __device__ __forceinline__ void load(uint32_t panel, uint32_t second) {
#pragma unroll
        for (int q = 0; q < BLOCK_K / 32; q++) {
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                part[q][j] = load_matrices(((panel + (q / 2) * second) ^ (q % 2 * 64)) + j * SWIZZLE_BYTES);
            }
        }
    }
};

// Whether the scales of 32 k multiply sums. With more tokens that takes more instructions than multiplying weights.
template <class Format, int N> constexpr bool FEW_SCALED_SUMS = Format::SCALED_GROUPS && N <= 32;
// Number of accumulators of eight tokens that steps of 16 k use in turn, so that products need not wait for each other. Sums that are
// scaled are products of their own.
template <class Format, int N> constexpr int FEW_CHAINS = FEW_SCALED_SUMS<Format, N> ? 1 : N <= 8 ? 4 : N <= 16 ? 2 : 1;

// INT4: adds the scaled sums of four groups of 32 k.
template <class Format, int N>
__device__ __forceinline__ void multiply_groups(float (&sums)[FEW_CHAINS<Format, N>][N / 2], const FewWeights<Format>& weights, const FewTokens<N>& tokens) {
#pragma unroll
    for (int g = 0; g < BLOCK_K / 32; g++) {
        const uint4& chunk = weights.chunk[g / 2];
        uint32_t a[2][4];
        Format::integers(g % 2 == 0 ? chunk.x : chunk.z, weights.scales, g, a[0]);
        Format::integers(g % 2 == 0 ? chunk.y : chunk.w, weights.scales, g, a[1]);
        const uint4& scales = weights.scales.scales;
        const float low = Format::group_scale(scales.x, scales.y, g), high = Format::group_scale(scales.z, scales.w, g);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const uint4& b = tokens.part[g][j];
            float part[4] = {};
            mma_16x8x16(part, a[0], b.x, b.y);
            mma_16x8x16(part, a[1], b.z, b.w);
#pragma unroll
            for (int i = 0; i < 4; i++) sums[0][4 * j + i] = fmaf(part[i], i < 2 ? low : high, sums[0][4 * j + i]);
        }
    }
}

template <class Format, int N>
__device__ __forceinline__ void multiply_few(float (&sums)[FEW_CHAINS<Format, N>][N / 2], const FewWeights<Format>& weights, const FewTokens<N>& tokens) {
    if constexpr (FEW_SCALED_SUMS<Format, N>) {
        multiply_groups<Format, N>(sums, weights, tokens);
    } else {
#pragma unroll
        for (int c = 0; c < FewWeights<Format>::CHUNKS; c++) {
            uint32_t a[Format::CHUNK_STEPS][4];
            Format::widen(weights.chunk[c], weights.scales, c, a);
#pragma unroll
            for (int s = 0; s < Format::CHUNK_STEPS; s++) {
                const int step = c * Format::CHUNK_STEPS + s;
                float (&d)[N / 2] = sums[step % FEW_CHAINS<Format, N>];
#pragma unroll
                for (int j = 0; j < N / 8; j++) {
                    const uint4& b = tokens.part[step / 2][j];
                    mma_16x8x16(&d[4 * j], a[s], step % 2 == 0 ? b.x : b.z, step % 2 == 0 ? b.y : b.w);
                }
            }
        }
    }
}

// As compute<N> in experts_compute.cuh. A stage has an even number of k blocks (stage_blocks_for), which are computed in twos: x, then y.
// The weights of one and, if registers allow, its tokens are loaded before the other is multiplied.
template <int N, class Format>
__device__ __forceinline__ void compute_few(const Block<Format>& block, const Segment& segment, int from, bool shared_segment,
                                            const Cursor& slot, Cursor& stage) {
    static_assert(!Format::SCALED_SUMS, "scales are part of the widened weights, or multiply sums of 32 k");
    constexpr bool TOKENS_AHEAD = N <= 16;
    const int panels = block.k_panels(segment), blocks = block.k_blocks(segment), twos = block.per_stage(segment) / 2;
    const uint32_t weight_step = segment.rows / UNIT_ROWS * Format::UNIT_BYTES, token_step = round_up_8(segment.tokens) * PANEL_ROW_BYTES;
    const int lane = thread_here() % 32;
    const uint32_t weight_place = unit_of_warp<Format>(segment, from) + lane * 16;
    const uint32_t scale_place = Format::scale_place(lane) - lane * 16;
    // The lane gives the address of token l % 8, chunk l / 8 of 32 k.
    const uint32_t token_place = lane % 8 * PANEL_ROW_BYTES + ((lane / 8) ^ (lane % 8)) * 16;

    // Loaded here, so that the end of the segment need not wait for them.
    const Epilogue epilogue = epilogue_of(block, segment, from, slot);
    const float2 scales = row_scales(epilogue), biases = row_biases(epilogue);

    float sums[FEW_CHAINS<Format, N>][N / 2];
#pragma unroll
    for (int c = 0; c < FEW_CHAINS<Format, N>; c++) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) sums[c][i] = 0.0f;
    }
    FewWeights<Format> x, y;
    FewTokens<N> x_tokens, y_tokens; // y_tokens only if loaded ahead
    uint32_t weight_at = 0, token_at = 0;
    int left = 0; // twos left in the stage

    auto open_stage = [&] {
        await_stage(block, stage);
        weight_at = block.weight_stage(stage.slot) + weight_place;
        token_at = block.token_stage(stage.slot) + token_place;
        left = twos;
    };
    auto close_stage = [&] {
        __syncwarp(); // every lane has read its operands
        release_stage(block, stage.slot, shared_segment ? 1 : 2);
        if (++stage.slot == block.plan.stages) stage.slot = 0, stage.parity ^= 1;
    };
    auto load_weights = [&](FewWeights<Format>& to, uint32_t at) {
#pragma unroll
        for (int c = 0; c < FewWeights<Format>::CHUNKS; c++) to.chunk[c] = load_shared_16(at + c * 512);
        to.scales = Format::load_scales_at(at + scale_place, lane);
    };
    // The distance of a k block's second panel. If there is none, its weights are zeros, and the first panel is multiplied again.
    auto second = [&](int k) { return 2 * k + 1 < panels ? token_step : 0; };

    open_stage();
    load_weights(x, weight_at);
    if constexpr (TOKENS_AHEAD) x_tokens.load(token_at, second(0));
    int k = 0;
#pragma unroll 1
    for (; k + 1 < blocks; k += 2) {
        load_weights(y, weight_at + weight_step);
        if constexpr (TOKENS_AHEAD) {
            y_tokens.load(token_at + 2 * token_step, second(k + 1));
            weight_at += 2 * weight_step, token_at += 4 * token_step;
            const bool last = --left == 0 || k + 2 >= blocks;
            if (last) close_stage();
            multiply_few<Format, N>(sums, x, x_tokens);
            if (k + 2 < blocks) {
                if (last) open_stage();
                load_weights(x, weight_at);
                x_tokens.load(token_at, second(k + 2));
            }
            multiply_few<Format, N>(sums, y, y_tokens);
        } else {
            x_tokens.load(token_at, second(k));
            multiply_few<Format, N>(sums, x, x_tokens);
            x_tokens.load(token_at + 2 * token_step, second(k + 1));
            weight_at += 2 * weight_step, token_at += 4 * token_step;
            const bool last = --left == 0 || k + 2 >= blocks;
            if (last) close_stage();
            if (k + 2 < blocks) {
                if (last) open_stage();
                load_weights(x, weight_at);
            }
            multiply_few<Format, N>(sums, y, x_tokens);
        }
    }
    if (k < blocks) {
        if constexpr (!TOKENS_AHEAD) x_tokens.load(token_at, second(k));
        close_stage();
        multiply_few<Format, N>(sums, x, x_tokens);
    }
    if (!shared_segment && arrives_for_warp()) barrier_arrive(&block.shared.turn[threadIdx.x / 128]);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        if constexpr (FEW_CHAINS<Format, N> == 4) sums[1][i] += sums[3][i], sums[0][i] += sums[2][i];
        if constexpr (FEW_CHAINS<Format, N> >= 2) sums[0][i] += sums[1][i];
    }
    finish_segment<N>(block, segment, from, slot, scales, biases, sums[0]);
}

} // namespace expertd
