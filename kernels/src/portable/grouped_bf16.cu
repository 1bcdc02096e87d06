#include "grouped.cuh"

namespace expertd {

namespace {
const Module module(reinterpret_cast<const void*>(portable_grouped<GroupedBf16>));
}

int setup_bf16() { return grouped_blocks<GroupedBf16>() > 0 ? cudaSuccess : cudaErrorInvalidConfiguration; }
int launch_bf16(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped<GroupedBf16>(p, stream); }

} // namespace expertd
