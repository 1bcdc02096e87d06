#include "grouped.cuh"

namespace expertd {

namespace {
const Module module(reinterpret_cast<const void*>(portable_grouped<GroupedUsual<GroupedNvfp4>>));
}

int setup_nvfp4() { return setup_grouped<GroupedNvfp4>(); }
int launch_nvfp4(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped_format<GroupedNvfp4>(p, stream); }

} // namespace expertd
