// Copies of received rows into panels, grouped by expert.
#pragma once

#include "experts_block.cuh"
#include "experts_quantise.cuh"

namespace expertd {

// Rows are copied into panels in pieces of 8 rows and COPY_PANELS panels.
constexpr int COPY_PANELS = 16;
constexpr int COPY_BATCH = 8; // 16-byte loads in flight per thread

__device__ __forceinline__ int copy_slices(const ExpertdExpertsParams& p) {
    return divide_up(p.hidden, COPY_PANELS * PANEL_K);
}

// The part of a row that eight threads copy together: panels `first` up to but not including `end` (64 elements each) of the row at
// `source`, to row `row` of the panels. The copying functions call `loaded` once their first loads have arrived.
struct Piece {
    const char* source;
    int row, first, end;
};

// Copies rows in bf16 to panels in bf16.
template <class Format, class Loaded>
__device__ __forceinline__ void copy_piece(const ExpertdExpertsParams& p, const Piece& piece, int chunk, Constant<0>, Loaded loaded) {
    const uint4* source = reinterpret_cast<const uint4*>(piece.source) + chunk;
    uint4* destination = static_cast<uint4*>(p.x_panels) + int64_t(piece.row) * 8 + (chunk ^ (piece.row % 8));
    for (int panel = piece.first; panel < piece.end; panel += COPY_BATCH) {
        uint4 v[COPY_BATCH];
#pragma unroll
        for (int i = 0; i < COPY_BATCH; i++) {
            if (panel + i < piece.end) v[i] = __ldcg(source + (panel + i) * 8);
        }
#pragma unroll
        for (int i = 0; i < COPY_BATCH; i++) {
            if (panel + i < piece.end) destination[int64_t(panel + i) * p.panel_rows * 8] = v[i];
        }
        loaded();
    }
}

// Copies rows in e4m3, or quantises rows in bf16, to panels in e4m3, each of which is two panels of bf16. The eight threads of a row
// are neighbours in a warp, and all eight must call it.
template <class Format, class Loaded>
__device__ __forceinline__ void copy_piece(const ExpertdExpertsParams& p, const Piece& piece, int chunk, Constant<1>, Loaded loaded) {
    constexpr int BATCH = 4;
    const uint32_t lanes = 0xFFu << (threadIdx.x % 32 / 8 * 8);
    uint8_t* destination = static_cast<uint8_t*>(p.x_panels) + int64_t(piece.row) * BLOCK_K;
    const int64_t panel_bytes = int64_t(p.panel_rows) * BLOCK_K;
    if (p.x_format == EXPERTD_ROWS_FP8) {
        const float* scales = reinterpret_cast<const float*>(piece.source + p.hidden);
        for (int first = piece.first / 2; 2 * first < piece.end; first += BATCH) {
            uint4 v[BATCH];
            float scale[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int panel = first + i, k = panel * BLOCK_K + chunk * 16;
                v[i] = make_uint4(0, 0, 0, 0);
                if (2 * panel < piece.end && k < p.hidden) v[i] = __ldcg(reinterpret_cast<const uint4*>(piece.source + k));
                if (2 * panel < piece.end && chunk == 0) scale[i] = __ldcg(scales + panel);
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int panel = first + i;
                if (2 * panel >= piece.end) break;
                if constexpr (Format::PERMUTED) {
                    const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
                    store_permuted(destination + panel * panel_bytes, piece.row, chunk * 16, words);
                } else {
                    *reinterpret_cast<uint4*>(destination + panel * panel_bytes + panel_byte(piece.row, chunk * 16)) = v[i];
                }
                if (chunk == 0) p.x_scales[int64_t(panel) * p.panel_rows + piece.row] = scale[i];
            }
            loaded();
        }
        return;
    }
    const uint4* source = reinterpret_cast<const uint4*>(piece.source) + chunk;
    for (int panel = piece.first; panel < piece.end; panel += BATCH) {
        uint4 v[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            v[i] = make_uint4(0, 0, 0, 0);
            if (panel + i < piece.end) v[i] = __ldcg(source + (panel + i) * 8);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i += 2) {
            if (panel + i >= piece.end) break;
            float largest = fmaxf(largest_of(v[i]), largest_of(v[i + 1]));
#pragma unroll
            for (int by = 1; by < 8; by *= 2) largest = fmaxf(largest, __shfl_xor_sync(lanes, largest, by));
            const GroupScale group = group_scale(largest, p.power_of_two_scales != 0);
            const int block = (panel + i) / 2;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint2 codes = quantise(v[i + half], group.inverse);
                if constexpr (Format::PERMUTED) {
                    const uint32_t words[2] = {codes.x, codes.y};
                    store_permuted(destination + block * panel_bytes, piece.row, half * 64 + chunk * 8, words);
                } else {
                    *reinterpret_cast<uint2*>(destination + block * panel_bytes + panel_byte(piece.row, half * 64 + chunk * 8)) = codes;
                }
            }
            if (chunk == 0) p.x_scales[int64_t(block) * p.panel_rows + piece.row] = group.scale;
        }
        loaded();
    }
}

// Copies received rows into panels, where the rows of an expert are contiguous, in the order in which experts are computed. All
// blocks share the pieces evenly. The rows of later experts are copied while the tensor cores compute the first ones. Two warps run
// this.
template <class Format>
__device__ __forceinline__ void copy_rows(const Block<Format>& block) {
    const ExpertdExpertsParams& p = block.p;
    const Tables& tables = block.shared.tables;
    const int thread = threadIdx.x - Format::COPY_WARP * 32, chunk = thread % 8, row = thread / 8;
    const int slices = copy_slices(p), panels = p.hidden / PANEL_K;
    const int64_t pieces = int64_t(tables.row[p.experts] / 8) * slices;
    int expert = 0;
    bool arrived = false;
    auto loaded = [&] { // the block's first rows have arrived
        if (!arrived) barrier_arrive(&block.shared.rows_loaded);
        arrived = true;
    };
    for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        const int panel_row = int(piece / slices) * 8, slice = int(piece % slices);
        expert = expert_at(tables.row, p.experts, expert, panel_row);
        const int in_expert = panel_row - tables.row[expert] + row;
        if (in_expert < tables.offset[expert + 1] - tables.offset[expert]) {
            const uint64_t source_row = p.row_index[tables.offset[expert] + in_expert];
            const Piece from{static_cast<const char*>(p.x) + source_row * p.x_stride, panel_row + row, slice * COPY_PANELS,
                             min(panels, (slice + 1) * COPY_PANELS)};
            copy_piece<Format>(p, from, chunk, Constant<Format::SCALE_STAGE_BYTES != 0>{}, loaded);
        }
        loaded();
        named_sync<COPY_THREADS>(COPY_BARRIER);
        if (thread == 0) publish(block.x_ready(expert), 1);
    }
    loaded();
}

} // namespace expertd
