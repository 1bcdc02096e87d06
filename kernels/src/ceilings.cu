// Kernels that measure a GPU's speed limits: reads of its memory, products on its tensor cores, stores to another GPU. The floors of
// a step are computed from these.
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"
#include "wgmma.cuh"

namespace expertd {
namespace {

// The length of buffers is a multiple of THREADS * UNROLL words.
constexpr int THREADS = 256, UNROLL = 8, BLOCKS_PER_SM = 8;
// The product: each of two warpgroups has ROWS rows of its own; both share COLUMNS columns. The inner dimension is DEPTH.
constexpr int DEPTH = 64, ROWS = 64, COLUMNS = 256, ROW_BYTES = DEPTH * 2;
constexpr int TILE_BYTES = (2 * ROWS + COLUMNS) * ROW_BYTES, ALIGNMENT = 1024;
// Number of instructions between two waits for earlier ones.
constexpr int IN_FLIGHT = 16;

// Keeps the compiler from removing the computation of `value`.
__device__ void keep(uint32_t value, uint32_t* sink) {
    if (value == 0x5eed5eedu) *sink = value;
}

// Reads every word once. `use` gets UNROLL words of a thread, which are THREADS apart, and the index of the first.
template <class Use> __device__ __forceinline__ void stream(const uint4* from, uint64_t words, Use use) {
    const uint64_t stride = uint64_t(gridDim.x) * THREADS * UNROLL;
    for (uint64_t i = uint64_t(blockIdx.x) * THREADS * UNROLL + threadIdx.x; i < words; i += stride) {
        uint4 read[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) read[u] = __ldcs(from + i + u * THREADS);
        use(read, i);
    }
}

__global__ void __launch_bounds__(THREADS) read_memory(const uint4* from, uint64_t words, uint32_t* sink) {
    uint32_t sum = 0;
    stream(from, words, [&](const uint4 (&read)[UNROLL], uint64_t) {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) sum ^= read[u].x ^ read[u].y ^ read[u].z ^ read[u].w;
    });
    keep(sum, sink);
}

__global__ void __launch_bounds__(THREADS) push(uint4* to, const uint4* from, uint64_t words) {
    stream(from, words, [&](const uint4 (&read)[UNROLL], uint64_t i) {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) to[i + u * THREADS] = read[u];
    });
}

// Multiplies operands that stay in shared memory, so that only the tensor cores limit the speed. The operands are random, because
// products of zeros draw less power and run at higher clocks.
__global__ void __launch_bounds__(THREADS, 1) multiply(uint32_t rounds, uint32_t* sink) {
    extern __shared__ uint8_t shared[];
    uint8_t* tiles = shared + (ALIGNMENT - smem_address(shared) % ALIGNMENT) % ALIGNMENT;
    for (int i = threadIdx.x; i < TILE_BYTES / 4; i += THREADS) {
        const uint32_t random = (i + blockIdx.x * (TILE_BYTES / 4)) * 2654435761u;
        // bf16 between 0.5 and 2, of either sign.
        reinterpret_cast<uint32_t*>(tiles)[i] = ((random ^ random >> 15) & 0x80FF80FFu) | 0x3F003F00u;
    }
    fence_async_proxy();
    __syncthreads();
    const uint32_t rows = wgmma_descriptor(smem_address(tiles + threadIdx.x / 128 * (ROWS * ROW_BYTES)));
    const uint32_t columns = wgmma_descriptor(smem_address(tiles + 2 * ROWS * ROW_BYTES));
    float sums[COLUMNS / 2] = {};
    wgmma_pin(sums);
    for (uint32_t round = 0; round < rounds; round++) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            // 16 elements of the inner dimension are 32 bytes, which are 2 units of a descriptor's address.
            Wgmma<COLUMNS>::mma(sums, rows + i % 4 * 2, columns + i % 4 * 2);
        }
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    wgmma_pin(sums);
    float sum = 0;
#pragma unroll
    for (float value : sums) sum += value;
    keep(__float_as_uint(sum), sink);
}

} // namespace
} // namespace expertd

extern "C" int expertd_read_memory(const void* from, uint64_t bytes, uint32_t* sink, uint32_t sms, void* stream) {
    using namespace expertd;
    read_memory<<<sms * BLOCKS_PER_SM, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const uint4*>(from), bytes / sizeof(uint4), sink);
    return cudaGetLastError();
}

extern "C" int expertd_push(void* to, const void* from, uint64_t bytes, uint32_t sms, void* stream) {
    using namespace expertd;
    push<<<sms * BLOCKS_PER_SM, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<uint4*>(to), static_cast<const uint4*>(from), bytes / sizeof(uint4));
    return cudaGetLastError();
}

// Stores the number of FLOPs of the launch in `flops`.
extern "C" int expertd_multiply(uint32_t rounds, uint32_t* sink, uint32_t sms, void* stream, double* flops) {
    using namespace expertd;
    constexpr int SHARED = TILE_BYTES + ALIGNMENT;
    const int code = cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    if (code != cudaSuccess) return code;
    multiply<<<sms, THREADS, SHARED, static_cast<cudaStream_t>(stream)>>>(rounds, sink);
    *flops = 2.0 * sms * rounds * IN_FLIGHT * (2 * ROWS) * COLUMNS * 16;
    return cudaGetLastError();
}
