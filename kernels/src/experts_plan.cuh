// Makes the plan of a step from its counts: prefix sums over experts, tile shapes, pipeline depth.
#pragma once

#include "experts_block.cuh"

namespace expertd {

// Adds up the counts of all experts. All threads must call it.
template <class Format>
__device__ __forceinline__ Counts add_counts(const ExpertdExpertsParams& p, Shared& shared, const TwoCounts& two) {
    const int(&count)[2] = two.count;
    const int lane = threadIdx.x % 32;
    Counts c{};
    c.longest = __reduce_max_sync(0xffffffff, max(count[0], count[1]));
    c.active = __popc(__ballot_sync(0xffffffff, count[0] > 0)) + __popc(__ballot_sync(0xffffffff, count[1] > 0));
    auto tiles = [&](int tokens) { return __reduce_add_sync(0xffffffff, divide_up(count[0], tokens) + divide_up(count[1], tokens)); };
    if constexpr (Format::FEW_TOKENS_ALONE) c.tiles_64 = tiles(64), c.tiles_128 = tiles(128);
    constexpr bool CROWDED = FP8_ROWS<Format> && Format::TOKEN_ROWS;
    auto crowded = [&](int tokens) { return tokens > Format::MAX_TOKENS ? tokens : 0; };
    if constexpr (CROWDED) c.crowded = __reduce_add_sync(0xffffffff, crowded(count[0]) + crowded(count[1]));
    if (lane == 0 && c.longest > 0) {
        atomicMax(&shared.counts.longest, c.longest), atomicAdd(&shared.counts.active, c.active);
        if constexpr (Format::FEW_TOKENS_ALONE) {
            atomicAdd(&shared.counts.tiles_64, c.tiles_64), atomicAdd(&shared.counts.tiles_128, c.tiles_128);
        }
        if constexpr (CROWDED) atomicAdd(&shared.counts.crowded, c.crowded);
    }
    for (int i = 0; i < 2; i++) {
        const int e = 2 * threadIdx.x + i;
        if (e <= p.experts) shared.tables.offset[e] = two.start[i];
    }
    __syncthreads();
    c = shared.counts;
    c.all = shared.tables.offset[p.experts] - shared.tables.offset[0];
    return c;
}

// The same value, of which the compiler does not know how it follows from others. It would otherwise derive what a scheme means again
// wherever that is asked, which takes longer than a register, in main loops, too.
__device__ __forceinline__ int settled(int value) {
    asm("" : "+r"(value));
    return value;
}

// Computes the plan and the prefix sums over the experts. All threads must call it.
template <class Format>
__device__ __forceinline__ Plan make_plan(const ExpertdExpertsParams& p, Shared& shared, const TwoCounts& two, const Counts& c) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int(&count)[2] = two.count;
    const Scheme scheme = scheme_for<Format>(p, shared.layer, c);

    Plan plan;
    plan.pairs = settled(in_pairs(scheme));
    plan.token_rows = Format::TOKEN_ROWS && settled(rows_are_tokens(scheme));
    plan.share_weights = Format::TOKEN_ROWS && settled(weights_are_shared(scheme));
    plan.in_turn = Format::HALVES && settled(scheme == Scheme::TURNS);
    plan.late_draw = FP8_ROWS<Format> || plan.token_rows;
    plan.block_rows = FP8_ROWS<Format> ? TALL_ROWS : Format::HALVES ? settled(is_tall(scheme) ? TALL_ROWS : TILE_ROWS) : Format::TILE_ROWS;
    plan.tile_tokens = plan.token_rows      ? ROW_TILE_TOKENS
                       : p.tile_tokens != 0 ? min(p.tile_tokens, Format::MAX_TOKENS)
                                            : tile_tokens_for<Format>(c, scheme);
    if (plan.in_turn) plan.tile_tokens = min(plan.tile_tokens, 128);
    plan.paced = paced<Format>(p, plan, c.active);
    plan.stage_blocks = stage_blocks_for<Format>(plan.tile_tokens);
    plan.stages = stages_for<Format>(plan.tile_tokens, plan.block_rows, plan.stage_blocks);

    // Token tiles of an expert; an even number if a pair computes two at once.
    const int step = plan.share_weights ? 2 : 1;
    const int tiles[2] = {divide_up(count[0], plan.tile_tokens * step) * step, divide_up(count[1], plan.tile_tokens * step) * step};
    const int rows[2] = {round_up_8(count[0]), round_up_8(count[1])};
    // The routing weights are loaded later.
    int32_t *const warp_tiles = reinterpret_cast<int32_t*>(shared.weights[0]), *const warp_rows = warp_tiles + Format::THREADS / 32;
    int tiles_before = tiles[0] + tiles[1], rows_before = rows[0] + rows[1]; // inclusive, made exclusive below
    for (int delta = 1; delta < 32; delta *= 2) {
        const int t = __shfl_up_sync(0xffffffff, tiles_before, delta), r = __shfl_up_sync(0xffffffff, rows_before, delta);
        if (lane >= delta) tiles_before += t, rows_before += r;
    }
    if (lane == 31) warp_tiles[warp] = tiles_before, warp_rows[warp] = rows_before;
    __syncthreads();
    tiles_before -= tiles[0] + tiles[1], rows_before -= rows[0] + rows[1];
    plan.tiles = 0;
    for (int w = 0; w < Format::THREADS / 32; w++) {
        if (w < warp) tiles_before += warp_tiles[w], rows_before += warp_rows[w];
        plan.tiles += warp_tiles[w];
    }
    for (int i = 0; i < 2; i++) {
        const int e = 2 * threadIdx.x + i;
        if (e <= p.experts) shared.tables.tile[e] = tiles_before, shared.tables.row[e] = rows_before;
        tiles_before += tiles[i], rows_before += rows[i];
    }
    const int given = is_tall(scheme) || plan.in_turn ? 0 : min(p.tile_rows, Format::TILE_ROWS);
    plan.up_rows = plan.in_turn ? level_rows(2 * p.inter, plan.tiles) : given != 0 ? given : segment_rows_for<Format>(2 * p.inter, plan);
    plan.down_rows = plan.in_turn ? LOW_ROWS : given != 0 ? given : segment_rows_for<Format>(p.hidden, plan);
    __syncthreads();
    return plan;
}

} // namespace expertd
