// The expert kernel for MXFP4 weights and many FP8 rows.
#include "experts_kernel.cuh"
#include "experts_launch.h"

namespace expertd {

int setup_w4a8_rows() { return setup_format<W4a8Rows>(); }
int launch_w4a8_rows(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_format<W4a8Rows>(p, stream); }

} // namespace expertd
