// The expert MLP of one layer on one rank, in one persistent kernel for Hopper. Rows are bf16 or, with W8A8 and W4A8, FP8.
//
// Weights are wgmma's M operand and tokens its N, except for many tokens in bf16 and W8A8. Each SM runs one block: two consumer
// warpgroups (64 or 128 weight rows each), or three with MXFP4, one warp that draws segments and streams weights, one warp that streams
// token rows, and two warps that copy received rows into panels, grouped by expert. The blocks compute gate_up of all experts first, then down; readiness
// is counted per expert, so a block starts down while others still finish gate_up. Weights depend on no other data: they fill the ring
// meanwhile, so the stream from HBM does not pause.
//
//   experts_schedule.cuh   order of segments        experts_layout.cuh          places of elements in memory
//   experts_plan.cuh       tile shapes              experts_formats.cuh         widening of FP8 and MXFP4 to bf16
//   experts_producers.cuh  weights and rows         experts_compute.cuh         mainloop, both operands in shared memory
//   experts_rows.cuh       rows to panels           experts_compute_narrow.cuh  mainloop, weights widened in registers
//   experts_block.cuh      data of all roles        experts_compute_w8a8.cuh    mainloop, FP8 products (_w4a8: with MXFP4 weights)
//                                                   experts_compute_rows.cuh    many tokens (_bf16, _w8a8: mainloops)
//                                                   experts_compute_few.cuh     mainloop of few tokens with MXFP4
//   experts_quantise.cuh   e4m3 codes and scales    experts_epilogue.cuh        activation, biases, stores (_w8a8: h in e4m3)
//                                                   experts_widen.cuh           MXFP4 to e4m3 in shared memory, for many FP8 rows
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "experts_compute.cuh"
#include "experts_compute_few.cuh"
#include "experts_compute_narrow.cuh"
#include "experts_compute_rows_bf16.cuh"
#include "experts_compute_rows_w8a8.cuh"
#include "experts_compute_w4a8.cuh"
#include "experts_compute_w8a8.cuh"
#include "experts_launch.h"
#include "experts_plan.cuh"
#include "experts_producers.cuh"
#include "experts_rows.cuh"
#include "experts_widen.cuh"

namespace expertd {

// Computes a segment with the smallest width of wgmma that holds its tokens.
__device__ __forceinline__ void compute_any(const Block<Bf16>& block, const Segment& segment, int from, bool shared_segment,
                                            const Cursor& slot, Cursor& stage, Counters&) {
    const int n = segment.tokens;
    if (block.plan.token_rows && n > ROW_TILE_LEAST) {
        compute_rows(block, segment, slot, stage);
        return;
    }
#define EXPERTD_UP_TO(N) else if (n <= N) EXPERTD_COMPUTE(N);
#define EXPERTD_COMPUTE(N) compute<N, 2>(block, segment, from, shared_segment, slot, stage)
    if (shared_segment ? block.plan.block_rows == TALL_ROWS : segment.rows > 64) {
        if (n <= 16) EXPERTD_COMPUTE(16);
        EXPERTD_UP_TO(32)
        EXPERTD_UP_TO(48)
        EXPERTD_UP_TO(64)
        EXPERTD_UP_TO(80)
        EXPERTD_UP_TO(96)
        EXPERTD_UP_TO(112)
        EXPERTD_UP_TO(128)
        else EXPERTD_COMPUTE(144);
        return;
    }
#undef EXPERTD_COMPUTE
#define EXPERTD_COMPUTE(N) compute<N, 1>(block, segment, from, shared_segment, slot, stage)
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
#undef EXPERTD_COMPUTE
}

template <class Format>
__device__ __forceinline__ void compute_any(const Block<Format>& block, const Segment& segment, int from, bool shared_segment,
                                            const Cursor& slot, Cursor& stage, Counters&) {
    static_assert(Format::MAX_TOKENS == 128, "the widest below");
    const int n = segment.tokens;
#define EXPERTD_COMPUTE(N) compute<N>(block, segment, from, shared_segment, slot, stage)
    if constexpr (Format::FEW_TOKENS_ALONE) {
        if (block.plan.stage_blocks > 1) {
            if (n <= 8) return compute_few<8>(block, segment, from, shared_segment, slot, stage);
            if (n <= 16) return compute_few<16>(block, segment, from, shared_segment, slot, stage);
            if (n <= 24) return compute_few<24>(block, segment, from, shared_segment, slot, stage);
            if (n <= 32) return compute_few<32>(block, segment, from, shared_segment, slot, stage);
        }
        if (n > 32 && n <= 48) return EXPERTD_COMPUTE(48);
        if (n > 64 && n <= 80) return EXPERTD_COMPUTE(80);
        if (n > 96 && n <= 112) return EXPERTD_COMPUTE(112);
    } else {
        if (n <= 8) return EXPERTD_COMPUTE(8);
    }
    if (n <= 16) EXPERTD_COMPUTE(16);
    EXPERTD_UP_TO(32)
    EXPERTD_UP_TO(64)
    EXPERTD_UP_TO(96)
    else EXPERTD_COMPUTE(128);
#undef EXPERTD_COMPUTE
}

__device__ __forceinline__ void compute_any(const Block<W8a8>& block, const Segment& segment, int from, bool,
                                            const Cursor& slot, Cursor& stage, Counters& counters) {
    static_assert(W8a8::MAX_TOKENS == 112, "the widest below");
    const int n = segment.tokens;
    if (block.plan.token_rows && n > ROW_TILE_LEAST) {
        compute_rows(block, segment, slot, stage, counters);
        return;
    }
#define EXPERTD_COMPUTE(N) compute_w8a8<N>(block, segment, from, slot, stage, counters)
    if (n <= 8) EXPERTD_COMPUTE(8);
    EXPERTD_UP_TO(16)
    EXPERTD_UP_TO(32)
    EXPERTD_UP_TO(48)
    EXPERTD_UP_TO(64)
    EXPERTD_UP_TO(80)
    EXPERTD_UP_TO(96)
    else EXPERTD_COMPUTE(112);
}

__device__ __forceinline__ void compute_any(const Block<W4a8Rows>& block, const Segment& segment, int from, bool,
                                            const Cursor& slot, Cursor& stage, Counters& counters) {
    static_assert(ROW_TILE_LEAST == 80, "the widest below");
    const int n = segment.tokens;
    if (n > ROW_TILE_LEAST) compute_rows(block, segment, slot, stage, counters);
    EXPERTD_UP_TO(8)
    EXPERTD_UP_TO(16)
    EXPERTD_UP_TO(32)
    EXPERTD_UP_TO(48)
    EXPERTD_UP_TO(64)
    else EXPERTD_COMPUTE(80);
#undef EXPERTD_COMPUTE
}

__device__ __forceinline__ void compute_any(const Block<W4a8>& block, const Segment& segment, int from, bool,
                                            const Cursor& slot, Cursor& stage, Counters& counters) {
    static_assert(W4a8::MAX_TOKENS == 104, "the widest below");
    const int n = segment.tokens;
#define EXPERTD_COMPUTE(N) compute_w4a8<N>(block, segment, from, slot, stage, counters)
    if (n <= 8) EXPERTD_COMPUTE(8);
    EXPERTD_UP_TO(16)
    EXPERTD_UP_TO(24)
    EXPERTD_UP_TO(32)
    EXPERTD_UP_TO(48)
    EXPERTD_UP_TO(64)
    EXPERTD_UP_TO(72)
    EXPERTD_UP_TO(80)
    EXPERTD_UP_TO(88)
    EXPERTD_UP_TO(96)
    else EXPERTD_COMPUTE(104);
#undef EXPERTD_UP_TO
#undef EXPERTD_COMPUTE
}

// Computes the block's segments, in both consumer warpgroups. The warpgroups share high segments and take low ones in turn, so that
// one computes while the other stores.
template <class Format>
__device__ __forceinline__ void consume(const Block<Format>& block) {
    Shared& shared = block.shared;
    const int warpgroup = uniform(threadIdx.x / 128);
    Cursor slot, stage;
    int turn = 0;
    uint32_t turn_parity = 0;
    Counters counters;
    if constexpr (Format::PANEL_ELEMENTS == BLOCK_K) {
        if (Format::TURNS && warpgroup == 1) named_arrive<256>(TURN_BARRIER); // the first warpgroup has the first turn
    }
    while (true) {
        barrier_wait(&shared.segment_full[slot.slot], slot.parity);
        const Segment segment = uniform(shared.segments[slot.slot]);
        if (segment.phase == 2) break;
        const bool shared_segment = block.shared_segment(segment);
        const bool mine = shared_segment || turn == warpgroup;
        if (!shared_segment) turn ^= 1;
        if (!mine) { // wait until the other warpgroup has read its stages: the parity of a barrier distinguishes only two rounds of the ring
            barrier_wait(&shared.turn[warpgroup ^ 1], turn_parity);
            turn_parity ^= 1;
            stage.advance(block.plan.stages, divide_up(block.k_blocks(segment), block.per_stage(segment)));
        } else {
            const int from = shared_segment ? warpgroup * (block.plan.block_rows / Format::GROUPS) : 0;
            compute_any(block, segment, from, shared_segment, slot, stage, counters);
        }
        const Segment done = uniform(shared.segments[slot.slot]); // read again, because keeping it would occupy registers
        __syncwarp(); // every lane has read the slot
        if (arrives_for_warp()) barrier_arrive(&shared.segment_empty[slot.slot]);
        slot.advance(SEGMENT_SLOTS);
        if (done.phase == 0 && mine) {
            named_sync<128>(STAGING_BARRIER + warpgroup);
            const int units = done.rows / UNIT_ROWS, share = shared_segment ? share_of_units<Format::GROUPS>(units, warpgroup) : units;
            if (threadIdx.x % 128 == 0 && share > 0) publish(block.h_ready(done.expert), share);
        }
    }
}

template <class Format>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Format::THREADS, 1)
    experts_kernel(const __grid_constant__ ExpertdExpertsParams p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + Format::RING_BYTES + Format::WIDENED_BYTES + Format::GROUPS * STAGING_BYTES);
    const int warp = uniform(threadIdx.x / 32);

    if (threadIdx.x == 0) {
        shared.counts = Counts{};
        shared.failed = 0;
        for (int i = 0; i < SEGMENT_SLOTS; i++) {
            barrier_init(&shared.segment_full[i], 1);
            barrier_init(&shared.segment_empty[i], (Format::CONSUMER_WARPS + Format::WIDENER_WARPS + 1) * WARP_ARRIVALS);
            barrier_init(&shared.routing_full[i], 32);
        }
        for (int i = 0; i < MAX_STAGES; i++) {
            const int readers = Format::WIDENS && i >= WIDENED_STAGES ? Format::WIDENER_WARPS : Format::CONSUMER_WARPS;
            barrier_init(&shared.full[i], Format::WIDENS ? 1 : 2);
            barrier_init(&shared.weights_full[i], 1);
            barrier_init(&shared.stage_empty[i], readers * WARP_ARRIVALS);
            barrier_init(&shared.pair_empty[i], 2 * readers * WARP_ARRIVALS);
        }
        for (int i = 0; i < Format::WIDENED_BLOCKS; i++) {
            barrier_init(&shared.widened_full[i], Format::WIDENER_WARPS * WARP_ARRIVALS);
            barrier_init(&shared.widened_empty[i], Format::CONSUMER_WARPS * WARP_ARRIVALS);
        }
        for (int i = 0; i < DRAWN_SLOTS; i++) barrier_init(&shared.drawn.full[i], 1);
        barrier_init(&shared.turn[0], 4 * WARP_ARRIVALS);
        barrier_init(&shared.turn[1], 4 * WARP_ARRIVALS);
        barrier_init(&shared.rows_loaded, COPY_THREADS);
        barrier_init_fence();
    }
    if (threadIdx.x < sizeof(shared.layer) / sizeof(uint64_t)) { // visible to all threads after add_counts' barrier
        const uint32_t index = p.layer != nullptr ? __ldcg(p.layer) : 0;
        reinterpret_cast<uint64_t*>(&shared.layer)[threadIdx.x] = reinterpret_cast<const uint64_t*>(p.layers + index)[threadIdx.x];
    }
    cluster_sync();
    wait_for_previous_kernel();
    // One thread reads the error word for both blocks, because the word may change at any time: neither a thread nor a block of a pair
    // may return alone. The thread has no expert in add_counts.
    if (p.error != nullptr && cluster_block() == 0 && threadIdx.x == Format::THREADS - 1) {
        const uint32_t failed = __ldcg(p.error);
        for (uint32_t block = 0; block < 2; block++) store_peer(peer_address(smem_address(&shared.failed), block), failed);
    }
    __syncwarp();
    cluster_arrive();
    const TwoCounts two(p);
    const Counts counts = add_counts<Format>(p, shared, two);
    const Plan plan = make_plan<Format>(p, shared, two, counts);
    cluster_wait();
    if (shared.failed != 0) return;
    if (shared.tables.row[p.experts] > p.panel_rows) {
        if (p.error != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.error = EXPERTD_ERROR_ROWS;
        return;
    }
    const uint32_t ring = smem_address(memory);
    const uint32_t token_ring = ring + weight_ring_bytes<Format>(plan);
    const uint32_t scale_ring = token_ring + plan.stages * plan.stage_blocks * stage_token_bytes<Format>(plan.tile_tokens);
    const Block<Format> block{p, shared.layer, shared, plan, ring, token_ring, scale_ring, ring + Format::RING_BYTES, ring + Format::RING_BYTES + Format::WIDENED_BYTES};

    if (warp >= Format::WEIGHT_WARP) {
        registers_down<Format::PRODUCER_REGISTERS>();
        if (warp >= Format::COPY_WARP) {
            copy_rows(block);
        } else if (warp == Format::TOKEN_WARP) {
            produce_tokens(block);
            finish(p);
        } else if (threadIdx.x % 32 == 0) {
            produce_weights(block);
        }
    } else if (Format::WIDENS && warp >= Format::CONSUMER_WARPS) {
        if constexpr (Format::WIDENS) {
            registers_down<Format::WIDENER_REGISTERS>();
            widen_weights(block);
        }
    } else {
        registers_up<Format::CONSUMER_REGISTERS>();
        consume(block);
    }
    __syncwarp();
    cluster_sync(); // the other block may still write to this one's shared memory
}

// Number of blocks that can be resident at once, in whole clusters: one per multiprocessor that MPS grants this process, or of the GPU.
// Blocks wait for each other, so all must be resident.
template <class Format> int resident_blocks() {
    static const int count = [] {
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(2);
        config.blockDim = dim3(Format::THREADS);
        config.dynamicSmemBytes = SHARED_BYTES;
        int clusters = 0, device = 0, processors = 0;
        if (cudaOccupancyMaxActiveClusters(&clusters, experts_kernel<Format>, &config) != cudaSuccess || cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
            return 0;
        }
        return 2 * std::min(clusters, processors / 2);
    }();
    return count;
}

// Host functions of one format, which return a cudaError_t. experts.cu chooses among them.
template <class Format> int setup_format() {
    const cudaError_t status =
        cudaFuncSetAttribute(experts_kernel<Format>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    if (status != cudaSuccess) return status;
    return resident_blocks<Format>() > 0 ? cudaSuccess : cudaErrorInvalidConfiguration;
}

template <class Format> int launch_format(const ExpertdExpertsParams& p, cudaStream_t stream) {
    int blocks = resident_blocks<Format>();
    if (p.blocks > 0 && p.blocks < blocks) blocks = (p.blocks + 1) / 2 * 2;
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    return launch_resident(experts_kernel<Format>, p, blocks, Format::THREADS, SHARED_BYTES, stream);
}

} // namespace expertd
