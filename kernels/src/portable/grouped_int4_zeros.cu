#include "grouped.cuh"

namespace expertd {

namespace {
const Module module(reinterpret_cast<const void*>(portable_grouped<GroupedInt4Zeros>));
}

int setup_int4_zeros() { return grouped_blocks<GroupedInt4Zeros>() > 0 ? cudaSuccess : cudaErrorInvalidConfiguration; }
int launch_int4_zeros(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped<GroupedInt4Zeros>(p, stream); }

} // namespace expertd
