// prepare and dispatch: pushes rows to the ranks that own their experts, and lists the received rows by local expert.
//
// A token's place at the receiver is fixed (source * max_tokens + token), so nothing is counted before sending: each warp sends a
// piece of a row as soon as it has read the row's expert ids. Unused rows of the window cost nothing, because experts find rows
// through row_index.
//
// The first blocks exchange the routing, which is small, and list rows while the rows of the other blocks are still under way. The
// other blocks send rows and end, except the first of them, which waits for the rows of all ranks. So the kernel ends only after
// all flags of all ranks have arrived, and both rows and lists are complete for the experts.
//
// In a group of one rank nothing is sent. If experts take FP8 rows, the other blocks quantise each row once, into the window.
#include "dispatch_clusters.cuh"
#include "experts_quantise.cuh"

namespace expertd {
namespace {

constexpr uint32_t kLoads = 4;                         // number of 16-byte loads in flight per lane
constexpr uint32_t kPiece = 32 * kLoads;               // 16-byte words of a piece, the part of a row that one warp sends: 2 KB

// Number of blocks, out of `blocks`, that send routing and list rows. They are the first ones.
__host__ __device__ __forceinline__ uint32_t list_blocks(uint32_t blocks) { return min(max(blocks / 8, 1u), 16u); }

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
    if (p.group.ranks > 1 && lane < p.group.top_k) loaded.id = __ldcg(p.topk_ids + static_cast<uint64_t>(token) * p.group.top_k + lane);
    return loaded;
}

// Quantises a piece of a row and sends it to the ranks in `wanted`. The elements of 16 lanes share a scale.
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

__device__ __forceinline__ void send_item(const DispatchParams& p, const uint32_t* copies, const Item& loaded, uint32_t token,
                                          uint32_t piece, uint32_t words) {
    const Group& g = p.group;
    const uint32_t lane = threadIdx.x % 32;
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

// Lists rows in a group of one rank, where nothing is sent.
__device__ void list_alone(const DispatchParams& p, const uint4& state, uint32_t lists, uint32_t* counts) {
    const Group& g = p.group;
    // Load entries before the number of tokens is known: the buffers always hold max_tokens tokens.
    uint32_t experts[kEach];
    float weights[kEach];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
        const uint32_t v = (threadIdx.x / 32 * kEach + i) * 32 + threadIdx.x % 32;
        const bool there = blockIdx.x == 0 && v < g.max_tokens * g.top_k;
        experts[i] = there ? static_cast<uint32_t>(__ldcg(p.topk_ids + v)) : ~0u;
        weights[i] = there ? __ldcg(p.topk_weights + v) : 0.0f;
    }
    FewEntry few = {~0u, 0.0f, threadIdx.x};
    if (blockIdx.x == 0 && threadIdx.x < min(kFew, g.max_tokens * g.top_k)) {
        few.expert = static_cast<uint32_t>(__ldcg(p.topk_ids + threadIdx.x));
        few.weight = __ldcg(p.topk_weights + threadIdx.x);
    }
    const StepView step = open_step(state, g.max_tokens);
    if (!step.ok) return;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        g.state->exchange = step.sequence;
        g.state->end_ns[kDispatch] = now_ns();
    }
    const uint32_t total = step.tokens * g.top_k;
    if (total > kInOneBlock || g.experts > kThreads) {
        list_rows(p, step.tokens, lists, counts);
    } else if (blockIdx.x == 0) {
        if (total <= kFew && g.experts < kThreads) list_few(p, total, g.experts, few, counts);
        else list_in_one_block(p, total, experts, weights, counts);
    }
    stamp_end(g.state, kPrepare);
}

// A warp's share of the pieces of this rank's rows, which the warps of `blocks` blocks divide. Neighbouring warps of a block have
// neighbouring pieces of a row, and the blocks take turns.
class Pieces {
  public:
    // Loads the first piece, as in carry_routing before the number of tokens is known.
    __device__ __forceinline__ Pieces(const DispatchParams& p, uint32_t block, uint32_t blocks)
        : p_(p), words_(p.group.hidden / 8), pieces_((words_ + kPiece - 1) / kPiece), item_(block * kWarps + threadIdx.x / 32), stride_(blocks * kWarps) {
        if (item_ < p.group.max_tokens * pieces_) loaded_ = load_item(p, item_, pieces_, words_);
    }

    // Calls `send(piece, token, index of the piece, words of a row)` for each piece, after the load of the next piece has begun.
    template <class Send> __device__ __forceinline__ void each(uint32_t tokens, Send send) {
        const uint32_t items = tokens * pieces_;
        while (item_ < items) {
            const Item current = loaded_;
            const uint32_t token = item_ / pieces_, piece = item_ - token * pieces_;
            item_ += stride_;
            if (item_ < items) loaded_ = load_item(p_, item_, pieces_, words_);
            send(current, token, piece, words_);
        }
    }

  private:
    const DispatchParams& p_;
    const uint32_t words_, pieces_;
    uint32_t item_;
    const uint32_t stride_;
    Item loaded_;
};

// Sends this rank's rows to the ranks of their experts. The first of these blocks also waits for the rows of all ranks.
__device__ void carry_rows(const DispatchParams& p, const uint4& state, uint32_t lists) {
    const Group& g = p.group;
    const uint32_t block = blockIdx.x - lists, blocks = gridDim.x - lists;
    Pieces pieces(p, block, blocks);
    const StepView step = open_step(state, g.max_tokens);
    if (!step.ok) return;
    const uint32_t* copies = copies_of(g);
    const uint64_t flag = g.generation | step.sequence;
    random_delay(g, step.sequence);
    pieces.each(step.tokens, [&](const Item& item, uint32_t token, uint32_t piece, uint32_t words) {
        send_item(p, copies, item, token, piece, words);
    });
    send_flags(g, g.dispatch_flags, flag);
    if (block != 0 || !wait_flags(g, g.dispatch_flags, flag, kDispatch, lists, blocks)) return;
    if (threadIdx.x == 0) g.state->end_ns[kDispatch] = now_ns();
}

// Quantises the rows of a rank alone, each once, while the first blocks list them.
__device__ void quantise_alone(const DispatchParams& p, const uint4& state, uint32_t lists) {
    Pieces pieces(p, blockIdx.x - lists, gridDim.x - lists);
    const StepView step = open_step(state, p.group.max_tokens);
    if (!step.ok) return;
    pieces.each(step.tokens, [&](const Item& item, uint32_t token, uint32_t piece, uint32_t words) {
        send_fp8(p, item, 1, token, piece, words);
    });
}

// Lists the rows of a rank alone in a grid of clusters. All blocks take the same branch: nothing sets the error word while this kernel
// runs.
__device__ void list_many_alone(const DispatchParams& p, const uint4& state, uint32_t* counts) {
    const StepView step = open_step(state, p.group.max_tokens);
    if (!step.ok) return;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        p.group.state->exchange = step.sequence;
        p.group.state->end_ns[kDispatch] = now_ns();
    }
    list_by_clusters(p, step.tokens, counts);
    stamp_end(p.group.state, kPrepare);
}

template <int Count>
__global__ void __launch_bounds__(kThreads, 1) dispatch(const __grid_constant__ Ranks<DispatchParams, Count> all) {
    extern __shared__ uint32_t counts[];
    const DispatchParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    begin_kernel();
    stamp_begin(p.group.state, kDispatch);
    const uint4 state = head(p.group.state);
    const bool alone = Count == 1 && p.group.ranks == 1, clusters = alone && cluster_blocks() > 1;
    // A rank alone whose rows stay in bf16 has only the blocks that list.
    const uint32_t lists = clusters ? kClusterLists : alone && p.fp8_rows == 0 ? gridDim.x : list_blocks(gridDim.x);
    if (alone && blockIdx.x >= lists) {
        quantise_alone(p, state, lists);
    } else if (clusters) {
        list_many_alone(p, state, counts);
    } else if (alone) {
        list_alone(p, state, lists, counts);
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
    const bool alone = count == 1 && params->group.ranks == 1, clusters = alone && blocks >= kClustersFrom;
    const uint32_t lists = clusters ? kClusterLists : list_blocks(blocks);
    const uint32_t all = clusters ? blocks / kClusterBlocks * kClusterBlocks : blocks;
    const uint32_t launched = alone && params->fp8_rows == 0 ? lists : all;
    return launch(dispatch<1>, dispatch<kMaxRanks>, params, count, launched, kThreads, true, stream, shared, clusters ? kClusterBlocks : 1);
}
