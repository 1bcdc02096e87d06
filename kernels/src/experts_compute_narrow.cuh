// The mainloop of a segment with FP8 or MXFP4 weights: a warp widens its 16 rows from shared memory to registers, from which wgmma
// reads them.
//
// Two sets of fragments are filled in turn: while the tensor cores multiply one, the other is widened. A set is multiplied only after
// the previous product has ended, because ptxas serialises wgmmas if A registers are written while other wgmmas are in flight across
// the end of a loop.
#pragma once

#include "experts_block.cuh"
#include "experts_compute.cuh"
#include "wgmma.cuh"

namespace expertd {

// Number of accumulators that k blocks use in turn. FP8: an accumulator holds the unscaled sum over one k block; with two, one is
// scaled and added while the other is filled. MXFP4: with two, narrow wgmmas do not wait for each other.
template <class Format, int N> constexpr int PARTS = N <= (Format::SCALED_SUMS ? 64 : 32) ? 2 : 1;

// Largest number of tokens with which a set of fragments is a whole k block.
constexpr int WHOLE_SET_TOKENS = 32;
// Number of steps of 16 k in a set: fewer if accumulators leave few registers.
template <class Format, int N> constexpr int SET_STEPS = N <= WHOLE_SET_TOKENS ? 8 : Format::SCALED_SUMS && N > 64 ? 2 : 4;
constexpr int BLOCK_STEPS = BLOCK_K / 16;

template <class Format, int N> class NarrowSums {
  public:
    float total[N / 2]; // scaled sums of all k blocks (FP8); MXFP4 adds up its parts here at the end

    __device__ __forceinline__ NarrowSums() {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            total[i] = 0.0f;
#pragma unroll
            for (int p = 0; p < PARTS<Format, N>; p++) part_[p][i] = 0.0f;
        }
    }

    __device__ __forceinline__ float (&part(int p))[N / 2] { return part_[p]; }

    // Adds the complete sum of a k block in part `p`.
    __device__ __forceinline__ void add(int p, const typename Format::Scales& scales) {
        wgmma_pin(part_[p]);
        if constexpr (Format::SCALED_SUMS) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) total[i] = fmaf(part_[p][i], i % 4 < 2 ? scales.x : scales.y, total[i]);
        }
    }

    __device__ __forceinline__ void finish() {
        if constexpr (!Format::SCALED_SUMS) {
#pragma unroll
            for (int p = 0; p < PARTS<Format, N>; p++) {
#pragma unroll
                for (int i = 0; i < N / 2; i++) total[i] += part_[p][i];
            }
        }
    }

  private:
    float part_[PARTS<Format, N>][N / 2];
};

// Distance from the weights of a k block to those of the warp's 16 rows. A warp without rows takes the last ones, so that it reads
// nothing that the copy engine may be writing; its sums are not stored.
template <class Format> __device__ __forceinline__ uint32_t unit_of_warp(const Segment& segment, int from) {
    return min(from / UNIT_ROWS + uniform(threadIdx.x / 32 % 4), max(segment.rows / UNIT_ROWS - 1, 0)) * Format::UNIT_BYTES;
}

// Iterates over a segment's k blocks in the ring, for one warp.
template <class Format> class KBlocks {
  public:
    uint32_t unit = 0;   // shared-memory address of the warp's unit of the current k block
    uint32_t tokens = 0; // wgmma descriptor of the current k block's tokens
    int release = -1;    // stage that ends with the current k block; -1: none

    __device__ __forceinline__ KBlocks(const Block<Format>& block, const Segment& segment, int from, Cursor& stage)
        : block_(block), stage_(stage), blocks_(block.k_blocks(segment)), per_stage_(block.per_stage(segment)),
          weight_step_(segment.rows / UNIT_ROWS * Format::UNIT_BYTES),
          token_step_(round_up_8(segment.tokens) * PANEL_ROW_BYTES / 16),
          unit_(unit_of_warp<Format>(segment, from)) {}

    // Moves to k block `k` and waits for it. After the last k block it stays there.
    __device__ __forceinline__ void next(int k) {
        if (k >= blocks_) return;
        if (in_stage_ == 0) {
            await_stage(block_, stage_);
            unit = block_.weight_stage(stage_.slot) + unit_;
            tokens = wgmma_descriptor(block_.token_stage(stage_.slot));
        } else {
            unit += weight_step_;
            tokens += 2 * token_step_;
        }
        release = -1;
        if (++in_stage_ == per_stage_ || k + 1 == blocks_) {
            release = stage_.slot;
            in_stage_ = 0;
            if (++stage_.slot == block_.plan.stages) stage_.slot = 0, stage_.parity ^= 1;
        }
    }

    // Distance from the tokens of the first panel to those of the second. If there is no second panel, its weights are zeros and are
    // multiplied with the tokens of the first panel.
    __device__ __forceinline__ uint32_t panel_step(int k, int panels) const { return 2 * k + 1 < panels ? token_step_ : 0; }

  private:
    const Block<Format>& block_;
    Cursor& stage_;
    int blocks_, per_stage_, weight_step_, token_step_, unit_;
    int in_stage_ = 0;
};

// A lane's words of a piece of a k block, as they are in shared memory.
template <class Format, int N> struct Words {
    static constexpr int CHUNKS = SET_STEPS<Format, N> / Format::CHUNK_STEPS;
    uint4 chunk[CHUNKS];
    typename Format::Scales scales; // scales of the k block

    __device__ __forceinline__ void load(uint32_t unit, int piece) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) chunk[c] = load_chunk(unit, piece * CHUNKS + c, lane);
        if (piece == 0) scales = Format::load_scales(unit, lane);
    }
    __device__ __forceinline__ void widen(int piece, uint32_t (&set)[SET_STEPS<Format, N>][4]) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) Format::widen(chunk[c], scales, piece * CHUNKS + c, set + c * Format::CHUNK_STEPS);
        wgmma_pin(set);
    }
};

// Multiplies piece `piece` of a k block.
template <int N, class Format, int STEPS>
__device__ __forceinline__ void multiply(float (&sums)[N / 2], const uint32_t (&set)[STEPS][4], uint32_t tokens, uint32_t panel_step,
                                         int piece) {
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int at = piece * STEPS + s;
        const uint32_t columns = tokens + (at >= BLOCK_STEPS / 2 ? panel_step : 0) + at % 4 * 2;
        WgmmaRegisters<N>::mma(sums, set[s], columns, Format::SCALED_SUMS ? at > 0 : 1);
    }
    wgmma_commit();
}

// The mainloop of few tokens. A set holds a whole k block, and the words of the k block after the next are loaded while the tensor
// cores finish. So the next product starts as soon as the current one ends; latency limits this case.
template <int N, class Format>
__device__ __forceinline__ void multiply_all(const Block<Format>& block, const Segment& segment, int from, int arrivals,
                                             Cursor& stage, NarrowSums<Format, N>& sums, Constant<1>) {
    const int panels = block.k_panels(segment), blocks = block.k_blocks(segment);
    static_assert(PARTS<Format, N> == 2, "the part is the set");
    uint32_t a[2][BLOCK_STEPS][4];
    Words<Format, N> words;
    typename Format::Scales scales, before{}; // scales of the k block that is multiplied, and of the one whose product is not yet added

    KBlocks<Format> ring(block, segment, from, stage);
    ring.next(0);
    words.load(ring.unit, 0);
    words.widen(0, a[0]);
    scales = words.scales;
    uint32_t tokens = ring.tokens;
    int release = ring.release;
    ring.next(1);
    words.load(ring.unit, 0);
    auto step = [&](int k, auto part_constant) {
        constexpr int part = decltype(part_constant)::value;
        multiply<N, Format>(sums.part(part), a[part], tokens, ring.panel_step(k, panels), 0);
        sums.add(1 - part, before);
        words.widen(0, a[1 - part]); // after the last k block this widens the last one again, and the result is not used
        before = scales;
        scales = words.scales;
        const uint32_t next_tokens = ring.tokens;
        const int next_release = ring.release;
        ring.next(k + 2);
        words.load(ring.unit, 0);
        wgmma_wait<0>();
        wgmma_pin(sums.part(part));
        if (release >= 0) {
            __syncwarp(); // every lane has read its words
            release_stage(block, release, arrivals);
        }
        tokens = next_tokens;
        release = next_release;
    };
#pragma unroll 1
    for (int k = 0; k < blocks; k += 2) {
        step(k, Constant<0>{});
        if (k + 1 < blocks) step(k + 1, Constant<1>{});
    }
    if (blocks % 2 == 0) {
        sums.add(1, before);
    } else {
        sums.add(0, before);
    }
}

// The mainloop of many tokens with MXFP4. A set holds half of a k block, because accumulators leave few registers. Words are loaded one
// product before the one under which they are widened.
template <int N, class Format>
__device__ __forceinline__ void multiply_all(const Block<Format>& block, const Segment& segment, int from, int arrivals,
                                             Cursor& stage, NarrowSums<Format, N>& sums, Constant<2>) {
    const int panels = block.k_panels(segment), blocks = block.k_blocks(segment);
    constexpr int STEPS = SET_STEPS<Format, N>;
    static_assert(PARTS<Format, N> == 1 && BLOCK_STEPS / STEPS == 2, "a set for each half");
    uint32_t a[2][STEPS][4];
    Words<Format, N> words;
    KBlocks<Format> ring(block, segment, from, stage);
    ring.next(0);
    words.load(ring.unit, 0);
    words.widen(0, a[0]);
    words.load(ring.unit, 1);
#pragma unroll 1
    for (int k = 0; k < blocks; k++) {
        const uint32_t tokens = ring.tokens, panel_step = ring.panel_step(k, panels);
        const int release = ring.release;
        multiply<N, Format>(sums.part(0), a[0], tokens, panel_step, 0);
        words.widen(1, a[1]);
        ring.next(k + 1); // after the last k block this widens the last one again, and the result is not used
        words.load(ring.unit, 0);
        wgmma_wait<0>();
        multiply<N, Format>(sums.part(0), a[1], tokens, panel_step, 1);
        words.widen(0, a[0]);
        words.load(ring.unit, 1);
        wgmma_wait<0>();
        wgmma_pin(sums.part(0));
        if (release >= 0) {
            __syncwarp(); // every lane has read its words
            release_stage(block, release, arrivals);
        }
    }
}

// The mainloop of many tokens with FP8: the tensor cores are busy and registers are scarce.
template <int N, class Format>
__device__ __forceinline__ void multiply_all(const Block<Format>& block, const Segment& segment, int from, int arrivals,
                                             Cursor& stage, NarrowSums<Format, N>& sums, Constant<0>) {
    const int panels = block.k_panels(segment), blocks = block.k_blocks(segment);
    constexpr int TURNS = PARTS<Format, N>, STEPS = SET_STEPS<Format, N>, PIECES = BLOCK_STEPS / STEPS;
    static_assert(PIECES % 2 == 0, "sets alternate");
    uint32_t a[2][STEPS][4];
    Words<Format, N> words;
    typename Format::Scales before{}; // of the k block that is not yet added

    KBlocks<Format> ring(block, segment, from, stage);
    ring.next(0);
    words.load(ring.unit, 0);
    words.widen(0, a[0]);
    auto step = [&](int k, auto part_constant) {
        constexpr int part = decltype(part_constant)::value;
        const uint32_t tokens = ring.tokens, panel_step = ring.panel_step(k, panels);
        const int release = ring.release;
        const typename Format::Scales scales = words.scales;
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            multiply<N, Format>(sums.part(part), a[piece % 2], tokens, panel_step, piece);
            if (piece == 0 && TURNS == 2) sums.add(TURNS - 1 - part, before);
            const int next_piece = (piece + 1) % PIECES;
            if (next_piece == 0) ring.next(k + 1);
            words.load(ring.unit, next_piece);
            words.widen(next_piece, a[1 - piece % 2]);
            wgmma_wait<0>();
        }
        if (release >= 0) {
            __syncwarp(); // every lane has read its words
            release_stage(block, release, arrivals);
        }
        if constexpr (TURNS == 1) {
            sums.add(part, scales);
        } else {
            wgmma_pin(sums.part(part));
            before = scales;
        }
    };
#pragma unroll 1
    for (int k = 0; k < blocks; k += TURNS) {
        step(k, Constant<0>{});
        if constexpr (TURNS == 2) {
            if (k + 1 < blocks) step(k + 1, Constant<1>{});
        }
    }
    if constexpr (TURNS == 2) {
        if (blocks % 2 == 0) {
            sums.add(1, before);
        } else {
            sums.add(0, before);
        }
    }
}

// As compute<N> in experts_compute.cuh.
template <int N, class Format>
__device__ __forceinline__ void compute(const Block<Format>& block, const Segment& segment, int from, bool shared_segment,
                                        const Cursor& slot, Cursor& stage) {
    NarrowSums<Format, N> sums;
    multiply_all<N>(block, segment, from, shared_segment ? 1 : 2, stage, sums, Constant<N <= WHOLE_SET_TOKENS ? 1 : Format::SCALED_SUMS ? 0 : 2>{});
    if (!shared_segment && arrives_for_warp()) barrier_arrive(&block.shared.turn[threadIdx.x / 128]);
    sums.finish();
    finish_segment<N>(block, segment, from, slot, sums.total);
}

} // namespace expertd
