// The gate of steps with few tokens: computes logits = tokens x weight^T in bf16 with f32 sums on the tensor cores; then the block
// that finishes a tile of tokens last chooses the experts, with one warp per token. gate_wide.cu is the gate of many tokens.
#include "gate_choice.cuh"
#include "gate_wide.h"

namespace expertd {
namespace {

constexpr uint32_t kTokens = 16;   // tokens of a block
constexpr uint32_t kColumns = 8;   // experts of a block
constexpr uint32_t kGateWarps = 16;  // warps of a block, each of which sums over a part of the inner dimension

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int Per>
__device__ __forceinline__ void choose_stored(const GateParams& p, const GateLayer& layer, uint32_t token, float* scratch) {
    const uint32_t lane = threadIdx.x % 32;
    const float* from = p.logits + static_cast<uint64_t>(token) * p.experts;
    float logits[Per];
#pragma unroll
    for (int i = 0; i < Per; ++i) {
        const uint32_t expert = i * 32 + lane;
        logits[i] = expert < p.experts ? __ldcg(from + expert) : -kInfinity;
    }
    choose<Per>(p, layer, token, logits, scratch);
}

__global__ void __launch_bounds__(32 * kGateWarps, 1) gate(const __grid_constant__ GateParams p) {
    constexpr uint32_t kScratch = kGateWarps * kMaxExperts;
    static_assert((kGateWarps - 1) * kTokens * kColumns <= kScratch, "sums and scratch share the memory");
    __shared__ float shared[kScratch];
    begin_kernel();
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) p.state->begin_ns[kGate] = now_ns();
    const StepKind what = step_kind(p.state);
    const StepView step = open_step(head(p.state), p.max_tokens);
    const uint32_t tokens = step.tokens, first_token = blockIdx.y * kTokens;
    if (!step.ok || what.routed || first_token >= tokens) return;
    const GateLayer layer = p.layers[what.layer];

    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row = lane / 4, quarter = lane % 4;
    const uint32_t first_expert = blockIdx.x * kColumns;
    const uint32_t words = p.hidden / 8;
    const uint32_t weight_row = first_expert + row;
    float acc[4] = {};
    // 32 columns per step. A lane's 16-byte load feeds two instructions. The columns of a step are in another order than the
    // instruction expects, but in the same order for both operands, so the terms of the sum are the same.
    const GateProducts products(p, layer, what);
    for (uint32_t product = 0; product < products.count(); ++product) {
        const uint4* x = static_cast<const uint4*>(products.takes_low_rows(product) ? p.tokens_low : p.tokens);
        const uint4* w = static_cast<const uint4*>(products.takes_low_weights(product) ? layer.weight_low : layer.weight);
#pragma unroll 4
        for (uint32_t block = warp; block * 4 < words; block += kGateWarps) {
            const uint32_t word = block * 4 + quarter;
            const bool inside = word < words;
            uint4 a[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t token = first_token + half * 8 + row;
                a[half] = inside && token < tokens ? load_row(x + static_cast<uint64_t>(token) * words + word) : make_uint4(0, 0, 0, 0);
            }
            const uint4 b = inside && weight_row < p.experts ? __ldg(w + static_cast<uint64_t>(weight_row) * words + word)
                                                             : make_uint4(0, 0, 0, 0);
            mma(acc, a[0].x, a[1].x, a[0].y, a[1].y, b.x, b.y);
            mma(acc, a[0].z, a[1].z, a[0].w, a[1].w, b.z, b.w);
        }
    }
    // Add up the sums of the warps in the order of warps.
    if (warp != 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) shared[((warp - 1) * 4 + i) * 32 + lane] = acc[i];
    }
    __syncthreads();
    if (warp == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float sum = acc[i];
#pragma unroll
            for (int s = 1; s < static_cast<int>(kGateWarps); ++s) sum += shared[((s - 1) * 4 + i) * 32 + lane];
            const uint32_t token = first_token + (i / 2) * 8 + row;
            const uint32_t expert = first_expert + quarter * 2 + i % 2;
            if (token < tokens && expert < p.experts) p.logits[static_cast<uint64_t>(token) * p.experts + expert] = sum;
        }
    }
    if (!last_block(p.tickets + blockIdx.y, gridDim.x)) return;
    const uint32_t token = first_token + warp;
    static_assert(kGateWarps >= kTokens, "a warp chooses for one token");
    if (token < tokens && (p.places == nullptr || (p.places[token].flags & kGivenRouting) == 0)) {
        float* scratch = shared + warp * kMaxExperts;
        if (p.experts <= 64) choose_stored<2>(p, layer, token, scratch);
        else if (p.experts <= 128) choose_stored<4>(p, layer, token, scratch);
        else if (p.experts <= 256) choose_stored<8>(p, layer, token, scratch);
        else choose_stored<16>(p, layer, token, scratch);
    }
    __syncthreads();
    if (blockIdx.y == 0 && threadIdx.x == 0) p.state->end_ns[kGate] = now_ns();
}

int launch_gate(const GateParams& params, uint32_t tokens, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((params.experts + kColumns - 1) / kColumns, (tokens + kTokens - 1) / kTokens);
    config.blockDim = dim3(32 * kGateWarps);
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, gate, params);
}

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
