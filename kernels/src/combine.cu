// combine: expert outputs back to the source ranks, reduced per rank, then over ranks.
#include "common.cuh"

namespace expertd {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kLoads = 2;            // 16-byte words per lane of a piece
constexpr uint32_t kPiece = 32 * kLoads;  // 1 KB of bf16
constexpr uint32_t kBatch = 4;            // expert outputs loaded together

struct Counts {
    uint32_t tokens[kMaxRanks];
};

__device__ __forceinline__ Counts load_counts(const Group& g) {
    Counts counts;
#pragma unroll
    for (uint32_t source = 0; source < kMaxRanks; ++source) {
        counts.tokens[source] = source < g.ranks ? __ldcg(at<uint32_t>(g, g.rank, g.counts) + source) : 0;
    }
    return counts;
}

__device__ void send_partials(const CombineParams& p, const Counts& counts) {
    const Group& g = p.group;
    const Range range = experts_of(g, g.rank);
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t words = g.hidden / 8;
    const uint32_t pieces = (words + kPiece - 1) / kPiece;
    const uint4* out = static_cast<const uint4*>(p.expert_out);
    uint32_t tokens[kMaxRanks], all = 0, received = 0;
#pragma unroll
    for (uint32_t source = 0; source < kMaxRanks; ++source) {
        tokens[source] = min(counts.tokens[source], g.max_tokens);
        all += tokens[source];
    }
    for (uint32_t item = blockIdx.x * kWarps + threadIdx.x / 32; item < all * pieces; item += gridDim.x * kWarps) {
        // Sources in turn, starting with the next rank, so that no link is asked by all at once.
        uint32_t token = item / pieces, source = g.rank;
        const uint32_t piece = item - token * pieces;
        for (uint32_t step = 1; step <= g.ranks; ++step) {
            const uint32_t candidate = g.rank + step >= g.ranks ? g.rank + step - g.ranks : g.rank + step;
            uint32_t has = 0;
#pragma unroll
            for (uint32_t s = 0; s < kMaxRanks; ++s) has = s == candidate ? tokens[s] : has;
            if (token < has) {
                source = candidate;
                break;
            }
            token -= has;
        }
        const uint64_t row = static_cast<uint64_t>(source) * g.max_tokens + token;
        uint32_t place = 0;
        bool local = false;
        if (lane < g.top_k) {
            // The place of a choice that is not local means nothing, but reading it costs no second round trip.
            const uint32_t id = static_cast<uint32_t>(__ldcg(at<int32_t>(g, g.rank, g.ids) + row * g.top_k + lane));
            place = __ldcg(p.position + row * g.top_k + lane);
            local = id >= range.first && id < range.last;
        }
        uint32_t chosen = __ballot_sync(~0u, local);
        if (chosen == 0) continue;
        received += piece == 0;
        float sum[kLoads][8] = {};
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
        uint4* to = at<uint4>(g, source, g.partials)
            + (static_cast<uint64_t>(g.rank) * g.max_tokens + token) * words;
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i) {
            const uint32_t word = piece * kPiece + i * 32 + lane;
            if (word < words) to[word] = pack_bf16x8(sum[i]);
        }
    }
    if (lane == 0 && received != 0) atomicAdd(&g.state->received, received);
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

// Ranks that hold a partial of `token`.
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

// The same for this warp's first piece, looked up before the wait.
__device__ __forceinline__ uint32_t first_ranks(const CombineParams& p, uint32_t tokens) {
    const uint32_t pieces = (p.group.hidden / 8 + kPiece - 1) / kPiece;
    const uint32_t token = (blockIdx.x * kWarps + threadIdx.x / 32) / pieces;
    return token < tokens ? ranks_of(p, token) : 0;
}

__device__ void reduce_partials(const CombineParams& p, uint32_t tokens, uint32_t dtype, uint32_t wanted) {
    const Group& g = p.group;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t words = g.hidden / 8;
    const uint32_t pieces = (words + kPiece - 1) / kPiece;
    const uint4* partials = at<uint4>(g, g.rank, g.partials);
    for (uint32_t item = blockIdx.x * kWarps + threadIdx.x / 32; item < tokens * pieces; item += gridDim.x * kWarps) {
        const uint32_t token = item / pieces, piece = item - token * pieces;
        if (item >= gridDim.x * kWarps) wanted = ranks_of(p, token);
        uint4 data[kMaxRanks][kLoads];
#pragma unroll
        for (uint32_t r = 0; r < kMaxRanks; ++r) {
            if ((wanted >> r & 1) == 0) continue;
            const uint4* from = partials + (static_cast<uint64_t>(r) * g.max_tokens + token) * words;
#pragma unroll
            for (uint32_t i = 0; i < kLoads; ++i) {
                const uint32_t word = piece * kPiece + i * 32 + lane;
                data[r][i] = word < words ? load_row(from + word) : make_uint4(0, 0, 0, 0);
            }
        }
        const bool shared =
            p.shared != nullptr && (p.places == nullptr || (p.places[token].flags & kSharedExperts) != 0);
        float sum[kLoads][8] = {};
#pragma unroll
        for (uint32_t r = 0; r < kMaxRanks; ++r) {
            if ((wanted >> r & 1) == 0) continue;
#pragma unroll
            for (uint32_t i = 0; i < kLoads; ++i) add_bf16x8(sum[i], data[r][i]);
        }
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i) {
            const uint32_t word = piece * kPiece + i * 32 + lane;
            if (word >= words) continue;
            if (shared) {
                add_bf16x8(sum[i], __ldcg(static_cast<const uint4*>(p.shared)
                                          + static_cast<uint64_t>(token) * words + word));
            }
            store_row(p.out, token, words, word, dtype, sum[i]);
        }
    }
}

template <int Count>
__global__ void __launch_bounds__(kThreads, 1) combine(const __grid_constant__ Ranks<CombineParams, Count> all) {
    const CombineParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    const Group& g = p.group;
    begin_kernel();
    stamp_begin(g.state, kCombine);
    const uint4 state = head(g.state);
    const Counts counts = load_counts(g);
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
    random_delay(g, ~exchange);
    send_partials(p, counts);
    const uint32_t wanted = first_ranks(p, step.tokens);
    send_flags(g, g.combine_flags, flag);
    if (!wait_flags(g, g.combine_flags, flag, kCombine)) return;
    reduce_partials(p, step.tokens, dtype, wanted);
    stamp_end(g.state, kCombine);
}

}  // namespace
}  // namespace expertd

extern "C" int expertd_combine(const expertd::CombineParams* params, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    if (blocks > kMaxBlocks) return cudaErrorInvalidValue;
    return launch(combine<1>, combine<kMaxRanks>, params, count, blocks, kThreads, true, stream);
}
