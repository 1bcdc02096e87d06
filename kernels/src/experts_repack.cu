// Rewrites matrices that are packed for processors into the panels and units of experts_layout.cuh, so that copies of the experts of CPU
// ranks need no second form in host memory.
#include <cuda_runtime.h>

#include "experts_repack.cuh"
#include "modules.h"

namespace expertd {
namespace {

constexpr int REPACK_THREADS = 256;
constexpr int REPACK_BLOCKS = 1024;
constexpr int CHUNK_K = 8;      // elements of k in a chunk of a bf16 panel
constexpr int RANGE_BLOCKS = 4; // k blocks of a unit that a warp packs

// Eight elements of a row in bf16 from column `k` on.
EXPERTD_HD uint4 load_chunk(const PanelRow<EXPERTD_BF16>& row, int k) {
    uint32_t words[4] = {0, 0, 0, 0};
    if (row.s.source_format() == EXPERTD_FROM_BF16 && row.has(k)) {
        // Pairs of neighbouring k are words, and padding of the last block is zeros.
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(row.block(k)) + k % BLOCK_32 / 2 * row.s.p.width + row.column;
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = pairs[i * row.s.p.width];
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = row.bf16(k + 2 * i) | uint32_t(row.bf16(k + 2 * i + 1)) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Chunks of 16 bytes of the panels of an expert, and rewriting of one of them. Neighbouring numbers are neighbouring rows of a panel of
// the source, so loads are contiguous; the chunks of 16 or 32 rows that threads store are merged in the L2 cache.
struct Chunks {
    int rows, features, of_panel, per_row;
    uint64_t count;

    EXPERTD_HD explicit Chunks(const ExpertdRepackParams& p) {
        const bool gate_up = p.kind == EXPERTD_PACK_GATE_UP;
        of_panel = gate_up ? p.width / 2 : p.width;
        rows = gate_up ? 2 * p.inter : p.hidden, features = gate_up ? p.inter : p.hidden;
        per_row = (gate_up ? p.hidden : p.inter) / CHUNK_K;
        count = uint64_t(features / of_panel) * per_row * p.width;
    }

    EXPERTD_HD void rewrite(const ExpertdRepackParams& p, uint64_t expert, uint64_t number) const {
        const int column = number % p.width, chunk = number / p.width % per_row, panel = number / p.width / per_row;
        const int feature = panel * of_panel + column % of_panel;
        const int row = p.kind != EXPERTD_PACK_GATE_UP ? feature : feature / 8 * 16 + feature % 8 + (column < of_panel ? 0 : 8);
        uint8_t* to = static_cast<uint8_t*>(p.panels) + expert * p.panel_stride;
        const PanelRows<EXPERTD_BF16> source(p, expert);
        *reinterpret_cast<uint4*>(to + 2 * panel_index(row, uint64_t(chunk) * CHUNK_K, rows)) = load_chunk(source.row(row), chunk * CHUNK_K);
    }
};

__global__ void __launch_bounds__(REPACK_THREADS, 4) repack_bf16_kernel(const __grid_constant__ ExpertdRepackParams p) {
    const Chunks chunks(p);
    const uint64_t total = chunks.count * p.experts, threads = uint64_t(gridDim.x) * REPACK_THREADS;
    for (uint64_t i = blockIdx.x * uint64_t(REPACK_THREADS) + threadIdx.x; i < total; i += threads) {
        chunks.rewrite(p, i / chunks.count, i % chunks.count);
    }
}

template <class Source> EXPERTD_HD int blocks_of(const Source& source) { return (source.k + BLOCK_K - 1) / BLOCK_K; }
template <class Source> EXPERTD_HD int ranges_of(const Source& source) { return (blocks_of(source) + RANGE_BLOCKS - 1) / RANGE_BLOCKS; }
EXPERTD_HD uint8_t* units_of(const ExpertdRepackParams& p, uint64_t expert) { return static_cast<uint8_t*>(p.panels) + expert * p.panel_stride; }
EXPERTD_HD float* row_scales_of(const ExpertdRepackParams& p, uint64_t expert) {
    return p.row_scales + expert * (p.kind == EXPERTD_PACK_GATE_UP ? 2 * p.inter : p.hidden);
}

// A warp packs a unit's k blocks of a range; blockIdx.y is the expert.
template <int Format> __global__ void __launch_bounds__(REPACK_THREADS, 2) repack_units_kernel(const __grid_constant__ ExpertdRepackParams p) {
    const PanelRows<Format> source(p, blockIdx.y);
    const int warp = (blockIdx.x * REPACK_THREADS + threadIdx.x) / LANES, unit = warp % source.units, range = warp / source.units;
    if (range >= ranges_of(source)) return;
    const int first = range * RANGE_BLOCKS, last = first + RANGE_BLOCKS, blocks = blocks_of(source);
    pack_unit(source, units_of(p, blockIdx.y), row_scales_of(p, blockIdx.y), unit, first, last < blocks ? last : blocks);
}

template <int Format> int repack_units(const ExpertdRepackParams& p, cudaStream_t on) {
    const PanelRows<Format> source(p, 0);
    const int warps = source.units * ranges_of(source), blocks = (warps * LANES + REPACK_THREADS - 1) / REPACK_THREADS;
    repack_units_kernel<Format><<<dim3(blocks, p.experts), REPACK_THREADS, 0, on>>>(p);
    return cudaGetLastError();
}

template <int Format> int repack_units_on_host(const ExpertdRepackParams& p) {
    for (int expert = 0; expert < p.experts; expert++) {
        const PanelRows<Format> source(p, expert);
        for (int unit = 0; unit < source.units; unit++) pack_unit_on_host(source, units_of(p, expert), row_scales_of(p, expert), unit);
    }
    return cudaSuccess;
}

// Whether the source holds all that the destination's format needs.
bool is_rewritten(const ExpertdRepackParams& p) {
    const int from = p.source_format;
    const bool in_blocks = from == EXPERTD_FROM_MXFP4 || from == EXPERTD_FROM_NVFP4 || from == EXPERTD_FROM_MXFP8 || from == EXPERTD_FROM_INT4;
    const bool groups = p.block_groups == 1 || p.block_groups == 2 || p.block_groups == 4;
    if (from < EXPERTD_FROM_BF16 || from > EXPERTD_FROM_INT4 || (in_blocks ? !groups : p.block_groups != 0)) return false;
    const bool apart = from == EXPERTD_FROM_FP8 || (in_blocks && p.scale_type == EXPERTD_SCALES_F16);
    if ((apart && p.scales == nullptr) || (from == EXPERTD_FROM_FP8 && p.scale_blocks < 1)) return false;
    switch (p.format) {
    case EXPERTD_BF16: return true;
    case EXPERTD_FP8:
    case EXPERTD_W8A8:
        return from == EXPERTD_FROM_FP8 && (p.scale_blocks % (BLOCK_K / BLOCK_32) == 0 || p.scale_blocks * BLOCK_32 >= p.source_k);
    case EXPERTD_MXFP4: return from == EXPERTD_FROM_MXFP4;
    case EXPERTD_MXFP8: return from == EXPERTD_FROM_MXFP8;
    case EXPERTD_NVFP4: return from == EXPERTD_FROM_NVFP4 && p.scale_type == EXPERTD_SCALES_F16 && p.block_groups <= 2;
    case EXPERTD_INT4:
    case EXPERTD_INT4_ZEROS: return from == EXPERTD_FROM_INT4 && p.block_groups == 1 && (p.format == EXPERTD_INT4_ZEROS || p.has_zeros == 0);
    default: return false;
    }
}

bool is_valid(const ExpertdRepackParams& p) {
    const bool gate_up = p.kind == EXPERTD_PACK_GATE_UP;
    const int features = gate_up ? p.inter : p.hidden, k = gate_up ? p.hidden : p.inter;
    return p.hidden > 0 && p.hidden % 64 == 0 && p.inter > 0 && p.inter % 64 == 0 && p.experts >= 1 && (p.width == 16 || p.width == 32) &&
           p.source != nullptr && p.panels != nullptr && p.source_stride % 16 == 0 && p.panel_stride % 16 == 0 && p.source_features > 0 &&
           p.source_features <= features && p.source_k > 0 && p.source_k <= k && (p.format == EXPERTD_BF16 || p.row_scales != nullptr) &&
           is_rewritten(p);
}

const Module module(reinterpret_cast<const void*>(repack_bf16_kernel));

} // namespace
} // namespace expertd

extern "C" int expertd_experts_repack(const ExpertdRepackParams* params, void* stream) {
    using namespace expertd;
    const ExpertdRepackParams& p = *params;
    if (!is_valid(p)) return cudaErrorInvalidValue;
    cudaStream_t on = static_cast<cudaStream_t>(stream);
    switch (p.format) {
    case EXPERTD_FP8: return repack_units<EXPERTD_FP8>(p, on);
    case EXPERTD_W8A8: return repack_units<EXPERTD_W8A8>(p, on);
    case EXPERTD_MXFP4: return repack_units<EXPERTD_MXFP4>(p, on);
    case EXPERTD_INT4: return repack_units<EXPERTD_INT4>(p, on);
    case EXPERTD_INT4_ZEROS: return repack_units<EXPERTD_INT4_ZEROS>(p, on);
    case EXPERTD_NVFP4: return repack_units<EXPERTD_NVFP4>(p, on);
    case EXPERTD_MXFP8: return repack_units<EXPERTD_MXFP8>(p, on);
    default: repack_bf16_kernel<<<REPACK_BLOCKS, REPACK_THREADS, 0, on>>>(p); return cudaGetLastError();
    }
}

extern "C" int expertd_experts_repack_host(const ExpertdRepackParams* params) {
    using namespace expertd;
    const ExpertdRepackParams& p = *params;
    if (!is_valid(p)) return cudaErrorInvalidValue;
    switch (p.format) {
    case EXPERTD_FP8: return repack_units_on_host<EXPERTD_FP8>(p);
    case EXPERTD_W8A8: return repack_units_on_host<EXPERTD_W8A8>(p);
    case EXPERTD_MXFP4: return repack_units_on_host<EXPERTD_MXFP4>(p);
    case EXPERTD_INT4: return repack_units_on_host<EXPERTD_INT4>(p);
    case EXPERTD_INT4_ZEROS: return repack_units_on_host<EXPERTD_INT4_ZEROS>(p);
    case EXPERTD_NVFP4: return repack_units_on_host<EXPERTD_NVFP4>(p);
    case EXPERTD_MXFP8: return repack_units_on_host<EXPERTD_MXFP8>(p);
    default: break;
    }
    const Chunks chunks(p);
    for (int expert = 0; expert < p.experts; expert++) {
        for (uint64_t i = 0; i < chunks.count; i++) chunks.rewrite(p, expert, i);
    }
    return cudaSuccess;
}
