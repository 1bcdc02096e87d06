// Chooses a token's experts from its logits, in one warp.
//
// The functions are those of GateSpec, in its order. NaNs have a fixed meaning too: they are chosen before all other values, lower
// ids first, so ids are distinct and in range for any scores. Weights that are computed from NaNs are NaN.
#pragma once
#include "common.cuh"

namespace expertd {
namespace {

// The products whose sum is a logit. Rows are the sum of two bf16 matrices if some rows are f16 or f32, and weights are if the
// checkpoint stores them in f16 or f32: f16 exactly, f32 to 2^-17 of an element. So experts are chosen by the rows as they were sent
// and the weights as they are stored. The products are high x high, low rows x high weights, and high rows x low weights; the fourth
// is below 2^-16 of the first and left out.
struct GateProducts {
    bool low_rows, low_weights;

    __device__ __forceinline__ GateProducts(const GateParams& p, const GateLayer& layer, const StepKind& kind)
        : low_rows(kind.wide && p.tokens_low != nullptr), low_weights(layer.weight_low != nullptr) {}

    __device__ __forceinline__ uint32_t count() const { return 1 + low_rows + low_weights; }
    __device__ __forceinline__ bool takes_low_rows(uint32_t product) const { return low_rows && product == 1; }
    __device__ __forceinline__ bool takes_low_weights(uint32_t product) const { return low_weights && product == 1 + low_rows; }
};

// What a step begins with, if copy_in has announced it.
struct Hint {
    uint32_t tokens, layer;
    bool known;

    __device__ __forceinline__ explicit Hint(uint64_t announced)
        : tokens(static_cast<uint32_t>(announced) & 0xfffff), layer(static_cast<uint32_t>(announced) >> 20), known(announced != 0) {}
};

// Waits for copy_in's announcement of this step, or until `started` is 1: the previous kernel has ended. Returns 0 without an announcement.
__device__ __forceinline__ uint64_t await_announcement(const SlotState* state, const volatile uint32_t* started) {
    const uint64_t sequence = load_word(&state->sequence);
    const volatile uint64_t* announced = &state->announced;
    for (;;) {
        const uint64_t seen = *announced;
        if (seen >> 32 == (sequence & ~0u)) return seen;
        if (*started != 0) return 0;
    }
}

constexpr float kInfinity = __builtin_huge_valf();

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

// Maps larger floats to larger integers, NaN above everything, and -0 like +0. The key 0 means "not available".
__device__ __forceinline__ uint32_t rank_key(float v) {
    if (v != v) return ~0u;
    const uint32_t bits = __float_as_uint(v + 0.0f);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float score_of(uint32_t function, float logit) {
    if (function == kSigmoid) return 1.0f / (1.0f + expf(-logit));
    // softplus(x) = max(x, 0) + log1p(exp(-|x|)) neither overflows nor loses small values.
    if (function == kSqrtSoftplus) return sqrtf(fmaxf(logit, 0.0f) + log1pf(expf(-fabsf(logit))));
    return logit;
}

// Writes the warp's values to `scratch`, from where all lanes may read those of any expert. (A choice among registers by an index that
// is not known to the compiler becomes local memory.)
template <int Per>
__device__ __forceinline__ void publish(const float (&values)[Per], float* scratch) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Per; ++i) scratch[i * 32 + threadIdx.x % 32] = values[i];
    __syncwarp();
}

// Returns the id of the warp's largest key, the lowest id among equal keys, and sets that key to 0.
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

// Excludes the experts of all groups but the best `groups_kept`. `scratch` is the warp's: Per * 32 floats.
template <int Per>
__device__ __forceinline__ void limit_groups(const GateParams& p, float (&values)[Per], float (&scores)[Per], float* scratch) {
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

// Phi's sparse mixer, as in evaluation: chooses the largest remaining logit top_k times; each weight is a softmax over the logits near it.
template <int Per>
__device__ __forceinline__ void sparse_mixer(const GateParams& p, const float (&logits)[Per], uint32_t& id, float& weight, float* scratch) {
    const uint32_t lane = threadIdx.x % 32;
    publish<Per>(logits, scratch);
    uint32_t keys[Per];
#pragma unroll
    for (int i = 0; i < Per; ++i) keys[i] = i * 32 + lane < p.experts ? rank_key(logits[i]) : 0;
    uint32_t taken = ~0u;
    for (uint32_t round = 0; round < p.top_k; ++round) {
        const uint32_t best = take_best<Per>(keys);
        const float top = scratch[best];
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

// Chooses the experts of a token. A lane's logits are those of experts lane, lane + 32, ...; they are -infinity past the last expert.
// `scratch` is the warp's: Per * 32 floats.
template <int Per>
__device__ __forceinline__ void choose(const GateParams& p, const GateLayer& layer, uint32_t token, float (&logits)[Per],
                                       float* scratch) {
    const uint32_t lane = threadIdx.x % 32;
    float scores[Per];
#pragma unroll
    for (int i = 0; i < Per; ++i) {
        const uint32_t expert = i * 32 + lane;
        if (layer.logit_bias != nullptr && expert < p.experts) logits[i] += layer.logit_bias[expert];
    }
    uint32_t id = 0;
    float weight = 0.0f;
    if (p.score_fn == kSparseMixer) {
        sparse_mixer<Per>(p, logits, id, weight, scratch);
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
            if (lane < p.top_k) id = static_cast<uint32_t>(layer.token_table[row * p.top_k + lane]);
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
                if (lane == j) id = best;
            }
        }
        publish<Per>(scores, scratch);
        const bool mine = lane < p.top_k;
        weight = mine && id < p.experts ? scratch[id] : 0.0f;
        if (p.score_fn == kSoftmaxOfChosen) {
            const float top = warp_max(mine ? weight : -kInfinity);
            const float e = mine ? expf(weight - top) : 0.0f;
            weight = e / warp_sum(e);
        }
        if (p.normalise != kNo) {
            const float sum = warp_sum(mine ? weight : 0.0f);
            // Unlike fmaxf, this comparison keeps a NaN.
            weight /= p.normalise == kSum ? sum + p.epsilon : (sum < p.epsilon ? p.epsilon : sum);
        }
        weight *= p.scale;
    }
    if (lane < p.top_k) {
        p.topk_ids[static_cast<uint64_t>(token) * p.top_k + lane] = static_cast<int32_t>(id);
        p.topk_weights[static_cast<uint64_t>(token) * p.top_k + lane] = weight;
    }
}

}  // namespace
}  // namespace expertd
