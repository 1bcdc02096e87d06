// The gate of steps with few tokens: computes logits = tokens x weight^T in bf16 with f32 sums on the tensor cores, then chooses the
// experts. gate_wide.cu is the gate of many tokens.
//
// A cluster of blocks computes kTokens tokens and all experts; each block has a part of the experts, and chooses for some of the tokens.
// Logits go straight to the shared memory of the block that chooses. What needs no rows happens while the rows are still on their way:
// copy_in announces the layer, and the gate loads its weights.
#include "gate_choice.cuh"
#include "gate_wide.h"
#include "modules.h"
#include "mma.cuh"
#include "ptx.cuh"

namespace expertd {
namespace {

constexpr uint32_t kTokens = 16;     // tokens of a cluster
constexpr uint32_t kColumns = 8;     // experts of a tile
constexpr uint32_t kSumWarps = 16;   // warps of a block that multiply; each sums over a part of the inner dimension
constexpr uint32_t kSumThreads = 32 * kSumWarps;
constexpr int kHintBarrier = 1, kStartBarrier = 2, kSumsBarrier = 3;

// Tiles: tiles of experts of a block. Size: blocks of a cluster.
template <int Tiles, int Size> constexpr uint32_t kChoosers = kTokens / Size;  // warps of a block that choose, each for one token
template <int Tiles, int Size> constexpr uint32_t kAllThreads = kSumThreads + 32 * (1 + kChoosers<Tiles, Size>);
template <int Tiles, int Size> constexpr uint32_t kMost = Tiles * Size * kColumns;  // largest number of experts
template <int Tiles> constexpr uint32_t kSumBytes = kSumWarps * Tiles * kTokens * kColumns * sizeof(float);

template <int Threads> __device__ __forceinline__ void barrier_of(int barrier) {
    __syncwarp();
    named_sync<Threads>(barrier);
}

// Loads a lane's part of 32 columns of kTokens rows, or of the rows of Tiles * kColumns experts. What does not exist is zero.
template <int Tiles>
__device__ __forceinline__ void load_weights(const uint4* w, uint32_t first, uint32_t experts, uint32_t word, uint32_t words,
                                             uint4 (&b)[Tiles]) {
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
        const uint32_t expert = first + t * kColumns + threadIdx.x % 32 / 4;
        b[t] = word < words && expert < experts ? __ldg(w + static_cast<uint64_t>(expert) * words + word) : make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ void load_tokens(const uint4* x, uint32_t first, uint32_t tokens, uint32_t word, uint32_t words, uint4 (&a)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t token = first + half * 8 + threadIdx.x % 32 / 4;
        a[half] = word < words && token < tokens ? load_row(x + static_cast<uint64_t>(token) * words + word) : make_uint4(0, 0, 0, 0);
    }
}

// Adds the products of 32 columns. A lane's 16-byte load feeds two instructions. The columns are in another order than the instruction
// expects, but in the same order for both operands, so the terms of the sum are the same.
template <int Tiles>
__device__ __forceinline__ void multiply(float (&acc)[Tiles][4], const uint4 (&a)[2], const uint4 (&b)[Tiles]) {
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
        mma_16x8x16(acc[t], {a[0].x, a[1].x, a[0].y, a[1].y}, b[t].x, b[t].y);
        mma_16x8x16(acc[t], {a[0].z, a[1].z, a[0].w, a[1].w}, b[t].z, b[t].w);
    }
}

template <int Tiles, int Size>
__global__ void __launch_bounds__(kAllThreads<Tiles, Size>, 1) gate(const __grid_constant__ GateParams p) {
    constexpr uint32_t kAll = kAllThreads<Tiles, Size>, kChoose = kChoosers<Tiles, Size>;
    constexpr int kPer = kMost<Tiles, Size> < 64 ? 2 : kMost<Tiles, Size> / 32;  // experts of a lane that chooses
    constexpr int kAhead = Tiles == 1 ? 4 : 8 / Tiles;  // steps of the inner dimension whose weights are loaded before rows arrive
    extern __shared__ float sums[];                  // [kSumWarps][Tiles * 4][32]
    __shared__ float logits[kChoose][kPer * 32];     // of the tokens for which this block chooses
    __shared__ float scratch[kChoose][kPer * 32];
    __shared__ uint64_t complete;                    // completes when the logits are there
    __shared__ uint32_t started;                     // 1: the previous kernel has ended
    __shared__ uint64_t announced;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t block = blockIdx.x, first_token = blockIdx.y * kTokens;
    if (threadIdx.x == 0) {
        barrier_init(&complete, 1);
        barrier_init_fence();
        started = 0;
    }
    for (uint32_t i = threadIdx.x; i < kChoose * kPer * 32; i += kAll) logits[0][i] = 0.0f;
    __syncwarp();
    cluster_sync();

    if (warp == kSumWarps) {
        begin_kernel();
        if (block == 0 && blockIdx.y == 0 && lane == 0) p.state->begin_ns[kGate] = now_ns();
        *static_cast<volatile uint32_t*>(&started) = 1;
        barrier_of<kAll>(kStartBarrier);
        return;
    }
    if (warp > kSumWarps) {
        const uint32_t slot = warp - kSumWarps - 1, token = first_token + slot * Size + block;
        barrier_of<kAll>(kStartBarrier);
        const uint4 state = head(p.state);
        const StepKind what = step_kind(p.state);
        const bool given = token < p.max_tokens && p.places != nullptr && (p.places[token].flags & kGivenRouting) != 0;
        const uint32_t tokens = min(state.w, p.max_tokens);
        if (state.z != 0 || what.routed || token >= tokens) return;
        if (slot == 0 && lane == 0) {
            // The tokens of this block, which are every Size-th of the tile.
            const uint32_t mine = (min(tokens - first_token, kTokens) - block + Size - 1) / Size;
            barrier_arrive_expect(&complete, mine * p.experts * sizeof(float));
        }
        const GateLayer layer = p.layers[what.layer];
        barrier_wait(&complete, 0);
        if (!given) {
            float mine[kPer];
#pragma unroll
            for (int i = 0; i < kPer; ++i) mine[i] = i * 32 + lane < p.experts ? logits[slot][i * 32 + lane] : -kInfinity;
            choose<kPer>(p, layer, token, mine, scratch[slot]);
        }
        if (block == 0 && blockIdx.y == 0 && slot == 0 && lane == 0) p.state->end_ns[kGate] = now_ns();
        return;
    }

    const uint32_t row = lane / 4, quarter = lane % 4, words = p.hidden / 8;
    const uint32_t first_expert = block * (Tiles * kColumns);
    float acc[Tiles][4] = {};
    const auto word_of = [&](uint32_t step) { return (step * kSumWarps + warp) * 4 + quarter; };

    if (warp == 0) {
        if (lane == 0) announced = await_announcement(p.state, &started);
    }
    barrier_of<kSumThreads>(kHintBarrier);
    Hint hint(announced);
    GateLayer layer = {};
    uint4 a[kAhead][2], b[kAhead][Tiles];
    const auto load_ahead = [&] {
        layer = p.layers[hint.layer];
#pragma unroll
        for (int s = 0; s < kAhead; ++s) load_weights(static_cast<const uint4*>(layer.weight), first_expert, p.experts, word_of(s), words, b[s]);
    };
    if (hint.known) {
        load_ahead();
        // The rest comes to L2.
        for (uint32_t word = word_of(kAhead); word < words; word += 4 * kSumWarps) {
            for (uint32_t t = 0; t < Tiles; ++t) {
                const uint32_t expert = first_expert + t * kColumns + row;
                if (expert < p.experts) {
                    prefetch_l2(static_cast<const uint4*>(layer.weight) + static_cast<uint64_t>(expert) * words + word);
                }
            }
        }
    }
    barrier_of<kAll>(kStartBarrier);
    const uint4 state = head(p.state);
    const StepKind what = step_kind(p.state);
    const auto load_tokens_ahead = [&] {
#pragma unroll
        for (int s = 0; s < kAhead; ++s) load_tokens(static_cast<const uint4*>(p.tokens), first_token, hint.tokens, word_of(s), words, a[s]);
    };
    if (hint.known) load_tokens_ahead();
    const uint32_t tokens = min(state.w, p.max_tokens);
    if (state.z != 0 || what.routed || first_token >= tokens) return;
    if (!hint.known || hint.tokens != tokens || hint.layer != what.layer) {
        hint.tokens = tokens, hint.layer = what.layer;
        load_ahead();
        load_tokens_ahead();
    }
    const GateProducts products(p, layer, what);
#pragma unroll
    for (int s = 0; s < kAhead; ++s) multiply(acc, a[s], b[s]);
    for (uint32_t product = 0; product < products.count(); ++product) {
        const uint4* x = static_cast<const uint4*>(products.takes_low_rows(product) ? p.tokens_low : p.tokens);
        const uint4* w = static_cast<const uint4*>(products.takes_low_weights(product) ? layer.weight_low : layer.weight);
        const uint32_t steps = (words + 4 * kSumWarps - 1) / (4 * kSumWarps);
#pragma unroll 2
        for (uint32_t step = product == 0 ? kAhead : 0; step < steps; ++step) {
            uint4 some[2], of_experts[Tiles];
            load_weights(w, first_expert, p.experts, word_of(step), words, of_experts);
            load_tokens(x, first_token, tokens, word_of(step), words, some);
            multiply(acc, some, of_experts);
        }
    }
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[(warp * Tiles * 4 + t * 4 + i) * 32 + lane] = acc[t][i];
    }
    barrier_of<kSumThreads>(kSumsBarrier);
    // Add up the sums of the warps in the order of warps. A thread has one logit of the block at a time.
    for (uint32_t at = threadIdx.x; at < Tiles * kTokens * kColumns; at += kSumThreads) {
        float sum = sums[at];
#pragma unroll
        for (uint32_t w = 1; w < kSumWarps; ++w) sum += sums[w * (Tiles * kTokens * kColumns) + at];
        const uint32_t i = at / 32 % 4, token = (i / 2) * 8 + row;
        const uint32_t expert = first_expert + at / 128 * kColumns + quarter * 2 + i % 2;
        if (first_token + token < tokens && expert < p.experts) {
            store_at(reinterpret_cast<uint32_t*>(&logits[token / Size][expert]), token % Size, __float_as_uint(sum), &complete);
        }
    }
}

template <int Tiles, int Size>
int launch_few(const GateParams& params, uint32_t tokens, cudaStream_t stream, bool& fits) {
    const auto kernel = gate<Tiles, Size>;
    int code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSumBytes<Tiles>);
    if (code == cudaSuccess && Size > 8) code = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (code != cudaSuccess) return code;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(Size, (tokens + kTokens - 1) / kTokens);
    config.blockDim = dim3(kAllThreads<Tiles, Size>);
    config.dynamicSmemBytes = kSumBytes<Tiles>;
    config.stream = stream;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = Size;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes;
    config.numAttrs = 1;
    if (Size > 8) {
        int clusters = 0;
        fits = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess && clusters >= static_cast<int>(config.gridDim.y);
        if (!fits) return cudaSuccess;
    }
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, params);
}

// Clusters of 16 blocks read weights faster, but the device may not have room for all of them at once, and a part of one may have room for
// none.
int launch_gate(const GateParams& params, uint32_t tokens, cudaStream_t stream) {
    bool fits = true;
    if (params.experts <= 64) return launch_few<1, 8>(params, tokens, stream, fits);
    if (params.experts <= 128) return launch_few<2, 8>(params, tokens, stream, fits);
    const auto wide = params.experts <= 256 ? launch_few<2, 16> : launch_few<4, 16>;
    const int code = wide(params, tokens, stream, fits);
    if (fits) return code;
    const auto narrow = params.experts <= 256 ? launch_few<4, 8> : launch_few<8, 8>;
    fits = true;
    return narrow(params, tokens, stream, fits);
}

const Module module(reinterpret_cast<const void*>(gate<1, 8>));

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
        const uint32_t tokens = tokens_at_most == 0 ? 1 : tokens_at_most;
        const auto launcher = tokens <= 128 ? launch_gate : launch_gate_wide;
        const int code = launcher(p, tokens, static_cast<cudaStream_t>(stream));
        if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
}
