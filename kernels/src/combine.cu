// combine: adds up expert outputs per row at each rank, sends the partial sums to the source ranks, and adds them up there.
// Choices with weight zero are left out: an expert's output times zero is NaN where the output is infinite.
//
// An item is a piece of a row. Of B blocks, block i % B handles item i on every rank: it sends its rank's partial sums of item i to
// the source, where the block of the same index adds them up. So a block waits only for blocks of the same index. A block sends its
// items in chunks, each with a flag of its own, and adds up one chunk while the next one is under way. One warp only stores flags,
// because storing a flag waits for all earlier stores.
#include "common.cuh"

namespace expertd {
namespace {

constexpr uint32_t kWorkers = 15;         // number of warps that send and add up; with the warp that stores flags, each has 128 registers
constexpr uint32_t kThreads = 32 * (kWorkers + 1);
constexpr uint32_t kLoads = 2;            // number of 16-byte words of a piece per lane
constexpr uint32_t kPiece = 32 * kLoads;  // 16-byte words of a piece: 1 KB of bf16
constexpr uint32_t kBatch = 4;            // number of expert outputs that are loaded together
constexpr uint32_t kBatchAlone = 8;       // the same in a group of one rank
constexpr uint32_t kTogether = 4;         // number of ranks whose partial sums are loaded together

// Shared memory of a block.
struct Shared {
    uint32_t tokens[kMaxRanks];  // number of tokens of each source
    uint32_t sent[kMaxChunks];   // number of warps that have sent their part of each chunk
    uint32_t failed;             // 1: a wait has ended without its flag
};

// How a block's items are cut into chunks. It is equal on every rank, because it follows from the counts of all ranks.
struct Plan {
    uint32_t words;   // 16-byte words of a row
    uint32_t pieces;  // number of pieces of a row
    uint32_t mine;    // number of this block's items of the source with the most tokens
    uint32_t chunk;   // number of items of a chunk
    uint32_t chunks;  // number of chunks
    uint32_t begin;   // first chunk of this launch
    uint32_t end;     // the chunk after the last one of this launch
};

__device__ __forceinline__ uint32_t pieces_of(uint32_t words) { return (words + kPiece - 1) / kPiece; }

// The first chunk that begins with the first item of row `row` or with a later one.
__device__ __forceinline__ uint32_t chunk_at(const Plan& plan, uint32_t row) {
    const uint32_t items = plan.chunk * gridDim.x;
    return min((row * plan.pieces + items - 1) / items, plan.chunks);
}

__device__ __forceinline__ Plan make_plan(const CombineParams& p, const Shared& shared) {
    const Group& g = p.group;
    Plan plan;
    plan.words = g.hidden / 8;
    plan.pieces = pieces_of(plan.words);
    uint32_t most = 0;
    for (uint32_t s = 0; s < g.ranks; ++s) most = max(most, shared.tokens[s]);
    plan.mine = (most * plan.pieces + gridDim.x - 1) / gridDim.x;
    plan.chunk = g.chunk == 0 ? kWorkers : g.chunk;
    // Chunks must be large enough for the number of flags. They are whole turns of all warps, so that no warp idles in the last turn.
    const uint32_t least = (plan.mine + kMaxChunks - 1) / kMaxChunks;
    if (plan.chunk < least) plan.chunk = (least + kWorkers - 1) / kWorkers * kWorkers;
    plan.chunks = max(1u, (plan.mine + plan.chunk - 1) / plan.chunk);
    // A launch for the rows before a boundary has all chunks with items of those rows. Peers may cut their launches elsewhere or not at
    // all, because chunks are the same on every rank.
    plan.begin = chunk_at(plan, p.first_row);
    plan.end = p.end_row == 0 ? plan.chunks : chunk_at(plan, p.end_row);
    return plan;
}

// Counts in shared memory with release ordering: the warp's earlier accesses are visible to a warp that reads the count.
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

// A lane's choice of a row of the window: its physical expert, its weight, and the index of its output if the expert is local.
struct Choice {
    uint32_t physical;
    float weight;
    uint32_t place;
};

// Loads everything at the same time, which saves a second round trip. `place` is meaningless if the choice is not local.
__device__ __forceinline__ Choice load_choice(const CombineParams& p, uint32_t source, uint32_t token) {
    const Group& g = p.group;
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t entry = (static_cast<uint64_t>(source) * g.max_tokens + token) * g.top_k + lane;
    Choice choice = {~0u, 0.0f, 0};
    if (lane < g.top_k) {
        choice.physical = static_cast<uint32_t>(__ldcg(at<int32_t>(g, g.rank, g.ids) + entry));
        choice.weight = __ldcg(at<float>(g, g.rank, g.weights) + entry);
        choice.place = __ldcg(p.position + entry);
    }
    return choice;
}

// Adds up the expert outputs of the lanes in the mask `chosen`, in the order of choices. All lanes of the warp must call it.
template <uint32_t Batch>
__device__ __forceinline__ void add_outputs(const CombineParams& p, uint32_t chosen, uint32_t place, uint32_t words,
                                            uint32_t piece, float (&sum)[kLoads][8]) {
    const uint32_t lane = threadIdx.x % 32;
    const uint4* out = static_cast<const uint4*>(p.expert_out);
    while (chosen != 0) {
        uint4 data[Batch][kLoads];
        const uint32_t batch = min(static_cast<uint32_t>(__popc(chosen)), Batch);
#pragma unroll
        for (uint32_t b = 0; b < Batch; ++b) {
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
        for (uint32_t b = 0; b < Batch; ++b) {
            if (b >= batch) break;
#pragma unroll
            for (uint32_t i = 0; i < kLoads; ++i) add_bf16x8(sum[i], data[b][i]);
        }
    }
}

// An item of one source, which a warp sends. The units of a chunk visit the sources in turn, starting with the next rank, so that
// ranks do not all use the same link at once.
struct Unit {
    uint32_t source, token, piece;
    bool some;  // whether the source has this item
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
    loaded.choice = {~0u, 0.0f, 0};
    if (loaded.some) loaded.choice = load_choice(p, loaded.source, loaded.token);
    return loaded;
}

// Sends this warp's part of a chunk. Returns the number of its rows that have local experts.
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
        const bool local = current.choice.physical >= range.first && current.choice.physical < range.last;
        const uint32_t chosen = __ballot_sync(~0u, local && current.choice.weight != 0.0f);
        if (current.piece == 0) received += __any_sync(~0u, local);
        if (chosen == 0) continue;
        float sum[kLoads][8] = {};
        add_outputs<kBatch>(p, chosen, current.choice.place, plan.words, current.piece, sum);
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

// How result rows are stored.
struct Results {
    uint32_t dtype;
    bool direct;  // at their places; otherwise in `out`
};

__device__ __forceinline__ void store_word(uint8_t* row, uint32_t word, uint32_t dtype, const float (&sum)[8]) {
    if (dtype == kF32) {
        float4* to = reinterpret_cast<float4*>(row) + 2 * word;
        to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else if (dtype == kF16) {
        reinterpret_cast<uint4*>(row)[word] = pack_f16x8(sum);
    } else {
        reinterpret_cast<uint4*>(row)[word] = pack_bf16x8(sum);
    }
}

// Mask of the ranks that send a partial sum of this rank's token `token`.
__device__ __forceinline__ uint32_t ranks_of(const CombineParams& p, const uint32_t* copies, uint32_t token) {
    const Group& g = p.group;
    const uint32_t lane = threadIdx.x % 32;
    uint32_t rank = 0;
    if (lane < g.top_k) {
        const uint64_t entry = static_cast<uint64_t>(token) * g.top_k + lane;
        const int32_t id = __ldcg(p.topk_ids + entry);
        const float weight = __ldcg(p.topk_weights + entry);
        if (weight != 0.0f) rank = 1u << rank_of(g, physical_of(g, copies, static_cast<uint32_t>(id), token));
    }
    return __reduce_or_sync(~0u, rank);
}

// The place of this rank's token `token`. Without places the output of the shared experts belongs to all rows.
__device__ __forceinline__ RowPlace load_place(const CombineParams& p, uint32_t token) {
    if (p.places == nullptr) return {nullptr, 0, kSharedExperts};
    return load_row_place(p.places + token);
}

// Loads four sums of a CPU rank from host memory. The host has seen the CPU rank's word before this kernel was launched, so plain loads
// suffice, as in copy_in.
__device__ __forceinline__ float4 load_host(const float* address) {
    float4 v;
    asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(address));
    return v;
}

__device__ __forceinline__ void add_f32x8(float (&sum)[8], const float4& low, const float4& high) {
    const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += v[i];
}

// Stores the result of a piece of this rank's token `token`: `sum`, plus the output of the shared experts if the row includes it, plus
// the sums of CPU ranks.
__device__ __forceinline__ void finish(const CombineParams& p, uint32_t token, uint32_t piece, uint32_t words, const RowPlace& place,
                                       const Results& results, float (&sum)[kLoads][8]) {
    const uint32_t lane = threadIdx.x % 32;
    const bool shared = p.shared != nullptr && (place.flags & kSharedExperts) != 0;
    const uint64_t row_bytes = static_cast<uint64_t>(words) * (results.dtype == kF32 ? 32 : 16);
    uint8_t* row = results.direct ? place.output : static_cast<uint8_t*>(p.out) + token * row_bytes;
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
        const uint32_t word = piece * kPiece + i * 32 + lane;
        if (word >= words) continue;
        if (shared) {
            add_bf16x8(sum[i], __ldcg(static_cast<const uint4*>(p.shared) + static_cast<uint64_t>(token) * words + word));
        }
        for (uint32_t rank = 0; rank < p.sums_count; ++rank) {
            const float* from = p.sums + rank * p.sums_stride + static_cast<uint64_t>(token) * words * 8 + word * 8;
            add_f32x8(sum[i], load_host(from), load_host(from + 4));
        }
        store_word(row, word, results.dtype, sum[i]);
    }
}

// Waits until every rank has sent this block's part of a chunk. Returns false in all lanes if a wait failed.
__device__ __forceinline__ bool wait_chunk(const Group& g, uint64_t flag, uint32_t chunk) {
    const uint32_t lane = threadIdx.x % 32;
    bool late = false;
    if (lane < g.ranks) {
        const uint64_t* flags = at<uint64_t>(g, g.rank, g.combine_flags);
        late = !wait_flag(g, flags + (lane * kMaxBlocks + blockIdx.x) * kMaxChunks + chunk, flag, lane, kCombine);
    }
    late = __any_sync(~0u, late);
    // Makes what the polling lanes acquired visible to the other lanes.
    __syncwarp();
    return !late;
}

// Waits for a chunk, even if this warp has no part of it, and adds up this warp's part.
__device__ bool reduce_chunk(const CombineParams& p, const Shared& shared, const Plan& plan, const uint32_t* copies,
                             uint64_t flag, const Results& results, uint32_t chunk) {
    const Group& g = p.group;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint4* partials = at<uint4>(g, g.rank, g.partials);
    const uint32_t end = min((chunk + 1) * plan.chunk, plan.mine);
    uint32_t at_item = chunk * plan.chunk + warp;
    // Determine before the wait which ranks send partial sums.
    const uint32_t first_token = (blockIdx.x + at_item * gridDim.x) / plan.pieces;
    uint32_t wanted = at_item < end && first_token < shared.tokens[g.rank] ? ranks_of(p, copies, first_token) : 0;
    if (!wait_chunk(g, flag, chunk)) return false;
    for (; at_item < end; at_item += kWorkers) {
        const uint32_t item = blockIdx.x + at_item * gridDim.x;
        const uint32_t token = item / plan.pieces, piece = item - token * plan.pieces;
        if (token >= shared.tokens[g.rank]) break;
        if (at_item >= chunk * plan.chunk + kWorkers) wanted = ranks_of(p, copies, token);
        const RowPlace place = load_place(p, token);
        float sum[kLoads][8] = {};
        // Load the partial sums of kTogether ranks at a time, because registers hold no more.
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
        finish(p, token, piece, plan.words, place, results, sum);
    }
    return true;
}

// Stores a flag for each chunk, once all workers have sent their part of it. One warp runs this.
__device__ void flag_chunks(const Group& g, Shared& shared, const Plan& plan, uint64_t flag) {
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t chunk = plan.begin; chunk < plan.end; ++chunk) {
        while (load_acquire(&shared.sent[chunk]) != kWorkers) {
            if (load_acquire(&shared.failed) != 0) return;
        }
        __syncwarp();
        if (lane < g.ranks) {
            // The workers' counter and this release at system scope order the workers' stores before the flag.
            uint64_t* flags = at<uint64_t>(g, lane, g.combine_flags);
            store_release_system(flags + (g.rank * kMaxBlocks + blockIdx.x) * kMaxChunks + chunk, flag);
        }
    }
}

// What a warp needs to know of an item in a group of one rank.
struct ItemAlone {
    uint32_t token, piece;
    uint32_t output;  // a lane's choice: index of its output
    float weight;     // and its weight, zero in lanes without a choice
    RowPlace place;
};

__device__ __forceinline__ ItemAlone load_alone(const CombineParams& p, uint32_t item, uint32_t pieces) {
    const Group& g = p.group;
    const uint32_t lane = threadIdx.x % 32;
    ItemAlone loaded = {item / pieces, 0, 0, 0.0f, {}};
    loaded.piece = item - loaded.token * pieces;
    if (loaded.token >= g.max_tokens) return loaded;
    if (lane < g.top_k) {
        const uint64_t entry = static_cast<uint64_t>(loaded.token) * g.top_k + lane;
        loaded.output = __ldcg(p.position + entry);
        loaded.weight = __ldcg(p.topk_weights + entry);
    }
    loaded.place = load_place(p, loaded.token);
    return loaded;
}

// combine in a group of one rank: without windows and flags, but with the same roundings.
//
// What dispatch and the kernels before it wrote is loaded before the experts have ended: this kernel's blocks can only start once all
// blocks of the experts' kernel have waited for dispatch. So after that wait a result is one load away.
__device__ void combine_alone(const CombineParams& p) {
    const Group& g = p.group;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t words = g.hidden / 8, pieces = pieces_of(words), stride = gridDim.x * kWorkers;
    uint32_t item = p.first_row * pieces + blockIdx.x + warp * gridDim.x;
    // The first item is loaded before the number of tokens is known: the buffers always hold max_tokens tokens.
    ItemAlone next = load_alone(p, item, pieces);
    const uint4 state = head(g.state);
    const Results results = {__ldcg(&g.state->out_dtype), __ldcg(&g.state->direct) != 0};
    const uint64_t exchange = load_word(&g.state->exchange);
    const uint64_t number = load_word(&g.state->step);
    const uint32_t tokens = min(state.w, g.max_tokens);
    // After an earlier error the items are undefined.
    const uint32_t end = state.z != 0 ? 0 : (p.end_row == 0 ? tokens : min(p.end_row, tokens)) * pieces;
    begin_kernel();
    if (p.first_row == 0) stamp_begin(g.state, kCombine);
    const uint32_t error = __ldcg(&g.state->error);  // includes the experts' error; loaded here, so that it arrives with the first outputs
    if (warp == kWorkers) {
        if (blockIdx.x != 0 || lane != 0 || error != 0) return;
        g.state->sequence = exchange + 1;
        g.state->received = tokens;
        // No fence, because this is only a hint to the host and publishes no data.
        if (p.experts_done != nullptr) *static_cast<volatile uint64_t*>(p.experts_done) = number;
        return;
    }
    for (; item < end; item += stride) {
        const ItemAlone current = next;
        if (item + stride < end) next = load_alone(p, item + stride, pieces);
        float sum[kLoads][8] = {};
        add_outputs<kBatchAlone>(p, __ballot_sync(~0u, current.weight != 0.0f), current.output, words, current.piece, sum);
        if (error != 0) return;
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i) {
            // Round to bf16, as partial sums of several ranks are.
            const uint4 partial = pack_bf16x8(sum[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[i][j] = 0.0f;
            add_bf16x8(sum[i], partial);
        }
        finish(p, current.token, current.piece, words, current.place, results, sum);
    }
    stamp_end(g.state, kCombine);
}

template <int Count>
__global__ void __launch_bounds__(kThreads, 1) combine(const __grid_constant__ Ranks<CombineParams, Count> all) {
    __shared__ Shared shared;
    const CombineParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    const Group& g = p.group;
    if (g.ranks == 1) {
        combine_alone(p);
        return;
    }
    begin_kernel();
    if (p.first_row == 0) stamp_begin(g.state, kCombine);
    const uint4 state = head(g.state);
    if (threadIdx.x < g.ranks) {
        shared.tokens[threadIdx.x] = min(__ldcg(at<uint32_t>(g, g.rank, g.counts) + threadIdx.x), g.max_tokens);
    }
    if (threadIdx.x < kMaxChunks) shared.sent[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.failed = 0;
    const Results results = {__ldcg(&g.state->out_dtype), __ldcg(&g.state->direct) != 0};
    const uint64_t exchange = load_word(&g.state->exchange);
    const StepView step = open_step(state, g.max_tokens);
    if (!step.ok) return;
    const uint64_t flag = g.generation | exchange;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        g.state->sequence = exchange + 1;
        // No fence, because this is only a hint to the host and publishes no data.
        if (p.experts_done != nullptr) *static_cast<volatile uint64_t*>(p.experts_done) = g.state->step;
    }
    const Plan plan = make_plan(p, shared);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == kWorkers) {
        flag_chunks(g, shared, plan, flag);
        return;
    }
    const Range range = experts_of(g, g.rank);
    const uint32_t* copies = copies_of(g);
    uint32_t received = 0;
    bool ok = true;
    for (uint32_t chunk = plan.begin; chunk <= plan.end && ok; ++chunk) {
        if (chunk < plan.end) {
            random_delay(g, ~exchange, chunk * kWorkers + warp);
            received += send_chunk(p, shared, plan, range, chunk);
            __syncwarp();
            if (lane == 0) count_release(&shared.sent[chunk]);
        }
        if (chunk != plan.begin) ok = reduce_chunk(p, shared, plan, copies, flag, results, chunk - 1);
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
