// The tiles of the grouped product: up to 128 tokens of an expert times 128 weight rows, over the whole k.
#pragma once

#include "../experts_schedule.cuh"

namespace expertd {

constexpr int GROUPED_ROWS = 128;   // weight rows of a tile
constexpr int GROUPED_TOKENS = 128; // most tokens of a tile
constexpr int GROUPED_THREADS = 256;

// Prefix sums over the experts; together 3 KB, so that they fit 99 KB beside the stages of bf16.
struct GroupedTables {
    int32_t end[EXPERTD_MAX_EXPERTS];   // assignments up to and with expert e
    uint16_t tile[EXPERTD_MAX_EXPERTS]; // token tiles before expert e
};
constexpr int GROUPED_MOST_TILES = 65535; // token tiles of all experts together

struct GroupedTile {
    int expert;
    int first;  // first assignment
    int tokens; // 1 to GROUPED_TOKENS
    int row;    // first weight row
};

// Fills the tables and returns the number of token tiles; -1 in all threads if the step has failed. All threads must call it. `scratch` has
// room for a word of each warp.
__device__ __forceinline__ int make_grouped_tables(const ExpertdExpertsParams& p, GroupedTables& tables, int32_t* scratch) {
    static_assert(2 * GROUPED_THREADS == EXPERTD_MAX_EXPERTS, "two experts for a thread");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int tiles[2];
    for (int i = 0; i < 2; i++) {
        const int e = 2 * threadIdx.x + i;
        const int start = e < p.experts ? __ldcg(p.expert_offsets + e) : 0, end = e < p.experts ? __ldcg(p.expert_offsets + e + 1) : 0;
        tiles[i] = divide_up(end - start, GROUPED_TOKENS);
        tables.end[e] = end;
    }
    int before = tiles[0] + tiles[1]; // inclusive, made exclusive below
    for (int delta = 1; delta < 32; delta *= 2) {
        const int other = __shfl_up_sync(0xffffffff, before, delta);
        if (lane >= delta) before += other;
    }
    if (lane == 31) scratch[warp] = before;
    __syncthreads();
    before -= tiles[0] + tiles[1];
    int all = 0;
    for (int w = 0; w < GROUPED_THREADS / 32; w++) {
        if (w < warp) before += scratch[w];
        all += scratch[w];
    }
    tables.tile[2 * threadIdx.x] = uint16_t(before);
    tables.tile[2 * threadIdx.x + 1] = uint16_t(before + tiles[0]);
    bool failed = p.error != nullptr && __ldcg(p.error) != 0;
    if (tables.end[p.experts - 1] > p.panel_rows) {
        failed = true;
        if (p.error != nullptr && blockIdx.x == 0 && threadIdx.x == 0) atomicCAS(p.error, 0u, uint32_t(EXPERTD_ERROR_ROWS));
    }
    return __syncthreads_or(failed) != 0 ? -1 : all;
}

// Finds tile `id` of those with `strips` strips of weight rows per token tile. Tiles that run at the same time share rows in L2: strips
// change slowest within TOKEN_TILE_GROUP token tiles of an expert.
__device__ __forceinline__ GroupedTile find_tile(const ExpertdExpertsParams& p, const GroupedTables& tables, int strips, int id) {
    const int place = id / strips;
    int low = 0, high = p.experts - 1; // the last expert that begins at or before `place` has tiles
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (tables.tile[middle] <= place) low = middle;
        else high = middle - 1;
    }
    const int begin = low == 0 ? 0 : tables.end[low - 1], count = tables.end[low] - begin, token_tiles = divide_up(count, GROUPED_TOKENS);
    const int in_expert = id - tables.tile[low] * strips, group = in_expert / (TOKEN_TILE_GROUP * strips);
    const int in_group = in_expert - group * TOKEN_TILE_GROUP * strips, width = min(TOKEN_TILE_GROUP, token_tiles - group * TOKEN_TILE_GROUP);
    const int token_tile = group * TOKEN_TILE_GROUP + in_group % width, size = round_up_8(divide_up(count, token_tiles));
    return {low, begin + token_tile * size, min(size, count - token_tile * size), in_group / width * GROUPED_ROWS};
}

} // namespace expertd
