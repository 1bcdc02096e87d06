// combine: expert outputs back to the source ranks, reduced per rank, then over ranks.
//
// Work is cut into items, a piece of a row each, and item i is block i % B's business on every rank: that block sends
// its rank's partial sums of item i to the source, and at the source the block of the same number adds them up. So a
// block waits for its namesakes only. It sends in chunks of items, each with a flag of its own, and adds up a chunk while
// the next one is under way; a warp of its own stores the flags, because that waits for the stores before it.
#include "common.cuh"

namespace expertd {
namespace {

constexpr uint32_t kWorkers = 15;         // warps that send and add up: with the one for flags, 128 registers each
constexpr uint32_t kThreads = 32 * (kWorkers + 1);
constexpr uint32_t kLoads = 2;            // 16-byte words per lane of a piece
constexpr uint32_t kPiece = 32 * kLoads;  // 1 KB of bf16
constexpr uint32_t kBatch = 4;            // expert outputs loaded together
constexpr uint32_t kTogether = 4;         // ranks whose partial sums are loaded together

// What the warps of a block share.
struct Shared {
    uint32_t tokens[kMaxRanks];  // of each source
    uint32_t sent[kMaxChunks];   // warps that are done with sending a chunk
    uint32_t failed;             // a wait has ended without a flag
};

// How the items of a block are cut into chunks: the same on every rank, because it follows from all ranks' counts.
struct Plan {
    uint32_t words;   // 16-byte words of a row
    uint32_t pieces;  // of a row
    uint32_t mine;    // items of this block for the source that has most
    uint32_t chunk;   // items of a chunk
    uint32_t chunks;
};

__device__ __forceinline__ uint32_t pieces_of(uint32_t words) { return (words + kPiece - 1) / kPiece; }

__device__ __forceinline__ Plan make_plan(const Group& g, const Shared& shared) {
    Plan plan;
    plan.words = g.hidden / 8;
    plan.pieces = pieces_of(plan.words);
    uint32_t most = 0;
    for (uint32_t s = 0; s < g.ranks; ++s) most = max(most, shared.tokens[s]);
    plan.mine = (most * plan.pieces + gridDim.x - 1) / gridDim.x;
    plan.chunk = g.chunk == 0 ? kWorkers : g.chunk;
    // As many as fit the flags; whole turns of all warps, so that none waits for the last of a turn.
    const uint32_t least = (plan.mine + kMaxChunks - 1) / kMaxChunks;
    if (plan.chunk < least) plan.chunk = (least + kWorkers - 1) / kWorkers * kWorkers;
    plan.chunks = max(1u, (plan.mine + plan.chunk - 1) / plan.chunk);
    return plan;
}

// Shared counters of one block: what a warp did before it counts is visible to who sees the count.
__device__ __forceinline__ void count_release(uint32_t* counter) {
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(counter));
    asm volatile("red.release.cta.shared::cta.add.u32 [%0], 1;" ::"r"(at) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* counter) {
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(counter));
    uint32_t value;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
    return value;
}

// A lane's choice of one row of the window: whether its expert is local, and where its output stands.
struct Choice {
    uint32_t id;
    uint32_t place;
};

// The place of a choice that is not local means nothing, but reading it costs no second round trip.
__device__ __forceinline__ Choice load_choice(const CombineParams& p, uint32_t source, uint32_t token) {
    const Group& g = p.group;
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t entry = (static_cast<uint64_t>(source) * g.max_tokens + token) * g.top_k + lane;
    Choice choice = {~0u, 0};
    if (lane < g.top_k) {
        choice.id = static_cast<uint32_t>(__ldcg(at<int32_t>(g, g.rank, g.ids) + entry));
        choice.place = __ldcg(p.position + entry);
    }
    return choice;
}

// Adds up the outputs of the `chosen` lanes' experts, in the order of choices. All lanes call it.
__device__ __forceinline__ void add_outputs(const CombineParams& p, uint32_t chosen, uint32_t place, uint32_t words,
                                            uint32_t piece, float (&sum)[kLoads][8]) {
    const uint32_t lane = threadIdx.x % 32;
    const uint4* out = static_cast<const uint4*>(p.expert_out);
    while (chosen != 0) {
        uint4 data[kBatch][kLoads];
        const uint32_t batch = min(static_cast<uint32_t>(__popc(chosen)), kBatch);
#pragma unroll
        for (uint32_t b = 0; b < kBatch; ++b) {
            if (b >= batch) break;
            const uint32_t choice = __ffs(chosen) - 1;
            chosen &= chosen - 1;
            const uint4* from = out + static_cast<uint64_t>(__shfl_sync(~0u, place, choice)) * words;
#pragma unroll
            for (uint32_t i = 0; i < kLoads; ++i) {
                const uint32_t word = piece * kPiece + i * 32 + lane;
                data[b][i] = word < words ? load_row(from + word) : make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (uint32_t b = 0; b < kBatch; ++b) {
            if (b >= batch) break;
#pragma unroll
            for (uint32_t i = 0; i < kLoads; ++i) add_bf16x8(sum[i], data[b][i]);
        }
    }
}

// One unit of sending: an item of one source. Units of a chunk go to sources in turn, starting with the next rank, so
// that no link is asked by all at once.
struct Unit {
    uint32_t source, token, piece;
    bool some;  // the source has this item
    Choice choice;
};

__device__ __forceinline__ Unit load_unit(const CombineParams& p, const Shared& shared, const Plan& plan,
                                          uint32_t first, uint32_t unit) {
    const Group& g = p.group;
    const uint32_t within = unit / g.ranks, turn = unit - within * g.ranks + 1;
    Unit loaded;
    loaded.source = g.rank + turn >= g.ranks ? g.rank + turn - g.ranks : g.rank + turn;
    const uint32_t item = blockIdx.x + (first + within) * gridDim.x;
    loaded.token = item / plan.pieces;
    loaded.piece = item - loaded.token * plan.pieces;
    loaded.some = loaded.token < shared.tokens[loaded.source];
    loaded.choice = {~0u, 0};
    if (loaded.some) loaded.choice = load_choice(p, loaded.source, loaded.token);
    return loaded;
}

// Sends this warp's part of a chunk. Returns the rows it met that have local experts.
__device__ uint32_t send_chunk(const CombineParams& p, const Shared& shared, const Plan& plan, const Range& range,
                               uint32_t chunk) {
    const Group& g = p.group;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t first = chunk * plan.chunk;
    const uint32_t units = min(plan.chunk, plan.mine - min(first, plan.mine)) * g.ranks;
    uint32_t received = 0;
    if (warp >= units) return 0;
    Unit next = load_unit(p, shared, plan, first, warp);
    for (uint32_t unit = warp; unit < units; unit += kWorkers) {
        const Unit current = next;
        if (unit + kWorkers < units) next = load_unit(p, shared, plan, first, unit + kWorkers);
        const bool local = current.choice.id >= range.first && current.choice.id < range.last;
        const uint32_t chosen = __ballot_sync(~0u, local);
        if (chosen == 0) continue;
        received += current.piece == 0;
        float sum[kLoads][8] = {};
        add_outputs(p, chosen, current.choice.place, plan.words, current.piece, sum);
        uint4* to = at<uint4>(g, current.source, g.partials)
            + (static_cast<uint64_t>(g.rank) * g.max_tokens + current.token) * plan.words;
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i) {
            const uint32_t word = current.piece * kPiece + i * 32 + lane;
            if (word < plan.words) to[word] = pack_bf16x8(sum[i]);
        }
    }
    return received;
}

__device__ void store_row(void* out, uint64_t row, uint32_t words, uint32_t word, uint32_t dtype,
                          const float (&sum)[8]) {
    const uint64_t place = row * words + word;
    if (dtype == kF32) {
        float4* to = static_cast<float4*>(out) + 2 * place;
        to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else if (dtype == kF16) {
        static_cast<uint4*>(out)[place] = pack_f16x8(sum);
    } else {
        static_cast<uint4*>(out)[place] = pack_bf16x8(sum);
    }
}

// Ranks that hold a partial of own token `token`.
__device__ __forceinline__ uint32_t ranks_of(const CombineParams& p, uint32_t token) {
    const Group& g = p.group;
    const uint32_t lane = threadIdx.x % 32;
    uint32_t rank = 0;
    if (lane < g.top_k) {
        const int32_t id = __ldcg(p.topk_ids + static_cast<uint64_t>(token) * g.top_k + lane);
        rank = 1u << owner_of(g, static_cast<uint32_t>(id));
    }
    return __reduce_or_sync(~0u, rank);
}

// The result of a piece of own token `token`: `sum`, and the shared experts' row where it is wanted.
__device__ __forceinline__ void finish(const CombineParams& p, uint32_t token, uint32_t piece, uint32_t words,
                                       uint32_t dtype, float (&sum)[kLoads][8]) {
    const uint32_t lane = threadIdx.x % 32;
    const bool shared =
        p.shared != nullptr && (p.places == nullptr || (p.places[token].flags & kSharedExperts) != 0);
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
        const uint32_t word = piece * kPiece + i * 32 + lane;
        if (word >= words) continue;
        if (shared) {
            add_bf16x8(sum[i], __ldcg(static_cast<const uint4*>(p.shared) + static_cast<uint64_t>(token) * words + word));
        }
        store_row(p.out, token, words, word, dtype, sum[i]);
    }
}

// Waits until every rank has sent this block's part of a chunk. False when the deadline passed, for the whole warp.
__device__ __forceinline__ bool wait_chunk(const Group& g, uint64_t flag, uint32_t chunk) {
    const uint32_t lane = threadIdx.x % 32;
    bool late = false;
    if (lane < g.ranks) {
        const uint64_t* flags = at<uint64_t>(g, g.rank, g.combine_flags);
        late = !wait_flag(g, flags + (lane * kMaxBlocks + blockIdx.x) * kMaxChunks + chunk, flag, lane, kCombine);
    }
    late = __any_sync(~0u, late);
    // Hands what the polling lanes acquired to the others.
    __syncwarp();
    return !late;
}

// Waits for a chunk, whether or not there is something of it to do, and adds up this warp's part.
__device__ bool reduce_chunk(const CombineParams& p, const Shared& shared, const Plan& plan, uint64_t flag,
                             uint32_t dtype, uint32_t chunk) {
    const Group& g = p.group;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint4* partials = at<uint4>(g, g.rank, g.partials);
    const uint32_t end = min((chunk + 1) * plan.chunk, plan.mine);
    uint32_t at_item = chunk * plan.chunk + warp;
    // Which ranks to add is looked up before the wait.
    const uint32_t first_token = (blockIdx.x + at_item * gridDim.x) / plan.pieces;
    uint32_t wanted = at_item < end && first_token < shared.tokens[g.rank] ? ranks_of(p, first_token) : 0;
    if (!wait_chunk(g, flag, chunk)) return false;
    for (; at_item < end; at_item += kWorkers) {
        const uint32_t item = blockIdx.x + at_item * gridDim.x;
        const uint32_t token = item / plan.pieces, piece = item - token * plan.pieces;
        if (token >= shared.tokens[g.rank]) break;
        if (at_item >= chunk * plan.chunk + kWorkers) wanted = ranks_of(p, token);
        float sum[kLoads][8] = {};
        // As many ranks at a time as registers hold.
        for (uint32_t first = 0; first < g.ranks; first += kTogether) {
            uint4 data[kTogether][kLoads];
#pragma unroll
            for (uint32_t r = 0; r < kTogether; ++r) {
                if ((wanted >> (first + r) & 1) == 0) continue;
                const uint4* from = partials + (static_cast<uint64_t>(first + r) * g.max_tokens + token) * plan.words;
#pragma unroll
                for (uint32_t i = 0; i < kLoads; ++i) {
                    const uint32_t word = piece * kPiece + i * 32 + lane;
                    data[r][i] = word < plan.words ? load_row(from + word) : make_uint4(0, 0, 0, 0);
                }
            }
#pragma unroll
            for (uint32_t r = 0; r < kTogether; ++r) {
                if ((wanted >> (first + r) & 1) == 0) continue;
#pragma unroll
                for (uint32_t i = 0; i < kLoads; ++i) add_bf16x8(sum[i], data[r][i]);
            }
        }
        finish(p, token, piece, plan.words, dtype, sum);
    }
    return true;
}

// The warp that stores flags: one for each chunk, once all workers have sent their part of it.
__device__ void flag_chunks(const Group& g, Shared& shared, const Plan& plan, uint64_t flag) {
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t chunk = 0; chunk < plan.chunks; ++chunk) {
        while (load_acquire(&shared.sent[chunk]) != kWorkers) {
            if (load_acquire(&shared.failed) != 0) return;
        }
        __syncwarp();
        if (lane < g.ranks) {
            // The workers' stores are ordered before the flag through their counter, at system scope by this release.
            uint64_t* flags = at<uint64_t>(g, lane, g.combine_flags);
            store_release_system(flags + (g.rank * kMaxBlocks + blockIdx.x) * kMaxChunks + chunk, flag);
        }
    }
}

// A group of one rank: no windows, no flags, the same roundings.
__device__ void combine_alone(const CombineParams& p, const Plan& plan, uint32_t tokens, uint32_t dtype) {
    const Group& g = p.group;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t received = 0;
    for (uint32_t item = blockIdx.x + warp * gridDim.x; item < tokens * plan.pieces; item += gridDim.x * kWorkers) {
        const uint32_t token = item / plan.pieces, piece = item - token * plan.pieces;
        const uint32_t place = lane < g.top_k ? __ldcg(p.position + static_cast<uint64_t>(token) * g.top_k + lane) : 0;
        float sum[kLoads][8] = {};
        add_outputs(p, __ballot_sync(~0u, lane < g.top_k), place, plan.words, piece, sum);
        received += piece == 0;
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i) {
            // As it would have travelled.
            const uint4 partial = pack_bf16x8(sum[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[i][j] = 0.0f;
            add_bf16x8(sum[i], partial);
        }
        finish(p, token, piece, plan.words, dtype, sum);
    }
    if (lane == 0 && received != 0) atomicAdd(&g.state->received, received);
}

template <int Count>
__global__ void __launch_bounds__(kThreads, 1) combine(const __grid_constant__ Ranks<CombineParams, Count> all) {
    __shared__ Shared shared;
    const CombineParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    const Group& g = p.group;
    begin_kernel();
    stamp_begin(g.state, kCombine);
    const uint4 state = head(g.state);
    if (threadIdx.x < g.ranks) {
        shared.tokens[threadIdx.x] = min(__ldcg(at<uint32_t>(g, g.rank, g.counts) + threadIdx.x), g.max_tokens);
    }
    if (threadIdx.x < kMaxChunks) shared.sent[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.failed = 0;
    const uint32_t dtype = __ldcg(&g.state->out_dtype);
    const uint64_t exchange = __ldcg(reinterpret_cast<const unsigned long long*>(&g.state->exchange));
    const StepView step = open_step(state, g.max_tokens);
    if (!step.ok) return;
    const uint64_t flag = g.generation | exchange;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        g.state->sequence = exchange + 1;
        // A hint to the host, which publishes nothing: no fence.
        if (p.experts_done != nullptr) *static_cast<volatile uint64_t*>(p.experts_done) = g.state->step;
    }
    const Plan plan = make_plan(g, shared);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == kWorkers) {
        if (g.ranks != 1) flag_chunks(g, shared, plan, flag);
        return;
    }
    if (g.ranks == 1) {
        combine_alone(p, plan, step.tokens, dtype);
        stamp_end(g.state, kCombine);
        return;
    }
    const Range range = experts_of(g, g.rank);
    uint32_t received = 0;
    bool ok = true;
    for (uint32_t chunk = 0; chunk <= plan.chunks && ok; ++chunk) {
        if (chunk < plan.chunks) {
            random_delay(g, ~exchange, chunk * kWorkers + warp);
            received += send_chunk(p, shared, plan, range, chunk);
            __syncwarp();
            if (lane == 0) count_release(&shared.sent[chunk]);
        }
        if (chunk != 0) ok = reduce_chunk(p, shared, plan, flag, dtype, chunk - 1);
    }
    if (!ok && lane == 0) count_release(&shared.failed);
    if (lane == 0 && received != 0) atomicAdd(&g.state->received, received);
    stamp_end(g.state, kCombine);
}

}  // namespace
}  // namespace expertd

extern "C" int expertd_combine(const expertd::CombineParams* params, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    if (blocks > kMaxBlocks) return cudaErrorInvalidValue;
    return launch(combine<1>, combine<kMaxRanks>, params, count, blocks, kThreads, true, stream);
}
