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
constexpr int TOKEN_STEP = 16;            // mma's M
constexpr int GROUPED_MOST_TILES = 65535; // token tiles of all experts together

struct alignas(16) GroupedTile {
    int expert;
    int first;  // first assignment
    int tokens; // number of tokens; 0: there are no more tiles
    int row;    // first weight row
};

// Fills the tables and returns the number of token tiles; -1 in all threads if the step has failed. All threads must call it. `scratch` has
// room for a word of each warp. Tiles have at most `most` tokens.
template <int THREADS>
__device__ __forceinline__ int make_grouped_tables(const ExpertdExpertsParams& p, GroupedTables& tables, int32_t* scratch, int most) {
    constexpr int EACH = EXPERTD_MAX_EXPERTS / THREADS; // experts of a thread
    static_assert(EACH * THREADS == EXPERTD_MAX_EXPERTS);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0; // inclusive, made exclusive below
    for (int i = 0; i < EACH; i++) {
        const int e = EACH * threadIdx.x + i;
        const int start = e < p.experts ? __ldcg(p.expert_offsets + e) : 0, end = e < p.experts ? __ldcg(p.expert_offsets + e + 1) : 0;
        before += divide_up(end - start, most);
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

// a / b for a quotient of at most a million.
__device__ __forceinline__ int quotient(int a, int b) {
    int q = int(__fdividef(float(a), float(b)));
    const int rest = a - q * b;
    if (rest < 0) q--;
    if (rest >= b) q++;
    return q;
}

// Finds tile `id` of those with `strips` strips of ROWS weight rows per token tile. Tiles that run at the same time share rows in L2: strips
// change slowest within TOKEN_TILE_GROUP token tiles of an expert. Tiles but the last one of an expert have a multiple of TOKEN_STEP tokens and
// at most `most`, which is one of MOST and LESS. All lanes must call it.
template <int ROWS, int MOST, int LESS>
__device__ __forceinline__ GroupedTile find_tile(const ExpertdExpertsParams& p, const GroupedTables& tables, int strips, int most, int id) {
    const int place = quotient(id, strips), at = id - place * strips;
    const auto tiles_of = [&](int count) { return most == MOST ? divide_up(count, MOST) : divide_up(count, LESS); };
    const int groups = divide_up(p.experts, GroupedTables::GROUP), lane = threadIdx.x % 32;
    int low = -1; // the last group that begins at or before the place has the tile
    for (int from = 0; from < groups; from += 32) {
        const int here = __popc(__ballot_sync(0xffffffff, from + lane < groups && tables.tile[from + lane] <= place));
        low += here;
        if (here < 32) break;
    }
    int before = tables.tile[low], expert = low * GroupedTables::GROUP, begin = expert == 0 ? __ldcg(p.expert_offsets) : tables.end[expert - 1];
    int count = tables.end[expert] - begin, token_tiles = tiles_of(count);
    while (before + token_tiles <= place) {
        before += token_tiles, begin += count, expert++;
        count = tables.end[expert] - begin, token_tiles = tiles_of(count);
    }
    const int group = (place - before) / TOKEN_TILE_GROUP, width = min(TOKEN_TILE_GROUP, token_tiles - group * TOKEN_TILE_GROUP);
    const int in_group = (place - before - group * TOKEN_TILE_GROUP) * strips + at, strip = quotient(in_group, width);
    const int token_tile = group * TOKEN_TILE_GROUP + in_group - strip * width;
    const int size = divide_up(quotient(count + token_tiles - 1, token_tiles), TOKEN_STEP) * TOKEN_STEP;
    return {expert, begin + token_tile * size, min(size, count - token_tile * size), strip * ROWS};
}

} // namespace expertd
