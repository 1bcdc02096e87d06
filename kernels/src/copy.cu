// copy_in and copy_out: copy rows between mapped host staging and device memory. copy_in also reads the step's description, copy_out
// writes its completion record. The host's link limits them, so few blocks suffice.
#include "common.cuh"

namespace expertd {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kUnroll = 4;  // number of 16-byte words in flight per lane

// Loads host memory with plain loads that bypass L1. They are sufficient, because the host writes only before the launch and not
// while the kernel runs; a client that writes its rows while they are computed gets results of some mixture of them. Relaxed loads at system scope are not merged into wide requests: 1 GB/s instead of 50.
__device__ __forceinline__ uint4 load_host(const void* address) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

__device__ __forceinline__ uint64_t load_host(const uint64_t* address) {
    uint64_t v;
    asm volatile("ld.global.L1::no_allocate.u64 %0, [%1];" : "=l"(v) : "l"(address));
    return v;
}

__device__ __forceinline__ int32_t load_host(const int32_t* address) {
    int32_t v;
    asm volatile("ld.global.L1::no_allocate.s32 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
}

__device__ __forceinline__ float load_host(const float* address) {
    float v;
    asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(v) : "l"(address));
    return v;
}

// Number of entries of the segment table that a block holds at a time.
constexpr uint32_t kTable = 1024;
constexpr uint32_t kEntryWords = sizeof(Segment) / sizeof(uint64_t);
// Number of entries that are loaded together with the request, before their number is known.
constexpr uint32_t kEarly = kThreads / kEntryWords - 2;
// The same for a grid of more than kSmallGrid blocks: every block loads these entries over the host's link.
constexpr uint32_t kEarlyOfMany = 4;
constexpr uint32_t kSmallGrid = 16;
static_assert(kEarly * kEntryWords + sizeof(StepRequest) / 16 <= kThreads, "a thread each");

// The segment that holds `row`, among `count` segments of consecutive rows.
__device__ __forceinline__ Segment segment_of(const Segment* table, uint32_t count, uint32_t row) {
    uint32_t low = 0, high = count;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (table[middle].first_row <= row) low = middle;
        else high = middle;
    }
    return table[low];
}

// The rounding errors of bf16, `v - rounded`, themselves rounded to bf16; 0 for values that are not finite.
__device__ __forceinline__ uint4 rest_of(const float (&v)[8], const uint4& rounded) {
    float sum[8] = {};
    add_bf16x8(sum, rounded);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = isfinite(sum[i]) ? v[i] - sum[i] : 0.0f;
    return pack_bf16x8(sum);
}

__device__ __forceinline__ void widen_f16(const uint4& raw, float (&v)[8]) {
    const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
        v[2 * i] = two.x, v[2 * i + 1] = two.y;
    }
}

// Converts a row from staging to bf16 and, unless `low` is null, stores the rounding errors there. One warp runs this.
__device__ void take_row(const CopyInParams& p, const uint8_t* from, uint32_t dtype, uint4* to, uint4* low) {
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
                const uint4 rounded = pack_bf16x8(v);
                to[word] = rounded;
                if (low != nullptr) low[word] = rest_of(v, rounded);
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
            if (dtype == kF16) {
                float v[8];
                widen_f16(data[i], v);
                const uint4 rounded = pack_bf16x8(v);
                to[word] = rounded;
                if (low != nullptr) low[word] = rest_of(v, rounded);
            } else {
                to[word] = data[i];
                if (low != nullptr) low[word] = make_uint4(0, 0, 0, 0);
            }
        }
    }
}

// An element of a row that may lie at any multiple of the element size.
__device__ __forceinline__ float load_element(const void* row, uint32_t index, uint32_t dtype) {
    if (dtype == kF32) return load_host(static_cast<const float*>(row) + index);
    uint16_t bits;
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(bits) : "l"(static_cast<const uint16_t*>(row) + index));
    return dtype == kF16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// As take_row, for a row of `row_elements` elements.
__device__ void take_narrow_row(const CopyInParams& p, const void* from, uint32_t dtype, uint4* to, uint4* low) {
    for (uint32_t word = threadIdx.x % 32; word < p.hidden / 8; word += 32) {
        float v[8];
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
            const uint32_t index = word * 8 + i;
            v[i] = index < p.row_elements ? load_element(from, index, dtype) : 0.0f;
        }
        const uint4 rounded = pack_bf16x8(v);
        to[word] = rounded;
        if (low != nullptr) low[word] = rest_of(v, rounded);
    }
}

// Copies a row from staging with its place and its routing. One warp runs this.
__device__ void take(const CopyInParams& p, const Segment& segment, uint32_t row, bool wide) {
    const uint32_t lane = threadIdx.x % 32, words = p.hidden / 8;
    const bool narrow = (segment.flags & kNarrowRows) != 0;
    const uint32_t element_bytes = segment.dtype == kF32 ? 4 : 2, align = narrow ? element_bytes : 16;
    const uint64_t row_bytes = static_cast<uint64_t>(narrow ? p.row_elements : p.hidden) * element_bytes;
    const uint64_t within = (row - segment.first_row) * row_bytes, offset = segment.byte_offset + within;
    const bool attached = segment.memory != 0;
    // The host has checked these values. The check here keeps a fault in between from accessing other memory.
    if (offset % align != 0 || segment.output_offset % align != 0 || (!attached && offset + row_bytes > p.staged_bytes) ||
        row - segment.first_row >= segment.rows || p.row_elements > p.hidden) {
        if (lane == 0) set_error(p.state, kBadCount, 0xfe, kCopyIn);
        return;
    }
    // Load the routing first, so that its loads are under way while those of the row are issued.
    const uint64_t at = static_cast<uint64_t>(row) * p.top_k + lane;
    const bool given = (segment.flags & kGivenRouting) != 0 && lane < p.top_k;
    const bool named = p.staged_token_ids != nullptr && lane == 0;
    int32_t id = 0, token_id = 0;
    float weight = 0.0f;
    if (given) {
        id = load_host(p.staged_ids + at);
        weight = load_host(p.staged_weights + at);
    }
    if (named) token_id = load_host(p.staged_token_ids + row);
    const uint64_t first_word = static_cast<uint64_t>(row) * words;
    uint8_t* from = attached ? reinterpret_cast<uint8_t*>(offset) : p.staged_rows + offset;
    if (p.tokens != nullptr) {
        uint4* to = static_cast<uint4*>(p.tokens) + first_word;
        uint4* low = wide && p.tokens_low != nullptr ? static_cast<uint4*>(p.tokens_low) + first_word : nullptr;
        if (narrow) take_narrow_row(p, from, segment.dtype, to, low);
        else take_row(p, from, segment.dtype, to, low);
    }
    if (lane == 0) {
        uint8_t* output = attached ? reinterpret_cast<uint8_t*>(segment.output_offset + within) : from;
        p.places[row] = {output, segment.dtype, segment.flags};
    }
    if (given) {
        // Ids become addresses, so they are checked for the same reason.
        if (id < 0 || id >= static_cast<int32_t>(p.experts)) {
            set_error(p.state, kBadCount, 0xfe, kCopyIn);
            id = 0;
        }
        p.topk_ids[at] = id;
        p.topk_weights[at] = weight;
    }
    if (named) p.token_ids[row] = token_id;
}

template <int Count>
__global__ void __launch_bounds__(kThreads) copy_in(const __grid_constant__ Ranks<CopyInParams, Count> all) {
    const CopyInParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    __shared__ StepRequest request;
    __shared__ Segment table[kTable];
    uint64_t* table_words = reinterpret_cast<uint64_t*>(table);
    const uint64_t* entries = reinterpret_cast<const uint64_t*>(p.segments);
    begin_kernel();
    const uint64_t begin = now_ns();
    // The request and the first entries take one round trip to the host, the rows a second one. Segments are looked up in shared
    // memory, which takes none.
    const uint32_t early = min(p.max_segments, gridDim.x > kSmallGrid ? kEarlyOfMany : kEarly);
    if (threadIdx.x < early * kEntryWords) {
        table_words[threadIdx.x] = load_host(entries + threadIdx.x);
    } else if (threadIdx.x >= kThreads - sizeof(StepRequest) / 16) {
        const uint32_t part = kThreads - 1 - threadIdx.x;
        reinterpret_cast<uint4*>(&request)[part] = load_host(reinterpret_cast<const uint4*>(p.request) + part);
    }
    __syncthreads();
    const bool possible = request.tokens <= p.max_tokens && request.segments <= p.max_segments;
    const uint32_t tokens = possible ? request.tokens : 0, segments = possible ? request.segments : 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        if (!possible) set_error(p.state, kBadCount, 0xff, kCopyIn);
        p.state->tokens = tokens;
        p.state->layer = request.layer;
        p.state->given_routing = request.given_routing;
        p.state->received = 0;
        p.state->out_dtype = request.out_dtype;
        p.state->step = request.step;
        p.state->begin_ns[kCopyIn] = begin;
        p.state->raises = min(request.raises, kMaxRaises);
        p.state->direct = request.direct;
        for (uint32_t i = 0; i < kMaxRaises; ++i) p.state->raise[i] = request.raise[i];
    }
    // Neighbouring rows belong to different blocks, so that few rows are spread over many SMs.
    const uint32_t first = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    uint32_t covered = 0;
    for (uint32_t entry = 0; entry < segments; entry += kTable) {
        const uint32_t count = min(kTable, segments - entry);
        if (entry != 0) __syncthreads();
        for (uint32_t word = (entry == 0 ? early * kEntryWords : 0) + threadIdx.x; word < count * kEntryWords;
             word += kThreads) {
            table_words[word] = load_host(entries + static_cast<uint64_t>(entry) * kEntryWords + word);
        }
        if (count > early || entry != 0) __syncthreads();
        const Segment& last = table[count - 1];
        // Segments must be consecutive; otherwise some rows would not be copied.
        if (table[0].first_row != covered) break;
        const uint32_t end = min(tokens, last.first_row + last.rows);
        for (uint32_t row = covered + first; row < end; row += gridDim.x * kWarps) {
            take(p, segment_of(table, count, row), row, request.out_dtype != kBf16);
        }
        covered = end;
    }
    if (covered != tokens && blockIdx.x == 0 && threadIdx.x == 0) set_error(p.state, kBadCount, 0xfe, kCopyIn);
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

// Writes the first `row_elements` elements of a result row, whose first word is `first`, to any multiple of the element size.
__device__ void put_narrow_row(const CopyOutParams& p, const RowPlace& place, uint64_t first, uint32_t dtype) {
    for (uint32_t word = threadIdx.x % 32; word * 8 < p.row_elements; word += 32) {
        float v[8];
        load_out(p.out, first + word, dtype, v);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
            const uint32_t index = word * 8 + i;
            if (index >= p.row_elements) continue;
            if (place.dtype == kF32) reinterpret_cast<float*>(place.output)[index] = v[i];
            else if (place.dtype == kF16) reinterpret_cast<__half*>(place.output)[index] = __float2half_rn(v[i]);
            else reinterpret_cast<__nv_bfloat16*>(place.output)[index] = __float2bfloat16_rn(v[i]);
        }
    }
}

// Adds the rows of each local expert to the counts of the step's layer. Steps follow one another on the stream, so no other kernel
// changes the counts.
__device__ void count_rows(const CopyOutParams& p) {
    for (uint32_t local = blockIdx.x * kThreads + threadIdx.x; local < p.local_experts; local += gridDim.x * kThreads) {
        const uint32_t rows = __ldcg(p.expert_offsets + local + 1) - __ldcg(p.expert_offsets + local);
        if (rows == 0) continue;
        const uint64_t layer = p.group.state->layer;
        const uint32_t expert = p.local_ids == nullptr ? p.first_expert + local : p.local_ids[layer * p.local_experts + local];
        const uint64_t cell = layer * p.count_stride + expert;
        const uint64_t count = p.row_counts[cell] + rows;
        p.row_counts[cell] = count;
        // A whole word, which the host may read at any time.
        *static_cast<volatile uint64_t*>(p.row_counts_host + cell) = count;
    }
}

// Tells rank 0 that this rank's results are written. Rank 0 waits until all ranks have said so, if the step has completion words, and
// raises them. The step's number is in host memory before any of them, so that the host knows after a fault whether clients have seen the
// end of the step.
__device__ void raise_words(const CopyOutParams& p) {
    const Group& g = p.group;
    SlotState* state = g.state;
    if (__ldcg(&state->error) != 0) return;
    const uint32_t raises = state->raises;
    if (g.ranks != 1) {
        const uint64_t flag = g.generation | __ldcg(reinterpret_cast<const unsigned long long*>(&state->exchange));
        if (g.rank != 0) store_release_system(at<uint64_t>(g, 0, g.written_flags) + g.rank, flag);
        for (uint32_t r = 1; g.rank == 0 && raises != 0 && r < g.ranks; ++r) {
            if (!wait_flag(g, at<uint64_t>(g, 0, g.written_flags) + r, flag, r, kCopyOut)) return;
        }
    }
    if (raises == 0) return;
    for (uint32_t i = 0; i < raises; ++i) *static_cast<volatile uint64_t*>(state->raise[i].number) = state->raise[i].call;
    *static_cast<volatile uint64_t*>(p.raised) = state->step;
    __threadfence_system();
    for (uint32_t i = 0; i < raises; ++i) *static_cast<volatile uint32_t*>(state->raise[i].word) = 1;
}

__device__ __forceinline__ uint64_t load_time(const uint64_t* time) {
    return __ldcg(reinterpret_cast<const unsigned long long*>(time));
}

// Ends the step, once all blocks have written their results: raises completion words and stores the completion record. One thread runs
// this.
__device__ void end_step(const CopyOutParams& p) {
    SlotState* state = p.group.state;
    state->end_ns[kCopyOut] = now_ns();
    raise_words(p);
    // All loads of a batch before its stores, so that they are under way together.
    const uint32_t received = __ldcg(&state->received), error = __ldcg(&state->error);
    const uint32_t assignments = p.assignments == nullptr ? 0 : __ldcg(p.assignments);
    uint64_t times[kPhases];
#pragma unroll
    for (uint32_t phase = 0; phase < kPhases; ++phase) times[phase] = load_time(&state->begin_ns[phase]);
#pragma unroll
    for (uint32_t phase = 0; phase < kPhases; ++phase) p.completion->begin_ns[phase] = times[phase];
#pragma unroll
    for (uint32_t phase = 0; phase < kPhases; ++phase) times[phase] = load_time(&state->end_ns[phase]);
#pragma unroll
    for (uint32_t phase = 0; phase < kPhases; ++phase) p.completion->end_ns[phase] = times[phase];
    p.completion->received = received;
    p.completion->assignments = assignments;
    p.completion->error = error;
    store_release_system(&p.completion->step, state->step);
}

template <int Count>
__global__ void __launch_bounds__(kThreads, 1) copy_out(const __grid_constant__ Ranks<CopyOutParams, Count> all) {
    const CopyOutParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    SlotState* state = p.group.state;
    begin_kernel();
    stamp_begin(state, kCopyOut);
    const uint32_t tokens = min(state->tokens, p.max_tokens), dtype = state->out_dtype;
    const uint32_t lane = threadIdx.x % 32, words = p.hidden / 8;
    // `dtype` is either that of all rows, and words are copied unchanged, or f32.
    for (uint32_t row = blockIdx.x * kWarps + threadIdx.x / 32; state->error == 0 && row < tokens;
         row += gridDim.x * kWarps) {
        const RowPlace place = p.places[row];
        uint8_t* to = place.output;
        const uint64_t first = static_cast<uint64_t>(row) * words;
        if (state->direct != 0 || p.out == nullptr) {
            // combine has stored the row, or copy engines carry it.
        } else if ((place.flags & kNarrowRows) != 0) {
            put_narrow_row(p, place, first, dtype);
        } else if (place.dtype == dtype) {
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
    if (p.expert_offsets != nullptr && state->error == 0) count_rows(p);
    // At system scope, because the results are read by the host, by other GPUs, or by their copy engines.
    __threadfence_system();
    if (last_block(&state->ticket, gridDim.x) && threadIdx.x == 0) end_step(p);
}

// Lists every token with its weight for the shared experts, because the experts' kernel always reads rows through a list.
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
