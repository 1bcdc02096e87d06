// The expert kernel for INT4 weights with zero points.
#include "experts_kernel.cuh"
#include "experts_launch.h"

namespace expertd {

int setup_int4_zeros() { return setup_format<Int4Zeros>(); }
int launch_int4_zeros(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_format<Int4Zeros>(p, stream); }

} // namespace expertd
