// Rewrites row-major checkpoint weights into the panel layout of experts_layout.cuh.
#include <cuda_runtime.h>

#include <cstring>

#include "experts.h"
#include "experts_layout.cuh"
#include "experts_pack_host.h"
#include "modules.h"

namespace expertd {
namespace {

constexpr int PACK_THREADS = 256;

// The source of chunk `chunk` of a panel's row.
EXPERTD_HD const uint16_t* chunk_source(const ExpertdPackParams& p, int panel, int row, int chunk, int k) {
    const int column = panel * PANEL_K + ((chunk ^ (row % 8)) * 8);
    bool second = false;
    const int feature = p.kind == EXPERTD_PACK_GATE_UP ? gate_up_feature(row, second) : row;
    return static_cast<const uint16_t*>(second ? p.second : p.first) + uint64_t(feature) * k + column;
}

// Each thread writes one 16-byte chunk of the destination at a time.
__global__ void pack_kernel(const ExpertdPackParams p, int rows, int k) {
    const uint64_t chunks_per_expert = uint64_t(rows) * (k / 8);
    const uint64_t total = chunks_per_expert * p.experts;
    for (uint64_t i = blockIdx.x * uint64_t(PACK_THREADS) + threadIdx.x; i < total;
         i += uint64_t(gridDim.x) * PACK_THREADS) {
        const uint64_t expert = i / chunks_per_expert, in_expert = i % chunks_per_expert;
        const int chunk = in_expert % 8;
        const int row = (in_expert / 8) % rows;
        const int panel = in_expert / 8 / rows;
        const uint16_t* source = chunk_source(p, panel, row, chunk, k) + expert * p.expert_stride;
        reinterpret_cast<uint4*>(p.panels)[i] = *reinterpret_cast<const uint4*>(source);
    }
}

bool is_valid(const ExpertdPackParams& p) {
    const bool gate_up = p.kind == EXPERTD_PACK_GATE_UP;
    return p.hidden > 0 && p.hidden % 64 == 0 && p.inter > 0 && p.inter % 64 == 0 && p.experts >= 1 && p.expert_stride % 8 == 0 &&
           p.first != nullptr && (!gate_up || p.second != nullptr);
}

const Module module(reinterpret_cast<const void*>(pack_kernel));

} // namespace
} // namespace expertd

extern "C" int expertd_experts_pack(const ExpertdPackParams* params, void* stream) {
    const ExpertdPackParams& p = *params;
    const bool gate_up = p.kind == EXPERTD_PACK_GATE_UP;
    if (!expertd::is_valid(p)) return cudaErrorInvalidValue;
    const int rows = gate_up ? 2 * p.inter : p.hidden, k = gate_up ? p.hidden : p.inter;
    expertd::pack_kernel<<<2048, expertd::PACK_THREADS, 0, static_cast<cudaStream_t>(stream)>>>(p, rows, k);
    return cudaGetLastError();
}

extern "C" int expertd_experts_pack_host(const ExpertdPackParams* params, uint64_t first, uint64_t count) {
    const ExpertdPackParams& p = *params;
    const bool gate_up = p.kind == EXPERTD_PACK_GATE_UP;
    const int rows = gate_up ? 2 * p.inter : p.hidden, k = gate_up ? p.hidden : p.inter;
    const uint64_t panels = k / expertd::PANEL_K;
    if (!expertd::is_valid(p) || p.experts != 1 || p.panels == nullptr || first > panels || count > panels - first) return cudaErrorInvalidValue;
    for (uint64_t panel = first; panel < first + count; panel++) {
        uint8_t* out = static_cast<uint8_t*>(p.panels) + panel * rows * expertd::PANEL_ROW_BYTES;
        for (int row = 0; row < rows; row++) {
            for (int chunk = 0; chunk < 8; chunk++, out += 16) {
                std::memcpy(out, expertd::chunk_source(p, int(panel), row, chunk, k), 16);
            }
        }
    }
    return cudaSuccess;
}
