// The gate: logits = tokens x weight^T in bf16 with f32 sums on the tensor cores, then the choice of experts, one warp
// per token, by the block that finishes a tile of tokens last.
//
// The functions are those of GateSpec, in its order; what a NaN does is fixed too: it is chosen before everything else,
// lower ids first, so ids are distinct and in range whatever the scores. Weights that come out of NaNs stay NaN.
#include "common.cuh"

namespace expertd {
namespace {

constexpr float kInfinity = __builtin_huge_valf();

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, offset));
    return v;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
    return v;
}

// Larger floats to larger integers; NaN above everything, -0 as +0. 0 stands for "not available".
__device__ __forceinline__ uint32_t rank_key(float v) {
    if (v != v) return ~0u;
    const uint32_t bits = __float_as_uint(v + 0.0f);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float score_of(uint32_t function, float logit) {
    if (function == kSigmoid) return 1.0f / (1.0f + expf(-logit));
    // softplus as max(x, 0) + log1p(exp(-|x|)), which neither overflows nor loses small values.
    if (function == kSqrtSoftplus) return sqrtf(fmaxf(logit, 0.0f) + log1pf(expf(-fabsf(logit))));
    return logit;
}

// The lane's value for expert `id`, which lane id % 32 holds at id / 32.
template <int Per>
__device__ __forceinline__ float value_at(const float (&values)[Per], uint32_t id) {
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < Per; ++i) mine = i == static_cast<int>(id / 32) ? values[i] : mine;
    return __shfl_sync(~0u, mine, id % 32);
}

// Largest key of the warp, lowest id among equals; takes it away.
template <int Per>
__device__ __forceinline__ uint32_t take_best(uint32_t (&keys)[Per]) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t best = 0, where = 0;
#pragma unroll
    for (int i = 0; i < Per; ++i) {
        if (keys[i] > best) {
            best = keys[i];
            where = i;
        }
    }
    const uint32_t top = __reduce_max_sync(~0u, best);
    const uint32_t id = __reduce_min_sync(~0u, best == top ? where * 32 + lane : ~0u);
#pragma unroll
    for (int i = 0; i < Per; ++i) {
        if (id == static_cast<uint32_t>(i) * 32 + lane) keys[i] = 0;
    }
    return id;
}

// Marks the experts of groups that do not stay; `scratch` holds the warp's values by expert.
template <int Per>
__device__ void limit_groups(const GateParams& p, float (&values)[Per], float (&scores)[Per], float* scratch) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t size = p.experts / p.groups;
#pragma unroll
    for (int i = 0; i < Per; ++i) {
        if (i * 32 + lane < p.experts) scratch[i * 32 + lane] = values[i];
    }
    __syncwarp();
    uint32_t key[1] = {0};
    if (lane < p.groups) {
        float first = -kInfinity, second = -kInfinity;
        for (uint32_t i = 0; i < size; ++i) {
            const float v = scratch[lane * size + i];
            if (rank_key(v) > rank_key(first)) {
                second = first;
                first = v;
            } else if (rank_key(v) > rank_key(second)) {
                second = v;
            }
        }
        key[0] = rank_key(p.group_score == kGroupMax || size < 2 ? first : first + second);
    }
    __syncwarp();
    uint32_t kept = 0;
    for (uint32_t i = 0; i < p.groups_kept; ++i) kept |= 1u << take_best<1>(key);
#pragma unroll
    for (int i = 0; i < Per; ++i) {
        const uint32_t expert = i * 32 + lane;
        if (expert < p.experts && (kept >> expert / size & 1) == 0) {
            values[i] = p.group_score == kGroupMax ? 0.0f : -kInfinity;
            if (p.group_score == kGroupMax) scores[i] = 0.0f;
        }
    }
}

// Phi's sparse mixer in evaluation: twice the largest logit, each weighted by a softmax over its near neighbours.
template <int Per>
__device__ void sparse_mixer(const GateParams& p, const float (&logits)[Per], uint32_t& id, float& weight) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t keys[Per];
#pragma unroll
    for (int i = 0; i < Per; ++i) keys[i] = i * 32 + lane < p.experts ? rank_key(logits[i]) : 0;
    uint32_t taken = ~0u;
    for (uint32_t round = 0; round < p.top_k; ++round) {
        const uint32_t best = take_best<Per>(keys);
        const float top = value_at<Per>(logits, best);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < Per; ++i) {
            const uint32_t expert = i * 32 + lane;
            if (expert >= p.experts || expert == taken) continue;
            const float distance = (top - logits[i]) / fmaxf(fabsf(logits[i]), top);
            if (!(distance > 2.0f * p.jitter)) sum += expf(logits[i] - top);
        }
        sum = warp_sum(sum);
        if (lane == round) {
            id = best;
            weight = 1.0f / sum;
        }
        taken = best;
    }
}

template <int Per>
__device__ void choose(const GateParams& p, const GateLayer& layer, uint32_t token, float* scratch) {
    const uint32_t lane = threadIdx.x % 32;
    const float* from = p.logits + static_cast<uint64_t>(token) * p.experts;
    float logits[Per], scores[Per];
#pragma unroll
    for (int i = 0; i < Per; ++i) {
        const uint32_t expert = i * 32 + lane;
        logits[i] = expert < p.experts ? __ldcg(from + expert) : -kInfinity;
        if (layer.logit_bias != nullptr && expert < p.experts) logits[i] += layer.logit_bias[expert];
    }
    uint32_t id = 0;
    float weight = 0.0f;
    if (p.score_fn == kSparseMixer) {
        sparse_mixer<Per>(p, logits, id, weight);
    } else {
        if (p.score_fn == kSoftmax) {
            float top = -kInfinity, sum = 0.0f;
#pragma unroll
            for (int i = 0; i < Per; ++i) top = fmaxf(top, logits[i]);
            top = warp_max(top);
#pragma unroll
            for (int i = 0; i < Per; ++i) {
                scores[i] = i * 32 + lane < p.experts ? expf(logits[i] - top) : 0.0f;
                sum += scores[i];
            }
            sum = warp_sum(sum);
#pragma unroll
            for (int i = 0; i < Per; ++i) scores[i] /= sum;
        } else {
#pragma unroll
            for (int i = 0; i < Per; ++i) scores[i] = score_of(p.score_fn, logits[i]);
        }
        if (p.choice == kByTokenIds) {
            const uint32_t row = min(static_cast<uint32_t>(max(p.token_ids[token], 0)), p.vocab - 1);
            for (uint32_t j = 0; j < p.top_k; ++j) {
                const uint32_t expert = static_cast<uint32_t>(layer.token_table[row * p.top_k + j]);
                const float w = value_at<Per>(scores, expert);
                if (lane == j) {
                    id = expert;
                    weight = w;
                }
            }
        } else {
            float values[Per];
#pragma unroll
            for (int i = 0; i < Per; ++i) {
                const uint32_t expert = i * 32 + lane;
                values[i] = p.choice == kByLogits ? logits[i] : scores[i];
                if (p.choice == kByScores && layer.correction_bias != nullptr && expert < p.experts) {
                    values[i] += layer.correction_bias[expert];
                }
            }
            if (p.choice == kByScores && p.group_score != kNoGroups) limit_groups<Per>(p, values, scores, scratch);
            uint32_t keys[Per];
#pragma unroll
            for (int i = 0; i < Per; ++i) keys[i] = i * 32 + lane < p.experts ? rank_key(values[i]) : 0;
            for (uint32_t j = 0; j < p.top_k; ++j) {
                const uint32_t best = take_best<Per>(keys);
                const float w = value_at<Per>(scores, best);
                if (lane == j) {
                    id = best;
                    weight = w;
                }
            }
        }
        const bool mine = lane < p.top_k;
        if (p.score_fn == kSoftmaxOfChosen) {
            const float top = warp_max(mine ? weight : -kInfinity);
            const float e = mine ? expf(weight - top) : 0.0f;
            weight = e / warp_sum(e);
        }
        if (p.normalise != kNo) {
            const float sum = warp_sum(mine ? weight : 0.0f);
            // Unlike fmaxf, lets a NaN through.
            weight /= p.normalise == kSum ? sum + p.epsilon : (sum < p.epsilon ? p.epsilon : sum);
        }
        weight *= p.scale;
    }
    if (lane < p.top_k) {
        p.topk_ids[static_cast<uint64_t>(token) * p.top_k + lane] = static_cast<int32_t>(id);
        p.topk_weights[static_cast<uint64_t>(token) * p.top_k + lane] = weight;
    }
}

// A block computes MT * 16 tokens x WN * NT * 8 experts; WK groups of warps share the inner dimension.
template <int MT, int NT, int WK, int WN>
__global__ void __launch_bounds__(32 * WK * WN, 1) gate(const __grid_constant__ GateParams p) {
    constexpr uint32_t kWarps = WK * WN, kTokens = MT * 16, kExperts = NT * 8;
    constexpr uint32_t kPartial = kTokens * kExperts * WN;
    constexpr uint32_t kScratch = kWarps * kMaxExperts;
    __shared__ float shared[(WK - 1) * kPartial > kScratch ? (WK - 1) * kPartial : kScratch];
    begin_kernel();
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) p.state->begin_ns[kGate] = now_ns();
    const uint2 what = __ldcg(reinterpret_cast<const uint2*>(&p.state->layer));
    const StepView step = open_step(head(p.state), p.max_tokens);
    const uint32_t tokens = step.tokens, first_token = blockIdx.y * kTokens;
    const bool routed = what.y != 0;
    if (!step.ok || routed || first_token >= tokens) return;
    const GateLayer layer = p.layers[what.x];

    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row = lane / 4, quarter = lane % 4;
    const uint32_t split = warp / WN;
    const uint32_t first_expert = (blockIdx.x * WN + warp % WN) * kExperts;
    const uint32_t words = p.hidden / 8;
    const uint4* x = static_cast<const uint4*>(p.tokens);
    const uint4* w = static_cast<const uint4*>(layer.weight);
    float acc[MT][NT][4] = {};
    // 32 columns a step. A lane's 16-byte load feeds two instructions; the order of columns within the step differs
    // from the instruction's, in the same way for both operands, which does not change the sum's set of terms.
#pragma unroll(MT == 1 ? 4 : 2)
    for (uint32_t block = split; block * 4 < words; block += WK) {
        const uint32_t word = block * 4 + quarter;
        const bool inside = word < words;
        uint4 a[MT][2], b[NT];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t token = first_token + m * 16 + half * 8 + row;
                a[m][half] = inside && token < tokens ? __ldg(x + static_cast<uint64_t>(token) * words + word)
                                                      : make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const uint32_t expert = first_expert + n * 8 + row;
            b[n] = inside && expert < p.experts ? __ldg(w + static_cast<uint64_t>(expert) * words + word)
                                                : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                mma(acc[m][n], a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y, b[n].x, b[n].y);
                mma(acc[m][n], a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w, b[n].z, b[n].w);
            }
        }
    }
    // Sum over the splits in their order.
    const uint32_t tile = (warp % WN) * kTokens * kExperts;
    if (split != 0) {
        float* to = shared + (split - 1) * kPartial + tile;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) to[((m * NT + n) * 4 + i) * 32 + lane] = acc[m][n][i];
            }
        }
    }
    __syncthreads();
    if (split == 0) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float sum = acc[m][n][i];
#pragma unroll
                    for (int s = 1; s < WK; ++s) {
                        sum += shared[(s - 1) * kPartial + tile + ((m * NT + n) * 4 + i) * 32 + lane];
                    }
                    const uint32_t token = first_token + m * 16 + (i / 2) * 8 + row;
                    const uint32_t expert = first_expert + n * 8 + quarter * 2 + i % 2;
                    if (token < tokens && expert < p.experts) {
                        p.logits[static_cast<uint64_t>(token) * p.experts + expert] = sum;
                    }
                }
            }
        }
    }
    if (!last_block(p.tickets + blockIdx.y, gridDim.x)) return;
    for (uint32_t token = first_token + warp; token < min(first_token + kTokens, tokens); token += kWarps) {
        if (p.places != nullptr && (p.places[token].flags & kGivenRouting) != 0) continue;
        float* scratch = shared + warp * kMaxExperts;
        if (p.experts <= 64) choose<2>(p, layer, token, scratch);
        else if (p.experts <= 128) choose<4>(p, layer, token, scratch);
        else if (p.experts <= 256) choose<8>(p, layer, token, scratch);
        else choose<16>(p, layer, token, scratch);
    }
    __syncthreads();
    if (blockIdx.y == 0 && threadIdx.x == 0) p.state->end_ns[kGate] = now_ns();
}

template <int MT, int NT, int WK, int WN>
int launch_gate(const GateParams& params, uint32_t tokens, cudaStream_t stream) {
    const dim3 grid((params.experts + WN * NT * 8 - 1) / (WN * NT * 8), (tokens + MT * 16 - 1) / (MT * 16));
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(32 * WK * WN);
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, gate<MT, NT, WK, WN>, params);
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
        const auto launcher = tokens <= 128 ? launch_gate<1, 1, 16, 1>
            : tokens <= 2048 ? launch_gate<2, 4, 8, 1> : launch_gate<4, 4, 4, 2>;
        const int code = launcher(p, tokens, static_cast<cudaStream_t>(stream));
        if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
}
