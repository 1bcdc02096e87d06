// The expert kernel for MXFP8 weights.
#include "experts_kernel.cuh"
#include "experts_launch.h"

namespace expertd {

int setup_mxfp8() { return setup_format<Mxfp8>(); }
int launch_mxfp8(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_format<Mxfp8>(p, stream); }

} // namespace expertd
