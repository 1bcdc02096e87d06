// list_shared routes every token to the shared experts.
#include "common.cuh"
#include "modules.h"

namespace expertd {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;

// Lists every token with its weight for the shared experts, because the experts' kernel always reads rows through a list.
template <int Count>
__global__ void __launch_bounds__(kThreads) list_shared(const __grid_constant__ Ranks<SharedParams, Count> all) {
    const SharedParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    begin_kernel();
    const uint32_t layer = p.state->layer;
    const StepView step = open_step(head(p.state), p.max_tokens);
    if (!step.ok) return;
    const uint32_t lane = threadIdx.x % 32, words = p.hidden / 8;
    const uint4* gate = p.gates == nullptr ? nullptr : static_cast<const uint4*>(p.gates[layer]);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        p.expert_offsets[0] = 0;
        p.expert_offsets[1] = step.tokens;
    }
    for (uint32_t row = blockIdx.x * kWarps + threadIdx.x / 32; row < step.tokens; row += gridDim.x * kWarps) {
        float sum = 0.0f;
        if (gate != nullptr) {
            const uint4* x = static_cast<const uint4*>(p.tokens) + static_cast<uint64_t>(row) * words;
            for (uint32_t word = lane; word < words; word += 32) {
                float a[8] = {}, b[8] = {};
                add_bf16x8(a, __ldcg(x + word));
                add_bf16x8(b, __ldcg(gate + word));
#pragma unroll
                for (int i = 0; i < 8; ++i) sum += a[i] * b[i];
            }
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        }
        if (lane == 0) {
            p.row_index[row] = row;
            p.row_weight[row] = gate == nullptr ? 1.0f : 1.0f / (1.0f + expf(-sum));
        }
    }
}

const Module module(reinterpret_cast<const void*>(list_shared<1>));

}  // namespace
}  // namespace expertd

extern "C" int expertd_shared(const expertd::SharedParams* params, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    return launch(list_shared<1>, list_shared<kMaxRanks>, params, count, blocks, kThreads, false, stream);
}
