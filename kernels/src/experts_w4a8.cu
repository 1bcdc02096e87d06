// The expert kernel for MXFP4 weights and FP8 rows.
#include "experts_kernel.cuh"
#include "experts_launch.h"

namespace expertd {

int setup_w4a8() { return setup_format<W4a8>(); }
int launch_w4a8(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_format<W4a8>(p, stream); }

} // namespace expertd
