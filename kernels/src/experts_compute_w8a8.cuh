// The mainloop of a segment with FP8 rows. wgmma reads both operands from shared memory; sums over 128 k are multiplied by the scales
// of weight row (W8A8) and token, and added up, in f32. W4A8 has a factor of each weight row instead, which multiplies the total.
//
// A warpgroup computes twice 64 weight rows of up to 112 tokens. The warpgroups take turns with the tensor cores, so that one scales
// its sums while the other multiplies.
#pragma once

#include "experts_block.cuh"
#include "experts_compute.cuh"
#include "experts_epilogue_w8a8.cuh"
#include "wgmma.cuh"

namespace expertd {

constexpr int W8A8_STEPS = BLOCK_K / 32; // number of wgmmas of a k block

// Addresses of a thread's scales among those of 64 weight rows and those of the tokens. The rows of lane l are l / 4 and l / 4 + 8 of
// its warp's 16 rows; its tokens are 2 (l % 4) and 2 (l % 4) + 1 of every eight.
struct ScalePlaces {
    uint32_t row, token;
    __device__ __forceinline__ ScalePlaces()
        : row((thread_here() % 128 / 32 * 16 + thread_here() % 32 / 4) * 4), token(thread_here() % 4 * 2) {}
};

__device__ __forceinline__ float2 weight_scales(uint32_t scales) {
    return make_float2(load_shared_f32(scales), load_shared_f32(scales + 32));
}

// Multiplies a k block of 64 weight rows and overwrites `sums`, in two groups of wgmmas.
template <int N> __device__ __forceinline__ void multiply_w8a8(float (&sums)[N / 2], uint32_t a, uint32_t b) {
#pragma unroll
    for (int step = 0; step < W8A8_STEPS; step++) {
        WgmmaFp8<N>::mma(sums, a + step * 2, b + step * 2, step > 0);
        if (step % 2 == 1) wgmma_commit();
    }
}

// Loads the scales of a thread's tokens a few columns before their use, because loads from shared memory are slow while the tensor
// cores work.
template <int N> class TokenScales {
  public:
    __device__ __forceinline__ explicit TokenScales(uint32_t at) : at_(at) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) ahead_[j] = load_shared_2f32(at_ + j * 32);
    }
    // The scales of the thread's tokens among columns 8 j to 8 j + 7. Must be called with ascending j.
    __device__ __forceinline__ float2 next(int j) {
        const float2 scales = ahead_[j % AHEAD];
        if (j + AHEAD < N / 8) ahead_[j % AHEAD] = load_shared_2f32(at_ + (j + AHEAD) * 32);
        return scales;
    }

  private:
    static constexpr int AHEAD = N / 8 < 4 ? N / 8 : 4;
    uint32_t at_;
    float2 ahead_[AHEAD];
};

template <int N>
__device__ __forceinline__ void add_scaled(float (&total)[N / 2], float (&sums)[N / 2], float2 rows, TokenScales<N>& scales) {
    wgmma_pin(sums);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float2 tokens = scales.next(j);
        total[4 * j] = fmaf(sums[4 * j], tokens.x * rows.x, total[4 * j]);
        total[4 * j + 1] = fmaf(sums[4 * j + 1], tokens.y * rows.x, total[4 * j + 1]);
        total[4 * j + 2] = fmaf(sums[4 * j + 2], tokens.x * rows.y, total[4 * j + 2]);
        total[4 * j + 3] = fmaf(sums[4 * j + 3], tokens.y * rows.y, total[4 * j + 3]);
    }
}

template <int N>
__device__ __forceinline__ void add_scaled_tokens(float (&total)[N / 2], float (&sums)[N / 2], TokenScales<N>& scales) {
    wgmma_pin(sums);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float2 tokens = scales.next(j);
        total[4 * j] = fmaf(sums[4 * j], tokens.x, total[4 * j]);
        total[4 * j + 1] = fmaf(sums[4 * j + 1], tokens.y, total[4 * j + 1]);
        total[4 * j + 2] = fmaf(sums[4 * j + 2], tokens.x, total[4 * j + 2]);
        total[4 * j + 3] = fmaf(sums[4 * j + 3], tokens.y, total[4 * j + 3]);
    }
}

// A warpgroup's turn with the tensor cores, from `begin` to `end`. Both warpgroups have the same number of turns.
class Turn {
  public:
    __device__ __forceinline__ explicit Turn(int warpgroup) : own_(TURN_BARRIER + warpgroup), other_(TURN_BARRIER + 1 - warpgroup) {}
    __device__ __forceinline__ void begin() const { named_sync<256>(own_); }
    __device__ __forceinline__ void end() const { named_arrive<256>(other_); }

  private:
    int own_, other_;
};

// The mainloop and epilogue of one segment in one warpgroup, which computes weight rows `from` to `from` + 127.
template <int N, class Format>
__device__ __forceinline__ void compute_w8a8(const Block<Format>& block, const Segment& at_first, int from, const Cursor& slot,
                                             Cursor& stage, Counters& counters) {
    constexpr int SETS = N <= 80 ? 2 : 1; // sets of sums: with two, one is scaled while the other is filled
    constexpr uint32_t HALF = 64 * PANEL_ROW_BYTES / 16; // distance from the first 64 weight rows to the second 64, as in a descriptor
    const Turn turn(uniform(threadIdx.x / 128));
    const ScalePlaces places;
    if constexpr (Format::WIDENS) {
#pragma unroll
        for (int half = 0; half < 2; half++) prefetch_rows(epilogue_of(block, at_first, from + half * 64, slot));
    }
    const auto add = [](float (&to)[N / 2], float (&of)[N / 2], float2 rows, TokenScales<N>& tokens) {
        if constexpr (Format::WIDENS) add_scaled_tokens<N>(to, of, tokens);
        else add_scaled<N>(to, of, rows, tokens);
    };
    float total[2][N / 2], sums[SETS][N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) total[0][i] = total[1][i] = sums[0][i] = sums[SETS - 1][i] = 0.0f;
#pragma unroll 1
    for (int panels = block.k_panels(at_first); panels > 0; panels--) {
        const uint32_t a = wgmma_descriptor(await_fp8(block, stage, counters) + from * PANEL_ROW_BYTES);
        const uint32_t b = wgmma_descriptor(block.token_stage(stage.slot));
        const uint32_t token_scales = block.token_scales(stage.slot) + places.token * 4;
        turn.begin();
        wgmma_fence();
        multiply_w8a8<N>(sums[0], a, b);
        if constexpr (SETS == 2) multiply_w8a8<N>(sums[1], a + HALF, b);
        float2 first_rows = make_float2(1.0f, 1.0f), second_rows = first_rows;
        if constexpr (!Format::WIDENS) {
            const uint32_t row_scales = block.scale_stage(stage.slot) + from * 4 + places.row;
            first_rows = weight_scales(row_scales), second_rows = weight_scales(row_scales + 64 * 4);
        }
        TokenScales<N> first(token_scales);
        // A turn ends when half of its last product is done, so that the other warpgroup's product starts without a gap.
        if constexpr (SETS == 1) {
            wgmma_wait<1>();
            turn.end();
            wgmma_wait<0>();
        } else {
            wgmma_wait<2>();
        }
        add(total[0], sums[0], first_rows, first);
        if constexpr (SETS == 1) {
            wgmma_pin(sums[0]);
            turn.begin();
            wgmma_fence();
            multiply_w8a8<N>(sums[0], a + HALF, b);
        }
        TokenScales<N> second(token_scales);
        wgmma_wait<1>();
        turn.end();
        wgmma_wait<0>();
        add(total[1], sums[SETS - 1], second_rows, second);
        // Every lane of the warp has used the stage's scales, so the stage may be released.
        wgmma_pin(total[0]);
        wgmma_pin(total[1]);
        __syncwarp();
        release_fp8(block, stage.slot, counters);
        stage.advance(block.plan.stages);
    }
    const Segment segment = uniform(block.shared.segments[slot.slot]); // read again, because keeping it would occupy registers
    if (segment.rows == 0) return; // a pair's second strip may be empty
    std::conditional_t<Format::WIDENS, RowFactors, NoRowFactors> factors;
    if constexpr (Format::WIDENS) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Epilogue epilogue = epilogue_of(block, segment, from + half * 64, slot);
            factors.scales[half] = row_scales(epilogue), factors.biases[half] = row_biases(epilogue);
        }
    }
    if (segment.phase == 0) {
        barrier_wait(&block.shared.routing_full[slot.slot], slot.parity);
        store_h_w8a8<Format::PERMUTED, N>(block.p, block.layer, segment, from, block.shared.weights[slot.slot], block.staging,
                                          block.maxima(0), block.maxima(1), counters.exchanges, total, factors);
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (from + half * 64 >= segment.rows) continue;
            if constexpr (Format::WIDENS) {
                finish_segment<N>(block, segment, from + half * 64, slot, factors.scales[half], factors.biases[half], total[half]);
            } else {
                finish_segment<N>(block, segment, from + half * 64, slot, total[half]);
            }
        }
    }
}

} // namespace expertd
