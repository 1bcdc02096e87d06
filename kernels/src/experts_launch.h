// The expert kernel of each format, which return a cudaError_t. Each is in its own source file, so that they compile in parallel.
#pragma once

#include <cuda_runtime.h>

#include "experts.h"

namespace expertd {

int setup_bf16();
int setup_fp8();
int setup_mxfp4();
int setup_w8a8();
int launch_bf16(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_fp8(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_mxfp4(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_w8a8(const ExpertdExpertsParams& p, cudaStream_t stream);

} // namespace expertd
