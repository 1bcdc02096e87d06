// Rewrites row-major checkpoint weights that are not bf16 into the units and panels of experts_layout.cuh.
#include <cuda_runtime.h>

#include "experts.h"
#include "experts_pack_host.h"
#include "experts_units.cuh"
#include "modules.h"

namespace expertd {
namespace {

constexpr int PACK_WARPS = 8;

// A row of the source.
struct PlainRow {
    const uint8_t* codes;
    const uint8_t* scales;
    const uint8_t* zeros;
    float scale;
    int index;

    EXPERTD_HD uint8_t nibbles(int column) const { return codes[column / 2]; }
    EXPERTD_HD uint16_t bytes(int column) const { return *reinterpret_cast<const uint16_t*>(codes + column); }
    EXPERTD_HD float multiplier(int block) const { return reinterpret_cast<const float*>(scales)[block]; }
    EXPERTD_HD uint8_t exponent(int group) const { return scales[group]; }
    EXPERTD_HD uint8_t e4m3(int group) const { return scales[group]; }
    EXPERTD_HD uint16_t half_scale(int group, const RowFacts&) const { return reinterpret_cast<const uint16_t*>(scales)[group]; }
    EXPERTD_HD uint8_t zero(int group) const { return zeros[group]; }
    EXPERTD_HD float row_scale(const RowFacts&) const { return scale; }
    EXPERTD_HD void find(int, RowFacts&) const {}
};

struct PlainRows {
    using Row = PlainRow;
    const ExpertdPackNarrowParams& p;
    int format, k, units;
    int code_bytes, scale_bytes; // of a row

    EXPERTD_HD explicit PlainRows(const ExpertdPackNarrowParams& params) : p(params), format(params.format) {
        const bool gate_up = p.kind == EXPERTD_PACK_GATE_UP;
        k = gate_up ? p.hidden : p.inter;
        units = (gate_up ? 2 * p.inter : p.hidden) / UNIT_ROWS;
        const bool has_bytes = format == EXPERTD_FP8 || format == EXPERTD_W8A8 || format == EXPERTD_MXFP8;
        code_bytes = has_bytes ? k : k / 2;
        scale_bytes = is_int4(format)              ? k / INT4_GROUP * 2
                      : format == EXPERTD_NVFP4    ? k / NVFP4_GROUP
                      : format == EXPERTD_MXFP4 || format == EXPERTD_MXFP8 ? k / 32
                                                   : (k + BLOCK_K - 1) / BLOCK_K * 4;
    }

    EXPERTD_HD Row row(int r) const {
        bool second = false;
        const int feature = p.kind == EXPERTD_PACK_GATE_UP ? gate_up_feature(r, second) : r, index = feature + (second ? p.inter : 0);
        const auto at = [&](const void* first, const void* other, int bytes) {
            return static_cast<const uint8_t*>(second ? other : first) + uint64_t(feature) * bytes;
        };
        const uint8_t* zeros = format == EXPERTD_INT4_ZEROS ? at(p.first_zeros, p.second_zeros, k / INT4_GROUP) : nullptr;
        return {at(p.first, p.second, code_bytes), at(p.first_scales, p.second_scales, scale_bytes), zeros, p.row_scales_in[index], index};
    }
};

__global__ void pack_narrow_kernel(const __grid_constant__ ExpertdPackNarrowParams p) {
    const PlainRows source(p);
    const int unit = blockIdx.x * PACK_WARPS + threadIdx.x / LANES;
    if (unit >= source.units) return;
    pack_unit(source, static_cast<uint8_t*>(p.units), p.row_scales, unit, 0, (source.k + BLOCK_K - 1) / BLOCK_K);
}

bool is_valid(const ExpertdPackNarrowParams& p) {
    const bool gate_up = p.kind == EXPERTD_PACK_GATE_UP;
    return p.hidden > 0 && p.hidden % 64 == 0 && p.inter > 0 && p.inter % 64 == 0 &&
           p.format > EXPERTD_BF16 && p.format <= EXPERTD_MXFP8 && p.first != nullptr &&
           (p.format != EXPERTD_INT4_ZEROS || (p.first_zeros != nullptr && (!gate_up || p.second_zeros != nullptr))) &&
           p.first_scales != nullptr && (!gate_up || (p.second != nullptr && p.second_scales != nullptr)) && p.row_scales_in != nullptr &&
           p.row_scales != nullptr && p.units != nullptr;
}

const Module module(reinterpret_cast<const void*>(pack_narrow_kernel));

} // namespace
} // namespace expertd

extern "C" int expertd_experts_pack_narrow(const ExpertdPackNarrowParams* params, void* stream) {
    const ExpertdPackNarrowParams& p = *params;
    if (!expertd::is_valid(p)) return cudaErrorInvalidValue;
    const int blocks = (expertd::PlainRows(p).units + expertd::PACK_WARPS - 1) / expertd::PACK_WARPS;
    expertd::pack_narrow_kernel<<<blocks, expertd::PACK_WARPS * expertd::LANES, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return cudaGetLastError();
}

extern "C" int expertd_experts_pack_narrow_host(const ExpertdPackNarrowParams* params, uint64_t first, uint64_t count) {
    const ExpertdPackNarrowParams& p = *params;
    if (!expertd::is_valid(p)) return cudaErrorInvalidValue;
    const expertd::PlainRows source(p);
    const uint64_t units = source.units;
    if (first > units || count > units - first) return cudaErrorInvalidValue;
    for (uint64_t unit = first; unit < first + count; unit++) {
        expertd::pack_unit_on_host(source, static_cast<uint8_t*>(p.units), p.row_scales, int(unit));
    }
    return cudaSuccess;
}

extern "C" uint64_t expertd_experts_matrix_bytes(int32_t format, int32_t kind, int32_t hidden, int32_t inter) {
    const bool gate_up = kind == EXPERTD_PACK_GATE_UP;
    const uint64_t rows = gate_up ? 2 * inter : hidden, k = gate_up ? hidden : inter;
    if (format == EXPERTD_BF16) return rows * k * 2;
    static_assert(expertd::FP8_UNIT_BYTES == expertd::W8A8_UNIT_BYTES, "FP8 takes the same memory in both layouts");
    return rows / expertd::UNIT_ROWS * ((k + expertd::BLOCK_K - 1) / expertd::BLOCK_K) * expertd::unit_bytes(format);
}
