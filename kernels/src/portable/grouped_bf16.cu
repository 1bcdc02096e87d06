#include "grouped.cuh"

namespace expertd {

namespace {
using Shape = GroupedUsual<GroupedBf16>;
const Module module(reinterpret_cast<const void*>(portable_grouped<Shape>));
}

int setup_bf16() { return grouped_fitting<Shape>().blocks > 0 ? cudaSuccess : cudaErrorInvalidConfiguration; }
int launch_bf16(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped<Shape>(p, stream); }

} // namespace expertd
