// Rewrites matrices that are packed for processors (server/compute/src/linalg/packed.rs) into the panels of experts_layout.cuh, so that
// copies of the experts of CPU ranks need no second form in host memory.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "experts_layout.cuh"
#include "experts_repack.h"
#include "modules.h"

namespace expertd {
namespace {

constexpr int REPACK_THREADS = 256;
constexpr int REPACK_BLOCKS = 1024;
constexpr int CHUNK_K = 8;   // elements of k that a thread moves
constexpr int BLOCK_32 = 32; // elements of k in a block of the source

// To nearest, ties to even, with the payload of a NaN cut off, as loaders round on the host.
__device__ __forceinline__ uint32_t bf16_bits(float value) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Eight elements of one row of a bf16, f16 or f32 matrix as bf16. `block` is a block of the source, whose units of `width` rows are
// pairs of neighbouring k (bf16) or single k (f16, f32).
template <int Source> __device__ __forceinline__ uint4 load_chunk(const uint8_t* block, int chunk, int column, int width) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int k = chunk * CHUNK_K + 2 * i;
        if (Source == EXPERTD_FROM_BF16) {
            words[i] = reinterpret_cast<const uint32_t*>(block)[(k / 2) * width + column];
        } else if (Source == EXPERTD_FROM_F16) {
            const __half* from = reinterpret_cast<const __half*>(block) + k * width + column;
            words[i] = bf16_bits(__half2float(from[0])) | bf16_bits(__half2float(from[width])) << 16;
        } else {
            const float* from = reinterpret_cast<const float*>(block) + k * width + column;
            words[i] = bf16_bits(from[0]) | bf16_bits(from[width]) << 16;
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Each thread writes one 16-byte chunk of the destination at a time. Neighbouring threads have neighbouring rows of a panel of the source,
// so loads are contiguous; the chunks of 16 or 32 rows that they store are merged in the L2 cache. Features that only the destination
// has are zeros.
template <int Source> __global__ void __launch_bounds__(REPACK_THREADS) repack_kernel(const ExpertdRepackParams p) {
    const bool gate_up = p.kind == EXPERTD_PACK_GATE_UP;
    const int of_panel = gate_up ? p.width / 2 : p.width; // features of each projection in a panel of the source
    const int rows = gate_up ? 2 * p.inter : p.hidden, features = gate_up ? p.inter : p.hidden;
    const int k = gate_up ? p.hidden : p.inter, chunks = k / CHUNK_K;
    const int panels = features / of_panel, source_panels = (p.source_features + of_panel - 1) / of_panel;
    const int source_blocks = (p.source_k + BLOCK_32 - 1) / BLOCK_32;
    constexpr int BYTES = Source == EXPERTD_FROM_F32 ? 4 : 2;
    const uint64_t block_bytes = uint64_t(BLOCK_32) * p.width * BYTES;
    const uint64_t per_expert = uint64_t(panels) * chunks * p.width, total = per_expert * p.experts;
    for (uint64_t i = blockIdx.x * uint64_t(REPACK_THREADS) + threadIdx.x; i < total; i += uint64_t(gridDim.x) * REPACK_THREADS) {
        const uint64_t expert = i / per_expert, in_expert = i % per_expert;
        const int column = in_expert % p.width, chunk = in_expert / p.width % chunks, panel = in_expert / p.width / chunks;
        const int block = chunk * CHUNK_K / BLOCK_32;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (panel < source_panels && block < source_blocks) {
            const uint8_t* from = static_cast<const uint8_t*>(p.source) + expert * p.source_stride;
            from += (uint64_t(panel) * source_blocks + block) * block_bytes;
            words = load_chunk<Source>(from, chunk % (BLOCK_32 / CHUNK_K), column, p.width);
        }
        const int feature = panel * of_panel + column % of_panel;
        const int row = !gate_up ? feature : feature / 8 * 16 + feature % 8 + (column < of_panel ? 0 : 8);
        uint8_t* to = static_cast<uint8_t*>(p.panels) + expert * p.panel_stride;
        *reinterpret_cast<uint4*>(to + 2 * panel_index(row, uint64_t(chunk) * CHUNK_K, rows)) = words;
    }
}

bool is_valid(const ExpertdRepackParams& p) {
    const bool gate_up = p.kind == EXPERTD_PACK_GATE_UP;
    const int features = gate_up ? p.inter : p.hidden, k = gate_up ? p.hidden : p.inter;
    return p.hidden > 0 && p.hidden % 64 == 0 && p.inter > 0 && p.inter % 64 == 0 && p.experts >= 1 && (p.width == 16 || p.width == 32) &&
           p.source != nullptr && p.panels != nullptr && p.source_stride % 16 == 0 && p.panel_stride % 16 == 0 && p.source_features > 0 &&
           p.source_features <= features && p.source_k > 0 && p.source_k <= k;
}

const Module module(reinterpret_cast<const void*>(repack_kernel<EXPERTD_FROM_BF16>));

} // namespace
} // namespace expertd

extern "C" int expertd_experts_repack(const ExpertdRepackParams* params, void* stream) {
    using namespace expertd;
    const ExpertdRepackParams& p = *params;
    if (!is_valid(p)) return cudaErrorInvalidValue;
    cudaStream_t on = static_cast<cudaStream_t>(stream);
    switch (p.source_format) {
    case EXPERTD_FROM_BF16: repack_kernel<EXPERTD_FROM_BF16><<<REPACK_BLOCKS, REPACK_THREADS, 0, on>>>(p); break;
    case EXPERTD_FROM_F16: repack_kernel<EXPERTD_FROM_F16><<<REPACK_BLOCKS, REPACK_THREADS, 0, on>>>(p); break;
    case EXPERTD_FROM_F32: repack_kernel<EXPERTD_FROM_F32><<<REPACK_BLOCKS, REPACK_THREADS, 0, on>>>(p); break;
    default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}
