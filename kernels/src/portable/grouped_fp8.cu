#include "grouped.cuh"

namespace expertd {

namespace {
const Module module(reinterpret_cast<const void*>(portable_grouped<GroupedUsual<GroupedFp8>>));
}

int setup_fp8() { return setup_grouped<GroupedFp8>(); }
int launch_fp8(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped_format<GroupedFp8>(p, stream); }

} // namespace expertd
