// The expert MLP of one layer on one rank, in one persistent kernel (bf16, Hopper).
//
// Weights are wgmma's M operand and tokens its N in every regime. One block per SM: two consumer warpgroups (64 weight
// rows each), one warp that decides what comes next and streams weights, one that streams token rows, two that copy
// received rows into panels, grouped by expert. Gate_up of all experts comes first, then down; readiness is counted per
// expert, so a block starts down while others still finish gate_up. Weights wait for nothing: they fill the ring
// meanwhile and the stream from HBM does not pause.
//
//   experts_schedule.cuh  which segment next        experts_layout.cuh    where an element lies
//   this file             pipeline and mainloop     experts_epilogue.cuh  activation, biases, stores
#include <cuda_runtime.h>

#include "experts.h"
#include "experts_epilogue.cuh"
#include "experts_layout.cuh"
#include "experts_ptx.cuh"
#include "experts_schedule.cuh"
#include "experts_wgmma.cuh"

namespace expertd {
namespace {

constexpr int CONSUMER_WARPS = 8;
constexpr int WEIGHT_WARP = 8;
constexpr int TOKEN_WARP = 9;
constexpr int COPY_WARP = 10; // and 11
constexpr int COPY_THREADS = 64;
constexpr int THREADS = 384;
constexpr int CONSUMER_REGISTERS = 208; // 256 * 208 + 128 * 88 = 384 * 168
constexpr int PRODUCER_REGISTERS = 88;

constexpr int SEGMENT_SLOTS = 4;
constexpr int STAGING_BARRIER = 1; // named barriers: 1 and 2 for the warpgroups' staging areas, 3 for the copy warps
constexpr int COPY_BARRIER = 3;

// Rows are copied into panels in pieces of 8 rows and COPY_PANELS panels.
constexpr int COPY_PANELS = 16;
constexpr int COPY_BATCH = 8; // 16-byte loads in flight per thread

struct Shared {
    Tables tables;
    Segment segments[SEGMENT_SLOTS];
    float weights[SEGMENT_SLOTS][MAX_TILE_TOKENS]; // routing weights of the segment's tokens
    uint64_t segment_full[SEGMENT_SLOTS], segment_empty[SEGMENT_SLOTS], routing_full[SEGMENT_SLOTS];
    uint64_t pair_empty[MAX_STAGES]; // both blocks of the pair have read the stage
    uint64_t turn[2];     // the warpgroup has read the operands of a segment that it has to itself
    uint64_t rows_loaded; // the block's first piece of x has arrived
    uint64_t weights_full[MAX_STAGES], tokens_full[MAX_STAGES], stage_empty[MAX_STAGES];
    int32_t longest;
    int32_t warp_tiles[THREADS / 32], warp_rows[THREADS / 32];
};
constexpr int SHARED_BYTES = RING_BYTES + 2 * STAGING_BYTES + sizeof(Shared);
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory of one block");

// Position in a ring of `size` slots; the parity flips each round.
struct Cursor {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance(int size, int by = 1) {
        for (slot += by; slot >= size; slot -= size) parity ^= 1;
    }
};

// The same value in all lanes, in a way that lets the compiler know: wgmma must not sit in code that may diverge.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

__device__ __forceinline__ Segment uniform(const Segment& s) {
    return Segment{uniform(s.phase),     uniform(s.expert), uniform(s.first), uniform(s.tokens),
                   uniform(s.panel_row), uniform(s.row),    uniform(s.rows),  0};
}

// What every role of the block works with.
struct Block {
    const ExpertdExpertsParams& p;
    const ExpertdLayerWeights& layer;
    Shared& shared;
    const Plan& plan;
    uint32_t weight_ring, token_ring, staging; // shared-memory addresses

    __device__ int k_panels(const Segment& s) const { return (s.phase == 0 ? p.hidden : p.inter) / PANEL_K; }
    __device__ int per_stage(const Segment& s) const {
        return plan.pairs ? 1 : panels_per_stage(s.rows, s.tokens, plan.tile_tokens);
    }
    __device__ uint32_t weight_stage(int slot) const { return weight_ring + slot * STAGE_WEIGHT_BYTES; }
    __device__ uint32_t token_stage(int slot) const { return token_ring + slot * plan.tile_tokens * PANEL_ROW_BYTES; }
    __device__ uint32_t* h_ready(int expert) const { return p.state + STATE_READY + expert; }
    __device__ uint32_t* x_ready(int expert) const { return p.state + STATE_READY + p.experts + expert; }
};

// Prefix sums over experts and the plan that follows from them. All threads; two experts per thread.
__device__ __forceinline__ Plan make_plan(const ExpertdExpertsParams& p, Shared& shared) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int count[2];
    for (int i = 0; i < 2; i++) {
        const int e = 2 * thread + i;
        const int start = e <= p.experts ? p.expert_offsets[e] : 0;
        count[i] = e < p.experts ? p.expert_offsets[e + 1] - start : 0;
        if (e <= p.experts) shared.tables.offset[e] = start;
    }
    const int longest = __reduce_max_sync(0xffffffff, max(count[0], count[1]));
    if (lane == 0 && longest > 0) atomicMax(&shared.longest, longest);
    __syncthreads();

    Plan plan;
    plan.tile_tokens = p.tile_tokens != 0 ? p.tile_tokens : tile_tokens_for(shared.longest);
    plan.stages = stages_for(plan.tile_tokens);

    const int tiles[2] = {divide_up(count[0], plan.tile_tokens), divide_up(count[1], plan.tile_tokens)};
    const int rows[2] = {round_up_8(count[0]), round_up_8(count[1])};
    int tiles_before = tiles[0] + tiles[1], rows_before = rows[0] + rows[1]; // inclusive, made exclusive below
    for (int delta = 1; delta < 32; delta *= 2) {
        const int t = __shfl_up_sync(0xffffffff, tiles_before, delta), r = __shfl_up_sync(0xffffffff, rows_before, delta);
        if (lane >= delta) tiles_before += t, rows_before += r;
    }
    if (lane == 31) shared.warp_tiles[warp] = tiles_before, shared.warp_rows[warp] = rows_before;
    __syncthreads();
    tiles_before -= tiles[0] + tiles[1], rows_before -= rows[0] + rows[1];
    plan.tiles = 0;
    for (int w = 0; w < THREADS / 32; w++) {
        if (w < warp) tiles_before += shared.warp_tiles[w], rows_before += shared.warp_rows[w];
        plan.tiles += shared.warp_tiles[w];
    }
    for (int i = 0; i < 2; i++) {
        const int e = 2 * thread + i;
        if (e <= p.experts) shared.tables.tile[e] = tiles_before, shared.tables.row[e] = rows_before;
        tiles_before += tiles[i], rows_before += rows[i];
    }
    plan.pairs = p.tile_rows != 0 ? p.tile_rows == PAIR_ROWS
                                  : plan.tile_tokens > PAIR_TOKENS && min(p.hidden, p.inter) >= PAIR_K;
    plan.rows[0] = p.tile_rows != 0 ? p.tile_rows : segment_rows_for(2 * p.inter, plan);
    plan.rows[1] = p.tile_rows != 0 ? p.tile_rows : segment_rows_for(p.hidden, plan);
    __syncthreads();
    return plan;
}

// One thread: draws the block's segments and streams their weights. It runs as far ahead as the ring allows.
__device__ __forceinline__ void produce_weights(const Block& block) {
    const ExpertdExpertsParams& p = block.p;
    Shared& shared = block.shared;
    Scheduler scheduler(p, shared.tables, block.plan);
    Cursor slot, stage;
    const uint64_t once = policy_evict_first(), again = policy_evict_normal();
    // Rows first: behind 200 KB of weights per SM in the memory system they would be late, and every block waits for them.
    barrier_wait(&shared.rows_loaded, 0);
    bool more = true;
    while (more) {
        Segment segment;
        more = scheduler.next(segment);
        if (!more) segment.phase = 2;
        barrier_wait(&shared.segment_empty[slot.slot], slot.parity ^ 1);
        shared.segments[slot.slot] = segment;
        barrier_arrive(&shared.segment_full[slot.slot]);
        slot.advance(SEGMENT_SLOTS);
        if (!more) break;

        const int all_rows = segment.phase == 0 ? 2 * p.inter : p.hidden;
        const int panels = block.k_panels(segment), per_stage = block.per_stage(segment);
        const char* source = static_cast<const char*>(segment.phase == 0 ? block.layer.gate_up : block.layer.down) +
                             (int64_t(segment.expert) * panels * all_rows + segment.row) * PANEL_ROW_BYTES;
        const uint32_t bytes = segment.rows * PANEL_ROW_BYTES;
        const int* tile = &shared.tables.tile[segment.expert];
        const uint64_t policy = tile[1] - tile[0] == 1 ? once : again; // is there another token tile for these rows?
        for (int panel = 0; panel < panels; panel += per_stage) {
            const int here = min(per_stage, panels - panel);
            barrier_wait(&shared.stage_empty[stage.slot], stage.parity ^ 1);
            barrier_arrive_expect(&shared.weights_full[stage.slot], bytes * here);
            for (int i = 0; i < here && bytes != 0; i++) {
                bulk_load(block.weight_stage(stage.slot) + i * bytes, source, bytes, &shared.weights_full[stage.slot], policy);
                source += int64_t(all_rows) * PANEL_ROW_BYTES;
            }
            stage.advance(block.plan.stages);
        }
    }
    let_next_kernel_start();
}

// Counters of written panels. The writers have met at a barrier, so one thread's release covers the stores of all. These
// are ordinary stores and the copy engine reads them, hence the reader's proxy fence.
__device__ __forceinline__ void publish(uint32_t* counter, uint32_t amount) { add_release(counter, amount); }
__device__ __forceinline__ void await(const uint32_t* counter, uint32_t wanted) {
    const SpinLimit limit;
    while (load_acquire(counter) < wanted) limit.tick();
    fence_async_proxy();
}

__device__ __forceinline__ int copy_slices(const ExpertdExpertsParams& p) {
    return divide_up(p.hidden, COPY_PANELS * PANEL_K);
}

// One warp: routing weights of each segment; its first lane streams token rows: x for gate_up, h for down.
__device__ __forceinline__ void produce_tokens(const Block& block) {
    const ExpertdExpertsParams& p = block.p;
    Shared& shared = block.shared;
    const int lane = threadIdx.x % 32;
    const uint64_t policy = policy_evict_normal();
    Cursor slot, stage;
    int ready_phase = -1, ready_expert = -1;
    while (true) {
        barrier_wait(&shared.segment_full[slot.slot], slot.parity);
        const Segment segment = shared.segments[slot.slot];
        if (segment.phase == 2) break;
        for (int i = lane; i < segment.tokens; i += 32) {
            copy_4(smem_address(&shared.weights[slot.slot][i]), p.row_weight + segment.first + i);
        }
        barrier_arrive_after_copies(&shared.routing_full[slot.slot]);
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(&shared.segment_empty[slot.slot]);
            if (segment.expert != ready_expert || segment.phase != ready_phase) {
                const int e = segment.expert;
                if (segment.phase == 0) {
                    const int octets = (shared.tables.row[e + 1] - shared.tables.row[e]) / 8;
                    await(block.x_ready(e), uint32_t(octets) * copy_slices(p));
                } else {
                    await(block.h_ready(e), uint32_t(shared.tables.tile[e + 1] - shared.tables.tile[e]) * (2 * p.inter / UNIT_ROWS));
                }
                ready_expert = e, ready_phase = segment.phase;
            }
            const int panels = block.k_panels(segment), per_stage = block.per_stage(segment);
            const uint32_t bytes = round_up_8(segment.tokens) * PANEL_ROW_BYTES;
            const char* source = static_cast<const char*>(segment.phase == 0 ? p.x_panels : p.h) + int64_t(segment.panel_row) * PANEL_ROW_BYTES;
            // In a pair, the first block brings the first half of the tokens for both, the second block the second half.
            const uint32_t half = (bytes / 2 + 1023) / 1024 * 1024;
            const uint32_t mine_from = block.plan.pairs && blockIdx.x % 2 == 1 ? half : 0;
            const uint32_t mine = !block.plan.pairs ? bytes : mine_from == 0 ? half : bytes - half;
            for (int panel = 0; panel < panels; panel += per_stage) {
                const int here = min(per_stage, panels - panel);
                barrier_wait(block.plan.pairs ? &shared.pair_empty[stage.slot] : &shared.stage_empty[stage.slot], stage.parity ^ 1);
                uint64_t* full = &shared.tokens_full[stage.slot];
                barrier_arrive_expect(full, bytes * here);
                for (int i = 0; i < here; i++) {
                    if (!block.plan.pairs) {
                        bulk_load(block.token_stage(stage.slot) + i * bytes, source, bytes, full, policy);
                    } else if (mine != 0) {
                        bulk_load_both(block.token_stage(stage.slot) + mine_from, source + mine_from, mine, full, policy);
                    }
                    source += int64_t(p.panel_rows) * PANEL_ROW_BYTES;
                }
                stage.advance(block.plan.stages);
            }
        }
        __syncwarp();
        slot.advance(SEGMENT_SLOTS);
    }
}

// Two warps: copy received rows into panels, one contiguous run of rows per expert, in the order of need. All blocks
// share the pieces evenly; while the tensor cores work on the first experts, later ones are copied.
__device__ __forceinline__ void copy_rows(const Block& block) {
    const ExpertdExpertsParams& p = block.p;
    const Tables& tables = block.shared.tables;
    const int thread = threadIdx.x - COPY_WARP * 32, chunk = thread % 8, row = thread / 8;
    const int slices = copy_slices(p), panels = p.hidden / PANEL_K;
    const int64_t pieces = int64_t(tables.row[p.experts] / 8) * slices;
    int expert = 0;
    bool arrived = false;
    for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        const int panel_row = int(piece / slices) * 8, slice = int(piece % slices);
        while (panel_row >= tables.row[expert + 1]) expert++;
        const int in_expert = panel_row - tables.row[expert] + row;
        if (in_expert < tables.offset[expert + 1] - tables.offset[expert]) {
            const uint64_t source_row = p.row_index[tables.offset[expert] + in_expert];
            const uint4* source = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.x) + source_row * p.x_stride) + chunk;
            uint4* destination = static_cast<uint4*>(p.x_panels) + int64_t(panel_row + row) * 8 + (chunk ^ row);
            const int end = min(panels, (slice + 1) * COPY_PANELS);
            for (int panel = slice * COPY_PANELS; panel < end; panel += COPY_BATCH) {
                uint4 v[COPY_BATCH];
#pragma unroll
                for (int i = 0; i < COPY_BATCH; i++) {
                    if (panel + i < end) v[i] = __ldcg(source + (panel + i) * 8);
                }
#pragma unroll
                for (int i = 0; i < COPY_BATCH; i++) {
                    if (panel + i < end) destination[int64_t(panel + i) * p.panel_rows * 8] = v[i];
                }
                if (!arrived) barrier_arrive(&block.shared.rows_loaded);
                arrived = true;
            }
        }
        if (!arrived) barrier_arrive(&block.shared.rows_loaded);
        arrived = true;
        named_sync<COPY_THREADS>(COPY_BARRIER);
        if (thread == 0) publish(block.x_ready(expert), 1);
    }
    if (!arrived) barrier_arrive(&block.shared.rows_loaded);
}

__device__ __forceinline__ void release_stage(const Block& block, int slot, int arrivals) {
    if (threadIdx.x % 32 != 0) return;
    barrier_arrive(&block.shared.stage_empty[slot], arrivals);
    if (block.plan.pairs) {
        barrier_arrive_at(&block.shared.pair_empty[slot], 0);
        barrier_arrive_at(&block.shared.pair_empty[slot], 1);
    }
}

// Narrow wgmmas are over before their sum can be added to: k is dealt out to this many accumulators, added at the end.
template <int N> constexpr int CHAINS = N <= 32 ? 4 : N <= 64 ? 2 : 1;

// The mainloop and epilogue of one segment for one warpgroup, with tokens padded to N. The warpgroup computes up to 64
// weight rows from `from` on, of a segment that it shares with the other warpgroup or has to itself.
template <int N>
__device__ __forceinline__ void compute(const Block& block, const Segment& segment, int from, bool shared_segment,
                                        const Cursor& slot, Cursor& stage) {
    Shared& shared = block.shared;
    const int warpgroup = uniform(threadIdx.x / 128);
    const int panels = block.k_panels(segment), per_stage = block.per_stage(segment);
    const int weight_step = segment.rows * PANEL_ROW_BYTES, token_step = round_up_8(segment.tokens) * PANEL_ROW_BYTES;

    float sums[CHAINS<N>][N / 2];
#pragma unroll
    for (int c = 0; c < CHAINS<N>; c++) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) sums[c][i] = 0.0f; // also ends the registers' lifetime between segments
    }
    uint32_t a = 0, b = 0;
    int in_stage = 0, previous = -1;
    for (int panel = 0; panel < panels; panel++) {
        if (in_stage == 0) {
            barrier_wait(&shared.weights_full[stage.slot], stage.parity);
            barrier_wait(&shared.tokens_full[stage.slot], stage.parity);
            // A warpgroup reads 64 weight rows even where the segment has fewer: what lies behind them only reaches
            // accumulator rows that are not stored. The same holds for token columns.
            a = wgmma_descriptor(block.weight_stage(stage.slot) + from * PANEL_ROW_BYTES);
            b = wgmma_descriptor(block.token_stage(stage.slot));
        }
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PANEL_K / 16; k++) Wgmma<N>::mma(sums[k % CHAINS<N>], a + k * 2, b + k * 2);
        wgmma_commit();
        a += weight_step / 16;
        b += token_step / 16;
        if (previous >= 0) {
            wgmma_wait<1>();
            release_stage(block, previous, shared_segment ? 1 : 2);
        }
        previous = -1;
        if (++in_stage == per_stage || panel + 1 == panels) {
            previous = stage.slot;
            in_stage = 0;
            stage.advance(block.plan.stages);
        }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < CHAINS<N>; c++) wgmma_pin(sums[c]);
    release_stage(block, previous, shared_segment ? 1 : 2);
    if (!shared_segment && threadIdx.x % 32 == 0) barrier_arrive(&shared.turn[warpgroup]);
    float (&d)[N / 2] = sums[0];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        if constexpr (CHAINS<N> == 4) sums[1][i] += sums[3][i], d[i] += sums[2][i];
        if constexpr (CHAINS<N> >= 2) d[i] += sums[1][i];
    }

    barrier_wait(&shared.routing_full[slot.slot], slot.parity);
    const Epilogue epilogue{block.p,
                            block.layer,
                            segment,
                            segment.row + from,
                            min(64, segment.rows - from),
                            shared.weights[slot.slot],
                            block.staging + warpgroup * STAGING_BYTES,
                            STAGING_BARRIER + warpgroup};
    if (segment.phase == 0) {
        store_h<N>(epilogue, d);
    } else {
        store_y<N>(epilogue, d);
    }
}

// High segments are shared by the warpgroups, low ones go to the two in turn: one computes while the other stores.
__device__ __forceinline__ void consume(const Block& block) {
    Shared& shared = block.shared;
    const int warpgroup = uniform(threadIdx.x / 128);
    Cursor slot, stage;
    int turn = 0;
    uint32_t turn_parity = 0;
    while (true) {
        barrier_wait(&shared.segment_full[slot.slot], slot.parity);
        const Segment segment = uniform(shared.segments[slot.slot]);
        if (segment.phase == 2) break;
        const bool shared_segment = segment.rows > 64 || block.plan.pairs;
        const bool mine = shared_segment || turn == warpgroup;
        if (!shared_segment) turn ^= 1;
        if (!mine) { // not before the other is through with them: a barrier's parity tells two rounds of the ring apart, not three
            barrier_wait(&shared.turn[warpgroup ^ 1], turn_parity);
            turn_parity ^= 1;
            stage.advance(block.plan.stages, divide_up(block.k_panels(segment), block.per_stage(segment)));
        } else {
            const int from = shared_segment ? warpgroup * 64 : 0;
            const int n = segment.tokens;
#define EXPERTD_COMPUTE(N) compute<N>(block, segment, from, shared_segment, slot, stage)
#define EXPERTD_UP_TO(N) else if (n <= N) EXPERTD_COMPUTE(N);
            if (n <= 64) {
                if (n <= 8) EXPERTD_COMPUTE(8);
                EXPERTD_UP_TO(16)
                EXPERTD_UP_TO(32)
                EXPERTD_UP_TO(48)
                else EXPERTD_COMPUTE(64);
            } else if (n <= 160) {
                if (n <= 80) EXPERTD_COMPUTE(80);
                EXPERTD_UP_TO(96)
                EXPERTD_UP_TO(112)
                EXPERTD_UP_TO(128)
                EXPERTD_UP_TO(144)
                else EXPERTD_COMPUTE(160);
            } else {
                if (n <= 176) EXPERTD_COMPUTE(176);
                EXPERTD_UP_TO(192)
                EXPERTD_UP_TO(208)
                EXPERTD_UP_TO(224)
                EXPERTD_UP_TO(240)
                else EXPERTD_COMPUTE(256);
            }
#undef EXPERTD_UP_TO
#undef EXPERTD_COMPUTE
        }
        __syncwarp(); // every lane has read the slot
        if (threadIdx.x % 32 == 0) barrier_arrive(&shared.segment_empty[slot.slot]);
        slot.advance(SEGMENT_SLOTS);
        if (segment.phase == 0 && mine) {
            named_sync<128>(STAGING_BARRIER + warpgroup);
            const int from = shared_segment ? warpgroup * 64 : 0, rows = min(64, segment.rows - from);
            if (threadIdx.x % 128 == 0 && rows > 0) publish(block.h_ready(segment.expert), rows / UNIT_ROWS);
        }
    }
}

// The last block to end leaves the counters as the next launch expects them. Every wait on them has ended by then.
__device__ __forceinline__ void finish(const ExpertdExpertsParams& p) {
    __threadfence();
    if (atomicAdd(p.state + STATE_DONE, 1u) == gridDim.x - 1) {
        for (int i = 0; i < 2 * p.experts; i++) p.state[STATE_READY + i] = 0;
        p.state[0] = 0;
        p.state[STATE_DONE] = 0;
        __threadfence();
    }
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    experts_kernel(const __grid_constant__ ExpertdExpertsParams p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + RING_BYTES + 2 * STAGING_BYTES);
    const int warp = uniform(threadIdx.x / 32);

    if (threadIdx.x == 0) {
        shared.longest = 0;
        for (int i = 0; i < SEGMENT_SLOTS; i++) {
            barrier_init(&shared.segment_full[i], 1);
            barrier_init(&shared.segment_empty[i], CONSUMER_WARPS + 1);
            barrier_init(&shared.routing_full[i], 32);
        }
        for (int i = 0; i < MAX_STAGES; i++) {
            barrier_init(&shared.weights_full[i], 1);
            barrier_init(&shared.tokens_full[i], 1);
            barrier_init(&shared.stage_empty[i], CONSUMER_WARPS);
            barrier_init(&shared.pair_empty[i], 2 * CONSUMER_WARPS);
        }
        barrier_init(&shared.turn[0], CONSUMER_WARPS / 2);
        barrier_init(&shared.turn[1], CONSUMER_WARPS / 2);
        barrier_init(&shared.rows_loaded, COPY_THREADS);
        barrier_init_fence();
    }
    cluster_sync();
    wait_for_previous_kernel();
    // Loads that do not depend on each other are issued before the first is used.
    const uint32_t failed = p.error != nullptr ? *p.error : 0, index = p.layer != nullptr ? *p.layer : 0;
    const ExpertdLayerWeights layer = p.layers[index];
    const Plan plan = make_plan(p, shared);
    if (failed != 0) return;
    if (shared.tables.row[p.experts] > p.panel_rows) {
        if (p.error != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.error = EXPERTD_ERROR_ROWS;
        return;
    }
    const uint32_t ring = smem_address(memory);
    const Block block{p, layer, shared, plan, ring, ring + plan.stages * STAGE_WEIGHT_BYTES, ring + RING_BYTES};

    if (warp >= WEIGHT_WARP) {
        registers_down<PRODUCER_REGISTERS>();
        if (warp >= COPY_WARP) {
            copy_rows(block);
        } else if (warp == TOKEN_WARP) {
            produce_tokens(block);
        } else if (threadIdx.x % 32 == 0) {
            produce_weights(block);
        }
    } else {
        registers_up<CONSUMER_REGISTERS>();
        consume(block);
        if (threadIdx.x == 0) finish(p);
    }
    __syncwarp();
    cluster_sync(); // the other block may still write to this one's shared memory
}

// Blocks that can be resident at once, in whole clusters: they wait for each other.
int resident_blocks() {
    static const int count = [] {
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(2);
        config.blockDim = dim3(THREADS);
        config.dynamicSmemBytes = SHARED_BYTES;
        int clusters = 0;
        const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, experts_kernel, &config);
        return status == cudaSuccess ? 2 * clusters : 0;
    }();
    return count;
}

template <class... Known> bool one_of(int value, Known... known) { return ((value == known) || ...); }

bool valid(const ExpertdExpertsParams& p) {
    return one_of(p.tile_tokens, 0, 32, 64, 128, 192, 256) && one_of(p.tile_rows, 0, 16, 32, 64, 128, 256) &&
           p.layers != nullptr && p.expert_offsets != nullptr && p.row_index != nullptr && p.row_weight != nullptr &&
           p.x != nullptr && p.y != nullptr && p.x_panels != nullptr && p.h != nullptr && p.state != nullptr &&
           p.x_stride % 8 == 0 && p.experts >= 1 && p.experts <= EXPERTD_MAX_EXPERTS && p.hidden > 0 &&
           p.hidden % 64 == 0 && p.inter > 0 && p.inter % 64 == 0 && p.panel_rows > 0 && p.blocks >= 0 &&
           p.activation >= EXPERTD_SWIGLU && p.activation <= EXPERTD_SWIGLU_OAI;
}

} // namespace
} // namespace expertd

extern "C" uint32_t expertd_experts_state_words(int32_t experts) { return expertd::STATE_READY + 2 * experts; }

extern "C" int expertd_experts_setup(void) {
    const cudaError_t status = cudaFuncSetAttribute(
        expertd::experts_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, expertd::SHARED_BYTES);
    if (status != cudaSuccess) return status;
    return expertd::resident_blocks() > 0 ? cudaSuccess : cudaErrorInvalidConfiguration;
}

extern "C" int expertd_experts_launch(const ExpertdExpertsParams* params, void* stream) {
    if (!expertd::valid(*params)) return cudaErrorInvalidValue;
    int blocks = expertd::resident_blocks();
    if (params->blocks > 0 && params->blocks < blocks) blocks = (params->blocks + 1) / 2 * 2;
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (params->flags & EXPERTD_LAUNCH_PROGRAMMATIC) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (params->flags & EXPERTD_LAUNCH_COOPERATIVE) {
        attributes[count].id = cudaLaunchAttributeCooperative;
        attributes[count++].val.cooperative = 1;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(expertd::THREADS);
    config.dynamicSmemBytes = expertd::SHARED_BYTES;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = count;
    return cudaLaunchKernelEx(&config, expertd::experts_kernel, *params);
}
