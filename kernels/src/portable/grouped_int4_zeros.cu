#include "grouped.cuh"

namespace expertd {

namespace {
using Shape = GroupedUsual<GroupedInt4Zeros>;
const Module module(reinterpret_cast<const void*>(portable_grouped<Shape>));
}

int setup_int4_zeros() { return grouped_fitting<Shape>().blocks > 0 ? cudaSuccess : cudaErrorInvalidConfiguration; }
int launch_int4_zeros(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped<Shape>(p, stream); }

} // namespace expertd
