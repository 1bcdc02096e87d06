#include "grouped.cuh"

namespace expertd {

namespace {
const Module module(reinterpret_cast<const void*>(portable_grouped<GroupedUsual<GroupedMxfp8>>));
}

int setup_mxfp8() { return setup_grouped<GroupedMxfp8>(); }
int launch_mxfp8(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped_format<GroupedMxfp8>(p, stream); }

} // namespace expertd
