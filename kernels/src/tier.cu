// tier sends a step's rows to the CPU ranks of a mixed group, through pinned host memory, and divides the choices of the gate: those of
// experts on this GPU get indices of resident experts, the others have weight zero here. The kernels that follow see a rank alone with
// its resident experts. Where it has all experts of the step, nothing is sent.
#include "common.cuh"
#include "modules.h"

namespace expertd {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kUnroll = 4;  // number of 16-byte words in flight per lane

template <int Count>
__global__ void __launch_bounds__(kThreads) send_tier(const __grid_constant__ Ranks<TierParams, Count> all) {
    const TierParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    SlotState* state = p.state;
    begin_kernel();
    const uint32_t layer = __ldcg(&state->layer);
    const uint64_t number = load_word(&state->step);
    const StepView step = open_step(head(state), p.max_tokens);
    // The host launches the rest of a step that has failed, which reports the error, without waiting for CPU ranks.
    if (!step.ok) {
        if (blockIdx.x == 0 && threadIdx.x == 0) *static_cast<volatile uint64_t*>(p.failed) = number;
        return;
    }
    const uint32_t* resident = p.resident + static_cast<uint64_t>(layer) * kMaxExperts;
    const uint32_t entries = step.tokens * p.top_k;
    for (uint32_t entry = blockIdx.x * kThreads + threadIdx.x; entry < entries; entry += gridDim.x * kThreads) {
        const int32_t id = __ldcg(p.topk_ids + entry);
        const float weight = __ldcg(p.topk_weights + entry);
        // No kernel writes the table while another one reads it, so the load may be cached. The gate and copy_in make no other ids.
        const uint32_t local = static_cast<uint32_t>(id) < kMaxExperts ? __ldg(resident + id) : kAway;
        const bool away = local == kAway;
        p.local_ids[entry] = static_cast<int32_t>(local);
        p.local_weights[entry] = away ? 0.0f : weight;
        if (p.sent == nullptr) continue;
        // Choices with weight zero are left out, as in combine.
        p.sent_ids[entry] = away && weight != 0.0f ? id : -1;
        p.sent_weights[entry] = weight;
    }
    if (p.sent == nullptr) return;
    // All rows are sent: few have no expert on a CPU rank, and these need not be told apart then.
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t words = static_cast<uint64_t>(step.tokens) * (p.hidden / 8);
    const uint4* from = static_cast<const uint4*>(p.tokens);
    uint4* to = static_cast<uint4*>(p.sent_rows);
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * kWarps * 32 * kUnroll;
    for (uint64_t base = (blockIdx.x + threadIdx.x / 32 * gridDim.x) * static_cast<uint64_t>(32 * kUnroll); base < words; base += stride) {
        uint4 data[kUnroll];
#pragma unroll
        for (uint32_t i = 0; i < kUnroll; ++i) {
            if (base + i * 32 + lane < words) data[i] = __ldcg(from + base + i * 32 + lane);
        }
#pragma unroll
        for (uint32_t i = 0; i < kUnroll; ++i) {
            if (base + i * 32 + lane < words) to[base + i * 32 + lane] = data[i];
        }
    }
    // At system scope, because processors read what this block has stored.
    __threadfence_system();
    if (last_block(&state->ticket, gridDim.x) && threadIdx.x == 0) store_release_system(p.sent, p.generation | number);
}

const Module module(reinterpret_cast<const void*>(send_tier<1>));

}  // namespace
}  // namespace expertd

extern "C" int expertd_tier(const expertd::TierParams* params, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    return launch(send_tier<1>, send_tier<kMaxRanks>, params, count, blocks, kThreads, false, stream);
}
