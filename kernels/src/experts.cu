// The expert MLP of one layer on one rank, in one persistent kernel (bf16, Hopper).
//
// Weights are wgmma's M operand and tokens its N in every regime. One block per SM: two consumer warpgroups (64 weight
// rows each), one warp that streams weights and decides what comes next, three warps that bring token rows. Gate_up of
// all experts comes first, then down; a block starts down while others still finish gate_up, waiting per expert for h.
// The weights of down do not wait: they fill the ring meanwhile, so the stream from HBM never pauses.
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
constexpr int TOKEN_WARPS = 3;
constexpr int TOKEN_THREADS = TOKEN_WARPS * 32;
constexpr int THREADS = 384;
constexpr int CONSUMER_REGISTERS = 208; // 256 * 208 + 128 * 88 = 384 * 168
constexpr int PRODUCER_REGISTERS = 88;

constexpr int SEGMENT_SLOTS = 4;
constexpr int GATHER_ROWS = TOKEN_THREADS / 8;                                        // rows per pass of the token warps
constexpr int GATHER_PASSES = (MAX_TILE_TOKENS + GATHER_ROWS - 1) / GATHER_ROWS;
static_assert(GATHER_ROWS % 8 == 4, "the swizzle of alternate passes");

// Words of ExpertdExpertsParams::state, apart from each other: tile counter, blocks that are done, readiness of h.
constexpr int STATE_DONE = 32;
constexpr int STATE_READY = 64;

struct Shared {
    Tables tables;
    Segment segments[SEGMENT_SLOTS];
    float weights[SEGMENT_SLOTS][MAX_TILE_TOKENS]; // routing weights of the segment's tokens
    uint64_t segment_full[SEGMENT_SLOTS], segment_empty[SEGMENT_SLOTS];
    uint64_t weights_full[MAX_STAGES], tokens_full[MAX_STAGES], stage_empty[MAX_STAGES];
    int32_t longest, active;
    int32_t warp_tiles[THREADS / 32], warp_rows[THREADS / 32];
};
static_assert(RING_BYTES + sizeof(Shared) <= 227 * 1024, "shared memory of one block");

// Position in a ring of `size` slots; the parity flips each round.
struct Cursor {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance(int size) {
        if (++slot == size) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// The same value in all lanes, in a way that lets the compiler know: wgmma must not sit in code that may diverge.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

__device__ __forceinline__ Segment uniform(const Segment& s) {
    return Segment{uniform(s.phase), uniform(s.expert), uniform(s.first), uniform(s.tokens),
                   uniform(s.h_row), uniform(s.row),    uniform(s.rows),  0};
}

struct Ring {
    uint32_t weights, tokens; // shared-memory addresses
    int token_stage_bytes;
    int stages;
};

// Prefix sums over experts and the plan that follows from them. All threads; two experts per thread.
__device__ Plan make_plan(const ExpertdExpertsParams& p, Shared& shared, int32_t& padded_rows) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int count[2], start[2];
    for (int i = 0; i < 2; i++) {
        const int e = 2 * thread + i;
        start[i] = e <= p.experts ? p.expert_offsets[e] : 0;
        count[i] = e < p.experts ? p.expert_offsets[e + 1] - start[i] : 0;
        if (e <= p.experts && e <= EXPERTD_MAX_EXPERTS) shared.tables.offset[e] = start[i];
    }
    const int longest = __reduce_max_sync(0xffffffff, max(count[0], count[1]));
    const int active = __reduce_add_sync(0xffffffff, (count[0] > 0) + (count[1] > 0));
    if (lane == 0 && longest > 0) {
        atomicMax(&shared.longest, longest);
        atomicAdd(&shared.active, active);
    }
    __syncthreads();

    Plan plan;
    plan.tile_tokens = p.max_tile_tokens != 0 ? p.max_tile_tokens : tile_tokens_for(shared.longest);
    plan.stages = stages_for(plan.tile_tokens);
    const int total = shared.tables.offset[p.experts];
    plan.ranges = p.schedule == EXPERTD_SCHEDULE_AUTO ? total < TILES_FROM_MEAN * shared.active
                                                      : p.schedule == EXPERTD_SCHEDULE_RANGES;

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
    plan.tiles = 0, padded_rows = 0;
    for (int w = 0; w < THREADS / 32; w++) {
        if (w < warp) tiles_before += shared.warp_tiles[w], rows_before += shared.warp_rows[w];
        plan.tiles += shared.warp_tiles[w], padded_rows += shared.warp_rows[w];
    }
    for (int i = 0; i < 2; i++) {
        const int e = 2 * thread + i;
        if (e < p.experts) {
            shared.tables.tile[e] = tiles_before, shared.tables.h_row[e] = rows_before;
        }
        if (e == p.experts) shared.tables.tile[e] = tiles_before;
        tiles_before += tiles[i], rows_before += rows[i];
    }
    __syncthreads();
    return plan;
}

// One thread: decides the block's segments and streams their weights. It runs as far ahead as the ring allows.
__device__ void produce_weights(const ExpertdExpertsParams& p, const ExpertdLayerWeights& layer, Shared& shared,
                                const Plan& plan, const Ring& ring) {
    Scheduler scheduler(p, shared.tables, plan);
    Cursor slot, stage;
    const uint64_t once = policy_evict_first(), again = policy_evict_normal();
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
        const int panels = (segment.phase == 0 ? p.hidden : p.inter) / PANEL_K;
        const char* source = static_cast<const char*>(segment.phase == 0 ? layer.gate_up : layer.down) +
                             (int64_t(segment.expert) * panels * all_rows + segment.row) * PANEL_ROW_BYTES;
        const int per_stage = panels_per_stage(segment.rows, segment.tokens, plan.tile_tokens);
        const uint32_t bytes = segment.rows * PANEL_ROW_BYTES;
        const int* tile = &shared.tables.tile[segment.expert];
        const uint64_t policy = tile[1] - tile[0] == 1 ? once : again; // is there another token tile for these rows?
        for (int panel = 0; panel < panels; panel += per_stage) {
            const int here = min(per_stage, panels - panel);
            barrier_wait(&shared.stage_empty[stage.slot], stage.parity ^ 1);
            barrier_arrive_expect(&shared.weights_full[stage.slot], bytes * here);
            for (int i = 0; i < here; i++) {
                bulk_load(ring.weights + stage.slot * STAGE_WEIGHT_BYTES + i * bytes, source, bytes,
                          &shared.weights_full[stage.slot], policy);
                source += int64_t(all_rows) * PANEL_ROW_BYTES;
            }
            stage.advance(ring.stages);
        }
    }
    let_next_kernel_start();
}

// Three warps: gather rows of x for gate_up, stream h for down; routing weights for both.
__device__ void produce_tokens(const ExpertdExpertsParams& p, Shared& shared, const Plan& plan, const Ring& ring) {
    const int thread = threadIdx.x - (WEIGHT_WARP + 1) * 32;
    const int chunk = thread % 8, first_row = thread / 8;
    Cursor slot, stage;
    int ready_expert = -1;
    while (true) {
        barrier_wait(&shared.segment_full[slot.slot], slot.parity);
        const Segment segment = shared.segments[slot.slot];
        if (segment.phase == 2) break;
        const int padded = round_up_8(segment.tokens);
        const int per_stage = panels_per_stage(segment.rows, segment.tokens, plan.tile_tokens);
        for (int i = thread; i < segment.tokens; i += TOKEN_THREADS) { // lands before the first tokens_full of the segment
            copy_4(smem_address(&shared.weights[slot.slot][i]), p.row_weight + segment.first + i);
        }
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(&shared.segment_empty[slot.slot]);
        slot.advance(SEGMENT_SLOTS);

        if (segment.phase == 0) {
            uint32_t rows[GATHER_PASSES];
#pragma unroll
            for (int i = 0; i < GATHER_PASSES; i++) {
                const int row = first_row + i * GATHER_ROWS;
                rows[i] = row < segment.tokens ? p.row_index[segment.first + row] : 0;
            }
            const char* source = static_cast<const char*>(p.x) + chunk * 16;
            const uint32_t stride = uint32_t(p.x_stride) * 2;
            const int panels = p.hidden / PANEL_K;
            for (int panel = 0; panel < panels; panel += per_stage) {
                const int here = min(per_stage, panels - panel);
                barrier_wait(&shared.stage_empty[stage.slot], stage.parity ^ 1);
                uint32_t destination = ring.tokens + stage.slot * ring.token_stage_bytes;
                for (int n = 0; n < here; n++, destination += padded * PANEL_ROW_BYTES, source += PANEL_ROW_BYTES) {
                    // Passes are 12 rows apart, so the swizzle of odd passes differs by 4 chunks.
                    const uint32_t even = destination + first_row * PANEL_ROW_BYTES + ((chunk ^ (first_row % 8)) * 16);
                    const uint32_t odd = even ^ 64;
#pragma unroll
                    for (int i = 0; i < GATHER_PASSES; i++) {
                        if (i * GATHER_ROWS >= segment.tokens) break;
                        if (i * GATHER_ROWS + first_row < segment.tokens) {
                            copy_row_16((i % 2 == 0 ? even : odd) + i * GATHER_ROWS * PANEL_ROW_BYTES, source, rows[i], stride);
                        }
                    }
                }
                barrier_arrive_after_copies(&shared.tokens_full[stage.slot]);
                stage.advance(ring.stages);
            }
        } else {
            if (thread == 0 && segment.expert != ready_expert) {
                const int token_tiles = shared.tables.tile[segment.expert + 1] - shared.tables.tile[segment.expert];
                const uint32_t wanted = uint32_t(token_tiles) * (2 * p.inter / UNIT_ROWS);
                const SpinLimit limit;
                while (load_acquire(p.state + STATE_READY + segment.expert) < wanted) limit.tick();
                fence_async_proxy(); // h was written with ordinary stores and is read by the copy engine
                ready_expert = segment.expert;
            }
            const int panels = p.inter / PANEL_K;
            const uint32_t bytes = padded * PANEL_ROW_BYTES;
            const uint64_t policy = policy_evict_normal();
            for (int panel = 0; panel < panels; panel += per_stage) {
                const int here = min(per_stage, panels - panel);
                barrier_wait(&shared.stage_empty[stage.slot], stage.parity ^ 1);
                if (thread == 0) {
                    barrier_expect(&shared.tokens_full[stage.slot], bytes * here);
                    for (int n = 0; n < here; n++) {
                        const char* source = static_cast<const char*>(p.h) +
                                             (int64_t(panel + n) * p.h_rows + segment.h_row) * PANEL_ROW_BYTES;
                        bulk_load(ring.tokens + stage.slot * ring.token_stage_bytes + n * bytes, source, bytes,
                                  &shared.tokens_full[stage.slot], policy);
                    }
                }
                barrier_arrive_after_copies(&shared.tokens_full[stage.slot]);
                stage.advance(ring.stages);
            }
        }
    }
}

__device__ __forceinline__ void release_stage(Shared& shared, int slot) {
    if (threadIdx.x % 32 == 0) barrier_arrive(&shared.stage_empty[slot]);
}

// The mainloop and epilogue of one segment for one warpgroup, with tokens padded to N.
template <int N>
__device__ __forceinline__ void compute(const ExpertdExpertsParams& p, const ExpertdLayerWeights& layer, Shared& shared,
                                        const Plan& plan, const Ring& ring, const Segment& segment, int slot,
                                        Cursor& stage) {
    const int warpgroup = uniform(threadIdx.x / 128), warp = threadIdx.x / 32 % 4;
    const int panels = (segment.phase == 0 ? p.hidden : p.inter) / PANEL_K;
    const int per_stage = panels_per_stage(segment.rows, segment.tokens, plan.tile_tokens);
    const int weight_step = segment.rows * PANEL_ROW_BYTES, token_step = round_up_8(segment.tokens) * PANEL_ROW_BYTES;

    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = 0.0f; // also ends the registers' lifetime between segments
    uint64_t a = 0, b = 0;
    int in_stage = 0, previous = -1;
    for (int panel = 0; panel < panels; panel++) {
        if (in_stage == 0) {
            barrier_wait(&shared.weights_full[stage.slot], stage.parity);
            barrier_wait(&shared.tokens_full[stage.slot], stage.parity);
            if (segment.phase == 0) fence_async_proxy_shared(); // tokens came through cp.async
            // A warpgroup reads 64 weight rows even where the segment has fewer: what lies behind them only reaches
            // accumulator rows that are not stored. The same holds for token columns.
            a = wgmma_descriptor(ring.weights + stage.slot * STAGE_WEIGHT_BYTES + warpgroup * 64 * PANEL_ROW_BYTES);
            b = wgmma_descriptor(ring.tokens + stage.slot * ring.token_stage_bytes);
        }
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PANEL_K / 16; k++) Wgmma<N>::mma(d, a + k * 2, b + k * 2);
        wgmma_commit();
        a += weight_step / 16;
        b += token_step / 16;
        wgmma_wait<1>();
        if (previous >= 0) release_stage(shared, previous);
        previous = -1;
        if (++in_stage == per_stage || panel + 1 == panels) {
            previous = stage.slot;
            in_stage = 0;
            stage.advance(ring.stages);
        }
    }
    wgmma_wait<0>();
    wgmma_pin(d);
    release_stage(shared, previous);

    const int in_segment = warpgroup * 64 + warp * 16;
    if (in_segment < segment.rows) {
        const float* weights = shared.weights[slot];
        if (segment.phase == 0) {
            store_h<N>(p, layer, segment, segment.row + in_segment, weights, d);
        } else {
            store_y<N>(p, layer, segment, segment.row + in_segment, weights, d);
        }
    }
}

// A warpgroup without rows in this segment only keeps the pipeline's count.
__device__ __forceinline__ void skip(const ExpertdExpertsParams& p, Shared& shared, const Plan& plan, const Ring& ring,
                                     const Segment& segment, Cursor& stage) {
    const int panels = (segment.phase == 0 ? p.hidden : p.inter) / PANEL_K;
    const int per_stage = panels_per_stage(segment.rows, segment.tokens, plan.tile_tokens);
    for (int panel = 0; panel < panels; panel += per_stage) {
        barrier_wait(&shared.weights_full[stage.slot], stage.parity);
        barrier_wait(&shared.tokens_full[stage.slot], stage.parity);
        release_stage(shared, stage.slot);
        stage.advance(ring.stages);
    }
}

__device__ void consume(const ExpertdExpertsParams& p, const ExpertdLayerWeights& layer, Shared& shared, const Plan& plan,
                        const Ring& ring) {
    const int warpgroup = uniform(threadIdx.x / 128);
    Cursor slot, stage;
    while (true) {
        barrier_wait(&shared.segment_full[slot.slot], slot.parity);
        const Segment segment = uniform(shared.segments[slot.slot]);
        if (segment.phase == 2) break;
        const int units = min(64, segment.rows - warpgroup * 64) / UNIT_ROWS;
        if (units <= 0) {
            skip(p, shared, plan, ring, segment, stage);
        } else {
#define EXPERTD_COMPUTE(N) compute<N>(p, layer, shared, plan, ring, segment, slot.slot, stage)
            const int n = segment.tokens;
            if (n <= 32) {
                if (n <= 8) EXPERTD_COMPUTE(8);
                else if (n <= 16) EXPERTD_COMPUTE(16);
                else EXPERTD_COMPUTE(32);
            } else if (n <= 128) {
                if (n <= 48) EXPERTD_COMPUTE(48);
                else if (n <= 64) EXPERTD_COMPUTE(64);
                else if (n <= 80) EXPERTD_COMPUTE(80);
                else if (n <= 96) EXPERTD_COMPUTE(96);
                else if (n <= 112) EXPERTD_COMPUTE(112);
                else EXPERTD_COMPUTE(128);
            } else {
                if (n <= 160) EXPERTD_COMPUTE(160);
                else if (n <= 192) EXPERTD_COMPUTE(192);
                else if (n <= 224) EXPERTD_COMPUTE(224);
                else EXPERTD_COMPUTE(256);
            }
#undef EXPERTD_COMPUTE
        }
        if (threadIdx.x % 32 == 0) barrier_arrive(&shared.segment_empty[slot.slot]);
        slot.advance(SEGMENT_SLOTS);
        if (segment.phase == 0 && units > 0) {
            fence_async_proxy();
            warpgroup_sync(1 + warpgroup);
            if (threadIdx.x % 128 == 0) {
                __threadfence();
                add_release(p.state + STATE_READY + segment.expert, units);
            }
        }
    }
}

// The last block to end leaves the counters as the next launch expects them. Every wait on them has ended by then.
__device__ void finish(const ExpertdExpertsParams& p) {
    __threadfence();
    if (atomicAdd(p.state + STATE_DONE, 1u) == gridDim.x - 1) {
        for (int e = 0; e < p.experts; e++) p.state[STATE_READY + e] = 0;
        p.state[0] = 0;
        p.state[STATE_DONE] = 0;
        __threadfence();
    }
}

__global__ void __launch_bounds__(THREADS, 1) experts_kernel(const __grid_constant__ ExpertdExpertsParams p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + RING_BYTES);
    const int warp = uniform(threadIdx.x / 32);

    if (threadIdx.x == 0) {
        shared.longest = 0, shared.active = 0;
        for (int i = 0; i < SEGMENT_SLOTS; i++) {
            barrier_init(&shared.segment_full[i], 1);
            barrier_init(&shared.segment_empty[i], CONSUMER_WARPS + TOKEN_WARPS);
        }
        for (int i = 0; i < MAX_STAGES; i++) {
            barrier_init(&shared.weights_full[i], 1);
            barrier_init(&shared.tokens_full[i], TOKEN_THREADS);
            barrier_init(&shared.stage_empty[i], CONSUMER_WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    wait_for_previous_kernel();
    if (p.error != nullptr && *p.error != 0) return;
    const ExpertdLayerWeights layer = p.layers[p.layer != nullptr ? *p.layer : 0];
    int32_t padded_rows;
    const Plan plan = make_plan(p, shared, padded_rows);
    if (padded_rows > p.h_rows) {
        if (p.error != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.error = EXPERTD_ERROR_ROWS;
        return;
    }
    Ring ring;
    ring.stages = plan.stages;
    ring.weights = smem_address(memory);
    ring.tokens = ring.weights + plan.stages * STAGE_WEIGHT_BYTES;
    ring.token_stage_bytes = plan.tile_tokens * PANEL_ROW_BYTES;

    if (warp >= WEIGHT_WARP) {
        registers_down<PRODUCER_REGISTERS>();
        if (warp > WEIGHT_WARP) {
            produce_tokens(p, shared, plan, ring);
        } else if (threadIdx.x % 32 == 0) {
            produce_weights(p, layer, shared, plan, ring);
        }
    } else {
        registers_up<CONSUMER_REGISTERS>();
        consume(p, layer, shared, plan, ring);
        if (threadIdx.x == 0) finish(p);
    }
}

constexpr int SHARED_BYTES = RING_BYTES + sizeof(Shared);

int sm_count() {
    static const int count = [] {
        int device = 0, value = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device);
        return value;
    }();
    return count;
}

bool valid(const ExpertdExpertsParams& p) {
    const int widths[] = {0, 32, 64, 128, 192, 256};
    bool width_known = false;
    for (int w : widths) width_known |= p.max_tile_tokens == w;
    return width_known && p.layers != nullptr && p.expert_offsets != nullptr && p.row_index != nullptr &&
           p.row_weight != nullptr && p.x != nullptr && p.y != nullptr && p.h != nullptr && p.state != nullptr &&
           p.x_stride % 8 == 0 && p.experts >= 1 && p.experts <= EXPERTD_MAX_EXPERTS && p.hidden > 0 &&
           p.hidden % 64 == 0 && p.inter > 0 && p.inter % 64 == 0 && p.h_rows > 0 && p.blocks >= 0 &&
           p.activation >= EXPERTD_SWIGLU && p.activation <= EXPERTD_SWIGLU_OAI &&
           p.schedule >= EXPERTD_SCHEDULE_AUTO && p.schedule <= EXPERTD_SCHEDULE_TILES;
}

} // namespace
} // namespace expertd

extern "C" uint32_t expertd_experts_state_words(int32_t experts) { return expertd::STATE_READY + experts; }

extern "C" int expertd_experts_setup(void) {
    return cudaFuncSetAttribute(expertd::experts_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                expertd::SHARED_BYTES);
}

extern "C" int expertd_experts_launch(const ExpertdExpertsParams* params, void* stream) {
    if (!expertd::valid(*params)) return cudaErrorInvalidValue;
    const int sms = expertd::sm_count();
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
    config.gridDim = dim3(params->blocks > 0 && params->blocks < sms ? params->blocks : sms);
    config.blockDim = dim3(expertd::THREADS);
    config.dynamicSmemBytes = expertd::SHARED_BYTES;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = count;
    return cudaLaunchKernelEx(&config, expertd::experts_kernel, *params);
}
