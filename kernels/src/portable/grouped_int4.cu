#include "grouped.cuh"

namespace expertd {

namespace {
const Module module(reinterpret_cast<const void*>(portable_grouped<GroupedInt4>));
}

int setup_int4() { return grouped_blocks<GroupedInt4>() > 0 ? cudaSuccess : cudaErrorInvalidConfiguration; }
int launch_int4(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped<GroupedInt4>(p, stream); }

} // namespace expertd
