// copy_out copies result rows from device memory to mapped host staging, or to the memory of clients, raises completion words and stores
// the completion record. The host's link limits it, so few blocks suffice.
#include "common.cuh"
#include "ptx.cuh"

namespace expertd {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kUnroll = 4;  // number of 16-byte words in flight per lane
constexpr uint32_t kAlone = 8 * kThreads;   // largest number of choices that the first block copies alone
constexpr int kReported = 1;                // barrier: the first block has reported
constexpr uint32_t kChoices = 4;            // number of choices that a thread loads together

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

// Copies ids and weights that were used, and adds the rows of each local expert to the counts of the step's layer. `first` is the thread's
// number among `stride` threads. Steps follow one another on the stream, so no other kernel changes the counts. A step that fails in
// combine is counted, and counted again when it is repeated.
__device__ __forceinline__ void report(const CopyOutParams& p, uint32_t tokens, uint32_t first, uint32_t stride) {
    const uint32_t count = tokens * p.top_k;
    for (uint32_t base = first; base < count; base += kChoices * stride) {
        int32_t ids[kChoices];
        float weights[kChoices];
#pragma unroll
        for (uint32_t i = 0; i < kChoices; ++i) {
            const uint32_t at = base + i * stride;
            if (at >= count) continue;
            ids[i] = __ldcg(p.topk_ids + at);
            weights[i] = __ldcg(p.topk_weights + at);
        }
#pragma unroll
        for (uint32_t i = 0; i < kChoices; ++i) {
            const uint32_t at = base + i * stride;
            if (at >= count) continue;
            p.staged_ids[at] = ids[i];
            p.staged_weights[at] = weights[i];
        }
    }
    if (p.expert_offsets == nullptr) return;
    const uint64_t layer = __ldcg(&p.group.state->layer);
    for (uint32_t local = first; local < p.local_experts; local += stride) {
        const uint32_t rows = __ldcg(p.expert_offsets + local + 1) - __ldcg(p.expert_offsets + local);
        const uint32_t expert = p.local_ids == nullptr ? p.first_expert + local : p.local_ids[layer * p.local_experts + local];
        if (rows == 0) continue;
        const uint64_t cell = layer * p.count_stride + expert;
        const uint64_t count = load_word(p.row_counts + cell) + rows;
        p.row_counts[cell] = count;
        // A whole word, which the host may read at any time.
        *static_cast<volatile uint64_t*>(p.row_counts_host + cell) = count;
    }
}

// What the end of the step needs and combine does not write. Each lane has one entry of `raise`.
struct Ending {
    uint64_t step, flag;
    uint32_t raises, assignments;
    Raise raise;
};

__device__ __forceinline__ Ending load_ending(const CopyOutParams& p) {
    SlotState* state = p.group.state;
    const uint64_t* raise = reinterpret_cast<const uint64_t*>(&state->raise[threadIdx.x % kMaxRaises]);
    Ending ending;
    ending.step = load_word(&state->step);
    ending.flag = p.group.generation | load_word(&state->exchange);
    ending.raises = __ldcg(&state->raises);
    ending.assignments = p.assignments == nullptr ? 0 : __ldcg(p.assignments);
    ending.raise = {reinterpret_cast<uint32_t*>(load_word(raise)), reinterpret_cast<uint64_t*>(load_word(raise + 1)), load_word(raise + 2)};
    return ending;
}

// Tells rank 0 that this rank's results are written. Rank 0 waits until all ranks have said so, if the step has completion words. One warp
// runs this. Returns false if the step has failed.
__device__ __forceinline__ bool meet_ranks(const Group& g, const Ending& ending) {
    const uint32_t lane = threadIdx.x % 32;
    if (g.rank != 0) {
        if (lane == 0) store_release_system(at<uint64_t>(g, 0, g.written_flags) + g.rank, ending.flag);
        return true;
    }
    if (ending.raises == 0) return true;
    bool late = false;
    if (lane != 0 && lane < g.ranks) {
        late = !wait_flag(g, at<uint64_t>(g, 0, g.written_flags) + lane, ending.flag, lane, kCopyOut);
    }
    late = __any_sync(~0u, late);
    // Makes what the polling lanes acquired visible to the other lanes.
    __syncwarp();
    return !late;
}

// Ends the step, once all blocks have written their results: raises completion words and stores the completion record. One warp runs
// this. With `Alone` it is the first warp of the only block; the other warps report meanwhile, and the record waits for them.
//
// The step's number is in host memory before any word is raised, so that after a fault the host can tell whether clients have seen the
// end of the step. One fence orders that, and all results that this warp knows of, before the words.
template <bool Alone>
__device__ __forceinline__ void end_step(const CopyOutParams& p, const Ending& ending) {
    const uint64_t begin = Alone ? now_ns() : 0;
    SlotState* state = p.group.state;
    const uint32_t lane = threadIdx.x % 32;
    // All loads are under way together. begin_ns and end_ns are one array of times.
    uint32_t error = __ldcg(&state->error);
    const uint32_t received = __ldcg(&state->received);
    uint64_t time = lane < 2 * kPhases ? load_word(state->begin_ns + lane) : 0;
    if (Alone && lane == kCopyOut) time = begin;
    if (error == 0 && p.group.ranks != 1 && !meet_ranks(p.group, ending)) error = __ldcg(&state->error);
    const bool raises = error == 0 && ending.raises != 0;
    if (raises) {
        if (lane < ending.raises) *static_cast<volatile uint64_t*>(ending.raise.number) = ending.raise.call;
        if (lane == 0) *static_cast<volatile uint64_t*>(p.raised) = ending.step;
    }
    if (lane == kPhases + kCopyOut) time = now_ns();
    static_assert(offsetof(SlotState, end_ns) == offsetof(SlotState, begin_ns) + kPhases * sizeof(uint64_t), "one array");
    static_assert(offsetof(Completion, end_ns) == offsetof(Completion, begin_ns) + kPhases * sizeof(uint64_t), "one array");
    if (lane < 2 * kPhases) p.completion->begin_ns[lane] = time;
    if (lane == 0) {
        p.completion->received = received;
        p.completion->assignments = ending.assignments;
        p.completion->error = error;
    }
    if (raises) {
        __syncwarp();
        __threadfence_system();
        if (lane < ending.raises) *static_cast<volatile uint32_t*>(ending.raise.word) = 1;
    }
    __syncwarp();
    if (Alone) named_sync<kThreads>(kReported);
    if (lane == 0) store_release_system(&p.completion->step, ending.step);
}

// Blocks can only start once all blocks of combine have waited for the experts. So everything except what combine writes is loaded, and
// reported to the host, before combine has ended.
template <int Count>
__global__ void __launch_bounds__(kThreads, 1) copy_out(const __grid_constant__ Ranks<CopyOutParams, Count> all) {
    const CopyOutParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    SlotState* state = p.group.state;
    const uint32_t lane = threadIdx.x % 32, words = p.hidden / 8;
    const Ending ending = load_ending(p);
    const uint32_t tokens = min(__ldcg(&state->tokens), p.max_tokens), dtype = __ldcg(&state->out_dtype);
    // All threads see an error of an earlier kernel, after which nothing is reported. An error of combine may be seen by some
    // threads only.
    const bool failed = __ldcg(&state->error) != 0;
    // Without rows to copy: combine stores them at their places, or copy engines carry them.
    const bool done = __ldcg(&state->direct) != 0 || p.out == nullptr;
    const bool alone = done && tokens * p.top_k <= kAlone;
    if (alone && blockIdx.x != 0) return;
    if (alone && threadIdx.x >= 32) {
        if (!failed) report(p, tokens, threadIdx.x - 32, kThreads - 32);
        __syncwarp();
        named_sync<kThreads>(kReported);
        return;
    }
    if (alone) {
        begin_kernel();
        end_step<true>(p, ending);
        return;
    }
    if (!failed) report(p, tokens, blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads);
    const uint32_t stride = gridDim.x * kWarps;
    uint32_t row = blockIdx.x * kWarps + threadIdx.x / 32;
    RowPlace next = {};
    if (row < tokens) next = load_row_place(p.places + row);
    begin_kernel();
    stamp_begin(state, kCopyOut);
    // `dtype` is either that of all rows, and words are copied unchanged, or f32.
    const bool copies = !done && __ldcg(&state->error) == 0;
    for (; copies && row < tokens; row += stride) {
        const RowPlace place = next;
        if (row + stride < tokens) next = load_row_place(p.places + row + stride);
        uint8_t* to = place.output;
        const uint64_t first = static_cast<uint64_t>(row) * words;
        if ((place.flags & kNarrowRows) != 0) {
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
    }
    // At system scope, because the results are read by the host, by other GPUs, or by their copy engines.
    __threadfence_system();
    if (last_block(&state->ticket, gridDim.x) && threadIdx.x < 32) end_step<false>(p, ending);
}

}  // namespace
}  // namespace expertd

extern "C" int expertd_copy_out(const expertd::CopyOutParams* params, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    return launch(copy_out<1>, copy_out<kMaxRanks>, params, count, blocks, kThreads, false, stream);
}
