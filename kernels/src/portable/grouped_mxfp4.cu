#include "grouped.cuh"

namespace expertd {

namespace {
const Module module(reinterpret_cast<const void*>(portable_grouped<GroupedUsual<GroupedMxfp4>>));
}

int setup_mxfp4() { return setup_grouped<GroupedMxfp4>(); }
int launch_mxfp4(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped_format<GroupedMxfp4>(p, stream); }

} // namespace expertd
