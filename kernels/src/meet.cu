// Waits until all ranks have reached this launch, so that later phases contain no wait for a rank that started late. Only
// `expertd bench --aligned` adds it to a step.
#include "common.cuh"
#include "modules.h"

namespace expertd {
namespace {

template <int Count>
__global__ void __launch_bounds__(32) meet(const __grid_constant__ Ranks<Group, Count> all) {
    const Group& g = all.rank[Count == 1 ? 0 : blockIdx.y];
    begin_kernel();
    const StepView step = open_step(head(g.state), g.max_tokens);
    if (!step.ok || blockIdx.x != 0 || threadIdx.x >= g.ranks) return;
    const uint64_t here = g.generation | step.sequence;
    store_release_system(at<uint64_t>(g, threadIdx.x, g.meet_flags) + g.rank, here);
    wait_flag(g, at<uint64_t>(g, g.rank, g.meet_flags) + threadIdx.x, here, threadIdx.x, kCopyIn);
}

const Module module(reinterpret_cast<const void*>(meet<1>));

}  // namespace
}  // namespace expertd

extern "C" int expertd_meet(const expertd::Group* groups, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    return launch(meet<1>, meet<kMaxRanks>, groups, count, blocks, 32, true, stream);
}
