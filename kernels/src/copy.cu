// copy_in and copy_out: rows between mapped host staging and device memory, with the step's description on the way in
// and its completion on the way out. Both run beside another slot's compute, so they use few blocks.
#include "common.cuh"

namespace expertd {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kUnroll = 4;  // 16-byte words per lane under way

// Host memory is read with plain loads, kept out of L1: a kernel sees what the host wrote before its launch, and nothing
// is written while it runs. Relaxed loads at system scope would not be merged into wide requests: 1 GB/s instead of 50.
__device__ __forceinline__ uint4 load_host(const void* address) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

template <typename T>
__device__ __forceinline__ T load_host_word(const T* address) {
    return *reinterpret_cast<const volatile T*>(address);
}

__device__ __forceinline__ uint32_t f16_to_bf16(uint32_t pair) {
    const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&pair));
    return pack_bf16(v.x, v.y);
}

// The segment that holds `row`: segments follow each other in rows.
__device__ Segment segment_of(const CopyInParams& p, uint32_t segments, uint32_t row) {
    uint32_t low = 0, high = segments;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (load_host_word(&p.segments[middle].first_row) <= row) low = middle;
        else high = middle;
    }
    const Segment* at = p.segments + low;
    return {load_host_word(&at->byte_offset), load_host_word(&at->first_row), load_host_word(&at->rows),
            load_host_word(&at->dtype), load_host_word(&at->flags)};
}

// One warp: a row from staging to bf16.
__device__ void take_row(const CopyInParams& p, const uint8_t* from, uint32_t dtype, uint4* to) {
    const uint32_t lane = threadIdx.x % 32, words = p.hidden / 8;
    if (dtype == kF32) {
        for (uint32_t base = 0; base < words; base += 32 * kUnroll) {
            uint4 a[kUnroll], b[kUnroll];
#pragma unroll
            for (uint32_t i = 0; i < kUnroll; ++i) {
                const uint32_t word = base + i * 32 + lane;
                if (word >= words) continue;
                a[i] = load_host(from + word * 32);
                b[i] = load_host(from + word * 32 + 16);
            }
#pragma unroll
            for (uint32_t i = 0; i < kUnroll; ++i) {
                const uint32_t word = base + i * 32 + lane;
                if (word >= words) continue;
                const float v[8] = {__uint_as_float(a[i].x), __uint_as_float(a[i].y), __uint_as_float(a[i].z),
                                    __uint_as_float(a[i].w), __uint_as_float(b[i].x), __uint_as_float(b[i].y),
                                    __uint_as_float(b[i].z), __uint_as_float(b[i].w)};
                to[word] = pack_bf16x8(v);
            }
        }
        return;
    }
    for (uint32_t base = 0; base < words; base += 32 * 2 * kUnroll) {
        uint4 data[2 * kUnroll];
#pragma unroll
        for (uint32_t i = 0; i < 2 * kUnroll; ++i) {
            const uint32_t word = base + i * 32 + lane;
            if (word < words) data[i] = load_host(from + word * 16);
        }
#pragma unroll
        for (uint32_t i = 0; i < 2 * kUnroll; ++i) {
            const uint32_t word = base + i * 32 + lane;
            if (word >= words) continue;
            uint4 v = data[i];
            if (dtype == kF16) v = make_uint4(f16_to_bf16(v.x), f16_to_bf16(v.y), f16_to_bf16(v.z), f16_to_bf16(v.w));
            to[word] = v;
        }
    }
}

template <int Count>
__global__ void __launch_bounds__(kThreads) copy_in(const __grid_constant__ Ranks<CopyInParams, Count> all) {
    const CopyInParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    __shared__ StepRequest request;
    begin_kernel();
    if (threadIdx.x == 0) {
        const uint64_t begin = now_ns();
        const uint4 a = load_host(p.request), b = load_host(reinterpret_cast<const uint4*>(p.request) + 1);
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
            p.state->received = 0;
            p.state->out_dtype = request.out_dtype;
            p.state->step = request.step;
            p.state->begin_ns[kCopyIn] = begin;
        }
    }
    __syncthreads();
    const uint32_t lane = threadIdx.x % 32, words = p.hidden / 8;
    for (uint32_t row = blockIdx.x * kWarps + threadIdx.x / 32; row < request.tokens; row += gridDim.x * kWarps) {
        const Segment segment = segment_of(p, request.segments, row);
        const uint64_t row_bytes = static_cast<uint64_t>(p.hidden) * (segment.dtype == kF32 ? 4 : 2);
        const uint64_t offset = segment.byte_offset + (row - segment.first_row) * row_bytes;
        // The host has checked them; a fault between there and here must not read or write astray.
        if (offset % 16 != 0 || offset + row_bytes > p.staged_bytes || row - segment.first_row >= segment.rows) {
            if (lane == 0) set_error(p.state, kBadCount, 0xfe, kCopyIn);
            continue;
        }
        if (lane == 0) p.places[row] = {offset, segment.dtype, segment.flags};
        take_row(p, p.staged_rows + offset, segment.dtype,
                 static_cast<uint4*>(p.tokens) + static_cast<uint64_t>(row) * words);
        if ((segment.flags & kGivenRouting) != 0 && lane < p.top_k) {
            const uint64_t at = static_cast<uint64_t>(row) * p.top_k + lane;
            int32_t id = load_host_word(p.staged_ids + at);
            // Ids become addresses: see above.
            if (id < 0 || id >= static_cast<int32_t>(p.experts)) {
                set_error(p.state, kBadCount, 0xfe, kCopyIn);
                id = 0;
            }
            p.topk_ids[at] = id;
            p.topk_weights[at] = load_host_word(p.staged_weights + at);
        }
        if (p.staged_token_ids != nullptr && lane == 0) p.token_ids[row] = load_host_word(p.staged_token_ids + row);
    }
    stamp_end(p.state, kCopyIn);
}

__device__ __forceinline__ void load_out(const void* out, uint64_t word, uint32_t dtype, float (&v)[8]) {
#pragma unroll
    for (float& x : v) x = 0.0f;
    if (dtype == kF32) {
        const float4* from = static_cast<const float4*>(out) + 2 * word;
        const float4 a = __ldcg(from), b = __ldcg(from + 1);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
        add_bf16x8(v, __ldcg(static_cast<const uint4*>(out) + word));
    }
}

template <int Count>
__global__ void __launch_bounds__(kThreads) copy_out(const __grid_constant__ Ranks<CopyOutParams, Count> all) {
    const CopyOutParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    begin_kernel();
    stamp_begin(p.state, kCopyOut);
    const uint32_t tokens = min(p.state->tokens, p.max_tokens), dtype = p.state->out_dtype;
    const uint32_t lane = threadIdx.x % 32, words = p.hidden / 8;
    // dtype is that of all rows (then words are copied as they are), or f32.
    for (uint32_t row = blockIdx.x * kWarps + threadIdx.x / 32; p.state->error == 0 && row < tokens;
         row += gridDim.x * kWarps) {
        const RowPlace place = p.places[row];
        uint8_t* to = p.staged_rows + place.byte_offset;
        const uint64_t first = static_cast<uint64_t>(row) * words;
        if (place.dtype == dtype) {
            const uint32_t all_words = dtype == kF32 ? 2 * words : words;
            const uint4* from = static_cast<const uint4*>(p.out) + static_cast<uint64_t>(row) * all_words;
            for (uint32_t base = 0; base < all_words; base += 32 * 2 * kUnroll) {
                uint4 data[2 * kUnroll];
#pragma unroll
                for (uint32_t i = 0; i < 2 * kUnroll; ++i) {
                    if (base + i * 32 + lane < all_words) data[i] = __ldcg(from + base + i * 32 + lane);
                }
#pragma unroll
                for (uint32_t i = 0; i < 2 * kUnroll; ++i) {
                    const uint32_t word = base + i * 32 + lane;
                    if (word < all_words) reinterpret_cast<uint4*>(to)[word] = data[i];
                }
            }
        } else {
            for (uint32_t word = lane; word < words; word += 32) {
                float v[8];
                load_out(p.out, first + word, dtype, v);
                if (place.dtype == kF32) {
                    reinterpret_cast<float4*>(to)[2 * word] = make_float4(v[0], v[1], v[2], v[3]);
                    reinterpret_cast<float4*>(to)[2 * word + 1] = make_float4(v[4], v[5], v[6], v[7]);
                } else {
                    reinterpret_cast<uint4*>(to)[word] = place.dtype == kF16 ? pack_f16x8(v) : pack_bf16x8(v);
                }
            }
        }
        if (lane < p.top_k) {
            const uint64_t at = static_cast<uint64_t>(row) * p.top_k + lane;
            p.staged_ids[at] = p.topk_ids[at];
            p.staged_weights[at] = p.topk_weights[at];
        }
    }
    __threadfence_system();
    if (last_block(&p.state->ticket, gridDim.x) && threadIdx.x == 0) {
        p.state->end_ns[kCopyOut] = now_ns();
        for (uint32_t phase = 0; phase < kPhases; ++phase) {
            p.completion->begin_ns[phase] = p.state->begin_ns[phase];
            p.completion->end_ns[phase] = p.state->end_ns[phase];
        }
        p.completion->received = __ldcg(&p.state->received);
        p.completion->assignments = p.assignments == nullptr ? 0 : __ldcg(p.assignments);
        p.completion->error = __ldcg(&p.state->error);
        store_release_system(&p.completion->step, p.state->step);
    }
}

// Shared experts see every token; the kernel that computes experts wants a list of rows with weights all the same.
template <int Count>
__global__ void __launch_bounds__(kThreads) list_shared(const __grid_constant__ Ranks<SharedParams, Count> all) {
    const SharedParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    begin_kernel();
    const uint32_t layer = p.state->layer;
    const StepView step = open_step(head(p.state), p.max_tokens);
    if (!step.ok) return;
    const uint32_t lane = threadIdx.x % 32, words = p.hidden / 8;
    const uint4* gate = p.gates == nullptr ? nullptr : static_cast<const uint4*>(p.gates[layer]);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        p.expert_offsets[0] = 0;
        p.expert_offsets[1] = step.tokens;
    }
    for (uint32_t row = blockIdx.x * kWarps + threadIdx.x / 32; row < step.tokens; row += gridDim.x * kWarps) {
        float sum = 0.0f;
        if (gate != nullptr) {
            const uint4* x = static_cast<const uint4*>(p.tokens) + static_cast<uint64_t>(row) * words;
            for (uint32_t word = lane; word < words; word += 32) {
                float a[8] = {}, b[8] = {};
                add_bf16x8(a, __ldcg(x + word));
                add_bf16x8(b, __ldcg(gate + word));
#pragma unroll
                for (int i = 0; i < 8; ++i) sum += a[i] * b[i];
            }
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        }
        if (lane == 0) {
            p.row_index[row] = row;
            p.row_weight[row] = gate == nullptr ? 1.0f : 1.0f / (1.0f + expf(-sum));
        }
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

extern "C" int expertd_shared(const expertd::SharedParams* params, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    return launch(list_shared<1>, list_shared<kMaxRanks>, params, count, blocks, kThreads, false, stream);
}

extern "C" const char* expertd_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
