// copy_in and copy_out: rows between mapped host staging and device memory, with the step's description on the way in
// and its completion on the way out. Both run beside another slot's compute, so they use few blocks.
#include "common.cuh"

namespace expertd {
namespace {

constexpr uint32_t kThreads = 512;

// Host memory is read with volatile loads: the host rewrites it between replays of one graph.
__device__ __forceinline__ uint4 load_host(const uint4* address) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

__device__ __forceinline__ uint32_t f16_to_bf16(uint32_t pair) {
    const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&pair));
    return pack_bf16(v.x, v.y);
}

template <int Count>
__global__ void __launch_bounds__(kThreads) copy_in(const __grid_constant__ Ranks<CopyInParams, Count> all) {
    const CopyInParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    __shared__ StepRequest request;
    begin_kernel();
    if (threadIdx.x == 0) {
        const uint64_t begin = now_ns();
        const uint4* words = reinterpret_cast<const uint4*>(p.request);
        const uint4 a = load_host(words), b = load_host(words + 1);
        reinterpret_cast<uint4*>(&request)[0] = a;
        reinterpret_cast<uint4*>(&request)[1] = b;
        if (request.tokens > p.max_tokens) {
            set_error(p.state, kBadCount, 0xff, kCopyIn);
            request.tokens = 0;
        }
        if (blockIdx.x == 0) {
            p.state->tokens = request.tokens;
            p.state->layer = request.layer;
            p.state->given_routing = request.given_routing;
            p.state->in_dtype = request.in_dtype;
            p.state->out_dtype = request.out_dtype;
            p.state->step = request.step;
            p.state->begin_ns[kCopyIn] = begin;
        }
    }
    __syncthreads();
    const uint64_t index = blockIdx.x * kThreads + threadIdx.x, stride = static_cast<uint64_t>(gridDim.x) * kThreads;
    const uint64_t words = static_cast<uint64_t>(request.tokens) * (p.hidden / 8);
    const uint4* staged = static_cast<const uint4*>(p.staged_rows);
    uint4* tokens = static_cast<uint4*>(p.tokens);
    constexpr uint64_t kUnroll = 4;
    if (request.in_dtype == kF32) {
        for (uint64_t word = index; word < words; word += stride) {
            const uint4 a = load_host(staged + 2 * word), b = load_host(staged + 2 * word + 1);
            const float v[8] = {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w),
                                __uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w)};
            tokens[word] = pack_bf16x8(v);
        }
    } else {
        const bool half = request.in_dtype == kF16;
        for (uint64_t word = index; word < words; word += kUnroll * stride) {
            uint4 data[kUnroll];
#pragma unroll
            for (uint64_t u = 0; u < kUnroll; ++u) {
                if (word + u * stride < words) data[u] = load_host(staged + word + u * stride);
            }
#pragma unroll
            for (uint64_t u = 0; u < kUnroll; ++u) {
                if (word + u * stride >= words) break;
                uint4 v = data[u];
                if (half) v = make_uint4(f16_to_bf16(v.x), f16_to_bf16(v.y), f16_to_bf16(v.z), f16_to_bf16(v.w));
                tokens[word + u * stride] = v;
            }
        }
    }
    if (request.given_routing != 0) {
        const uint64_t choices = static_cast<uint64_t>(request.tokens) * p.top_k;
        for (uint64_t i = index; i < choices; i += stride) {
            int32_t id = *reinterpret_cast<const volatile int32_t*>(p.staged_ids + i);
            // Ids become addresses. The API has checked them; a fault between there and here must not write astray.
            if (id < 0 || id >= static_cast<int32_t>(p.experts)) {
                set_error(p.state, kBadCount, 0xfe, kCopyIn);
                id = 0;
            }
            p.topk_ids[i] = id;
            p.topk_weights[i] = *reinterpret_cast<const volatile float*>(p.staged_weights + i);
        }
    }
    if (p.staged_token_ids != nullptr) {
        for (uint64_t i = index; i < request.tokens; i += stride) {
            p.token_ids[i] = *reinterpret_cast<const volatile int32_t*>(p.staged_token_ids + i);
        }
    }
    stamp_end(p.state, kCopyIn);
}

template <int Count>
__global__ void __launch_bounds__(kThreads) copy_out(const __grid_constant__ Ranks<CopyOutParams, Count> all) {
    const CopyOutParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    begin_kernel();
    stamp_begin(p.state, kCopyOut);
    const uint32_t tokens = min(p.state->tokens, p.max_tokens);
    const uint64_t index = blockIdx.x * kThreads + threadIdx.x, stride = static_cast<uint64_t>(gridDim.x) * kThreads;
    if (p.state->error == 0) {
        const uint64_t words = static_cast<uint64_t>(tokens) * (p.hidden / 8) * (p.state->out_dtype == kF32 ? 2 : 1);
        const uint4* from = static_cast<const uint4*>(p.out);
        uint4* to = static_cast<uint4*>(p.staged_rows);
        constexpr uint64_t kUnroll = 4;
        for (uint64_t word = index; word < words; word += kUnroll * stride) {
            uint4 data[kUnroll];
#pragma unroll
            for (uint64_t u = 0; u < kUnroll; ++u) {
                if (word + u * stride < words) data[u] = __ldcg(from + word + u * stride);
            }
#pragma unroll
            for (uint64_t u = 0; u < kUnroll; ++u) {
                if (word + u * stride < words) to[word + u * stride] = data[u];
            }
        }
        if (p.staged_ids != nullptr) {
            for (uint64_t i = index; i < static_cast<uint64_t>(tokens) * p.top_k; i += stride) {
                p.staged_ids[i] = p.topk_ids[i];
                p.staged_weights[i] = p.topk_weights[i];
            }
        }
    }
    __threadfence_system();
    if (last_block(&p.state->ticket, gridDim.x) && threadIdx.x == 0) {
        p.state->end_ns[kCopyOut] = now_ns();
        for (uint32_t phase = 0; phase < kPhases; ++phase) {
            p.completion->begin_ns[phase] = p.state->begin_ns[phase];
            p.completion->end_ns[phase] = p.state->end_ns[phase];
        }
        p.completion->error = p.state->error;
        store_release_system(&p.completion->step, p.state->step);
    }
}

}  // namespace
}  // namespace expertd

extern "C" int expertd_copy_in(const expertd::CopyInParams* params, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    return launch(copy_in<1>, copy_in<kMaxRanks>, params, count, blocks, kThreads, false, stream);
}

extern "C" int expertd_copy_out(const expertd::CopyOutParams* params, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    return launch(copy_out<1>, copy_out<kMaxRanks>, params, count, blocks, kThreads, false, stream);
}

extern "C" const char* expertd_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
