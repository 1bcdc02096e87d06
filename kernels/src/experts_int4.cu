// The expert kernel for INT4 weights.
#include "experts_kernel.cuh"
#include "experts_launch.h"

namespace expertd {

int setup_int4() { return setup_format<Int4>(); }
int launch_int4(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_format<Int4>(p, stream); }

} // namespace expertd
