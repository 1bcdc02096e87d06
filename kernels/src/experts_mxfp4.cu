// The expert kernel for MXFP4 weights.
#include "experts_kernel.cuh"
#include "experts_launch.h"

namespace expertd {

int setup_mxfp4() { return setup_format<Mxfp4>(); }
int launch_mxfp4(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_format<Mxfp4>(p, stream); }

} // namespace expertd
