#include "grouped.cuh"

namespace expertd {

namespace {
const Module module(reinterpret_cast<const void*>(portable_grouped<GroupedMxfp4>));
}

int setup_mxfp4() { return grouped_blocks<GroupedMxfp4>() > 0 ? cudaSuccess : cudaErrorInvalidConfiguration; }
int launch_mxfp4(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped<GroupedMxfp4>(p, stream); }

} // namespace expertd
