// The expert kernel for bf16 weights.
#include "experts_kernel.cuh"
#include "experts_launch.h"

namespace expertd {

int setup_bf16() { return setup_format<Bf16>(); }
int launch_bf16(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_format<Bf16>(p, stream); }

} // namespace expertd
