// The gate of steps with many tokens: computes logits = tokens x weight^T in bf16 with f32 sums (wgmma), then chooses the experts
// with one warp per token.
//
// A cluster of blocks computes kTile tokens and all experts; each block multiplies a part of the inner dimension. So rows are read
// once, weights once per cluster, and a few hundred tokens occupy half of the SMs. Each block then chooses the experts of some of
// the cluster's tokens: it reads their sums from the shared memory of all blocks and adds them up in the order of blocks. Nothing
// goes through global memory.
#include "gate_choice.cuh"
#include "gate_wide.h"
#include "modules.h"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace expertd {
namespace {

constexpr int kTile = 64;        // tokens of a cluster: wgmma's M
constexpr int kMostSplits = 8;   // largest number of blocks of a cluster
constexpr int kWarpgroups = 4;   // warpgroups of a block; each computes a quarter of the experts
constexpr int kGateWarps = 4 * kWarpgroups;
constexpr int kThreads = 32 * kGateWarps;
constexpr int kPanel = 64;       // columns of a stage: rows of 128 bytes
constexpr int kAlignment = 1024; // alignment of wgmma's operands in shared memory, in bytes

// N: wgmma's N, the experts of a warpgroup.
template <int N> constexpr int kRows = kTile + kWarpgroups * N;  // rows of a stage: tokens, then experts
template <int N> constexpr int kStageBytes = kRows<N> * kPanel * 2;
template <int N> constexpr int kStages = 200 * 1024 / kStageBytes<N> < 8 ? 200 * 1024 / kStageBytes<N> : 8;
template <int N> constexpr int kStride = kWarpgroups * N + 8;  // floats of a token's sums; the last 8 avoid bank conflicts
static_assert(kTile * kStride<128> * 4 <= kStages<128> * kStageBytes<128>, "sums take the place of the stages");

// A thread's copies into every stage: one chunk of 16 bytes of every 64th row, with the swizzle that wgmma expects. Rows and columns
// that do not exist are filled with zeros.
template <int N> class Copies {
  public:
    __device__ __forceinline__ Copies(const GateParams& p, const GateLayer& layer, const GateProducts& products, uint32_t first_token,
                                      uint32_t tokens)
        : hidden_(p.hidden), panels_((p.hidden + kPanel - 1) / kPanel), products_(products), any_(p.tokens),
          to_low_rows_(distance(p.tokens, p.tokens_low)), to_low_weights_(distance(layer.weight, layer.weight_low)) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const uint32_t row = i * kStep + threadIdx.x / 8, token = first_token + row, expert = row - kTile;
            const bool there = row < kTile ? token < tokens : expert < p.experts;
            const void* rows = row < kTile ? p.tokens : layer.weight;
            from_[i] = there ? static_cast<const uint16_t*>(rows) + static_cast<uint64_t>(row < kTile ? token : expert) * hidden_
                             : nullptr;
        }
    }

    // The panels of each product follow those of the previous one.
    __device__ __forceinline__ void start(uint32_t panel, uint32_t stage) const {
        const uint32_t product = (panel >= panels_) + (panel >= 2 * panels_);
        const int64_t of_rows = products_.takes_low_rows(product) ? to_low_rows_ : 0;
        const int64_t of_weights = products_.takes_low_weights(product) ? to_low_weights_ : 0;
        const uint32_t chunk = threadIdx.x % 8, column = (panel - product * panels_) * kPanel + chunk * 8;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const uint32_t row = i * kStep + threadIdx.x / 8;
            if (kRows<N> % kStep != 0 && row >= kRows<N>) break;
            const bool there = from_[i] != nullptr && column < hidden_;
            copy_16(stage + row * 128 + ((chunk ^ (row % 8)) * 16), there ? from_[i] + column + (row < kTile ? of_rows : of_weights) : any_, there);
        }
    }

  private:
    static constexpr int kStep = kThreads / 8, kCount = (kRows<N> + kStep - 1) / kStep;
    // Elements between two matrices.
    static __device__ __forceinline__ int64_t distance(const void* from, const void* to) {
        return to == nullptr ? 0 : static_cast<const uint16_t*>(to) - static_cast<const uint16_t*>(from);
    }

    uint32_t hidden_, panels_;
    GateProducts products_;
    const void* any_;
    int64_t to_low_rows_, to_low_weights_; // distance in elements from a row to its rounding errors
    const uint16_t* from_[kCount];
};

// Brings the block's part of the weights to L2 while rows are on their way. One warp runs this.
__device__ __forceinline__ void prefetch_weights(const GateParams& p, uint32_t layer, uint32_t splits, uint32_t split) {
    constexpr uint32_t kLine = 64;  // elements
    const uint32_t lines = (p.hidden + kLine - 1) / kLine, from = lines * split / splits, count = lines * (split + 1) / splits - from;
    const uint16_t* weight = static_cast<const uint16_t*>(p.layers[layer].weight);
    for (uint32_t i = threadIdx.x % 32; i < count * p.experts; i += 32) {
        const uint32_t expert = i / count;
        prefetch_l2(weight + static_cast<uint64_t>(expert) * p.hidden + (from + i - expert * count) * kLine);
    }
}

template <int N>
__global__ void __launch_bounds__(kThreads, 1) gate_wide(const __grid_constant__ GateParams p) {
    constexpr int kPer = N <= 16 ? 2 : N / 8;
    extern __shared__ unsigned char memory[];
    __shared__ float scratch[kGateWarps][kPer * 32];
    __shared__ uint32_t started;
    if (threadIdx.x == 0) started = 0;
    __syncthreads();
    if (threadIdx.x < 32) {
        uint64_t announced = threadIdx.x == 0 ? await_announcement(p.state, &started) : 0;
        announced = __shfl_sync(~0u, announced, 0);
        const Hint hint(announced);
        if (hint.known && blockIdx.y == 0 && *static_cast<volatile uint32_t*>(&started) == 0) prefetch_weights(p, hint.layer, gridDim.x, blockIdx.x);
    }
    begin_kernel();
    if (threadIdx.x == 32) *static_cast<volatile uint32_t*>(&started) = 1;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) p.state->begin_ns[kGate] = now_ns();
    const StepKind what = step_kind(p.state);
    const StepView step = open_step(head(p.state), p.max_tokens);
    const uint32_t tokens = step.tokens, first_token = blockIdx.y * kTile;
    // All blocks of a cluster take the same branch: nothing sets the error word while this kernel runs.
    if (!step.ok || what.routed || first_token >= tokens) return;
    const GateLayer layer = p.layers[what.layer];

    const uint32_t ring = (smem_address(memory) + kAlignment - 1) / kAlignment * kAlignment;
    const GateProducts products(p, layer, what);
    const uint32_t panels = (p.hidden + kPanel - 1) / kPanel * products.count(), splits = gridDim.x, split = blockIdx.x;
    const uint32_t from = panels * split / splits, count = panels * (split + 1) / splits - from;
    const Copies<N> copies(p, layer, products, first_token, tokens);
    for (uint32_t i = 0; i < kStages<N> - 1; ++i) {
        if (i < count) copies.start(from + i, ring + i * kStageBytes<N>);
        copies_commit();
    }
    const uint32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    float sums[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i] = 0.0f;
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t stage = ring + i % kStages<N> * kStageBytes<N>;
        copies_wait<kStages<N> - 2>();
        fence_shared_proxy();
        __syncthreads();  // this stage has arrived, and the previous stage has been read
        const uint32_t a = wgmma_descriptor(stage), b = wgmma_descriptor(stage + (kTile + warpgroup * N) * 128);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kPanel / 16; ++k) Wgmma<N>::mma(sums, a + k * 2, b + k * 2);
        wgmma_commit();
        const uint32_t next = i + kStages<N> - 1;
        if (next < count) copies.start(from + next, ring + next % kStages<N> * kStageBytes<N>);
        copies_commit();
        wgmma_wait<0>();
        wgmma_pin(sums);
    }
    __syncthreads();

    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    {
        float* mine = reinterpret_cast<float*>(memory + (ring - smem_address(memory))) + (warp % 4 * 16 + lane / 4) * kStride<N>
            + warpgroup * N + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            *reinterpret_cast<float2*>(mine + j * 8) = make_float2(sums[4 * j], sums[4 * j + 1]);
            *reinterpret_cast<float2*>(mine + 8 * kStride<N> + j * 8) = make_float2(sums[4 * j + 2], sums[4 * j + 3]);
        }
    }
    cluster_sync();
    const uint32_t share = kTile / splits;
#pragma unroll 1
    for (uint32_t i = warp; i < share; i += kGateWarps) {
        const uint32_t row = split * share + i, token = first_token + row;
        if (token >= tokens || (p.places != nullptr && (p.places[token].flags & kGivenRouting) != 0)) continue;
        float logits[kPer];
#pragma unroll
        for (int j = 0; j < kPer; ++j) logits[j] = j * 32 + lane < p.experts ? 0.0f : -kInfinity;
#pragma unroll 4
        for (uint32_t s = 0; s < splits; ++s) {
            const uint32_t sum = peer_address(ring + (row * kStride<N> + lane) * 4, s);
#pragma unroll
            for (int j = 0; j < kPer; ++j) {
                if (j * 32 + lane < p.experts) logits[j] += load_peer(sum + j * 128);
            }
        }
        choose<kPer>(p, layer, token, logits, scratch[warp]);
    }
    __syncwarp();
    cluster_sync();  // all blocks have read this block's sums
    if (split == 0 && threadIdx.x == 0 && tokens - first_token <= kTile) p.state->end_ns[kGate] = now_ns();
}

template <int N>
int launch_width(const GateParams& params, uint32_t tokens, cudaStream_t stream) {
    constexpr int kBytes = kStages<N> * kStageBytes<N> + kAlignment;
    const cudaError_t status = cudaFuncSetAttribute(gate_wide<N>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (status != cudaSuccess) return status;
    const uint32_t tiles = (tokens + kTile - 1) / kTile;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kBytes;
    config.stream = stream;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes;
    config.numAttrs = 1;
    // Use the largest number of blocks per tile with which all clusters are resident at once.
    for (uint32_t splits = kMostSplits; splits > 0; splits /= 2) {
        attributes[0].val.clusterDim.x = splits;
        config.gridDim = dim3(splits, tiles);
        int clusters = 0;
        const cudaError_t known = cudaOccupancyMaxActiveClusters(&clusters, gate_wide<N>, &config);
        if (known != cudaSuccess) return known;
        if (splits == 1 || tiles <= static_cast<uint32_t>(clusters)) break;
    }
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, gate_wide<N>, params);
}

const Module module(reinterpret_cast<const void*>(gate_wide<8>));

}  // namespace

int launch_gate_wide(const GateParams& params, uint32_t tokens_at_most, cudaStream_t stream) {
    const uint32_t experts = params.experts;
    const auto launcher = experts <= 32 ? launch_width<8> : experts <= 64 ? launch_width<16> : experts <= 128 ? launch_width<32>
        : experts <= 256 ? launch_width<64> : experts <= 384 ? launch_width<96> : launch_width<128>;
    return launcher(params, tokens_at_most, stream);
}

}  // namespace expertd
