// Lists the rows of a rank alone by clusters of blocks: a stable counting sort without a barrier between clusters.
//
// Every cluster counts all entries, each of its blocks a stretch of them, and exchanges the blocks' counts through shared memory. So each
// cluster has the place of every entry by itself, and writes a part of every stretch: scattered stores, which take most of the time of
// one block, are shared by all clusters.
#pragma once
#include "dispatch_lists.cuh"
#include "ptx.cuh"

namespace expertd {
namespace {

constexpr uint32_t kClusterBlocks = 8;
constexpr uint32_t kClusters = 4;
constexpr uint32_t kClusterLists = kClusterBlocks * kClusters;  // blocks that list
constexpr uint32_t kClustersFrom = 48;                          // smallest grid whose lists are made by clusters

// Adds up a value of every thread of the block over the threads before this one.
__device__ __forceinline__ uint32_t sum_before(uint32_t value) {
    __shared__ uint32_t sums[kWarps];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t sum = value;
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    uint32_t before = sum - value;
    for (uint32_t w = 0; w < warp; ++w) before += sums[w];
    return before;
}

// Lists at most kClusterBlocks * kThreads * Each entries. Each lane has Each of its warp's stretch.
template <uint32_t Each>
__device__ __forceinline__ void list_in_clusters(const DispatchParams& p, uint32_t total, uint32_t* counts /* shared [kWarps + 1][experts] */) {
    const uint32_t local = p.group.experts, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t block = cluster_block(), cluster = blockIdx.x / kClusterBlocks;
    const uint32_t base = (block * kWarps + warp) * Each * 32 + lane;
    const uint32_t bits = 32 - __clz(max(local, 1u) - 1);
    uint32_t experts[Each], before[Each];
#pragma unroll
    for (uint32_t i = 0; i < Each; ++i) experts[i] = base + i * 32 < total ? static_cast<uint32_t>(__ldcg(p.topk_ids + base + i * 32)) : ~0u;
    uint32_t* mine = counts + warp * local;
    for (uint32_t e = lane; e < local; e += 32) mine[e] = 0;
    __syncwarp();
    // Number of entries of the same expert that come before each entry in its warp's stretch.
#pragma unroll
    for (uint32_t i = 0; i < Each; ++i) {
        const bool has = experts[i] < local;
        const uint32_t same = lanes_alike(experts[i], has, bits);
        const uint32_t earlier = has ? mine[experts[i]] : 0;
        before[i] = earlier + __popc(same & ((1u << lane) - 1));
        __syncwarp();
        if (has && before[i] == earlier) mine[experts[i]] = earlier + __popc(same);
        __syncwarp();
    }
    __syncthreads();
    // A thread has an expert. Its counts become start indices: summed over warps, over the cluster's blocks, and over experts.
    const uint32_t e = threadIdx.x;
    uint32_t of_warp[kWarps], of_block = 0;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) {
        of_warp[w] = e < local ? counts[w * local + e] : 0;
        of_block += of_warp[w];
    }
    uint32_t* of_blocks = counts + kWarps * local + e;
    if (e < local) *of_blocks = of_block;
    __syncwarp();
    cluster_sync();
    uint32_t of_all = 0, earlier = 0;
    if (e < local) {
#pragma unroll
        for (uint32_t b = 0; b < kClusterBlocks; ++b) {
            const uint32_t count = __float_as_uint(load_peer(peer_address(smem_address(of_blocks), b)));
            of_all += count;
            earlier += b < block ? count : 0;
        }
    }
    __syncwarp();
    cluster_arrive();
    const uint32_t first = sum_before(of_all);
    if (e < local) {
        uint32_t start = first + earlier;
#pragma unroll
        for (uint32_t w = 0; w < kWarps; ++w) {
            counts[w * local + e] = start;
            start += of_warp[w];
        }
        if (blockIdx.x == 0) {
            p.expert_offsets[e] = first;
            if (e == local - 1) p.expert_offsets[local] = first + of_all;
        }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < Each; ++i) {
        const uint32_t v = base + i * 32;
        if (i % kClusters != cluster || experts[i] >= local) continue;
        const uint32_t to = mine[experts[i]] + before[i];
        p.row_index[to] = v / p.group.top_k;
        p.row_weight[to] = __ldcg(p.topk_weights + v);
        p.position[v] = to;
    }
    __syncwarp();
    cluster_wait();  // all blocks have read this block's counts
}

// Lists the entries of `tokens` rows, in the first kClusterLists blocks of a grid of clusters.
__device__ __forceinline__ void list_by_clusters(const DispatchParams& p, uint32_t tokens, uint32_t* counts) {
    constexpr uint32_t kLanes = kClusterBlocks * kThreads;
    const uint32_t total = tokens * p.group.top_k;
    if (total > 16 * kLanes || p.group.experts > kThreads) return list_rows(p, tokens, kClusterLists, counts);
    if (total <= kLanes) return list_in_clusters<1>(p, total, counts);
    if (total <= 4 * kLanes) return list_in_clusters<4>(p, total, counts);
    list_in_clusters<16>(p, total, counts);
}

}  // namespace
}  // namespace expertd
