#include "grouped.cuh"

namespace expertd {

namespace {
const Module module(reinterpret_cast<const void*>(portable_grouped<GroupedUsual<GroupedInt4Zeros>>));
}

int setup_int4_zeros() { return setup_grouped<GroupedInt4Zeros>(); }
int launch_int4_zeros(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped_format<GroupedInt4Zeros>(p, stream); }

} // namespace expertd
