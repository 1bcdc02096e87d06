#include "grouped.cuh"

namespace expertd {

namespace {
const Module module(reinterpret_cast<const void*>(portable_grouped<GroupedFp8>));
}

int setup_fp8() { return grouped_blocks<GroupedFp8>() > 0 ? cudaSuccess : cudaErrorInvalidConfiguration; }
int launch_fp8(const ExpertdExpertsParams& p, cudaStream_t stream) { return launch_grouped<GroupedFp8>(p, stream); }

} // namespace expertd
