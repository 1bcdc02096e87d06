// The gate of the portable path: logits = tokens x weight^T in bf16 with f32 sums on the tensor cores (mma.sync), then the choice of experts,
// in two launches. Logits go through memory of the module, so a process must not run two gates at once on a device: ranks run their steps
// on one stream.
#include "../gate_choice.cuh"
#include "../modules.h"
#include "../mma.cuh"

namespace expertd {
namespace {

constexpr uint32_t kRows = 16;         // tokens of a warp: mma's M
constexpr uint32_t kColumns = 8;       // experts of mma's N
constexpr uint32_t kWarps = 16;        // warps of a block of the first launch
constexpr uint32_t kThreads = 32 * kWarps;
constexpr uint32_t kMostLogits = 2048 * kMaxExperts; // of a pair of launches
constexpr uint32_t kChoosers = 8;      // warps of a block of the second launch, each for a token
constexpr uint32_t kFewTokens = 128;   // up to this many tokens blocks are small, so that there are many
constexpr uint32_t kEnoughBlocks = 100; // for large blocks, which read tokens and weights less often

__device__ float logits_of[kMostLogits];  // [tokens][experts]

// Tiles of experts that every warp multiplies, and groups of warps, each with its tokens. The warps of a group divide the inner dimension.
template <int Tiles, int Groups> struct Block {
    static constexpr uint32_t kSplits = kWarps / Groups;
    static constexpr uint32_t kTokens = kRows * Groups, kExperts = kColumns * Tiles;
    static constexpr int kBatch = Tiles < 8 ? Tiles : 8;  // tiles whose weights a warp loads at a time
    static constexpr int kPass = Tiles < 4 ? Tiles : 4;   // tiles whose sums are added up at a time
    static constexpr uint32_t kSumBytes = kWarps * kPass * 4 * 32 * sizeof(float);
};

// A lane's 16 bytes of a row; zeros where there is none.
__device__ __forceinline__ uint4 load_word_of(const uint4* matrix, uint32_t row, uint32_t rows, uint32_t word, uint32_t words) {
    return word < words && row < rows ? __ldcg(matrix + static_cast<uint64_t>(row) * words + word) : make_uint4(0, 0, 0, 0);
}

// Computes the logits of the tokens from `first` on. For few tokens the sums are those of gate.cu, term by term.
template <int Tiles, int Groups>
__global__ void __launch_bounds__(kThreads, 1) portable_logits(const __grid_constant__ GateParams p, uint32_t first) {
    using Of = Block<Tiles, Groups>;
    extern __shared__ float sums[];  // [kWarps][kPass * 4][32]
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / Of::kSplits, split = warp % Of::kSplits;
    if (first == 0 && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) p.state->begin_ns[kGate] = now_ns();
    const StepKind what = step_kind(p.state);
    const StepView step = open_step(head(p.state), p.max_tokens);
    const uint32_t first_token = first + blockIdx.y * Of::kTokens, first_expert = blockIdx.x * Of::kExperts;
    if (!step.ok || what.routed || first_token >= step.tokens) return;
    const GateLayer layer = p.layers[what.layer];
    const GateProducts products(p, layer, what);
    const uint32_t words = p.hidden / 8, steps = (words + 4 * Of::kSplits - 1) / (4 * Of::kSplits), row = lane / 4;
    float acc[Tiles][4] = {};
    for (uint32_t product = 0; product < products.count(); ++product) {
        const uint4* x = static_cast<const uint4*>(products.takes_low_rows(product) ? p.tokens_low : p.tokens);
        const uint4* w = static_cast<const uint4*>(products.takes_low_weights(product) ? layer.weight_low : layer.weight);
#pragma unroll(Tiles == 1 ? 4 : Tiles <= 4 ? 2 : 1)
        for (uint32_t at = 0; at < steps; ++at) {
            const uint32_t word = (at * Of::kSplits + split) * 4 + lane % 4;
            uint4 a[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) a[half] = load_word_of(x, first_token + group * kRows + half * 8 + row, step.tokens, word, words);
#pragma unroll
            for (int from = 0; from < Tiles; from += Of::kBatch) {
                uint4 b[Of::kBatch];
#pragma unroll
                for (int t = 0; t < Of::kBatch; ++t) b[t] = load_word_of(w, first_expert + (from + t) * kColumns + row, p.experts, word, words);
                // A lane's 16 bytes feed two instructions; which columns those have does not matter, as long as both operands agree.
#pragma unroll
                for (int t = 0; t < Of::kBatch; ++t) {
                    mma_16x8x16(acc[from + t], {a[0].x, a[1].x, a[0].y, a[1].y}, b[t].x, b[t].y);
                    mma_16x8x16(acc[from + t], {a[0].z, a[1].z, a[0].w, a[1].w}, b[t].z, b[t].w);
                }
            }
        }
    }
#pragma unroll
    for (int from = 0; from < Tiles; from += Of::kPass) {
        if (from != 0) __syncthreads();  // the sums before have been read
#pragma unroll
        for (int t = 0; t < Of::kPass; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[(warp * Of::kPass * 4 + t * 4 + i) * 32 + lane] = acc[from + t][i];
        }
        __syncthreads();
        // Adds up the sums of a group's warps in their order.
        constexpr uint32_t kEach = Of::kPass * 4 * 32;
        for (uint32_t at = threadIdx.x; at < Groups * kEach; at += kThreads) {
            const uint32_t of = at / kEach, within = at % kEach;
            const float* summands = sums + of * Of::kSplits * kEach + within;
            float sum = summands[0];
#pragma unroll
            for (uint32_t s = 1; s < Of::kSplits; ++s) sum += summands[s * kEach];
            const uint32_t i = within / 32 % 4, column = within % 32;
            const uint32_t token = first_token + of * kRows + i / 2 * 8 + column / 4;
            const uint32_t expert = first_expert + (from + within / 128) * kColumns + column % 4 * 2 + i % 2;
            if (token < step.tokens && expert < p.experts) logits_of[(token - first) * p.experts + expert] = sum;
        }
    }
}

// Chooses the experts of the tokens from `first` on, a warp for each.
template <int Per>
__global__ void __launch_bounds__(32 * kChoosers) portable_choice(const __grid_constant__ GateParams p, uint32_t first) {
    __shared__ float scratch[kChoosers][Per * 32];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, within = blockIdx.x * kChoosers + warp, token = first + within;
    const StepKind what = step_kind(p.state);
    const StepView step = open_step(head(p.state), p.max_tokens);
    if (step.ok && blockIdx.x == 0 && threadIdx.x == 0) p.state->end_ns[kGate] = now_ns();
    if (!step.ok || what.routed || token >= step.tokens || (p.places != nullptr && (p.places[token].flags & kGivenRouting) != 0)) return;
    const GateLayer layer = p.layers[what.layer];
    float logits[Per];
#pragma unroll
    for (int i = 0; i < Per; ++i) {
        const uint32_t expert = i * 32 + lane;
        logits[i] = expert < p.experts ? __ldcg(logits_of + within * p.experts + expert) : -kInfinity;
    }
    choose<Per>(p, layer, token, logits, scratch[warp]);
}

template <int Tiles, int Groups> dim3 grid_of(uint32_t experts, uint32_t tokens) {
    using Of = Block<Tiles, Groups>;
    return dim3((experts + Of::kExperts - 1) / Of::kExperts, (tokens + Of::kTokens - 1) / Of::kTokens);
}

template <int Tiles, int Groups> void launch_logits(const GateParams& p, uint32_t first, uint32_t tokens, cudaStream_t stream) {
    using Of = Block<Tiles, Groups>;
    static_assert(Of::kSumBytes <= 48 * 1024, "without asking for more");
    portable_logits<Tiles, Groups><<<grid_of<Tiles, Groups>(p.experts, tokens), kThreads, Of::kSumBytes, stream>>>(p, first);
}

// Whether blocks with this number of tiles of experts are filled, and enough.
template <int Tiles> bool has_enough(uint32_t experts, uint32_t tokens) {
    const dim3 grid = grid_of<Tiles, 4>(experts, tokens);
    return experts > Tiles * kColumns / 2 && grid.x * grid.y >= kEnoughBlocks;
}

int launch_gate(const GateParams& p, uint32_t tokens, cudaStream_t stream) {
    const auto choose = p.experts <= 64 ? portable_choice<2> : p.experts <= 128 ? portable_choice<4> : p.experts <= 256 ? portable_choice<8> : portable_choice<16>;
    const uint32_t most = kMostLogits / p.experts;
    for (uint32_t first = 0; first < tokens; first += most) {
        const uint32_t here = tokens - first < most ? tokens - first : most;
        if (tokens <= kFewTokens) launch_logits<1, 1>(p, first, here, stream);
        else if (has_enough<16>(p.experts, here)) launch_logits<16, 4>(p, first, here, stream);
        else if (has_enough<8>(p.experts, here)) launch_logits<8, 4>(p, first, here, stream);
        else launch_logits<4, 4>(p, first, here, stream);
        choose<<<(here + kChoosers - 1) / kChoosers, 32 * kChoosers, 0, stream>>>(p, first);
        const cudaError_t code = cudaGetLastError();
        if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
}

const Module module(reinterpret_cast<const void*>(portable_choice<2>));

}  // namespace
}  // namespace expertd

extern "C" int expertd_gate(const expertd::GateParams* params, uint32_t count, uint32_t tokens_at_most, void* stream) {
    using namespace expertd;
    for (uint32_t i = 0; i < count; ++i) {
        const GateParams& p = params[i];
        if (p.experts == 0 || p.experts > kMaxExperts || p.top_k == 0 || p.top_k > kMaxTopK || p.top_k > p.experts
            || p.hidden % 8 != 0 || (p.group_score != kNoGroups && (p.groups == 0 || p.groups > 32))) {
            return cudaErrorInvalidValue;
        }
        const int code = launch_gate(p, tokens_at_most == 0 ? 1 : tokens_at_most, static_cast<cudaStream_t>(stream));
        if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
}
