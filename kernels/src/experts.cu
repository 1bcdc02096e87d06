// The expert kernel's C interface: checks parameters and chooses the kernel of the weights' format.
#include <cuda_runtime.h>

#include "experts.h"
#include "experts_launch.h"
#include "experts_formats.cuh"
#include "experts_schedule.cuh"

namespace expertd {
namespace {

struct Entry {
    int (*setup)();
    int (*launch)(const ExpertdExpertsParams&, cudaStream_t);
    int widest; // widest token tile
};

const Entry ENTRIES[] = {
    {setup_bf16, launch_bf16, Bf16::MAX_TOKENS},
    {setup_fp8, launch_fp8, Fp8::MAX_TOKENS},
    {setup_mxfp4, launch_mxfp4, Mxfp4::MAX_TOKENS},
    {setup_w8a8, launch_w8a8, W8a8::MAX_TOKENS},
    {setup_int4, launch_int4, Int4::MAX_TOKENS},
    {setup_int4_zeros, launch_int4_zeros, Int4Zeros::MAX_TOKENS},
    {setup_nvfp4, launch_nvfp4, Nvfp4::MAX_TOKENS},
    {setup_mxfp8, launch_mxfp8, Mxfp8::MAX_TOKENS},
    {setup_w4a8, launch_w4a8, W4a8::MAX_TOKENS},
};

template <class... Known> bool one_of(int value, Known... known) { return ((value == known) || ...); }

bool valid(const ExpertdExpertsParams& p) {
    const bool fp8_rows = one_of(p.format, EXPERTD_W8A8, EXPERTD_W4A8), many = (p.flags & EXPERTD_LAUNCH_MANY_ROWS) != 0;
    return p.format >= EXPERTD_BF16 && p.format <= EXPERTD_W4A8 && p.tile_tokens <= (ENTRIES[p.format].widest + 31) / 32 * 32 &&
           one_of(p.tile_tokens, 0, 32, 64, 128, 192, 256) && (one_of(p.tile_rows, 0, 16, 32, 64, 128, 256) ||
            (one_of(p.tile_rows, EXPERTD_TILE_TALL, EXPERTD_TILE_TURNS) && p.format == EXPERTD_BF16 && p.tile_tokens <= 128) ||
            (p.tile_rows == EXPERTD_TILE_TALL && fp8_rows) ||
            (one_of(p.tile_rows, EXPERTD_TILE_TOKEN_ROWS, EXPERTD_TILE_TOKEN_PAIRS) && (one_of(p.format, EXPERTD_BF16, EXPERTD_W8A8) || many))) &&
           (p.format != EXPERTD_W8A8 || one_of(p.tile_rows, 0, EXPERTD_TILE_TALL, EXPERTD_TILE_TOKEN_ROWS, EXPERTD_TILE_TOKEN_PAIRS, 256)) &&
           (p.format != EXPERTD_W4A8 || (one_of(p.tile_rows, 0, many ? EXPERTD_TILE_TOKEN_ROWS : EXPERTD_TILE_TALL, many ? EXPERTD_TILE_TOKEN_PAIRS : EXPERTD_TILE_TALL) && (p.flags & EXPERTD_LAUNCH_FEW_ROWS) == 0)) &&
           (!many || p.format == EXPERTD_W4A8) &&
           (fp8_rows ? p.x_scales != nullptr && p.h_scales != nullptr && p.inter % BLOCK_K == 0 && p.panel_rows % 8 == 0
                     : p.x_format == EXPERTD_ROWS_BF16) &&
           p.layers != nullptr && p.expert_offsets != nullptr && p.row_index != nullptr && p.row_weight != nullptr &&
           p.x != nullptr && p.y != nullptr && p.x_panels != nullptr && p.h != nullptr && p.state != nullptr &&
           p.x_stride % 16 == 0 && p.experts >= 1 && p.experts <= EXPERTD_MAX_EXPERTS && p.hidden > 0 &&
           p.hidden % 64 == 0 && p.inter > 0 && p.inter % 64 == 0 && p.panel_rows > 0 && p.blocks >= 0 &&
           p.activation >= EXPERTD_SWIGLU && p.activation <= EXPERTD_SWIGLU_OAI;
}

} // namespace
} // namespace expertd

extern "C" uint32_t expertd_experts_state_words(int32_t experts) { return expertd::STATE_READY + 2 * experts; }

extern "C" int expertd_experts_setup(void) {
    for (const expertd::Entry& entry : expertd::ENTRIES) {
        const int status = entry.setup();
        if (status != cudaSuccess) return status;
    }
    return expertd::setup_w4a8_rows();
}

extern "C" int expertd_experts_launch(const ExpertdExpertsParams* params, void* stream) {
    if (!expertd::valid(*params)) return cudaErrorInvalidValue;
    const auto on = static_cast<cudaStream_t>(stream);
    if (params->flags & EXPERTD_LAUNCH_FEW_ROWS) return expertd::launch_few(*params, on);
    if (params->flags & EXPERTD_LAUNCH_MANY_ROWS) return expertd::launch_w4a8_rows(*params, on);
    return expertd::ENTRIES[params->format].launch(*params, on);
}
