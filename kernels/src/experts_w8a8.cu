// The expert kernel for FP8 e4m3 weights that are multiplied as FP8.
#include "experts_kernel.cuh"
#include "experts_launch.h"

namespace expertd {

int setup_w8a8() { return setup_format<W8a8>(); }
int launch_w8a8(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_format<W8a8>(p, stream); }

} // namespace expertd
