// The experts' kernels of the portable path. Functions return a cudaError_t.
#pragma once

#include <cuda_runtime.h>

#include "../experts.h"

namespace expertd {

int setup_few();
int launch_few(const ExpertdExpertsParams& p, cudaStream_t stream); // all formats with EXPERTD_LAUNCH_FEW_ROWS

// The grouped product of a format, two launches: gate and up, then down.
int setup_bf16();
int setup_fp8();
int setup_mxfp4();
int setup_int4();
int setup_int4_zeros();
int setup_nvfp4();
int setup_mxfp8();
int launch_bf16(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_fp8(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_mxfp4(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_int4(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_int4_zeros(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_nvfp4(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_mxfp8(const ExpertdExpertsParams& p, cudaStream_t stream);

} // namespace expertd
