// Makes the plan of a step from its counts: prefix sums over experts, tile shapes, pipeline depth.
#pragma once

#include "experts_block.cuh"

namespace expertd {

// Computes the prefix sums over experts and the plan that follows from them. All threads must call it; each handles two experts.
template <class Format>
__device__ __forceinline__ Plan make_plan(const ExpertdExpertsParams& p, Shared& shared) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int count[2];
    // The routing weights are loaded later.
    int32_t *const warp_tiles = reinterpret_cast<int32_t*>(shared.weights[0]), *const warp_rows = warp_tiles + Format::THREADS / 32;
    for (int i = 0; i < 2; i++) {
        const int e = 2 * thread + i;
        const int start = e <= p.experts ? p.expert_offsets[e] : 0;
        count[i] = e < p.experts ? p.expert_offsets[e + 1] - start : 0;
        if (e <= p.experts) shared.tables.offset[e] = start;
    }
    const int longest = __reduce_max_sync(0xffffffff, max(count[0], count[1]));
    const int active = __popc(__ballot_sync(0xffffffff, count[0] > 0)) + __popc(__ballot_sync(0xffffffff, count[1] > 0));
    if (lane == 0 && longest > 0) atomicMax(&shared.longest, longest), atomicAdd(&shared.active, active);
    __syncthreads();

    Plan plan;
    constexpr bool W8A8 = Format::PANEL_ELEMENTS == BLOCK_K;
    plan.token_rows = tokens_as_rows<Format>(p, shared.layer, shared.active, shared.tables.offset[p.experts]);
    const bool tall = W8A8 || plan.token_rows ? true
                      : p.tile_rows != 0   ? p.tile_rows == EXPERTD_TILE_TALL
                      : p.tile_tokens != 0 ? false
                                           : tall_segments<Format>(p, shared.longest, shared.active, shared.tables.offset[p.experts]);
    plan.tile_tokens = plan.token_rows      ? ROW_TILE_TOKENS
                       : p.tile_tokens != 0 ? min(p.tile_tokens, Format::MAX_TOKENS)
                       : W8A8               ? tile_tokens_for<Format>(shared.longest, TILE_ROWS)
                                          : tile_tokens_for<Format>(shared.longest, tall ? TALL_ROWS : TILE_ROWS);
    plan.block_rows = tall ? TALL_ROWS : Format::TILE_ROWS;
    if (p.tile_rows == EXPERTD_TILE_TURNS) plan.tile_tokens = min(plan.tile_tokens, 128);
    plan.paced = paced<Format>(p, plan, shared.active);
    plan.stage_blocks = stage_blocks_for<Format>(plan.tile_tokens);
    plan.stages = stages_for<Format>(plan.tile_tokens, plan.block_rows, plan.stage_blocks);

    plan.late_draw = W8A8 || plan.token_rows;
    plan.share_weights = plan.token_rows ? rows_in_pairs(p, shared.active, shared.tables.offset[p.experts])
                                         : W8A8 && Format::TOKEN_ROWS && (p.tile_rows != 0 ? p.tile_rows == PAIR_ROWS : shares_weights(shared.longest, Format::MAX_TOKENS));
    // Token tiles of an expert; an even number if a pair computes two at once.
    const int step = plan.share_weights ? 2 : 1;
    const int tiles[2] = {divide_up(count[0], plan.tile_tokens * step) * step, divide_up(count[1], plan.tile_tokens * step) * step};
    const int rows[2] = {round_up_8(count[0]), round_up_8(count[1])};
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
        const int e = 2 * thread + i;
        if (e <= p.experts) shared.tables.tile[e] = tiles_before, shared.tables.row[e] = rows_before;
        tiles_before += tiles[i], rows_before += rows[i];
    }
    plan.in_turn = p.tile_rows != 0 ? p.tile_rows == EXPERTD_TILE_TURNS : !tall && pairs_in_turn<Format>(p, plan);
    plan.pairs = plan.in_turn || (p.tile_rows != 0 ? p.tile_rows == PAIR_ROWS
                                                   : !tall && !Format::FEW_TOKENS_ALONE && plan.tile_tokens > PAIR_TOKENS && min(p.hidden, p.inter) >= PAIR_K);
    if (W8A8 || plan.token_rows) plan.pairs = plan.share_weights;
    const int given = tall || plan.in_turn ? 0 : min(p.tile_rows, Format::TILE_ROWS);
    plan.up_rows = plan.in_turn ? level_rows(2 * p.inter, plan.tiles) : given != 0 ? given : segment_rows_for<Format>(2 * p.inter, plan);
    plan.down_rows = plan.in_turn ? LOW_ROWS : given != 0 ? given : segment_rows_for<Format>(p.hidden, plan);
    __syncthreads();
    return plan;
}

} // namespace expertd
