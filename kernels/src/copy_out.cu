// copy_out copies result rows from device memory to mapped host staging, or to the memory of clients, raises completion words and stores
// the completion record. The host's link limits it, so few blocks suffice.
#include "common.cuh"

namespace expertd {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kUnroll = 4;  // number of 16-byte words in flight per lane

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
// raises them. The step's number is in host memory before any of them, so that after a fault the host can tell whether clients have seen the
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

}  // namespace
}  // namespace expertd

extern "C" int expertd_copy_out(const expertd::CopyOutParams* params, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    return launch(copy_out<1>, copy_out<kMaxRanks>, params, count, blocks, kThreads, false, stream);
}
