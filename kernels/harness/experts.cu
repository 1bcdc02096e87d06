// Checks and times the expert kernels alone, without Rust.
//
//   experts check [small]                correctness against f64, determinism, corner cases; small: few, for sanitizers
//   experts bench [model|all] [tokens]   time, bandwidth and rate beside the floor, at EP4-equivalent loads of one rank
//   experts tune [model|all] [tokens]    the same for every tile shape
//
// Build: see README.md beside this file.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../src/experts.h"
#include "../src/experts_layout.cuh"

#define CHECK(call)                                                                                  \
    do {                                                                                             \
        int status_ = (call);                                                                        \
        if (status_ != cudaSuccess) {                                                                \
            std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(cudaError_t(status_))); \
            std::fflush(stdout);                                                                     \
            std::exit(1);                                                                            \
        }                                                                                            \
    } while (0)

using bf16 = __nv_bfloat16;

struct Model {
    const char* name;
    int hidden, inter, experts, k, activation;
    bool biases;
};

const Model MODELS[] = {
    {"qwen3-30b", 2048, 768, 128, 8, EXPERTD_SWIGLU, false},
    {"deepseek-v3", 7168, 2048, 256, 8, EXPERTD_SWIGLU, false},
    {"mixtral-8x7b", 4096, 14336, 8, 2, EXPERTD_SWIGLU, false},
    {"olmoe-7b", 2048, 1024, 64, 8, EXPERTD_SWIGLU, false},
    {"gpt-oss-like", 2880, 2880, 32, 4, EXPERTD_SWIGLU_OAI, true},
};
constexpr int RANKS = 4;
constexpr double HBM = 4.2e12, TENSOR = 650e12; // the rates of the floors in docs/performance.md

// ---- device memory ----

template <class T> struct Buffer {
    T* data = nullptr;
    size_t count = 0;
    Buffer() = default;
    explicit Buffer(size_t n) : count(n) { CHECK(cudaMalloc(&data, std::max<size_t>(n, 1) * sizeof(T))); }
    explicit Buffer(const std::vector<T>& v) : Buffer(v.size()) {
        CHECK(cudaMemcpy(data, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    Buffer(const Buffer&) = delete;
    Buffer(Buffer&& o) : data(o.data), count(o.count) { o.data = nullptr; }
    Buffer& operator=(Buffer&& o) {
        std::swap(data, o.data);
        std::swap(count, o.count);
        return *this;
    }
    ~Buffer() { cudaFree(data); }
    void poison() { CHECK(cudaMemset(data, 0xFF, count * sizeof(T))); }
    std::vector<T> read() const {
        std::vector<T> v(count);
        CHECK(cudaMemcpy(v.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

__host__ __device__ inline uint64_t mix(uint64_t z) {
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

template <class T> __global__ void fill_kernel(T* out, size_t n, uint64_t seed, float scale) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        const uint64_t bits = mix(seed * 0x100000001ull + i);
        // Sum of four uniforms: close enough to a normal distribution of deviation 1.
        float sum = 0;
        for (int j = 0; j < 4; j++) sum += float((bits >> (16 * j)) & 0xFFFF) / 65536.0f - 0.5f;
        out[i] = T(sum * 1.7320508f * scale);
    }
}

uint64_t next_seed = 1;
template <class T> Buffer<T> random_buffer(size_t n, float scale) {
    Buffer<T> b(n);
    fill_kernel<<<2048, 256>>>(b.data, n, mix(next_seed++), scale);
    CHECK(cudaGetLastError());
    return b;
}

// ---- routing ----

struct Routing {
    std::vector<int32_t> offsets, rows;
    std::vector<float> weights;
    int window_rows = 0, active = 0;
    int assignments() const { return offsets.back(); }
};

Routing from_counts(const std::vector<int>& counts, int window_rows, std::mt19937& rng) {
    Routing r;
    r.offsets.push_back(0);
    r.window_rows = window_rows;
    std::uniform_real_distribution<float> weight(0.02f, 0.6f);
    for (int c : counts) {
        for (int i = 0; i < c; i++) {
            r.rows.push_back(int(rng() % window_rows));
            r.weights.push_back(weight(rng));
        }
        r.offsets.push_back(int(r.rows.size()));
        r.active += c > 0;
    }
    return r;
}

// What rank 0 of RANKS receives when every rank has `tokens` tokens with uniform routing.
Routing draw(const Model& m, int tokens, std::mt19937& rng) {
    const int local = m.experts / RANKS;
    std::vector<std::vector<int>> by_expert(local);
    Routing r;
    std::vector<int> ids(m.experts);
    for (int e = 0; e < m.experts; e++) ids[e] = e;
    for (int t = 0; t < RANKS * tokens; t++) {
        bool hit = false;
        for (int i = 0; i < m.k; i++) {
            std::swap(ids[i], ids[i + rng() % (m.experts - i)]);
            if (ids[i] < local) by_expert[ids[i]].push_back(r.window_rows), hit = true;
        }
        r.window_rows += hit;
    }
    r.offsets.push_back(0);
    std::uniform_real_distribution<float> weight(0.02f, 0.6f);
    for (auto& rows : by_expert) {
        for (int row : rows) r.rows.push_back(row), r.weights.push_back(weight(rng));
        r.offsets.push_back(int(r.rows.size()));
        r.active += !rows.empty();
    }
    return r;
}

struct DeviceRouting {
    Buffer<int32_t> offsets, rows;
    Buffer<float> weights;
    explicit DeviceRouting(const Routing& r) : offsets(r.offsets), rows(r.rows), weights(r.weights) {}
};

int panel_rows_for(int assignments, int experts) { return assignments + 7 * experts + 8; }

// ---- reference in f64 ----

__device__ double dot(const bf16* a, const bf16* b, int n) {
    double sum = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32) sum += double(float(a[i])) * double(float(b[i]));
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffff, sum, d);
    return sum;
}

struct Reference {
    const bf16 *gate, *up, *down, *x;
    const float *gate_up_bias, *down_bias;
    const int32_t *sample_row, *sample_expert;
    const float* sample_weight;
    double *h, *y;
    int hidden, inter, activation, weight_on_input;
    float alpha, limit;
};

__global__ void reference_h(Reference r) {
    const int s = blockIdx.x, f = blockIdx.y * 8 + threadIdx.x / 32;
    const int64_t e = r.sample_expert[s];
    const bf16* x = r.x + int64_t(r.sample_row[s]) * r.hidden;
    double g = dot(r.gate + (e * r.inter + f) * r.hidden, x, r.hidden);
    double u = dot(r.up + (e * r.inter + f) * r.hidden, x, r.hidden);
    const double w = r.sample_weight[s];
    if (r.weight_on_input) g *= w, u *= w;
    if (r.gate_up_bias) g += r.gate_up_bias[e * 2 * r.inter + f], u += r.gate_up_bias[e * 2 * r.inter + r.inter + f];
    double v;
    if (r.activation == EXPERTD_SWIGLU) {
        v = g / (1 + exp(-g)) * u;
    } else {
        g = fmin(g, double(r.limit));
        u = fmax(fmin(u, double(r.limit)), -double(r.limit));
        v = r.activation == EXPERTD_SWIGLU_CLAMPED ? g / (1 + exp(-g)) * u : g / (1 + exp(-r.alpha * g)) * (u + 1);
    }
    if (threadIdx.x % 32 == 0) r.h[int64_t(s) * r.inter + f] = r.weight_on_input ? v : v * w;
}

__global__ void reference_y(Reference r) {
    const int s = blockIdx.x, f = blockIdx.y * 8 + threadIdx.x / 32;
    const int64_t e = r.sample_expert[s];
    const bf16* w = r.down + (e * r.hidden + f) * r.inter;
    double sum = 0;
    for (int i = threadIdx.x % 32; i < r.inter; i += 32) sum += double(float(w[i])) * r.h[int64_t(s) * r.inter + i];
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffff, sum, d);
    if (r.down_bias) sum += double(r.down_bias[e * r.hidden + f]) * (r.weight_on_input ? 1.0 : double(r.sample_weight[s]));
    if (threadIdx.x % 32 == 0) r.y[int64_t(s) * r.hidden + f] = sum;
}

// Counts NaNs in the rows that must be written, and non-poison values behind them.
__global__ void scan_kernel(const uint16_t* y, size_t written, size_t all, unsigned long long* bad) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < all; i += size_t(gridDim.x) * blockDim.x) {
        const bool nan = (y[i] & 0x7FFF) > 0x7F80;
        if (i < written ? nan : y[i] != 0xFFFF) atomicAdd(bad, 1ull);
    }
}

__global__ void differ_kernel(const uint16_t* a, const uint16_t* b, size_t n, unsigned long long* bad) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        if (a[i] != b[i]) atomicAdd(bad, 1ull);
    }
}

// ---- weights ----

struct Layer {
    Buffer<bf16> gate, up, down; // row-major, kept only for checks
    Buffer<bf16> gate_up_panels, down_panels;
    Buffer<float> gate_up_bias, down_bias;
    ExpertdLayerWeights view{};

    Layer(int hidden, int inter, int experts, bool biases, bool keep) {
        const size_t n = size_t(experts) * hidden * inter;
        gate_up_panels = Buffer<bf16>(2 * n);
        down_panels = Buffer<bf16>(n);
        if (keep) {
            gate = random_buffer<bf16>(n, 1.5f / std::sqrt(float(hidden)));
            up = random_buffer<bf16>(n, 1.5f / std::sqrt(float(hidden)));
            down = random_buffer<bf16>(n, 1.5f / std::sqrt(float(inter)));
            gate_up_panels.poison();
            down_panels.poison();
            ExpertdPackParams p{};
            p.hidden = hidden, p.inter = inter, p.experts = experts;
            p.expert_stride = uint64_t(hidden) * inter;
            p.first = gate.data, p.second = up.data, p.panels = gate_up_panels.data, p.kind = EXPERTD_PACK_GATE_UP;
            CHECK(expertd_experts_pack(&p, nullptr));
            p.first = down.data, p.second = nullptr, p.panels = down_panels.data, p.kind = EXPERTD_PACK_DOWN;
            CHECK(expertd_experts_pack(&p, nullptr));
        } else { // for timing any order of random numbers will do
            fill_kernel<<<2048, 256>>>(gate_up_panels.data, 2 * n, mix(next_seed++), 1.5f / std::sqrt(float(hidden)));
            fill_kernel<<<2048, 256>>>(down_panels.data, n, mix(next_seed++), 1.5f / std::sqrt(float(inter)));
        }
        if (biases) {
            gate_up_bias = random_buffer<float>(size_t(experts) * 2 * inter, 0.5f);
            down_bias = random_buffer<float>(size_t(experts) * hidden, 0.5f);
        }
        CHECK(cudaDeviceSynchronize());
        view = {gate_up_panels.data, down_panels.data, gate_up_bias.data, down_bias.data};
    }
};

ExpertdExpertsParams parameters(const Model& m, int experts) {
    ExpertdExpertsParams p{};
    p.experts = experts, p.hidden = m.hidden, p.inter = m.inter;
    p.x_stride = m.hidden;
    p.activation = m.activation, p.alpha = 1.702f, p.limit = 1.5f; // a low limit, so that clamping happens
    return p;
}

// ---- checks ----

bool check_case(const Model& m, int experts, const Routing& routing, Layer& layer, const char* what, bool variants) {
    const int a = routing.assignments(), panel_rows = panel_rows_for(a, experts);
    const size_t y_written = size_t(a) * m.hidden, y_all = y_written + 64 * size_t(m.hidden);
    auto x = random_buffer<bf16>(size_t(routing.window_rows) * m.hidden, 1.0f);
    DeviceRouting dr(routing);
    Buffer<bf16> y(y_all), first(y_all), h(size_t(panel_rows) * m.inter), x_panels(size_t(panel_rows) * m.hidden);
    Buffer<uint32_t> state(expertd_experts_state_words(experts));
    CHECK(cudaMemset(state.data, 0, state.count * 4));
    Buffer<ExpertdLayerWeights> table(std::vector<ExpertdLayerWeights>{ExpertdLayerWeights{}, layer.view});
    Buffer<uint32_t> layer_index(std::vector<uint32_t>{1}), error(std::vector<uint32_t>{0});
    Buffer<unsigned long long> bad(std::vector<unsigned long long>{0, 0});

    ExpertdExpertsParams p = parameters(m, experts);
    p.layers = table.data, p.layer = layer_index.data, p.error = error.data;
    p.expert_offsets = dr.offsets.data, p.row_index = dr.rows.data, p.row_weight = dr.weights.data;
    p.x = x.data, p.h = h.data, p.x_panels = x_panels.data, p.state = state.data, p.panel_rows = panel_rows;

    struct Variant {
        int rows, width, blocks, weight_on_input;
    };
    std::vector<Variant> list = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    if (variants) {
        for (int w : {32, 64, 128, 192, 256}) list.push_back({0, w, 0, 0});
        for (int r : {16, 32, 64, 128, 256}) list.push_back({r, 0, 0, 0});
        for (int w : {32, 256}) list.push_back({128, w, 0, 0}), list.push_back({256, w, 0, 0});
        list.push_back({32, 256, 0, 0});
        list.push_back({0, 0, 7, 0});
        list.push_back({0, 0, 0, 1});
    }
    bool good = true;
    unsigned long long differing = 0;
    double worst = 0;
    for (size_t v = 0; v < list.size(); v++) {
        p.tile_rows = list[v].rows, p.tile_tokens = list[v].width, p.blocks = list[v].blocks;
        p.weight_on_input = list[v].weight_on_input;
        Buffer<bf16>& out = v == 0 ? first : y;
        out.poison();
        h.poison();
        x_panels.poison();
        CHECK(cudaMemset(bad.data, 0, 16));
        p.y = out.data;
        CHECK(expertd_experts_launch(&p, nullptr));
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        scan_kernel<<<1024, 256>>>(reinterpret_cast<uint16_t*>(out.data), y_written, y_all, bad.data);
        if (v > 0 && !p.weight_on_input) differ_kernel<<<1024, 256>>>(reinterpret_cast<uint16_t*>(out.data), reinterpret_cast<uint16_t*>(first.data), y_written, bad.data + 1);
        const auto found = bad.read();
        const auto left = state.read();
        const bool clean = std::all_of(left.begin(), left.end(), [](uint32_t w) { return w == 0; });
        differing += found[1];
        if (found[0] != 0 || !clean || (v == 1 && found[1] != 0)) {
            std::printf("  variant rows %d tokens %d blocks %d: %llu bad elements, %llu differ, state %s\n", p.tile_rows,
                        p.tile_tokens, p.blocks, found[0], found[1], clean ? "clean" : "DIRTY");
            good = false;
        }
        if (a == 0) continue;

        // A sample of assignments, ends of experts included.
        std::vector<int32_t> index, sample_row, sample_expert;
        std::vector<float> sample_weight;
        std::mt19937 rng(v + 5);
        for (int e = 0; e < experts && index.size() < 40; e++) {
            if (routing.offsets[e + 1] > routing.offsets[e]) index.push_back(routing.offsets[e]), index.push_back(routing.offsets[e + 1] - 1);
        }
        for (int i = 0; i < 24; i++) index.push_back(int(rng() % a));
        for (int i : index) {
            sample_row.push_back(routing.rows[i]);
            sample_weight.push_back(routing.weights[i]);
            sample_expert.push_back(int(std::upper_bound(routing.offsets.begin(), routing.offsets.end(), i) - routing.offsets.begin()) - 1);
        }
        const int samples = int(index.size());
        Buffer<int32_t> d_row(sample_row), d_expert(sample_expert);
        Buffer<float> d_weight(sample_weight);
        Buffer<double> ref_h(size_t(samples) * m.inter), ref_y(size_t(samples) * m.hidden);
        Reference r{layer.gate.data, layer.up.data, layer.down.data, x.data, layer.gate_up_bias.data, layer.down_bias.data,
                    d_row.data, d_expert.data, d_weight.data, ref_h.data, ref_y.data, m.hidden, m.inter, m.activation,
                    p.weight_on_input, p.alpha, p.limit};
        reference_h<<<dim3(samples, m.inter / 8), 256>>>(r);
        reference_y<<<dim3(samples, m.hidden / 8), 256>>>(r);
        CHECK(cudaGetLastError());
        const auto expected = ref_y.read();
        std::vector<bf16> row(m.hidden);
        for (int s = 0; s < samples; s++) {
            CHECK(cudaMemcpy(row.data(), out.data + size_t(index[s]) * m.hidden, m.hidden * 2, cudaMemcpyDeviceToHost));
            double error2 = 0, norm2 = 0;
            for (int f = 0; f < m.hidden; f++) {
                const double want = expected[size_t(s) * m.hidden + f], got = double(float(row[f]));
                error2 += (got - want) * (got - want), norm2 += want * want;
            }
            const double relative = std::sqrt(error2 / norm2);
            if (!(relative <= 1e-2)) {
                if (good) std::printf("  assignment %d expert %d: relative error %g (rows %d tokens %d)\n", index[s], sample_expert[s], relative, p.tile_rows, p.tile_tokens);
                good = false;
            }
            worst = std::max(worst, std::isnan(relative) ? 1e9 : relative);
        }
    }
    std::printf("%-13s %-34s A=%-6d worst row error %.2e, %zu runs, %llu elements differ between variants: %s\n", m.name, what, a,
                worst, list.size(), differing, good ? "ok" : "FAILED");
    std::fflush(stdout);
    return good;
}

int check_all(bool small_only) {
    std::mt19937 rng(std::random_device{}());
    bool good = true;
    for (const Model& m : MODELS) {
        if (small_only) break;
        const int experts = m.experts / RANKS;
        Layer layer(m.hidden, m.inter, experts, m.biases, true);
        auto counts_case = [&](const char* what, std::vector<int> counts, int window, bool variants) {
            counts.resize(experts, 0);
            good &= check_case(m, experts, from_counts(counts, window, rng), layer, what, variants);
        };
        counts_case("no rows", {}, 1, true);
        counts_case("one row on the last expert", [&] { std::vector<int> c(experts, 0); c.back() = 1; return c; }(), 3, true);
        counts_case("odd counts with zeros", {3, experts > 2 ? 0 : 17, 17, 1, 33, 0, 65, 9, 129, 0, 257, 31}, 300, true);
        counts_case("all rows on one expert", {0, 777}, 777, true);
        for (int tokens : {1, 8, 32, 128, 512, 2048}) {
            if (tokens > 512 && m.hidden > 4096) continue;
            good &= check_case(m, experts, draw(m, tokens, rng), layer, ("uniform routing, T=" + std::to_string(tokens)).c_str(), tokens == 32);
        }
    }
    Model clamped = MODELS[3];
    clamped.name = "clamped", clamped.activation = EXPERTD_SWIGLU_CLAMPED;
    if (small_only) clamped.hidden = 512, clamped.inter = 256;
    Layer layer(clamped.hidden, clamped.inter, 5, false, true);
    good &= check_case(clamped, 5, from_counts({40, 0, 7, 300, 2}, 333, rng), layer, "5 experts, clamped", true);
    Model small{"small", 64, 64, 8, 2, EXPERTD_SWIGLU, true};
    Layer tiny(64, 64, 3, true, true);
    good &= check_case(small, 3, from_counts({5, 0, 40}, 41, rng), tiny, "hidden 64, inter 64, biases", true);
    std::printf(good ? "ALL GOOD\n" : "SOME FAILED\n");
    return good ? 0 : 1;
}

// ---- timing ----

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

struct Timer {
    cudaEvent_t from, to;
    Timer() {
        CHECK(cudaEventCreate(&from));
        CHECK(cudaEventCreate(&to));
    }
    // Median milliseconds of one replay.
    float replay(cudaGraphExec_t graph, cudaStream_t stream, float budget_ms) {
        std::vector<float> times;
        float total = -40; // at least 40 ms first: the clocks need that long to rise
        for (int i = 0; i < 8000 && (times.size() < 5 || total < budget_ms); i++) {
            CHECK(cudaEventRecord(from, stream));
            CHECK(cudaGraphLaunch(graph, stream));
            CHECK(cudaEventRecord(to, stream));
            CHECK(cudaEventSynchronize(to));
            float ms;
            CHECK(cudaEventElapsedTime(&ms, from, to));
            if (i >= 3 && total >= 0) times.push_back(ms);
            total += ms;
        }
        std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
        return times[times.size() / 2];
    }
};

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

void bench_model(const Model& m, bool tune, int flags, int only_tokens) {
    const int experts = m.experts / RANKS;
    const size_t expert_bytes = size_t(3) * m.hidden * m.inter * 2;
    const int layer_count = std::max<int>(2, std::min<int>(4, int((size_t(2) << 30) / (expert_bytes * experts))));
    std::vector<Layer> layers;
    std::vector<ExpertdLayerWeights> views;
    for (int i = 0; i < layer_count; i++) layers.emplace_back(m.hidden, m.inter, experts, m.biases, false);
    for (auto& l : layers) views.push_back(l.view);
    Buffer<ExpertdLayerWeights> table(views);
    std::vector<uint32_t> indices(layer_count);
    for (int i = 0; i < layer_count; i++) indices[i] = i;
    Buffer<uint32_t> layer_indices(indices);
    Buffer<uint32_t> state(expertd_experts_state_words(experts));
    CHECK(cudaMemset(state.data, 0, state.count * 4));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    std::mt19937 rng(std::random_device{}());
    Timer timer;

    for (int tokens : {1, 8, 32, 128, 512, 2048, 8192}) {
        if (only_tokens != 0 && tokens != only_tokens) continue;
        const int repeats = tokens <= 128 ? 12 : tokens <= 512 ? 6 : 3; // fresh routing in each launch of the graph
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
        auto x = random_buffer<bf16>(size_t(window) * m.hidden, 1.0f);
        const int panel_rows = panel_rows_for(most, experts);
        Buffer<bf16> y(size_t(most) * m.hidden), h(size_t(panel_rows) * m.inter), x_panels(size_t(panel_rows) * m.hidden);
        h.poison();
        x_panels.poison();

        struct Variant {
            int rows, width;
        };
        std::vector<Variant> list = {{0, 0}};
        if (tune) {
            const double mean = double(most) / experts;
            for (int w : {32, 64, 128, 192, 256})
                for (int r : {32, 64, 128, 256})
                    if (w * 3 >= mean && (w <= 32 || mean * 8 >= w) && (r >= 128 || mean < 48)) list.push_back({r, w});
        }
        for (const Variant& v : list) {
            cudaGraph_t graph;
            cudaGraphExec_t exec;
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
            for (int i = 0; i < repeats; i++) {
                ExpertdExpertsParams p = parameters(m, experts);
                p.limit = 7.0f;
                p.layers = table.data, p.layer = layer_indices.data + i % layer_count;
                p.expert_offsets = device[i].offsets.data, p.row_index = device[i].rows.data, p.row_weight = device[i].weights.data;
                p.x = x.data, p.y = y.data, p.h = h.data, p.x_panels = x_panels.data, p.state = state.data, p.panel_rows = panel_rows;
                p.tile_rows = v.rows, p.tile_tokens = v.width, p.flags = flags;
                CHECK(expertd_experts_launch(&p, stream));
            }
            CHECK(cudaStreamEndCapture(stream, &graph));
            CHECK(cudaGraphInstantiate(&exec, graph, 0));
            const double us = timer.replay(exec, stream, 12) * 1e3 / repeats;
            std::printf("%-13s T=%-5d rows/expert %6.1f active %3d/%-3d rows %d tokens %3d | %9.1f us  floor %9.1f  x%.2f | %5.0f GB/s %4.0f TFLOP/s\n",
                        m.name, tokens, double(most) / experts, routings[0].active, experts, v.rows, v.width, us, floor_us,
                        us / floor_us, bytes / us / 1e3, flops / us / 1e6);
            std::fflush(stdout);
            CHECK(cudaGraphExecDestroy(exec));
            CHECK(cudaGraphDestroy(graph));
        }
    }
    CHECK(cudaStreamDestroy(stream));
}

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "check";
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        std::printf("no CUDA device\n");
        return 2;
    }
    CHECK(expertd_experts_setup());
    if (mode == "check") return check_all(argc > 2 && std::strcmp(argv[2], "small") == 0);
    if (mode != "bench" && mode != "tune") {
        std::printf("usage: experts check [small] | bench [model|all] [tokens] | tune [model|all] [tokens]\n");
        return 64;
    }
    measure_ceiling();
    const char* flags = std::getenv("EXPERTS_FLAGS"); // enum ExpertdLaunchFlags
    for (const Model& m : MODELS) {
        if (argc > 2 && std::strcmp(argv[2], "all") != 0 && std::strcmp(argv[2], m.name) != 0) continue;
        bench_model(m, mode == "tune", flags ? std::atoi(flags) : 0, argc > 3 ? std::atoi(argv[3]) : 0);
    }
    return 0;
}
