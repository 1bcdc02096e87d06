// Received rows to panels: the part of the expert kernel that gathers.
#pragma once

#include "experts_block.cuh"

namespace expertd {

// Rows are copied into panels in pieces of 8 rows and COPY_PANELS panels.
constexpr int COPY_PANELS = 16;
constexpr int COPY_BATCH = 8; // 16-byte loads in flight per thread

__device__ __forceinline__ int copy_slices(const ExpertdExpertsParams& p) {
    return divide_up(p.hidden, COPY_PANELS * PANEL_K);
}

// Two warps: copy received rows into panels, one contiguous run of rows per expert, in the order of need. All blocks
// share the pieces evenly; while the tensor cores work on the first experts, later ones are copied.
template <class Format>
__device__ __forceinline__ void copy_rows(const Block<Format>& block) {
    const ExpertdExpertsParams& p = block.p;
    const Tables& tables = block.shared.tables;
    const int thread = threadIdx.x - COPY_WARP * 32, chunk = thread % 8, row = thread / 8;
    const int slices = copy_slices(p), panels = p.hidden / PANEL_K;
    const int64_t pieces = int64_t(tables.row[p.experts] / 8) * slices;
    int expert = 0;
    bool arrived = false;
    for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        const int panel_row = int(piece / slices) * 8, slice = int(piece % slices);
        expert = expert_at(tables.row, p.experts, expert, panel_row);
        const int in_expert = panel_row - tables.row[expert] + row;
        if (in_expert < tables.offset[expert + 1] - tables.offset[expert]) {
            const uint64_t source_row = p.row_index[tables.offset[expert] + in_expert];
            const uint4* source = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.x) + source_row * p.x_stride) + chunk;
            uint4* destination = static_cast<uint4*>(p.x_panels) + int64_t(panel_row + row) * 8 + (chunk ^ row);
            const int end = min(panels, (slice + 1) * COPY_PANELS);
            for (int panel = slice * COPY_PANELS; panel < end; panel += COPY_BATCH) {
                uint4 v[COPY_BATCH];
#pragma unroll
                for (int i = 0; i < COPY_BATCH; i++) {
                    if (panel + i < end) v[i] = __ldcg(source + (panel + i) * 8);
                }
#pragma unroll
                for (int i = 0; i < COPY_BATCH; i++) {
                    if (panel + i < end) destination[int64_t(panel + i) * p.panel_rows * 8] = v[i];
                }
                if (!arrived) barrier_arrive(&block.shared.rows_loaded);
                arrived = true;
            }
        }
        if (!arrived) barrier_arrive(&block.shared.rows_loaded);
        arrived = true;
        named_sync<COPY_THREADS>(COPY_BARRIER);
        if (thread == 0) publish(block.x_ready(expert), 1);
    }
    if (!arrived) barrier_arrive(&block.shared.rows_loaded);
}

} // namespace expertd
