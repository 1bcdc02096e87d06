// prepare and dispatch: pushes rows to the ranks that own their experts, and lists the received rows by local expert.
//
// A token's place at the receiver is fixed (source * max_tokens + token), so nothing is counted before sending: each warp sends a
// piece of a row as soon as it has read the row's expert ids. Unused rows of the window cost nothing, because experts find rows
// through row_index.
//
// The first blocks exchange the routing, which is small, and list rows while the rows of the other blocks are still under way. The
// other blocks send rows and end, except the first of them, which waits for the rows of all ranks. So the kernel ends only after
// all flags of all ranks have arrived, and both rows and lists are complete for the experts.
#include "common.cuh"
#include "experts_quantise.cuh"

namespace expertd {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kLoads = 4;                         // number of 16-byte loads in flight per lane
constexpr uint32_t kPiece = 32 * kLoads;               // 16-byte words of a piece, the part of a row that one warp sends: 2 KB
constexpr uint32_t kAlone = 1024;                      // largest number of entries that one block lists alone
constexpr uint32_t kShare = 512;                       // smallest number of entries per block when several blocks list
constexpr uint32_t kBatchEntries = 8;                         // number of entries that a lane loads ahead
constexpr uint32_t kFew = 128;                         // largest number of entries that are listed by comparing each with all others

// Number of blocks, out of `blocks`, that send routing and list rows. They are the first ones.
__device__ __forceinline__ uint32_t list_blocks(uint32_t blocks) { return min(max(blocks / 8, 1u), 16u); }

// A piece of a row. Lane j also holds the expert id of the token's choice j.
struct Item {
    uint4 data[kLoads];
    int32_t id;
};

__device__ __forceinline__ Item load_item(const DispatchParams& p, uint32_t item, uint32_t pieces, uint32_t words) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t token = item / pieces, piece = item - token * pieces;
    const uint4* from = static_cast<const uint4*>(p.tokens) + static_cast<uint64_t>(token) * words;
    Item loaded;
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
        const uint32_t word = piece * kPiece + i * 32 + lane;
        loaded.data[i] = word < words ? __ldcg(from + word) : make_uint4(0, 0, 0, 0);
    }
    loaded.id = 0;
    if (lane < p.group.top_k) loaded.id = __ldcg(p.topk_ids + static_cast<uint64_t>(token) * p.group.top_k + lane);
    return loaded;
}

// Quantises and sends a piece of a row. The elements of 16 lanes share a scale.
__device__ __forceinline__ void send_fp8(const DispatchParams& p, const Item& loaded, uint32_t wanted, uint64_t row, uint32_t piece,
                                         uint32_t words) {
    const Group& g = p.group;
    const uint32_t lane = threadIdx.x % 32;
    uint2 codes[kLoads];
    float scales[kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
        const GroupScale group = group_scale(lanes_max<16>(largest_of(loaded.data[i])), p.power_of_two_scales != 0);
        codes[i] = quantise(loaded.data[i], group.inverse);
        scales[i] = group.scale;
    }
    for (uint32_t step = 1; step <= g.ranks; ++step) {
        uint32_t peer = g.rank + step;
        if (peer >= g.ranks) peer -= g.ranks;
        if ((wanted >> peer & 1) == 0) continue;
        uint8_t* to = at<uint8_t>(g, peer, g.rows) + row * fp8_row_bytes(g.hidden);
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i) {
            const uint32_t word = piece * kPiece + i * 32 + lane;  // eight elements
            if (word >= words) continue;
            reinterpret_cast<uint2*>(to)[word] = codes[i];
            if (lane % 16 == 0) reinterpret_cast<float*>(to + g.hidden)[word / 16] = scales[i];
        }
    }
}

__device__ __forceinline__ void send_item(const DispatchParams& p, const uint32_t* copies, const Item& loaded, uint32_t item,
                                          uint32_t pieces, uint32_t words) {
    const Group& g = p.group;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t token = item / pieces, piece = item - token * pieces;
    const uint64_t row = static_cast<uint64_t>(g.rank) * g.max_tokens + token;
    const uint32_t wanted = __reduce_or_sync(
        ~0u, lane < g.top_k ? 1u << rank_of(g, physical_of(g, copies, static_cast<uint32_t>(loaded.id), token)) : 0);
    if (p.fp8_rows != 0) {
        send_fp8(p, loaded, wanted, row, piece, words);
        return;
    }
    // Each rank starts with a different peer, so that they do not all use the same link at once.
    for (uint32_t step = 1; step <= g.ranks; ++step) {
        uint32_t peer = g.rank + step;
        if (peer >= g.ranks) peer -= g.ranks;
        if ((wanted >> peer & 1) == 0) continue;
        uint4* to = at<uint4>(g, peer, g.rows) + row * words;
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i) {
            const uint32_t word = piece * kPiece + i * 32 + lane;
            if (word < words) to[word] = loaded.data[i];
        }
    }
}

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

// Lists few entries in the first block, one thread per entry. A thread counts the entries that come before its own in the order of
// (expert, entry).
__device__ void list_few(const DispatchParams& p, const Entries& entries, uint32_t total, const Range& range,
                         uint32_t* keys /* shared [kFew] */) {
    const Routing routing = routing_of(p);
    const uint32_t local = range.last - range.first, v = threadIdx.x;
    uint32_t key = ~0u, place = 0;
    float weight = 0.0f;
    if (v < total) {
        place = find(p.group, entries, v);
        const uint32_t expert = static_cast<uint32_t>(__ldcg(routing.ids + place)) - range.first;
        weight = __ldcg(routing.weights + place);
        if (expert < local) key = expert * kFew + v;
    }
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
        if (blockIdx.x == 0) list_few(p, entries, total, range, counts);
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

// Sends this rank's chosen physical experts and their weights to every rank, waits for those of all ranks, and lists rows.
__device__ void carry_routing(const DispatchParams& p, const uint4& state, uint32_t lists, uint32_t* counts) {
    const Group& g = p.group;
    // Load the first entry before the number of tokens is known: the buffers always hold max_tokens tokens.
    uint32_t entry = blockIdx.x * kThreads + threadIdx.x;
    int32_t id = 0;
    float weight = 0.0f;
    if (entry < g.max_tokens * g.top_k) {
        id = __ldcg(p.topk_ids + entry);
        weight = __ldcg(p.topk_weights + entry);
    }
    const StepView step = open_step(state, g.max_tokens);
    if (!step.ok) return;
    const uint32_t* copies = copies_of(g);
    const uint64_t flag = g.generation | step.sequence;
    random_delay(g, step.sequence);
    if (blockIdx.x == 0 && threadIdx.x == 0) g.state->exchange = step.sequence;
    if (blockIdx.x == 0 && threadIdx.x < g.ranks) at<uint32_t>(g, threadIdx.x, g.counts)[g.rank] = step.tokens;
    const uint64_t start = static_cast<uint64_t>(g.rank) * g.max_tokens * g.top_k;
    const uint32_t entries = step.tokens * g.top_k, stride = lists * kThreads;
    for (; entry < entries; entry += stride) {
        const uint32_t physical = physical_of(g, copies, static_cast<uint32_t>(id), entry / g.top_k);
        for (uint32_t turn = 1; turn <= g.ranks; ++turn) {
            const uint32_t peer = g.rank + turn >= g.ranks ? g.rank + turn - g.ranks : g.rank + turn;
            at<uint32_t>(g, peer, g.ids)[start + entry] = physical;
            at<float>(g, peer, g.weights)[start + entry] = weight;
        }
        if (entry + stride < entries) {
            id = __ldcg(p.topk_ids + entry + stride);
            weight = __ldcg(p.topk_weights + entry + stride);
        }
    }
    send_flags(g, g.dispatch_flags, flag);
    if (!wait_flags(g, g.dispatch_flags, flag, kDispatch, 0, lists)) return;
    list_rows(p, step.tokens, lists, counts);
    stamp_end(g.state, kPrepare);
}

// Lists rows in a group of one rank, where nothing is sent and experts read `tokens`.
__device__ void list_alone(const DispatchParams& p, const uint4& state, uint32_t lists, uint32_t* counts) {
    const Group& g = p.group;
    const StepView step = open_step(state, g.max_tokens);
    if (!step.ok) return;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        g.state->exchange = step.sequence;
        g.state->end_ns[kDispatch] = now_ns();
    }
    list_rows(p, step.tokens, lists, counts);
    stamp_end(g.state, kPrepare);
}

// Sends this rank's rows to the ranks of their experts. The first of these blocks also waits for the rows of all ranks.
__device__ void carry_rows(const DispatchParams& p, const uint4& state, uint32_t lists) {
    const Group& g = p.group;
    // Neighbouring warps of a block send neighbouring pieces of a row, and the blocks take turns. As in carry_routing, the first
    // piece is loaded before the number of tokens is known.
    const uint32_t words = g.hidden / 8;
    const uint32_t pieces = (words + kPiece - 1) / kPiece;
    const uint32_t block = blockIdx.x - lists, blocks = gridDim.x - lists;
    uint32_t item = block * kWarps + threadIdx.x / 32;
    Item loaded;
    if (item < g.max_tokens * pieces) loaded = load_item(p, item, pieces, words);
    const StepView step = open_step(state, g.max_tokens);
    if (!step.ok) return;
    const uint32_t* copies = copies_of(g);
    const uint64_t flag = g.generation | step.sequence;
    random_delay(g, step.sequence);
    const uint32_t items = step.tokens * pieces, stride = blocks * kWarps;
    while (item < items) {
        const Item current = loaded;
        if (item + stride < items) loaded = load_item(p, item + stride, pieces, words);
        send_item(p, copies, current, item, pieces, words);
        item += stride;
    }
    send_flags(g, g.dispatch_flags, flag);
    if (block != 0 || !wait_flags(g, g.dispatch_flags, flag, kDispatch, lists, blocks)) return;
    if (threadIdx.x == 0) g.state->end_ns[kDispatch] = now_ns();
}

template <int Count>
__global__ void __launch_bounds__(kThreads, 1) dispatch(const __grid_constant__ Ranks<DispatchParams, Count> all) {
    extern __shared__ uint32_t counts[];
    const DispatchParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    begin_kernel();
    stamp_begin(p.group.state, kDispatch);
    const uint4 state = head(p.group.state);
    const uint32_t lists = list_blocks(gridDim.x);
    if (p.group.ranks == 1) {
        if (blockIdx.x < lists) list_alone(p, state, lists, counts);
    } else if (blockIdx.x < lists) {
        carry_routing(p, state, lists, counts);
    } else {
        carry_rows(p, state, lists);
    }
}

}  // namespace
}  // namespace expertd

extern "C" int expertd_dispatch(const expertd::DispatchParams* params, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    if (blocks > kMaxBlocks || blocks < 2 || count == 0) return cudaErrorInvalidValue;
    if (params->fp8_rows != 0 && params->group.hidden % 64 != 0) return cudaErrorInvalidValue;
    const uint32_t local = (params->group.experts + params->group.ranks - 1) / params->group.ranks;
    if (local > kMaxExperts) return cudaErrorInvalidValue;
    const uint32_t shared = max((kWarps + 2) * local, kFew) * sizeof(uint32_t);
    return launch(dispatch<1>, dispatch<kMaxRanks>, params, count, blocks, kThreads, true, stream, shared);
}
