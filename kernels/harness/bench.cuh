// Times replayed graphs, with different routing in every launch, and compares them with the floor.
#pragma once

#include "launch.cuh"
#include "timer.cuh"

__global__ void read_kernel(const uint4* data, size_t n, uint32_t* out) {
    uint32_t sum = 0;
    const size_t stride = size_t(gridDim.x) * blockDim.x;
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    for (; i + 3 * stride < n; i += 4 * stride) {
        uint4 v[4];
        for (int j = 0; j < 4; j++) v[j] = __ldcs(data + i + j * stride);
        for (int j = 0; j < 4; j++) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (sum == 0x12345678) *out = sum;
}

void measure_ceiling() {
    const size_t bytes = size_t(4) << 30;
    Buffer<uint32_t> data(bytes / 4), out(1);
    data.poison();
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    read_kernel<<<132 * 8, 256, 0, stream>>>(reinterpret_cast<uint4*>(data.data), bytes / 16, out.data);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    const float ms = Timer().replay(exec, stream, 30);
    std::printf("plain read of 4 GiB: %.0f GB/s\n", bytes / ms / 1e6);
}

// `flags`: values of ExpertdExpertsParams.flags, separated by commas, that take turns. `only_tokens`: numbers of tokens, likewise.
void bench_model(const Model& m, bool tune, const char* flags, const char* only_tokens) {
    const int experts = m.experts / ranks;
    const size_t expert_bytes = expertd_experts_matrix_bytes(m.format, EXPERTD_PACK_GATE_UP, m.hidden, m.inter) +
                                expertd_experts_matrix_bytes(m.format, EXPERTD_PACK_DOWN, m.hidden, m.inter);
    const int layer_count = std::max<int>(2, std::min<int>(4, int((size_t(2) << 30) / (expert_bytes * experts))));
    const TimedLayers layers(m, experts, layer_count);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    std::mt19937 rng(std::random_device{}());
    Timer timer;

    std::vector<int> token_counts = {1, 8, 32, 128, 512, 2048, 8192};
    if (only_tokens != nullptr && std::strcmp(only_tokens, "0") != 0) {
        token_counts.clear();
        for (const char* at = only_tokens; at != nullptr && *at != 0; at = std::strchr(at, ','), at += at != nullptr) token_counts.push_back(std::atoi(at));
    }
    for (int tokens : token_counts) {
        const int repeats = tokens <= 128 ? 12 : tokens <= 512 ? 6 : 3; // launches of a graph, each with its own routing
        std::vector<Routing> routings;
        std::vector<DeviceRouting> device;
        int most = 0, window = 0;
        double floor_us = 0, bytes = 0, flops = 0;
        for (int i = 0; i < repeats; i++) {
            routings.push_back(draw(m, tokens, rng));
            device.emplace_back(routings.back());
            const Routing& r = routings.back();
            most = std::max(most, r.assignments()), window = std::max(window, r.window_rows);
            const double b = double(r.active) * expert_bytes, f = 6.0 * r.assignments() * m.hidden * m.inter;
            bytes += b / repeats, flops += f / repeats;
            floor_us += std::max(b / HBM, f / TENSOR) * 1e6 / repeats;
        }
        const TimedRows rows(m, experts, most, window);
        const bool fp8_rows = fp8_products(m.format) && std::getenv("EXPERTS_BF16_ROWS") == nullptr;

        struct Variant {
            int rows, width, flags = 0;
        };
        std::vector<Variant> list = {{0, 0}};
        const char* only = std::getenv("EXPERTS_TILE_ROWS"); // values of ExpertdExpertsParams.tile_rows, separated by commas
        if (only != nullptr) {
            list.clear();
            for (const char* at = only; at != nullptr && *at != 0; at = std::strchr(at, ','), at += at != nullptr) list.push_back({std::atoi(at), 0});
        }
        if (tune && only == nullptr) {
            const double mean = double(most) / experts;
            for (int w : {32, 64, 128, 192, 256}) {
                if (w > (m.format == EXPERTD_BF16 ? 256 : 128)) continue;
                if (m.format == EXPERTD_MXFP4 || (m.format >= EXPERTD_INT4 && m.format != EXPERTD_W4A8)) list.push_back({0, w});
                for (int r : {32, 64, 128, 256})
                    if (!fp8_products(m.format) && w * 3 >= mean && (w <= 32 || mean * 8 >= w) && (r >= 128 || mean < 48)) list.push_back({r, w});
            }
        }
        if (tune && only == nullptr && m.format == EXPERTD_W8A8) list.push_back({EXPERTD_TILE_TOKEN_ROWS, 0}), list.push_back({EXPERTD_TILE_TOKEN_PAIRS, 0}), list.push_back({EXPERTD_TILE_TALL, 0}), list.push_back({256, 0}), list.push_back({256, 64});
        if (tune && only == nullptr && m.format == EXPERTD_BF16) list.push_back({EXPERTD_TILE_TOKEN_ROWS, 0}), list.push_back({EXPERTD_TILE_TOKEN_PAIRS, 0}), list.push_back({EXPERTD_TILE_TALL, 0}), list.push_back({EXPERTD_TILE_TURNS, 0});
        std::vector<Variant> shapes;
        std::swap(shapes, list);
        for (const char* at = flags; at != nullptr && *at != 0; at = std::strchr(at, ','), at += at != nullptr) {
            for (Variant v : shapes) v.flags = std::atoi(at), list.push_back(v);
        }
        std::vector<cudaGraphExec_t> graphs;
        for (const Variant& v : list) {
            cudaGraph_t graph;
            graphs.emplace_back();
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
            for (int i = 0; i < repeats; i++) {
                ExpertdExpertsParams p = timed_launch(m, experts, layers, rows, device[i], i, fp8_rows);
                p.tile_rows = v.rows, p.tile_tokens = v.width, p.flags = v.flags;
                CHECK(expertd_experts_launch(&p, stream));
            }
            CHECK(cudaStreamEndCapture(stream, &graph));
            CHECK(cudaGraphInstantiate(&graphs.back(), graph, 0));
            CHECK(cudaGraphDestroy(graph));
        }
        // The variants take turns, because times depend on the clock, and the clock on what ran before.
        std::vector<std::vector<double>> times(list.size());
        for (int round = 0; round < (list.size() > 1 ? 5 : 1); round++) {
            for (size_t v = 0; v < list.size(); v++) times[v].push_back(timer.replay(graphs[v], stream, 12) * 1e3 / repeats);
        }
        for (size_t v = 0; v < list.size(); v++) {
            std::sort(times[v].begin(), times[v].end());
            const double us = times[v][times[v].size() / 2];
            std::printf("%-15s T=%-5d rows/expert %6.1f active %3d/%-3d rows %d tokens %3d flags %d | %9.1f us (%.1f to %.1f)  floor %9.1f  x%.2f | %5.0f GB/s %4.0f TFLOP/s\n",
                        m.name, tokens, double(most) / experts, routings[0].active, experts, list[v].rows, list[v].width, list[v].flags, us, times[v].front(),
                        times[v].back(), floor_us, us / floor_us, bytes / us / 1e3, flops / us / 1e6);
            std::fflush(stdout);
            CHECK(cudaGraphExecDestroy(graphs[v]));
        }
    }
    CHECK(cudaStreamDestroy(stream));
}
