// The expert kernel for NVFP4 weights.
#include "experts_kernel.cuh"
#include "experts_launch.h"

namespace expertd {

int setup_nvfp4() { return setup_format<Nvfp4>(); }
int launch_nvfp4(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_format<Nvfp4>(p, stream); }

} // namespace expertd
