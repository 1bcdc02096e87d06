// prepare + dispatch: rows to the ranks that own their experts, then lists of rows per local expert.
//
// A token's place at the receiver is fixed (source * max_tokens + token), so nothing has to be counted before sending:
// every warp moves a piece of a row as soon as it has read which ranks want it. Holes cost nothing, because experts
// reach rows through row_index.
#include "common.cuh"

namespace expertd {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kLoads = 4;                         // 16-byte loads in flight per lane
constexpr uint32_t kPiece = 32 * kLoads;               // 16-byte words of one warp's piece of a row: 2 KB
constexpr uint32_t kFewEntries = 1024;                 // up to here a warp lists an expert's rows alone

__device__ void send_rows(const DispatchParams& p, uint32_t tokens) {
    const Group& g = p.group;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t words = g.hidden / 8;
    const uint32_t pieces = (words + kPiece - 1) / kPiece;
    const uint64_t own = static_cast<uint64_t>(g.rank) * g.max_tokens;
    // Neighbouring warps of one block take the pieces of one row, and blocks take rows in turn.
    for (uint32_t item = blockIdx.x * kWarps + threadIdx.x / 32; item < tokens * pieces; item += gridDim.x * kWarps) {
        const uint32_t token = item / pieces, piece = item - token * pieces;
        const uint4* from = static_cast<const uint4*>(p.tokens) + static_cast<uint64_t>(token) * words;
        uint4 data[kLoads];
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i) {
            const uint32_t word = piece * kPiece + i * 32 + lane;
            if (word < words) data[i] = __ldcg(from + word);
        }
        int32_t id = 0;
        uint32_t wanted = 0;
        if (lane < g.top_k) {
            id = __ldcg(p.topk_ids + static_cast<uint64_t>(token) * g.top_k + lane);
            wanted = 1u << owner_of(g, static_cast<uint32_t>(id));
        }
        wanted = __reduce_or_sync(~0u, wanted);
        if (piece == 0 && lane < g.top_k) {
            const float weight = __ldcg(p.topk_weights + static_cast<uint64_t>(token) * g.top_k + lane);
            const uint64_t place = (own + token) * g.top_k + lane;
            for (uint32_t peer = 0; peer < g.ranks; ++peer) {
                at<int32_t>(g, peer, g.ids)[place] = id;
                at<float>(g, peer, g.weights)[place] = weight;
            }
        }
        // Every rank starts with another peer, so that no link is asked by all at once.
        for (uint32_t step = 1; step <= g.ranks; ++step) {
            uint32_t peer = g.rank + step;
            if (peer >= g.ranks) peer -= g.ranks;
            if ((wanted >> peer & 1) == 0) continue;
            uint4* to = at<uint4>(g, peer, g.rows) + (own + token) * words;
#pragma unroll
            for (uint32_t i = 0; i < kLoads; ++i) {
                const uint32_t word = piece * kPiece + i * 32 + lane;
                if (word < words) to[word] = data[i];
            }
        }
    }
}

// Entries of all sources in order, without the holes between them.
struct Entries {
    uint32_t count[kMaxRanks];  // tokens * k of each source
    uint32_t total;
};

// Counts entries of [begin, end) below `first` + `expert` (and local), and equal to it. Same result on all lanes.
__device__ uint2 count_entries(const Group& g, const Entries& entries, uint32_t begin, uint32_t end, int32_t first,
                               int32_t expert) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t below = 0, equal = 0, start = 0;
    for (uint32_t source = 0; source < g.ranks; ++source) {
        const uint32_t from = max(begin, start), to = min(end, start + entries.count[source]);
        const int32_t* ids = at<int32_t>(g, g.rank, g.ids) + static_cast<uint64_t>(source) * g.max_tokens * g.top_k;
#pragma unroll 8
        for (uint32_t i = from + lane; i < to; i += 32) {
            const int32_t id = __ldcg(ids + (i - start));
            below += id >= first && id < expert;
            equal += id == expert;
        }
        start += entries.count[source];
    }
    return make_uint2(__reduce_add_sync(~0u, below), __reduce_add_sync(~0u, equal));
}

// Writes the entries of [begin, end) that chose `expert`, in order, from `place` on.
__device__ void list_entries(const DispatchParams& p, const Entries& entries, uint32_t begin, uint32_t end,
                             int32_t expert, uint32_t place) {
    const Group& g = p.group;
    const uint32_t lane = threadIdx.x % 32;
    uint32_t start = 0;
    for (uint32_t source = 0; source < g.ranks; ++source) {
        const uint32_t from = max(begin, start), to = min(end, start + entries.count[source]);
        const uint64_t base = static_cast<uint64_t>(source) * g.max_tokens * g.top_k;
        const int32_t* ids = at<int32_t>(g, g.rank, g.ids) + base;
        const float* weights = at<float>(g, g.rank, g.weights) + base;
#pragma unroll 4
        for (uint32_t chunk = from; chunk < to; chunk += 32) {
            const uint32_t i = chunk + lane;
            const bool chosen = i < to && __ldcg(ids + (i - start)) == expert;
            const uint32_t mask = __ballot_sync(~0u, chosen);
            if (chosen) {
                const uint32_t entry = i - start;
                const uint32_t to_place = place + __popc(mask & ((1u << lane) - 1));
                p.row_index[to_place] = source * g.max_tokens + entry / g.top_k;
                p.row_weight[to_place] = __ldcg(weights + entry);
                p.position[base + entry] = to_place;
            }
            place += __popc(mask);
        }
        start += entries.count[source];
    }
}

__device__ void list_rows(const DispatchParams& p) {
    const Group& g = p.group;
    const Range range = experts_of(g, g.rank);
    const int32_t first = static_cast<int32_t>(range.first);
    const uint32_t local = range.last - range.first;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Entries entries;
    entries.total = 0;
#pragma unroll
    for (uint32_t source = 0; source < kMaxRanks; ++source) {
        entries.count[source] = 0;
        if (source < g.ranks) {
            const uint32_t tokens = __ldcg(at<uint32_t>(g, g.rank, g.counts) + source);
            if (tokens > g.max_tokens) set_error(g.state, kBadCount, source, kDispatch);
            entries.count[source] = min(tokens, g.max_tokens) * g.top_k;
            entries.total += entries.count[source];
        }
    }
    if (local == 0) {
        if (blockIdx.x == 0 && threadIdx.x == 0) p.expert_offsets[0] = 0;
        return;
    }
    if (entries.total <= kFewEntries) {
        // Spread over blocks first: few experts per warp, all blocks busy.
        for (uint32_t e = warp * gridDim.x + blockIdx.x; e < local; e += gridDim.x * kWarps) {
            const int32_t expert = first + static_cast<int32_t>(e);
            const uint2 seen = count_entries(g, entries, 0, entries.total, first, expert);
            if (lane == 0) {
                p.expert_offsets[e] = seen.x;
                if (e == local - 1) p.expert_offsets[local] = seen.x + seen.y;
            }
            if (seen.y != 0) list_entries(p, entries, 0, entries.total, expert, seen.x);
        }
        return;
    }
    // Many entries: a block per expert, every warp with its own stretch of entries.
    __shared__ uint32_t below[kWarps], equal[kWarps];
    const uint32_t stretch = ((entries.total + kWarps - 1) / kWarps + 31) / 32 * 32;
    const uint32_t begin = min(warp * stretch, entries.total), end = min(begin + stretch, entries.total);
    for (uint32_t e = blockIdx.x; e < local; e += gridDim.x) {
        const int32_t expert = first + static_cast<int32_t>(e);
        const uint2 seen = count_entries(g, entries, begin, end, first, expert);
        __syncthreads();
        if (lane == 0) {
            below[warp] = seen.x;
            equal[warp] = seen.y;
        }
        __syncthreads();
        uint32_t start = 0, place = 0, count = 0;
        for (uint32_t w = 0; w < kWarps; ++w) {
            start += below[w];
            place += w < warp ? equal[w] : 0;
            count += equal[w];
        }
        if (threadIdx.x == 0) {
            p.expert_offsets[e] = start;
            if (e == local - 1) p.expert_offsets[local] = start + count;
        }
        if (seen.y != 0) list_entries(p, entries, begin, end, expert, start + place);
    }
}

template <int Count>
__global__ void __launch_bounds__(kThreads, 1) dispatch(const __grid_constant__ Ranks<DispatchParams, Count> all) {
    const DispatchParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    const Group& g = p.group;
    stamp_begin(g.state, kDispatch);
    const StepView step = open_step(g);
    if (!step.ok) return;
    const uint64_t flag = g.generation | step.sequence;
    random_delay(g, step.sequence);
    if (blockIdx.x == 0 && threadIdx.x < g.ranks) at<uint32_t>(g, threadIdx.x, g.counts)[g.rank] = step.tokens;
    send_rows(p, step.tokens);
    send_flags(g, g.dispatch_flags, flag);
    if (!wait_flags(g, g.dispatch_flags, flag, kDispatch)) return;
    stamp_end(g.state, kDispatch);
    list_rows(p);
    stamp_end(g.state, kPrepare);
}

}  // namespace
}  // namespace expertd

extern "C" int expertd_dispatch(const expertd::DispatchParams* params, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    if (blocks > kMaxBlocks) return cudaErrorInvalidValue;
    return launch(dispatch<1>, dispatch<kMaxRanks>, params, count, blocks, kThreads, true, stream);
}
