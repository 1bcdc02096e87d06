// Lists the received rows by local expert: a stable counting sort of the routing entries (dispatch.cu).
#pragma once
#include "common.cuh"

namespace expertd {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kAlone = 1024;                      // largest number of entries that one block lists alone
constexpr uint32_t kShare = 512;                       // smallest number of entries per block when several blocks list
constexpr uint32_t kBatchEntries = 8;                         // number of entries that a lane loads ahead
constexpr uint32_t kFew = 128;                         // largest number of entries that are listed by comparing each with all others
constexpr uint32_t kEach = 4;                          // number of entries of a lane where one block lists the entries of a rank alone
constexpr uint32_t kInOneBlock = kThreads * kEach;

// The routing entries (token, choice) of all sources, numbered in order without the unused entries between sources: `start` is the
// number of each source's first entry.
struct Entries {
    uint32_t start[kMaxRanks + 1];
};

// Index of entry `v` in the window's ids and weights. Divided by k it is the index of the entry's row.
__device__ __forceinline__ uint32_t find(const Group& g, const Entries& entries, uint32_t v) {
    uint32_t place = v;
#pragma unroll
    for (uint32_t s = 1; s < kMaxRanks; ++s) {
        if (s < g.ranks && v >= entries.start[s]) place = s * g.max_tokens * g.top_k + v - entries.start[s];
    }
    return place;
}

// Mask of the lanes that have a key and whose `bits`-bit key equals this lane's. It takes one ballot per bit, because the time of
// match.any grows with the number of different keys.
__device__ __forceinline__ uint32_t lanes_alike(uint32_t key, bool has, uint32_t bits) {
    uint32_t same = __ballot_sync(~0u, has);
    for (uint32_t bit = 0; bit < bits; ++bit) {
        const bool set = (key >> bit & 1) != 0;
        const uint32_t lanes = __ballot_sync(~0u, set);
        same &= set ? lanes : ~lanes;
    }
    return same;
}

// The arrays from which routing entries are read: those that arrived in the window or, in a group of one rank, this rank's own.
struct Routing {
    const int32_t* ids;
    const float* weights;
};

__device__ __forceinline__ Routing routing_of(const DispatchParams& p) {
    const Group& g = p.group;
    if (g.ranks == 1) return {p.topk_ids, p.topk_weights};
    return {at<int32_t>(g, g.rank, g.ids), at<float>(g, g.rank, g.weights)};
}

// Up to kBatchEntries entries per lane of the warp's stretch of entries, beginning at `base`.
struct Batch {
    uint32_t expert[kBatchEntries];  // local index; at least the number of local experts if the expert is not local
    float weight[kBatchEntries];
    uint32_t place[kBatchEntries];
};

__device__ __forceinline__ void load_batch(const DispatchParams& p, const Entries& entries, uint32_t first,
                                           uint32_t base, uint32_t end, Batch& batch) {
    const auto [ids, weights] = routing_of(p);
#pragma unroll
    for (uint32_t i = 0; i < kBatchEntries; ++i) {
        const uint32_t v = base + i * 32 + threadIdx.x % 32;
        batch.expert[i] = ~0u;
        if (v < end) {
            batch.place[i] = find(p.group, entries, v);
            batch.expert[i] = static_cast<uint32_t>(__ldcg(ids + batch.place[i])) - first;
            batch.weight[i] = __ldcg(weights + batch.place[i]);
        }
    }
}

// A thread's entry where a block lists few: its local expert, weight, and index in the arrays of the routing.
struct FewEntry {
    uint32_t expert;
    float weight;
    uint32_t place;
};

// Lists few entries in the first block, one thread per entry. A thread counts the entries that come before its own in the order of
// (expert, entry).
__device__ __forceinline__ void list_few(const DispatchParams& p, uint32_t total, uint32_t local, const FewEntry& entry,
                                         uint32_t* keys /* shared [kFew] */) {
    const uint32_t v = threadIdx.x;
    const auto [expert, weight, place] = entry;
    const uint32_t key = v < total && expert < local ? expert * kFew + v : ~0u;
    if (v < kFew) keys[v] = key;
    __syncthreads();
    if (v >= total && v > local) return;
    uint32_t before = 0, below = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < total; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(keys + i);
        before += (four.x < key) + (four.y < key) + (four.z < key) + (four.w < key);
        const uint32_t first = v * kFew;
        below += (four.x < first) + (four.y < first) + (four.z < first) + (four.w < first);
    }
    if (v <= local) p.expert_offsets[v] = below;
    if (key != ~0u) {
        p.row_index[before] = place / p.group.top_k;
        p.row_weight[before] = weight;
        p.position[place] = before;
    }
}

// Lists the rows of each local expert by a stable counting sort of the entries. Each warp counts the experts of its stretch of
// entries; after a scan over warps (and over blocks, if there are several) it writes its entries in order. Up to kAlone entries are
// sorted by the first block alone.
__device__ void list_rows(const DispatchParams& p, uint32_t own, uint32_t lists,
                          uint32_t* counts /* shared [kWarps + 2][kMaxExperts] */) {
    const Group& g = p.group;
    const Range range = experts_of(g, g.rank);
    const uint32_t local = range.last - range.first;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Entries entries;
    uint32_t total = 0;
#pragma unroll
    for (uint32_t source = 0; source < kMaxRanks; ++source) {
        entries.start[source] = total;
        if (source < g.ranks) {
            const uint32_t tokens = g.ranks == 1 ? own : __ldcg(at<uint32_t>(g, g.rank, g.counts) + source);
            if (tokens > g.max_tokens) set_error(g.state, kBadCount, source, kDispatch);
            total += min(tokens, g.max_tokens) * g.top_k;
        }
    }
    if (total <= kFew && local < kThreads) {
        if (blockIdx.x != 0) return;
        const Routing routing = routing_of(p);
        FewEntry entry = {};
        if (threadIdx.x < total) {
            entry.place = find(g, entries, threadIdx.x);
            entry.expert = static_cast<uint32_t>(__ldcg(routing.ids + entry.place)) - range.first;
            entry.weight = __ldcg(routing.weights + entry.place);
        }
        list_few(p, total, local, entry, counts);
        return;
    }
    uint32_t share = kAlone;
    if (total > kAlone) share = max(kShare, (total + lists - 1) / lists);
    const uint32_t stretch = ((share < total ? share : total) + kWarps * 32 - 1) / (kWarps * 32) * 32;
    share = stretch * kWarps;
    const uint32_t blocks = max(1u, share == 0 ? 1 : (total + share - 1) / share);
    if (blockIdx.x >= blocks) return;
    const uint32_t begin = min(blockIdx.x * share + warp * stretch, total), end = min(begin + stretch, total);
    const uint32_t bits = 32 - __clz(max(local, 1u) - 1);
    Batch batch;
    for (uint32_t i = threadIdx.x; i < kWarps * local; i += kThreads) counts[i] = 0;
    __syncthreads();
    // First pass: count each expert's entries in this warp's stretch. Of the lanes with the same expert, the first one counts.
    uint32_t* mine = counts + warp * local;
    for (uint32_t base = begin; base < end; base += 32 * kBatchEntries) {
        load_batch(p, entries, range.first, base, end, batch);
#pragma unroll
        for (uint32_t i = 0; i < kBatchEntries; ++i) {
            if (base + i * 32 >= end) break;
            const bool has = batch.expert[i] < local;
            const uint32_t same = lanes_alike(batch.expert[i], has, bits);
            if (has && (same & ((1u << lane) - 1)) == 0) mine[batch.expert[i]] += __popc(same);
            __syncwarp();
        }
    }
    __syncthreads();
    // Counts become start indices: summed over warps here, then over blocks, then over experts.
    uint32_t* here = counts + kWarps * local;   // per expert: number of this block's entries, later the index of the first one
    uint32_t* every = here + local;             // per expert: number of entries of all blocks
    for (uint32_t e = threadIdx.x; e < local; e += kThreads) {
        uint32_t sum = 0;
        for (uint32_t w = 0; w < kWarps; ++w) {
            const uint32_t count = counts[w * local + e];
            counts[w * local + e] = sum;
            sum += count;
        }
        here[e] = blocks == 1 ? 0 : sum;
        every[e] = sum;
        if (blocks != 1) __stcg(p.block_counts + blockIdx.x * local + e, sum);
    }
    if (blocks != 1) {
        if (!rank_barrier(g.state, blocks)) return;
        for (uint32_t e = threadIdx.x; e < local; e += kThreads) {
            uint32_t before = 0, sum = 0;
#pragma unroll 8
            for (uint32_t b = 0; b < blocks; ++b) {
                const uint32_t count = __ldcg(p.block_counts + b * local + e);
                before += b < blockIdx.x ? count : 0;
                sum += count;
            }
            here[e] = before;
            every[e] = sum;
        }
    }
    __syncthreads();
    if (warp == 0) {
        uint32_t offset = 0;
        for (uint32_t base = 0; base < local; base += 32) {
            const uint32_t e = base + lane;
            uint32_t sum = e < local ? every[e] : 0;
            const uint32_t count = sum;
#pragma unroll
            for (uint32_t step = 1; step < 32; step *= 2) {
                const uint32_t other = __shfl_up_sync(~0u, sum, step);
                if (lane >= step) sum += other;
            }
            if (e < local) {
                here[e] += offset + sum - count;
                if (blockIdx.x == 0) p.expert_offsets[e] = offset + sum - count;
            }
            offset += __shfl_sync(~0u, sum, 31);
        }
        if (blockIdx.x == 0 && lane == 0) p.expert_offsets[local] = offset;
    }
    __syncthreads();
    // Second pass: write every entry. The entries of a short stretch are still in registers.
    for (uint32_t base = begin; base < end; base += 32 * kBatchEntries) {
        if (end - begin > 32 * kBatchEntries) load_batch(p, entries, range.first, base, end, batch);
#pragma unroll
        for (uint32_t i = 0; i < kBatchEntries; ++i) {
            if (base + i * 32 >= end) break;
            const uint32_t expert = batch.expert[i];
            const bool has = expert < local;
            const uint32_t same = lanes_alike(expert, has, bits);
            const uint32_t before = __popc(same & ((1u << lane) - 1));
            if (has) {
                const uint32_t to = here[expert] + mine[expert] + before;
                p.row_index[to] = batch.place[i] / g.top_k;
                p.row_weight[to] = batch.weight[i];
                p.position[batch.place[i]] = to;
            }
            __syncwarp();
            if (has && before == 0) mine[expert] += __popc(same);
            __syncwarp();
        }
    }
}

// One block builds the row lists of a group with one rank, for at most kInOneBlock entries. Warp w has the kEach * 32 entries
// from w * kEach * 32 on, so that loads need not wait for the counts.
__device__ __forceinline__ void list_in_one_block(const DispatchParams& p, uint32_t total, const uint32_t (&experts)[kEach],
                                                  const float (&weights)[kEach], uint32_t* counts /* shared [kWarps][experts] */) {
    __shared__ uint32_t sums[kWarps];
    const uint32_t local = p.group.experts, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t base = warp * kEach * 32 + lane;
    const uint32_t bits = 32 - __clz(max(local, 1u) - 1);
    uint32_t* mine = counts + warp * local;
    for (uint32_t e = lane; e < local; e += 32) mine[e] = 0;
    __syncwarp();
    // Number of entries of the same expert that come before each entry in its warp's stretch.
    uint32_t before[kEach] = {};
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
        if (warp * kEach * 32 + i * 32 >= total) break;
        const bool has = base + i * 32 < total && experts[i] < local;
        const uint32_t same = lanes_alike(experts[i], has, bits);
        const uint32_t earlier = has ? mine[experts[i]] : 0;
        before[i] = earlier + __popc(same & ((1u << lane) - 1));
        __syncwarp();
        if (has && before[i] == earlier) mine[experts[i]] = earlier + __popc(same);
        __syncwarp();
    }
    __syncthreads();
    // Counts become start indices: a thread has an expert, adds up its counts over warps, and scans them over experts.
    const uint32_t e = threadIdx.x;
    uint32_t of_warp[kWarps], count = 0;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) of_warp[w] = e < local ? counts[w * local + e] : 0;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) count += of_warp[w];
    uint32_t sum = count;
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    uint32_t start = sum - count;
    for (uint32_t w = 0; w < warp; ++w) start += sums[w];
    if (e < local) {
        p.expert_offsets[e] = start;
        if (e == local - 1) p.expert_offsets[local] = start + count;
#pragma unroll
        for (uint32_t w = 0; w < kWarps; ++w) {
            counts[w * local + e] = start;
            start += of_warp[w];
        }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
        const uint32_t v = base + i * 32;
        if (v >= total || experts[i] >= local) continue;
        const uint32_t to = mine[experts[i]] + before[i];
        p.row_index[to] = v / p.group.top_k;
        p.row_weight[to] = weights[i];
        p.position[v] = to;
    }
}

}  // namespace
}  // namespace expertd
