// Work division of the expert kernel: which piece of which output tile a block computes, from counts on the device.
//
// The rows of an expert (tokens, wgmma's N) are cut into near-equal tiles of at most Plan::tile_tokens. A segment is one
// token tile times at most TILE_ROWS weight rows (wgmma's M), over the whole k. Phase 0 is gate_up, phase 1 down.
//
// Ranges: all (expert, token tile, 16 weight rows) units of a phase stand in one line, and every block takes an equal
// stretch of it. No block streams more bytes than another, however few experts are active.
// Tiles: blocks draw (expert, token tile, 128 weight rows) tiles from a counter, ordered so that the tiles in flight
// share token and weight rows in L2.
#pragma once

#include "experts.h"

namespace expertd {

constexpr int TILE_ROWS = 128;        // weight rows of a segment: 64 per consumer warpgroup
constexpr int UNIT_ROWS = 16;         // granularity of ranges, and of the h readiness counters
constexpr int MAX_TILE_TOKENS = 256;  // widest wgmma
constexpr int TOKEN_TILE_GROUP = 8;   // token tiles that share weight rows while they are in L2
constexpr int TILES_FROM_MEAN = 128;  // mean rows per active expert from which output tiles are drawn

constexpr int STAGE_WEIGHT_BYTES = TILE_ROWS * 128;
constexpr int RING_BYTES = 216 * 1024;
constexpr int MAX_STAGES = 10;

// Prefix sums over the local experts, in shared memory.
struct Tables {
    int32_t offset[EXPERTD_MAX_EXPERTS + 1]; // assignments before expert e
    int32_t tile[EXPERTD_MAX_EXPERTS + 1];   // token tiles before expert e
    int32_t h_row[EXPERTD_MAX_EXPERTS];      // first row of expert e in h: counts rounded up to 8
};

struct Plan {
    int tile_tokens;
    int stages;
    int tiles; // token tiles of all experts
    bool ranges;
};

__device__ __forceinline__ int round_up_8(int n) { return (n + 7) & ~7; }
__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ int stages_for(int tile_tokens) {
    return min(MAX_STAGES, RING_BYTES / (STAGE_WEIGHT_BYTES + tile_tokens * 128));
}

__device__ __forceinline__ int tile_tokens_for(int longest) {
    return longest <= 32 ? 32 : longest <= 64 ? 64 : longest <= 128 ? 128 : longest <= 192 ? 192 : 256;
}

struct alignas(16) Segment {
    int32_t phase;  // 0, 1; 2 ends the block
    int32_t expert;
    int32_t first;  // first assignment
    int32_t tokens; // 1 ... tile_tokens
    int32_t h_row;  // row of the first assignment in h, a multiple of 8
    int32_t row;    // first weight row, a multiple of 16
    int32_t rows;   // 16 ... 128
    int32_t unused;
};

// k panels that share a pipeline stage: low segments would otherwise leave too few bytes in flight.
__device__ __forceinline__ int panels_per_stage(int rows, int tokens, int tile_tokens) {
    int by_rows = rows <= 32 ? 4 : rows <= 64 ? 2 : 1;
    int by_tokens = tile_tokens / round_up_8(tokens);
    return min(by_rows, max(by_tokens, 1));
}

// Hands out the segments of one block, in the order in which they are computed. Runs in one thread.
class Scheduler {
  public:
    __device__ Scheduler(const ExpertdExpertsParams& p, const Tables& tables, const Plan& plan)
        : p_(p), tables_(tables), plan_(plan) {
        if (plan_.ranges) open_range();
    }

    __device__ bool next(Segment& segment) { return plan_.ranges ? next_of_range(segment) : next_tile(segment); }

  private:
    __device__ int weight_rows() const { return phase_ == 0 ? 2 * p_.inter : p_.hidden; }

    __device__ void open_range() {
        const int units = weight_rows() / UNIT_ROWS;
        const int64_t all = int64_t(plan_.tiles) * units;
        position_ = all * blockIdx.x / gridDim.x;
        end_ = all * (blockIdx.x + 1) / gridDim.x;
        const int tile = int(position_ / units);
        int low = 0, high = p_.experts; // the expert whose tiles contain `tile`
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (tables_.tile[middle] <= tile) low = middle; else high = middle;
        }
        expert_ = low;
    }

    __device__ bool next_of_range(Segment& segment) {
        while (position_ >= end_) {
            if (++phase_ == 2) return false;
            open_range();
        }
        const int units = weight_rows() / UNIT_ROWS;
        const int tile = int(position_ / units), unit = int(position_ % units);
        while (tile >= tables_.tile[expert_ + 1]) expert_++;
        const int left = int(min(end_ - position_, int64_t(units - unit)));
        const int take = divide_up(left, divide_up(left, TILE_ROWS / UNIT_ROWS));
        fill(segment, tile - tables_.tile[expert_], unit * UNIT_ROWS, take * UNIT_ROWS);
        position_ += take;
        return true;
    }

    __device__ bool next_tile(Segment& segment) {
        const int64_t id = tile_;
        const int64_t gate_up_tiles = int64_t(plan_.tiles) * divide_up(2 * p_.inter, TILE_ROWS);
        const int64_t all = gate_up_tiles + int64_t(plan_.tiles) * divide_up(p_.hidden, TILE_ROWS);
        if (id >= all) return false;
        tile_ = int64_t(gridDim.x) + atomicAdd(p_.state, 1u); // for the next call: its latency hides behind this tile
        if (phase_ == 0 && id >= gate_up_tiles) {
            phase_ = 1;
            expert_ = 0;
        }
        const int64_t in_phase = phase_ == 0 ? id : id - gate_up_tiles;
        const int strips = divide_up(weight_rows(), TILE_ROWS);
        while (in_phase >= int64_t(tables_.tile[expert_ + 1]) * strips) expert_++;
        const int in_expert = int(in_phase - int64_t(tables_.tile[expert_]) * strips);
        const int token_tiles = tables_.tile[expert_ + 1] - tables_.tile[expert_];
        const int group = in_expert / (TOKEN_TILE_GROUP * strips);
        const int in_group = in_expert - group * TOKEN_TILE_GROUP * strips;
        const int width = min(TOKEN_TILE_GROUP, token_tiles - group * TOKEN_TILE_GROUP);
        const int row = in_group / width * TILE_ROWS;
        fill(segment, group * TOKEN_TILE_GROUP + in_group % width, row, min(TILE_ROWS, weight_rows() - row));
        return true;
    }

    __device__ void fill(Segment& segment, int token_tile, int row, int rows) const {
        const int count = tables_.offset[expert_ + 1] - tables_.offset[expert_];
        const int size = round_up_8(divide_up(count, tables_.tile[expert_ + 1] - tables_.tile[expert_]));
        const int from = token_tile * size;
        segment.phase = phase_;
        segment.expert = expert_;
        segment.first = tables_.offset[expert_] + from;
        segment.tokens = min(size, count - from);
        segment.h_row = tables_.h_row[expert_] + from;
        segment.row = row;
        segment.rows = rows;
        segment.unused = 0;
    }

    const ExpertdExpertsParams& p_;
    const Tables& tables_;
    const Plan& plan_;
    int phase_ = 0;
    int expert_ = 0;
    int64_t position_ = 0, end_ = 0; // ranges: units of this phase
    int64_t tile_ = blockIdx.x;      // tiles: the next tile of this block
};

} // namespace expertd
