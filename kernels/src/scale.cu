// A stand-in for experts, for tests and for timing the exchange alone.
#include "common.cuh"
#include "modules.h"

namespace expertd {
namespace {

constexpr uint32_t kThreads = 256;

template <int Count>
__global__ void __launch_bounds__(kThreads) scale(const __grid_constant__ Ranks<ScaleParams, Count> all) {
    const ScaleParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    const Group& g = p.group;
    begin_kernel();
    if (!open_step(head(g.state), g.max_tokens).ok) return;
    const Range range = experts_of(g, g.rank);
    const uint32_t words = g.hidden / 8;
    const uint4* rows = static_cast<const uint4*>(p.rows);
    for (uint32_t e = 0; e < range.last - range.first; ++e) {
        const float factor = 1.0f + static_cast<float>(range.first + e) / static_cast<float>(g.experts);
        for (uint32_t i = p.expert_offsets[e] + blockIdx.x; i < p.expert_offsets[e + 1]; i += gridDim.x) {
            const uint4* from = rows + static_cast<uint64_t>(p.row_index[i]) * words;
            uint4* to = static_cast<uint4*>(p.out) + static_cast<uint64_t>(i) * words;
            for (uint32_t word = threadIdx.x; word < words; word += kThreads) {
                float value[8] = {};
                add_bf16x8(value, load_row(from + word));
#pragma unroll
                for (float& v : value) v = v * factor * p.row_weight[i];
                to[word] = pack_bf16x8(value);
            }
        }
    }
}

const Module module(reinterpret_cast<const void*>(scale<1>));

}  // namespace
}  // namespace expertd

extern "C" int expertd_scale(const expertd::ScaleParams* params, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    return launch(scale<1>, scale<kMaxRanks>, params, count, blocks, kThreads, false, stream);
}
