// Times the gate's kernels: replayed graphs with several rows and layers in turn, compared with the time to read their bytes.
//
//   gate [tokens]
//
// `device gate` (kernels/tests/device) and the engine's tests check correctness. README.md in this folder says how to build it.
#include "../src/step.h"
#include "timer.cuh"

struct Shape {
    const char* name;
    uint32_t hidden, experts, top_k;
};
const Shape SHAPES[] = {{"qwen3-30b", 2048, 128, 8}, {"deepseek-v3", 7168, 256, 8}, {"mixtral-8x7b", 4096, 8, 2}, {"kimi-like", 7168, 384, 8}};
constexpr uint32_t LAUNCHES = 8; // launches of a graph

void bench(const Shape& shape, uint32_t tokens, cudaStream_t stream) {
    std::vector<Buffer<bf16>> rows, weights;
    std::vector<expertd::GateLayer> layers;
    std::vector<expertd::SlotState> states(LAUNCHES);
    for (uint32_t i = 0; i < LAUNCHES; i++) {
        rows.push_back(random_buffer<bf16>(size_t(tokens) * shape.hidden, 1.0f));
        weights.push_back(random_buffer<bf16>(size_t(shape.experts) * shape.hidden, 0.03f));
        layers.push_back({weights.back().data, nullptr, nullptr, nullptr, nullptr});
        states[i].sequence = 1, states[i].tokens = tokens, states[i].layer = i;
    }
    Buffer<expertd::GateLayer> table(layers);
    Buffer<expertd::SlotState> state(states);
    Buffer<float> chosen_weights(size_t(tokens) * shape.top_k);
    Buffer<int32_t> ids(size_t(tokens) * shape.top_k);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (uint32_t i = 0; i < LAUNCHES; i++) {
        expertd::GateParams p{};
        p.state = state.data + i, p.layers = table.data, p.tokens = rows[i].data;
        p.topk_ids = ids.data, p.topk_weights = chosen_weights.data, p.hidden = shape.hidden, p.experts = shape.experts;
        p.top_k = shape.top_k, p.max_tokens = tokens, p.score_fn = expertd::kSoftmax, p.normalise = expertd::kSum, p.scale = 1.0f;
        CHECK(expertd_gate(&p, 1, tokens, stream));
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    const double us = Timer().replay(exec, stream, 20) * 1e3 / LAUNCHES;
    std::vector<double> phases;
    for (const auto& s : state.read()) phases.push_back(double(s.end_ns[expertd::kGate] - s.begin_ns[expertd::kGate]) / 1e3);
    std::sort(phases.begin(), phases.end());
    const double bytes = 2.0 * shape.hidden * (tokens + shape.experts);
    std::printf("%-13s H %u E %-3u T=%-5u | %7.1f us, phase %7.1f us | its bytes at %.1f TB/s %5.1f us\n", shape.name, shape.hidden,
                shape.experts, tokens, us, phases[phases.size() / 2], HBM / 1e12, bytes / HBM * 1e6);
    std::fflush(stdout);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
}

int main(int argc, char** argv) {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    for (const Shape& shape : SHAPES) {
        for (uint32_t tokens : {1, 32, 128, 256, 512, 2048, 8192}) {
            if (argc < 2 || uint32_t(std::atoi(argv[1])) == tokens) bench(shape, tokens, stream);
        }
    }
    return 0;
}
