// The C interface of the portable path's experts.
#include "experts.h"

namespace expertd {
namespace {

struct Entry {
    int format;
    int (*setup)();
    int (*launch)(const ExpertdExpertsParams&, cudaStream_t);
};

const Entry ENTRIES[] = {
    {EXPERTD_BF16, setup_bf16, launch_bf16}, {EXPERTD_FP8, setup_fp8, launch_fp8},
    {EXPERTD_MXFP4, setup_mxfp4, launch_mxfp4}, {EXPERTD_INT4, setup_int4, launch_int4},
    {EXPERTD_INT4_ZEROS, setup_int4_zeros, launch_int4_zeros},
    {EXPERTD_NVFP4, setup_nvfp4, launch_nvfp4}, {EXPERTD_MXFP8, setup_mxfp8, launch_mxfp8},
};

// tile_rows does not matter, and of tile_tokens only whether it is small (GroupedSmall).
bool valid(const ExpertdExpertsParams& p) {
    return p.x_format == EXPERTD_ROWS_BF16 && p.layers != nullptr && p.expert_offsets != nullptr && p.row_index != nullptr && p.row_weight != nullptr &&
           p.x != nullptr && p.y != nullptr && p.h != nullptr && p.state != nullptr && p.x_stride % 16 == 0 && p.experts >= 1 &&
           p.experts <= EXPERTD_MAX_EXPERTS && p.hidden > 0 && p.hidden % 64 == 0 && p.inter > 0 && p.inter % 64 == 0 && p.panel_rows > 0 &&
           p.blocks >= 0 && p.activation >= EXPERTD_SWIGLU && p.activation <= EXPERTD_SWIGLU_OAI;
}

} // namespace
} // namespace expertd

extern "C" int expertd_experts_setup(void) {
    for (const expertd::Entry& entry : expertd::ENTRIES) {
        const int status = entry.setup();
        if (status != cudaSuccess) return status;
    }
    return expertd::setup_few();
}

extern "C" int expertd_experts_launch(const ExpertdExpertsParams* params, void* stream) {
    if (!expertd::valid(*params)) return cudaErrorInvalidValue;
    if (params->flags & EXPERTD_LAUNCH_FEW_ROWS) return expertd::launch_few(*params, static_cast<cudaStream_t>(stream));
    for (const expertd::Entry& entry : expertd::ENTRIES) {
        if (entry.format == params->format) return entry.launch(*params, static_cast<cudaStream_t>(stream));
    }
    return cudaErrorInvalidValue;
}
