// Device helpers: ordered accesses across GPUs, the clock, conversions of bf16 rows in 16-byte words, flags and barriers.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "step.h"

namespace expertd {

__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_release_system(uint64_t* address, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t now_ns() {
    uint64_t value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

// Loads a word of a row through L2. The non-coherent path must not be used, because peers write the windows.
__device__ __forceinline__ uint4 load_row(const uint4* address) { return __ldcg(address); }

__device__ __forceinline__ void add_bf16x8(float (&sum)[8], const uint4& raw) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // bf16 is the upper half of an f32.
        sum[2 * i] += __uint_as_float(words[i] << 16);
        sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint4 pack_bf16x8(const float (&v)[8]) {
    return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

__device__ __forceinline__ uint4 pack_f16x8(const float (&v)[8]) {
    return make_uint4(pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7]));
}

// The range of physical experts of a rank: `first` up to but not including `last`.
struct Range {
    uint32_t first, last;
};

__device__ __forceinline__ Range experts_of(const Group& group, uint32_t rank) {
    const uint32_t share = group.experts / group.ranks, extra = group.experts % group.ranks;
    const uint32_t first = rank * share + min(rank, extra);
    return {first, first + share + (rank < extra ? 1 : 0)};
}

// The rank of a physical expert.
__device__ __forceinline__ uint32_t rank_of(const Group& group, uint32_t physical) {
    const uint32_t share = group.experts / group.ranks, extra = group.experts % group.ranks;
    const uint32_t longer = extra * (share + 1);
    return physical < longer ? physical / (share + 1) : extra + (physical - longer) / share;
}

// The copies of a layer's experts in the group's table; null without a placement.
__device__ __forceinline__ const uint32_t* copies_of(const Group& group) {
    if (group.copies == nullptr) return nullptr;
    return group.copies + static_cast<uint64_t>(__ldcg(&group.state->layer)) * (kMaxExperts * kMaxRanks);
}

// The copy of `expert` that computes this rank's row `token`: rows use the copies in turn, and ranks begin with
// different ones. `copies` are those of the step's layer.
__device__ __forceinline__ uint32_t physical_of(const Group& group, const uint32_t* copies, uint32_t expert, uint32_t token) {
    if (copies == nullptr) return expert;
    // No kernel writes the table while another one reads it, so the loads may be cached.
    const uint32_t* of_expert = copies + expert * kMaxRanks;
    uint32_t entry = __ldg(of_expert);
    const uint32_t count = entry >> kPhysicalBits;
    if (count > 1) entry = __ldg(of_expert + (token + group.rank) % count);
    return entry & ((1u << kPhysicalBits) - 1);
}

__device__ __forceinline__ void set_error(SlotState* state, Fault fault, uint32_t peer, Phase phase) {
    atomicCAS(&state->error, 0u, fault | peer << 8 | static_cast<uint32_t>(phase) << 16);
}

__device__ __forceinline__ void stamp_begin(SlotState* state, Phase phase) {
    if (blockIdx.x == 0 && threadIdx.x == 0) state->begin_ns[phase] = now_ns();
}

__device__ __forceinline__ void stamp_end(SlotState* state, Phase phase) {
    if (blockIdx.x == 0 && threadIdx.x == 0) state->end_ns[phase] = now_ns();
}

// Programmatic dependent launch: waits until the previous kernel has ended and its writes are visible, then lets the blocks of the
// next kernel start beside this one. Both instructions do nothing in a plain launch. The portable path has plain launches only.
__device__ __forceinline__ void begin_kernel() {
#ifndef EXPERTD_PORTABLE
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // Not before the wait: so at most one kernel waits behind a running one, whose blocks are all resident by then.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Loads the first 16 bytes of SlotState: sequence, error and tokens. open_step() decodes them; other loads can be issued in between.
__device__ __forceinline__ uint4 head(const SlotState* state) { return __ldcg(reinterpret_cast<const uint4*>(state)); }

// A 64-bit word, from L2.
__device__ __forceinline__ uint64_t load_word(const uint64_t* word) { return __ldcg(reinterpret_cast<const unsigned long long*>(word)); }

// The place of a row, from L2: kernels load places before they have waited for the previous kernel.
__device__ __forceinline__ RowPlace load_row_place(const RowPlace* place) {
    const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(place));
    return {reinterpret_cast<uint8_t*>(static_cast<uint64_t>(raw.y) << 32 | raw.x), raw.z, raw.w};
}

// What copy_in tells the gate as soon as it knows it, in SlotState::announced, so that the gate can load weights while rows are on their
// way: tokens and layer, and the sequence to tell it from that of an earlier step. It is a hint; the gate compares it with the state.
__device__ __forceinline__ uint64_t announcement(uint64_t sequence, uint32_t tokens, uint32_t layer) {
    return sequence << 32 | static_cast<uint64_t>(layer & 0xfff) << 20 | (tokens & 0xfffff);
}

struct StepView {
    uint64_t sequence;
    uint32_t tokens;
    bool ok;  // the step has not failed; equal in all threads of a block
};

__device__ __forceinline__ StepView open_step(const uint4& head, uint32_t max_tokens) {
    StepView view;
    view.sequence = static_cast<uint64_t>(head.y) << 32 | head.x;
    view.tokens = min(head.w, max_tokens);
    // Another block may set the error word between the threads' loads; all threads of a block must take the same branch.
    view.ok = __syncthreads_or(head.z != 0) == 0;
    return view;
}

// Properties of a step that the gate depends on.
struct StepKind {
    uint32_t layer;
    bool routed;  // all rows have given routing
    bool wide;    // some rows are f16 or f32
};

__device__ __forceinline__ StepKind step_kind(const SlotState* state) {
    const uint2 words = __ldcg(reinterpret_cast<const uint2*>(&state->layer));
    return {words.x, words.y != 0, __ldcg(&state->out_dtype) != kBf16};
}

template <typename T>
__device__ __forceinline__ T* at(const Group& group, uint32_t rank, uint64_t offset) {
    return reinterpret_cast<T*>(group.windows[rank] + offset);
}

// For tests: delays the calling threads by a time that depends on rank, block, step and `salt`. A warp with its own salt is delayed
// separately.
__device__ __forceinline__ void random_delay(const Group& group, uint64_t sequence, uint32_t salt = 0) {
    if (group.delay_ns == 0) return;
    uint64_t x = sequence * 0x9e3779b97f4a7c15ull + group.rank * 0xbf58476d1ce4e5b9ull
        + (salt * 1024ull + blockIdx.x) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    x *= 0xd6e8feb86659fd93ull;
    x ^= x >> 29;
    const uint64_t until = now_ns() + x % group.delay_ns;
    while (now_ns() < until) {
    }
}

// Sets this block's flag at every rank after all stores of the block. All threads of the block must call it.
__device__ __forceinline__ void send_flags(const Group& group, uint64_t flags, uint64_t value) {
    __syncthreads();
    if (threadIdx.x < group.ranks) {
        // The release orders this thread's stores and, through the barrier, those of the block before the flag at system scope.
        uint64_t* flag = at<uint64_t>(group, threadIdx.x, flags) + group.rank * kMaxBlocks + blockIdx.x;
        store_release_system(flag, value);
    }
}

// Polls a flag of `source` until it has `value`. Sets the error word and returns false if the deadline passes, or if the flag shows
// a later exchange of this generation, which means that ranks do not run the same steps.
__device__ __forceinline__ bool wait_flag(const Group& group, const uint64_t* flag, uint64_t value, uint32_t source,
                                          Phase phase) {
    uint64_t deadline = 0;
    for (uint32_t spins = 0;; ++spins) {
        const uint64_t seen = load_acquire_system(flag);
        if (seen == value) return true;
        if (seen > value && seen >> kSequenceBits == value >> kSequenceBits) {
            set_error(group.state, kAhead, source, phase);
            return false;
        }
        if ((spins & 63) != 63) continue;
        const uint64_t now = now_ns();
        if (deadline == 0) deadline = now + group.deadline_ns;
        if (now > deadline) {
            set_error(group.state, kTimeout, source, phase);
            return false;
        }
    }
}

// Waits for the flags of blocks `first` to `first + count - 1` of every rank. Returns false in all threads if a wait failed.
__device__ __forceinline__ bool wait_flags(const Group& group, uint64_t flags, uint64_t value, Phase phase,
                                           uint32_t first, uint32_t count) {
    const uint64_t* own = at<uint64_t>(group, group.rank, flags) + first;
    bool late = false;
    for (uint32_t i = threadIdx.x; i < count * group.ranks && !late; i += blockDim.x) {
        const uint32_t source = i / count;
        late = !wait_flag(group, own + source * kMaxBlocks + (i - source * count), value, source, phase);
    }
    // The barrier makes what the polling threads acquired visible to the rest of the block.
    return __syncthreads_or(late) == 0;
}

// Returns true in all threads of the last block that calls it, and resets the ticket for the next kernel.
__device__ __forceinline__ bool last_block(uint32_t* ticket, uint32_t blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(ticket, 1) == blocks - 1;
        if (last) *ticket = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// A barrier between the first `blocks` blocks of one rank. Returns false in all threads if the step has failed, so that no block
// waits for one that has returned early. SlotState::epoch has the number of passes above kEpochBits, and below it the number of blocks
// that wait in this one; a block that stops takes itself out, unless all have come.
constexpr uint32_t kEpochBits = 16;
static_assert(kMaxBlocks < 1u << kEpochBits, "all blocks can wait");

__device__ __forceinline__ bool rank_barrier(SlotState* state, uint32_t blocks) {
    __shared__ bool failed;
    __syncthreads();
    if (threadIdx.x == 0) {
        constexpr uint32_t waiting = (1u << kEpochBits) - 1;
        const volatile uint32_t* error = &state->error;
        bool stop = false;
        __threadfence();
        const uint32_t before = atomicAdd(&state->epoch, 1);
        if ((before & waiting) == blocks - 1) {
            atomicAdd(&state->epoch, (1u << kEpochBits) - blocks);
        } else {
            for (;;) {
                const uint32_t now = *static_cast<volatile uint32_t*>(&state->epoch);
                if (now >> kEpochBits != before >> kEpochBits) break;
                if (*error == 0 || (now & waiting) == blocks) continue;
                stop = atomicCAS(&state->epoch, now, now - 1) == now;
                if (stop) break;
            }
        }
        __threadfence();
        failed = stop;
    }
    __syncthreads();
    return !failed;
}

// Parameters of `Count` ranks, passed by value.
template <typename Params, int Count>
struct Ranks {
    Params rank[Count];
};

// Launches `one` for a single rank, as a programmatic dependent launch (every kernel begins with begin_kernel), or `many` for a
// loopback group. The blocks of a `resident` kernel wait for each other and must be resident together; a loopback group is launched
// cooperatively, which fails instead of hanging. `cluster` is the number of blocks of a cluster of a single rank's launch.
template <typename Params, typename One, typename Many>
int launch(One one, Many many, const Params* params, uint32_t count, uint32_t blocks, uint32_t threads,
           bool resident, void* stream, uint32_t shared_bytes = 0, uint32_t cluster = 1) {
    if (count == 0 || count > kMaxRanks || blocks == 0) return cudaErrorInvalidValue;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks, count);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchAttribute& attribute = attributes[0];
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    if (count == 1) {
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
    } else {
        attribute.id = cudaLaunchAttributeCooperative;
        attribute.val.cooperative = 1;
    }
    config.attrs = attributes;
#ifdef EXPERTD_PORTABLE
    if (cluster != 1) return cudaErrorInvalidValue;
    config.numAttrs = count != 1 && resident ? 1 : 0;
#else
    config.numAttrs = count == 1 ? (cluster == 1 ? 1 : 2) : resident ? 1 : 0;
#endif
    if (count == 1) {
        Ranks<Params, 1> all;
        all.rank[0] = params[0];
        return cudaLaunchKernelEx(&config, one, all);
    }
    Ranks<Params, kMaxRanks> all = {};
    for (uint32_t i = 0; i < count; ++i) all.rank[i] = params[i];
    return cudaLaunchKernelEx(&config, many, all);
}

}  // namespace expertd
