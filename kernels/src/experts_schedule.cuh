// Division of the expert kernel's work: which output tile a block computes next, derived from the counts on the device.
//
// The tokens of an expert (wgmma's N) are cut into near-equal tiles of at most Plan::tile_tokens. A segment is one token
// tile times Plan::rows weight rows (wgmma's M), over the whole k. Phase 0 is gate_up, phase 1 is down. Blocks draw segments
// from a counter, first all of phase 0, in an order in which segments in flight share token and weight rows in L2. Drawing
// balances differences between SMs. Low segments keep the tail short when few experts are active.
//
// With wide token tiles and long k the blocks work in pairs (clusters of two): both blocks work on the same segment of twice the
// height, each computes half of its weight rows, and each loads half of the tokens for both. That saves a third of the reads from L2.
// Pairs take every n-th segment instead of drawing, so that both blocks find the next one without communication.
//
// Pairs also compute few wide experts with few tokens. There low segments give every SM a part of down, and in pairs the weights
// that the two blocks read at a time are still contiguous in memory. Each warpgroup has segments of its own in this case.
//
// Other pairs share weights: both blocks compute the same weight rows, each for its own token tile, and each loads half of the rows for
// both. The first block draws a segment only when it needs one, so that pairs with the same weights start together and find them in L2.
//
// With many tokens per expert, bf16, W8A8 and W4A8 take tokens as wgmma's M. Tiles are then full, except an expert's last one, because M
// comes in 64. If the last one has no neighbour, the blocks of a pair take two strips of weights of it and share its tokens.
//
// No segment splits k, so the bits of a row depend neither on the division of work nor on other rows.
#pragma once

#include "experts.h"
#include "experts_formats.cuh"
#include "experts_layout.cuh"
#include "experts_schemes.cuh"
#include "ptx.cuh"

namespace expertd {

constexpr int MAX_TILE_TOKENS = 256; // widest wgmma
constexpr int TOKEN_TILE_GROUP = 8;  // token tiles that share weight rows while these are in L2
constexpr int DRAWN_SLOTS = 16;      // greater than MAX_STAGES, the largest number of segments by which a pair's first block is ahead of the second
constexpr int MAX_STAGES = 12;
constexpr int WIDENED_STAGES = MAX_STAGES / 2; // if weights are widened in shared memory

// Word indices in ExpertdExpertsParams::state, spaced apart: the segment counter (0), the number of finished blocks, then per expert
// the finished weight rows of gate_up (in units of 16, times token tiles), and per expert the finished pieces of x_panels. The portable
// products count drawn tiles in words 8 and 16.
constexpr int STATE_DONE = 32;
constexpr int STATE_READY = 64;

// Prefix sums over the local experts, in shared memory.
struct Tables {
    int32_t offset[EXPERTD_MAX_EXPERTS + 1]; // assignments before expert e
    int32_t tile[EXPERTD_MAX_EXPERTS + 1];   // token tiles before expert e
    int32_t row[EXPERTD_MAX_EXPERTS + 1];    // panel rows before expert e: counts rounded up to 8
};

struct Plan {
    int tile_tokens;
    int stages;
    int stage_blocks; // k blocks of block_rows weight rows and tile_tokens tokens in a stage
    int tiles;      // number of token tiles of all experts
    int up_rows, down_rows; // weight rows of a segment that a block computes, by phase
    int block_rows; // upper limit of both: TILE_ROWS of the format or TALL_ROWS
    // What the scheme says, see Scheme.
    bool pairs;     // two blocks share each segment
    bool late_draw; // segments are drawn when they are needed and not one ahead
    bool token_rows; // tokens are wgmma's M, except in small tiles
    bool share_weights; // the two blocks of a pair have the same weight rows and neighbouring token tiles
    bool in_turn;   // each segment of a block is computed by one warpgroup, even if it is not low
    bool paced;     // see PACED_BYTES

    __device__ __forceinline__ int rows(int phase) const { return phase == 0 ? up_rows : down_rows; }
};

template <class Format> __device__ __forceinline__ constexpr int stage_weight_bytes(int block_rows) {
    return block_rows / UNIT_ROWS * Format::UNIT_BYTES;
}
template <class Format> __device__ __forceinline__ int stage_token_bytes(int tile_tokens) {
    return tile_tokens * PANEL_ROW_BYTES * Format::BLOCK_PANELS; // without scales, which have a ring of their own
}

// Number of k blocks in a stage: two if they are small, because what a stage costs is then more than what it brings.
template <class Format> __device__ __forceinline__ int stage_blocks_for(int tile_tokens) {
    return Format::FEW_TOKENS_ALONE && tile_tokens <= 64 ? 2 : 1;
}

// Bytes of a pipeline stage with FP8 rows if tokens are wgmma's M.
template <class Format> constexpr int ROW_STAGE_BYTES = TALL_ROWS / UNIT_ROWS * Format::UNIT_BYTES + ROW_TILE_TOKENS * PANEL_ROW_BYTES + Format::SCALE_STAGE_BYTES;

// Bytes of the weight ring. Token stages follow it at a multiple of SWIZZLE_BYTES.
template <class Format> __device__ __forceinline__ int weight_ring_bytes(const Plan& plan) {
    return (plan.stages * plan.stage_blocks * stage_weight_bytes<Format>(plan.block_rows) + SWIZZLE_BYTES - 1) / SWIZZLE_BYTES * SWIZZLE_BYTES;
}
template <class Format> __device__ __forceinline__ int stages_for(int tile_tokens, int block_rows, int stage_blocks) {
    constexpr int LOST = stage_weight_bytes<Format>(Format::TILE_ROWS) % SWIZZLE_BYTES == 0 ? 0 : SWIZZLE_BYTES;
    constexpr int LARGEST = stage_weight_bytes<Format>(Format::TILE_ROWS) + Format::MAX_TOKENS * PANEL_ROW_BYTES * Format::BLOCK_PANELS;
    static_assert((Format::RING_BYTES - LOST) / LARGEST >= 3, "a consumer may hold two stages while it waits for the third");
    static_assert(Bf16::RING_BYTES / (stage_weight_bytes<Bf16>(TALL_ROWS) + TALL_TOKENS * PANEL_ROW_BYTES) >= 4, "the same");
    static_assert(W8a8::RING_BYTES / (stage_weight_bytes<W8a8>(TALL_ROWS) + ROW_TILE_TOKENS * PANEL_ROW_BYTES + W8a8::SCALE_STAGE_BYTES) >= 4, "the same");
    return min(Format::WIDENS ? WIDENED_STAGES : MAX_STAGES, (Format::RING_BYTES - LOST) / (stage_blocks * (stage_weight_bytes<Format>(block_rows) + stage_token_bytes<Format>(tile_tokens)) + Format::SCALE_STAGE_BYTES));
}

// Whether weights are paced (Block::paced).
template <class Format> __device__ __forceinline__ bool paced(const ExpertdExpertsParams& p, const Plan& plan, int active) {
    constexpr int K = Format::PANEL_ELEMENTS * Format::BLOCK_PANELS; // of a unit
    const int units = divide_up(p.hidden, K) * (2 * p.inter / UNIT_ROWS) + divide_up(p.inter, K) * (p.hidden / UNIT_ROWS); // of an expert
    return plan.tile_tokens <= LOW_SEGMENT_TOKENS &&
           int64_t(active) * units * Format::UNIT_BYTES <= int64_t(PACED_WEIGHTS) * gridDim.x;
}

// Weight rows of a segment. Low segments spread few strips over all SMs and shorten the tail, but each takes the tensor cores as long
// as a full one and loads its own copy of the tokens.
template <class Format> __device__ __forceinline__ int segment_rows_for(int weight_rows, const Plan& plan) {
    if (Format::FEW_TOKENS_ALONE) return plan.block_rows; // low segments would leave warps idle
    const int64_t segments = int64_t(plan.tiles) * divide_up(weight_rows, TILE_ROWS);
    if (plan.pairs || plan.block_rows == TALL_ROWS) return plan.block_rows;
    return plan.tile_tokens <= LOW_SEGMENT_TOKENS && segments * 4 < 7 * int64_t(gridDim.x) ? LOW_ROWS : TILE_ROWS;
}

// The segment height with which the last wave of the pairs' segments is full or nearly full.
__device__ __forceinline__ int level_rows(int weight_rows, int tiles) {
    int best = TILE_ROWS, least = INT32_MAX;
    for (int rows = TILE_ROWS; rows > TILE_ROWS * 2 / 3; rows -= UNIT_ROWS) {
        const int waves = divide_up(tiles * divide_up(weight_rows, 2 * rows), int(gridDim.x) / 2);
        const int cost = waves * (rows + UNIT_ROWS); // the fixed costs of a segment are those of UNIT_ROWS rows
        if (cost < least) best = rows, least = cost;
    }
    return best;
}

struct alignas(16) Segment {
    int32_t phase;  // 0: gate_up, 1: down, 2: no more segments
    int32_t expert;
    int32_t first;  // first assignment
    int32_t tokens; // number of tokens, 1 to tile_tokens
    int32_t panel_row; // row of the first assignment in x_panels and h, a multiple of 8
    int32_t row;    // first weight row, a multiple of 16
    int32_t rows;   // number of weight rows, 16 to 256; in a pair 0 to 128, in one that shares weights 0 to 256
    int32_t alone;  // in a pair that shares weights: whether the blocks have the same tokens instead, and other weights
};

// Number of k blocks in a pipeline stage: several for low segments, which would otherwise leave too few bytes in flight.
__device__ __forceinline__ int blocks_per_stage(int rows, int tokens, const Plan& plan) {
    return min(8, plan.stage_blocks * min(plan.block_rows / rows, plan.tile_tokens / round_up_8(tokens)));
}

// The expert e >= `from` with starts[e] <= place < starts[e + 1]. Callers ask for places in ascending order. It is a binary search,
// because with few rows most experts have none, and stepping over a hundred of them takes microseconds.
__device__ __forceinline__ int expert_at(const int32_t* starts, int experts, int from, int place) {
    if (place < starts[from + 1]) return from;
    int low = from + 1, high = experts - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (place < starts[middle + 1]) high = middle;
        else low = middle + 1;
    }
    return low;
}

// The segments that the first block of a pair drew, in the second block's shared memory.
struct Drawn {
    uint32_t ids[DRAWN_SLOTS];
    uint64_t full[DRAWN_SLOTS];
};

// Returns the segments of one block in the order in which they are computed. One thread uses it.
class Scheduler {
  public:
    __device__ Scheduler(const ExpertdExpertsParams& p, const Tables& tables, const Plan& plan, Drawn& drawn)
        : p_(p), tables_(tables), plan_(plan), drawn_(drawn), strips_(divide_up(2 * p.inter, strip_rows(0))),
          next_(plan.pairs ? blockIdx.x / 2 : blockIdx.x) {
        first_down_ = int64_t(plan.tiles / tiles_at_once()) * strips_;
        all_ = first_down_ + int64_t(plan.tiles / tiles_at_once()) * divide_up(p.hidden, strip_rows(1));
    }

    __device__ bool next(Segment& segment) {
        if (first_ || !plan_.late_draw) {
            first_ = false;
            if (next_ >= all_) return false;
            if (find(segment)) return true;
        }
        // Draw now. Such segments are large: the contents of the ring hide the latency of drawing.
        if (plan_.share_weights && blockIdx.x % 2 == 1) {
            next_ = receive();
            return next_ < all_ && find(segment);
        }
        do {
            next_ = int64_t(plan_.share_weights ? gridDim.x / 2 : gridDim.x) + atomicAdd(p_.state, 1u);
        } while (next_ < all_ && !find(segment));
        if (plan_.share_weights) send(uint32_t(next_));
        return next_ < all_;
    }

  private:
    // Sets the segment of the id `next_`. Returns false if there is no such segment, which happens only with drawn ids.
    __device__ __forceinline__ bool find(Segment& segment) {
        const int64_t id = next_;
        // Draw for the next call, so that this segment hides the latency of drawing.
        if (!plan_.late_draw) next_ = plan_.pairs ? id + gridDim.x / 2 : int64_t(gridDim.x) + atomicAdd(p_.state, 1u);
        if (phase_ == 0 && id >= first_down_) {
            phase_ = 1;
            expert_ = 0;
            strips_ = divide_up(p_.hidden, strip_rows(1));
        }
        const int at_once = tiles_at_once();
        const int64_t in_phase = phase_ == 0 ? id : id - first_down_;
        expert_ = expert_at(tables_.tile, p_.experts, expert_, int(in_phase) / strips_ * at_once);
        const int in_expert = int(in_phase - int64_t(tables_.tile[expert_] / at_once) * strips_);
        const int token_tiles = tables_.tile[expert_ + 1] - tables_.tile[expert_];
        const int group = in_expert / (TOKEN_TILE_GROUP * strips_);
        const int in_group = in_expert - group * TOKEN_TILE_GROUP * strips_;
        const int width = min(TOKEN_TILE_GROUP, token_tiles / at_once - group * TOKEN_TILE_GROUP);
        const int in_pair = plan_.share_weights ? blockIdx.x % 2 : 0;
        int token_tile = (group * TOKEN_TILE_GROUP + in_group % width) * at_once;
        int strip = in_group / width;
        const int count = tables_.offset[expert_ + 1] - tables_.offset[expert_];
        const int size = plan_.token_rows ? ROW_TILE_TOKENS : round_up_8(divide_up(count, token_tiles));
        segment.alone = plan_.token_rows && plan_.share_weights && (token_tile + 1) * size >= count;
        if (segment.alone) { // an expert's last tile has no neighbour: the blocks take two strips of it
            if (strip % 2 != 0) return false;
            strip += in_pair;
        } else {
            token_tile += in_pair;
        }
        const int first = min(token_tile * size, count);
        segment.phase = phase_;
        segment.expert = expert_;
        segment.first = tables_.offset[expert_] + first;
        segment.tokens = min(size, count - first);
        segment.panel_row = tables_.row[expert_] + token_tile * size;
        const int rows = plan_.rows(phase_);
        const int all_rows = phase_ == 0 ? 2 * p_.inter : p_.hidden;
        segment.row = strip * strip_rows(phase_) + (plan_.pairs && !plan_.share_weights ? int(blockIdx.x % 2) * rows : 0);
        segment.rows = max(min(rows, all_rows - segment.row), 0);
        return true;
    }

    // Weight rows of a segment; in a pair, those of both blocks.
    __device__ int strip_rows(int phase) const {
        return plan_.pairs && !plan_.share_weights ? 2 * plan_.rows(phase) : plan_.rows(phase);
    }
    // Number of token tiles per segment id.
    __device__ int tiles_at_once() const { return plan_.share_weights ? 2 : 1; }

    // The first block of a pair sends each id that it drew and that has a segment, and the one after the last; the second receives them.
    __device__ void send(uint32_t id) {
        const uint32_t slot = turn_++ % DRAWN_SLOTS;
        store_at(&drawn_.ids[slot], 1, id, &drawn_.full[slot]);
    }
    __device__ uint32_t receive() {
        const uint32_t slot = turn_ % DRAWN_SLOTS, parity = turn_ / DRAWN_SLOTS % 2;
        turn_++;
        barrier_arrive_expect(&drawn_.full[slot], sizeof(uint32_t));
        barrier_wait(&drawn_.full[slot], parity);
        return *static_cast<volatile uint32_t*>(&drawn_.ids[slot]);
    }

    const ExpertdExpertsParams& p_;
    const Tables& tables_;
    const Plan& plan_;
    Drawn& drawn_;
    bool first_ = true;
    uint32_t turn_ = 0;
    int phase_ = 0, expert_ = 0;
    int strips_; // number of segment ids per tiles_at_once() token tiles in this phase
    int64_t first_down_, all_;
    int64_t next_;
};

} // namespace expertd
