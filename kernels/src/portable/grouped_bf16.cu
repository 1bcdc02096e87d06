#include "grouped.cuh"

namespace expertd {

namespace {
const Module module(reinterpret_cast<const void*>(portable_grouped<GroupedUsual<GroupedBf16>>));
}

int setup_bf16() { return setup_grouped<GroupedBf16>(); }
int launch_bf16(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped_format<GroupedBf16>(p, stream); }

} // namespace expertd
