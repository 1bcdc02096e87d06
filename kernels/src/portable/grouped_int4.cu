#include "grouped.cuh"

namespace expertd {

namespace {
const Module module(reinterpret_cast<const void*>(portable_grouped<GroupedUsual<GroupedInt4>>));
}

int setup_int4() { return setup_grouped<GroupedInt4>(); }
int launch_int4(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped_format<GroupedInt4>(p, stream); }

} // namespace expertd
