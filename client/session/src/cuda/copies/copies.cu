// The two kernels of a call on arrays of the caller's own: `put` brings rows and routing to where the service reads them, `take` brings
// the output to the caller, or NaN if there is none.
//
// scripts/session_ptx.sh compiles this file to copies.ptx, which is part of the source: the driver compiles PTX for its GPU when a session
// is opened, so that a build of the client needs no CUDA.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Types of weights.
constexpr u32 BF16 = 1;
constexpr u32 F16 = 2;
// Value of a completion word once the output is complete.
constexpr u32 DONE = 1;

// Weights [tokens, k] of the caller; null if a call has none.
struct Weights {
    const void* data;
    u32 type;
    u32 k;
};

// Integers of the caller; null if a call has none.
struct Integers {
    const void* data;
    // Whether they have 64 bits instead of 32.
    u32 are_wide;
};

struct Put {
    const char* rows;
    char* rows_place;
    u64 rows_bytes;
    // Elements of ids and weights each.
    u64 routed;
    u64 tokens;
    Integers ids;
    int* ids_place;
    Weights weights;
    float* weights_place;
    Integers token_ids;
    int* token_ids_place;
    // Whether the weights of a row with a weight that is not finite are sent as zeros.
    u32 masks;
};

struct Take {
    // In host memory.
    const volatile u32* word;
    // In the GPU's memory: the number of blocks that have copied, which is 0 between calls, and the word that the first block read.
    u32* arrivals;
    // Two bf16 or f16, or one f32.
    u32 nan;
    const char* output_place;
    char* output;
    u64 output_bytes;
    u64 row_bytes;
    // Rows with a weight that is not finite become NaN. Null: none.
    Weights masks;
    // Returned routing; null if a call returns none.
    const int* ids_place;
    int* ids;
    const int* weights_place;
    int* weights;
    u64 routed;
};

__device__ float weight(const Weights& weights, u64 at) {
    if (weights.type == BF16) return __uint_as_float(u32(static_cast<const u16*>(weights.data)[at]) << 16);
    if (weights.type == F16) {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(static_cast<const u16*>(weights.data)[at]));
        return wide;
    }
    return static_cast<const float*>(weights.data)[at];
}

__device__ bool row_is_finite(const Weights& weights, u64 row) {
#pragma unroll 1
    for (u32 slot = 0; slot < weights.k; ++slot) {
        const u32 exponent = __float_as_uint(weight(weights, row * weights.k + slot)) & 0x7f800000;
        if (exponent == 0x7f800000) return false;
    }
    return true;
}

// Numbers beyond 32 bits become others that no expert has.
__device__ int narrow(const Integers& integers, u64 at) {
    if (!integers.are_wide) return static_cast<const int*>(integers.data)[at];
    const long long value = static_cast<const long long*>(integers.data)[at];
    return value > 0x7fffffffll ? 0x7fffffff : value < -0x80000000ll ? int(0x80000000) : int(value);
}

__device__ bool fits(const void* a, const void* b, u64 bytes, u64 unit) { return (u64(a) | u64(b) | bytes) % unit == 0; }

template <class Unit>
__device__ void copy(const char* from, char* to, u64 bytes, u64 first, u64 stride) {
#pragma unroll 1
    for (u64 at = first; at < bytes / sizeof(Unit); at += stride) {
        reinterpret_cast<Unit*>(to)[at] = reinterpret_cast<const Unit*>(from)[at];
    }
}

extern "C" __global__ void expertd_put(const Put call) {
    const u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    const u64 stride = u64(gridDim.x) * blockDim.x;
    if (fits(call.rows, call.rows_place, call.rows_bytes, sizeof(uint4))) {
        copy<uint4>(call.rows, call.rows_place, call.rows_bytes, first, stride);
    } else {
        copy<u16>(call.rows, call.rows_place, call.rows_bytes, first, stride);
    }
#pragma unroll 1
    for (u64 at = first; at < call.routed; at += stride) {
        call.ids_place[at] = narrow(call.ids, at);
        const bool zero = call.masks && !row_is_finite(call.weights, at / call.weights.k);
        call.weights_place[at] = zero ? 0.0f : weight(call.weights, at);
    }
    if (call.token_ids.data != nullptr) {
#pragma unroll 1
        for (u64 at = first; at < call.tokens; at += stride) call.token_ids_place[at] = narrow(call.token_ids, at);
    }
}

__device__ uint4 repeated(u32 nan, uint4) { return make_uint4(nan, nan, nan, nan); }
__device__ u32 repeated(u32 nan, u32) { return nan; }
__device__ u16 repeated(u32 nan, u16) { return u16(nan); }

// A unit does not cross the end of a row.
template <class Unit>
__device__ void take(const Take& call, bool exists, u64 first, u64 stride) {
#pragma unroll 1
    for (u64 at = first; at < call.output_bytes / sizeof(Unit); at += stride) {
        Unit value = repeated(call.nan, Unit());
        if (exists && (call.masks.data == nullptr || row_is_finite(call.masks, at * sizeof(Unit) / call.row_bytes))) {
            value = reinterpret_cast<const Unit*>(call.output_place)[at];
        }
        reinterpret_cast<Unit*>(call.output)[at] = value;
    }
}

__device__ void take_output(const Take& call, bool exists, u64 first, u64 stride) {
    // f32 elements are aligned to 4 bytes, others to 2.
    if (fits(call.output_place, call.output, call.row_bytes, sizeof(uint4))) {
        take<uint4>(call, exists, first, stride);
    } else if (fits(call.output_place, call.output, call.row_bytes, sizeof(u32))) {
        take<u32>(call, exists, first, stride);
    } else {
        take<u16>(call, exists, first, stride);
    }
}

// Reads of the completion word take about 1 us each, one after the other, because it is in host memory. So the first block reads it while
// all blocks copy, and the block that is done last replaces the output by NaN if the call failed.
extern "C" __global__ void expertd_take(const Take call) {
    __shared__ bool is_last;
    if (blockIdx.x == 0 && threadIdx.x == 0) call.arrivals[1] = *call.word;
    const u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    const u64 stride = u64(gridDim.x) * blockDim.x;
    take_output(call, true, first, stride);
#pragma unroll 1
    for (u64 at = first; at < call.routed; at += stride) {
        call.ids[at] = call.ids_place[at];
        call.weights[at] = call.weights_place[at];
    }
    __threadfence();
    __syncthreads();
    // Wraps to 0 with the last block.
    if (threadIdx.x == 0) is_last = atomicInc(call.arrivals, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (*static_cast<const volatile u32*>(call.arrivals + 1) != DONE) take_output(call, false, threadIdx.x, blockDim.x);
}
