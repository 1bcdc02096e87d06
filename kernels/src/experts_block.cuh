// Data that all roles of a block use: its shared memory, positions in rings, and the block's view of the launch.
#pragma once

#include "experts.h"
#include "experts_epilogue.cuh"
#include "experts_epilogue_w8a8.cuh"
#include "experts_formats.cuh"
#include "experts_layout.cuh"
#include "experts_schedule.cuh"
#include "ptx.cuh"

namespace expertd {

constexpr int COPY_THREADS = 64;

constexpr int SEGMENT_SLOTS = 4;
constexpr int COPY_BARRIER = 7; // named barrier, different from STAGING_BARRIER, MAXIMA_BARRIER and TURN_BARRIER

struct Shared {
    ExpertdLayerWeights layer;
    Tables tables;
    Drawn drawn;
    Segment segments[SEGMENT_SLOTS];
    float weights[SEGMENT_SLOTS][MAX_TILE_TOKENS]; // routing weights of the segment's tokens; W8A8 has narrower tiles and keeps Maxima at the end of a slot
    uint64_t segment_full[SEGMENT_SLOTS], segment_empty[SEGMENT_SLOTS], routing_full[SEGMENT_SLOTS];
    uint64_t pair_empty[MAX_STAGES]; // both blocks of the pair have read the stage
    uint64_t turn[2];     // the warpgroup has read all operands of a segment that it computes alone
    uint64_t rows_loaded; // the block's first piece of x has arrived
    uint64_t full[MAX_STAGES]; // weights and tokens of the stage have arrived; if weights are paced or widened in shared memory, only its tokens
    uint64_t weights_full[MAX_STAGES]; // the stage's weights have arrived, if they are paced or widened in shared memory
    // If weights are widened in shared memory, entries from WIDENED_STAGES on of the two are for the stages' weights and those before for
    // tokens: the widening warps release weights before tokens have been read.
    uint64_t stage_empty[MAX_STAGES];
    uint64_t widened_full[W4a8Rows::WIDENED_BLOCKS], widened_empty[W4a8Rows::WIDENED_BLOCKS];
    uint64_t failed;         // error word at the begin of the launch, equal in both blocks of a pair
    Counts counts;           // without `all`
};
static_assert(ROW_TILE_TOKENS * sizeof(float) + sizeof(Maxima) <= sizeof(Shared::weights[0]), "both fit a slot");
constexpr int SHARED_BYTES = Bf16::RING_BYTES + 2 * STAGING_BYTES + sizeof(Shared); // the same in all formats
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory of one block");

template <int V> struct Constant {
    static constexpr int value = V;
};

// The rows of two experts, which a thread loads.
struct TwoCounts {
    int start[2], count[2];

    __device__ __forceinline__ explicit TwoCounts(const ExpertdExpertsParams& p) {
        for (int i = 0; i < 2; i++) {
            const int e = 2 * threadIdx.x + i;
            start[i] = e <= p.experts ? __ldcg(p.expert_offsets + e) : 0;
            count[i] = e < p.experts ? __ldcg(p.expert_offsets + e + 1) - start[i] : 0;
        }
    }
};

// Position in a ring of `size` slots; the parity flips each round.
struct Cursor {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance(int size) {
        if (++slot == size) slot = 0, parity ^= 1;
    }
    __device__ __forceinline__ void advance(int size, int by) {
        for (slot += by; slot >= size; slot -= size) parity ^= 1;
    }
};

// Returns a value that is equal in all lanes so that the compiler knows it is: wgmma must not be in code that may diverge.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

__device__ __forceinline__ Segment uniform(const Segment& s) {
    return Segment{uniform(s.phase),     uniform(s.expert), uniform(s.first), uniform(s.tokens),
                   uniform(s.panel_row), uniform(s.row),    uniform(s.rows),  uniform(s.alone)};
}

// The block's view of the launch, which every role uses. Formats are in experts_formats.cuh.
template <class Format> struct Block {
    const ExpertdExpertsParams& p;
    const ExpertdLayerWeights& layer;
    Shared& shared;
    const Plan& plan;
    uint32_t weight_ring, token_ring, scale_ring, widened, staging; // shared-memory addresses

    __device__ int k_panels(const Segment& s) const { return divide_up(s.phase == 0 ? p.hidden : p.inter, Format::PANEL_ELEMENTS); }
    // Number of k blocks of a segment. A k block is the part of k that a unit of weights spans: one panel or several.
    __device__ int k_blocks(const Segment& s) const { return divide_up(k_panels(s), Format::BLOCK_PANELS); }
    __device__ int per_stage(const Segment& s) const {
        if (Format::PANEL_ELEMENTS == BLOCK_K || (Format::TOKEN_ROWS && plan.token_rows)) return 1;
        return blocks_per_stage(plan.rows(s.phase), s.tokens, plan);
    }
    // Whether each warpgroup computes half of the segment's rows. Otherwise one warpgroup computes the segment alone.
    __device__ bool shared_segment(const Segment& s) const { return !plan.in_turn && (Format::SHARED_SEGMENTS || s.rows > 64 || plan.pairs || (Format::TOKEN_ROWS && plan.token_rows)); }
    // Whether the ring is filled in portions, each after an earlier one has landed. In short steps x, h and the counters would
    // otherwise queue behind a whole ring of weights in the memory system, and every wait for them would lengthen the step.
    __device__ bool paced() const { return plan.paced; }
    __device__ uint32_t weight_stage(int slot) const { return weight_ring + slot * plan.stage_blocks * stage_weight_bytes<Format>(plan.block_rows); }
    __device__ uint32_t token_stage(int slot) const {
        return token_ring + slot * plan.stage_blocks * stage_token_bytes<Format>(plan.tile_tokens);
    }
    // W8A8: address of the f32 scales of the stage's weight rows. The scales of its tokens follow.
    __device__ uint32_t scale_stage(int slot) const { return scale_ring + slot * Format::SCALE_STAGE_BYTES; }
    __device__ uint32_t token_scales(int slot) const { return scale_stage(slot) + (Format::UNIT_SCALE_BYTES != 0 ? plan.block_rows * 4 : 0); }
    // W8A8: the maxima of set 0 or 1.
    __device__ Maxima& maxima(uint32_t set) const {
        return *reinterpret_cast<Maxima*>(&shared.weights[set][ROW_TILE_TOKENS]);
    }
    // Number of token tiles of an expert.
    __device__ int tiles(int expert) const {
        if (Format::TOKEN_ROWS && plan.token_rows) return divide_up(shared.tables.offset[expert + 1] - shared.tables.offset[expert], ROW_TILE_TOKENS);
        return shared.tables.tile[expert + 1] - shared.tables.tile[expert];
    }
    __device__ uint32_t* h_ready(int expert) const { return p.state + STATE_READY + expert; }
    __device__ uint32_t* x_ready(int expert) const { return p.state + STATE_READY + p.experts + expert; }
};

// Adds to a counter of written panels. The writers have passed a barrier, so one thread's release covers the stores of all. The copy
// engine reads what ordinary stores wrote, so the reader needs a proxy fence.
__device__ __forceinline__ void publish(uint32_t* counter, uint32_t amount) { add_release(counter, amount); }

// Waits until a counter has reached `wanted`. If the deadline passes or the step has failed, it sets the error word and returns; later
// results are not used. Everything that the block does afterwards ends in bounded time and stays within its buffers.
__device__ __forceinline__ void await(const ExpertdExpertsParams& p, const uint32_t* counter, uint32_t wanted) {
    uint64_t deadline = 0;
    for (uint32_t spins = 1; load_acquire(counter) < wanted; spins++) {
        if (spins % 256 != 0 || p.deadline_ns == 0) continue;
        const uint64_t now = device_time_ns();
        if (deadline == 0) deadline = now + p.deadline_ns;
        const bool late = now > deadline, failed = p.error != nullptr && load_acquire(p.error) != 0;
        if (!late && !failed) continue;
        if (late && p.error != nullptr) atomicCAS(p.error, 0u, uint32_t(EXPERTD_ERROR_TIMEOUT));
        break;
    }
    fence_async_proxy();
}

// Resets the counters for the next launch, in the last block that calls it. A block's token warp calls this after its last wait. By
// then the block has drawn all its segments, and all blocks have added to the counters, because the waits only end when they have.
// The last segments are still being computed at that time.
__device__ __forceinline__ void finish(const ExpertdExpertsParams& p) {
    const int lane = threadIdx.x % 32;
    uint32_t before = 0;
    if (lane == 0) {
        __threadfence();
        before = atomicAdd(p.state + STATE_DONE, 1u);
    }
    if (__shfl_sync(0xffffffff, before, 0) != gridDim.x - 1) return;
    __threadfence();
    for (int i = lane; i < 2 * p.experts; i += 32) p.state[STATE_READY + i] = 0;
    if (lane == 0) p.state[0] = 0, p.state[STATE_DONE] = 0;
}

// The part of a segment's units that a warpgroup announces. Every warpgroup that stores something has one: with tokens as wgmma's M, the
// second one stores features of the first rows, too.
template <int GROUPS> __device__ __forceinline__ int share_of_units(int units, int warpgroup) {
    return (units + GROUPS - 1 - warpgroup) / GROUPS;
}

template <class Format>
__device__ __forceinline__ void await_stage(const Block<Format>& block, const Cursor& stage) {
    barrier_wait(&block.shared.full[stage.slot], stage.parity);
    if (!Format::WIDENS && block.paced()) barrier_wait(&block.shared.weights_full[stage.slot], stage.parity);
}

// What a consumer warpgroup counts from segment to segment.
struct Counters {
    uint32_t exchanges = 0; // exchanges of maxima (W8A8, W4A8)
    Cursor widened;         // its widened k block
};

// Waits for the operands of a k block with FP8 rows, and returns the shared-memory address of its weights.
template <class Format>
__device__ __forceinline__ uint32_t await_fp8(const Block<Format>& block, const Cursor& stage, const Counters& counters) {
    await_stage(block, stage);
    if constexpr (!Format::WIDENS) return block.weight_stage(stage.slot);
    barrier_wait(&block.shared.widened_full[counters.widened.slot], counters.widened.parity);
    return block.widened + counters.widened.slot * (TALL_ROWS * BLOCK_K);
}

template <class Format>
__device__ __forceinline__ void release_stage(const Block<Format>& block, int slot, int arrivals) {
    if (!arrives_for_warp()) return;
    barrier_arrive(&block.shared.stage_empty[slot], arrivals);
    if (block.plan.pairs) {
        barrier_arrive_at(&block.shared.pair_empty[slot], 0, arrivals);
        barrier_arrive_at(&block.shared.pair_empty[slot], 1, arrivals);
    }
}

// Releases the operands that await_fp8 has waited for.
template <class Format>
__device__ __forceinline__ void release_fp8(const Block<Format>& block, int slot, Counters& counters) {
    release_stage(block, slot, 1);
    if constexpr (Format::WIDENS) {
        if (arrives_for_warp()) barrier_arrive(&block.shared.widened_empty[counters.widened.slot]);
        counters.widened.advance(Format::WIDENED_BLOCKS);
    }
}

} // namespace expertd
