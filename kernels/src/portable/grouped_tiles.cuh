// The tiles of the grouped product: some tokens of an expert times some weight rows, over the whole k.
#pragma once

#include "../experts_schedule.cuh"

namespace expertd {

// Prefix sums over the experts, small so that they fit 99 KB beside two stages of bf16.
struct GroupedTables {
    static constexpr int GROUP = 4;                    // experts
    int32_t end[EXPERTD_MAX_EXPERTS];                  // assignments up to and with expert e
    uint16_t tile[EXPERTD_MAX_EXPERTS / GROUP];        // token tiles before a group of experts
};
constexpr int GROUPED_MOST_TILES = 65535; // token tiles of all experts together

struct GroupedTile {
    int expert;
    int first;  // first assignment
    int tokens; // number of tokens, at least 1
    int row;    // first weight row
};

// Fills the tables and returns the number of token tiles; -1 in all threads if the step has failed. All threads must call it. `scratch` has
// room for a word of each warp. Tiles have at most TOKENS tokens.
template <int THREADS, int TOKENS>
__device__ __forceinline__ int make_grouped_tables(const ExpertdExpertsParams& p, GroupedTables& tables, int32_t* scratch) {
    constexpr int EACH = EXPERTD_MAX_EXPERTS / THREADS; // experts of a thread
    static_assert(EACH * THREADS == EXPERTD_MAX_EXPERTS);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0; // inclusive, made exclusive below
    for (int i = 0; i < EACH; i++) {
        const int e = EACH * threadIdx.x + i;
        const int start = e < p.experts ? __ldcg(p.expert_offsets + e) : 0, end = e < p.experts ? __ldcg(p.expert_offsets + e + 1) : 0;
        before += divide_up(end - start, TOKENS);
        tables.end[e] = end;
    }
    const int own = before;
    for (int delta = 1; delta < 32; delta *= 2) {
        const int other = __shfl_up_sync(0xffffffff, before, delta);
        if (lane >= delta) before += other;
    }
    if (lane == 31) scratch[warp] = before;
    __syncthreads();
    before -= own;
    int all = 0;
    for (int w = 0; w < THREADS / 32; w++) {
        if (w < warp) before += scratch[w];
        all += scratch[w];
    }
    static_assert(GroupedTables::GROUP % EACH == 0);
    if (EACH * threadIdx.x % GroupedTables::GROUP == 0) tables.tile[EACH * threadIdx.x / GroupedTables::GROUP] = uint16_t(before);
    bool failed = p.error != nullptr && __ldcg(p.error) != 0;
    if (tables.end[p.experts - 1] > p.panel_rows) {
        failed = true;
        if (p.error != nullptr && blockIdx.x == 0 && threadIdx.x == 0) atomicCAS(p.error, 0u, uint32_t(EXPERTD_ERROR_ROWS));
    }
    return __syncthreads_or(failed) != 0 ? -1 : all;
}

// Finds tile `id` of those with `strips` strips of ROWS weight rows per token tile. Tiles that run at the same time share rows in L2: strips
// change slowest within TOKEN_TILE_GROUP token tiles of an expert. Tiles but the last one of an expert have a multiple of STEP tokens.
template <int ROWS, int TOKENS, int STEP>
__device__ __forceinline__ GroupedTile find_tile(const ExpertdExpertsParams& p, const GroupedTables& tables, int strips, int id) {
    const int place = id / strips;
    int low = 0, high = (p.experts - 1) / GroupedTables::GROUP; // the last group that begins at or before `place` has the tile
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (tables.tile[middle] <= place) low = middle;
        else high = middle - 1;
    }
    int before = tables.tile[low], expert = low * GroupedTables::GROUP, begin = expert == 0 ? 0 : tables.end[expert - 1];
    int count = tables.end[expert] - begin, token_tiles = divide_up(count, TOKENS);
    while (before + token_tiles <= place) {
        before += token_tiles, begin += count, expert++;
        count = tables.end[expert] - begin, token_tiles = divide_up(count, TOKENS);
    }
    const int in_expert = id - before * strips, group = in_expert / (TOKEN_TILE_GROUP * strips);
    const int in_group = in_expert - group * TOKEN_TILE_GROUP * strips, width = min(TOKEN_TILE_GROUP, token_tiles - group * TOKEN_TILE_GROUP);
    const int token_tile = group * TOKEN_TILE_GROUP + in_group % width, size = divide_up(divide_up(count, token_tiles), STEP) * STEP;
    return {expert, begin + token_tile * size, min(size, count - token_tile * size), in_group / width * ROWS};
}

} // namespace expertd
