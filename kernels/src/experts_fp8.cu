// The expert kernel for FP8 e4m3 weights.
#include "experts_kernel.cuh"
#include "experts_launch.h"

namespace expertd {

int setup_fp8() { return setup_format<Fp8>(); }
int launch_fp8(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_format<Fp8>(p, stream); }

} // namespace expertd
