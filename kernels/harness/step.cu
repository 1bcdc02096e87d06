// Times one rank's step of few rows from staging to staging, as the service launches it: copy_in, gate, dispatch, experts, combine and
// copy_out in one captured graph. The host plays the peers: it sets their flags, routing and rows before the step, so the time is this
// rank's own latency.
//
//   step STEPS MODEL:RANKS:TOKENS[:TILE_ROWS[:FLAGS[:SEGMENTS[:COPY_BLOCKS]]]] ...      e.g. step 400 qwen3-30b:1:1 olmoe-7b:2:8
//
// FLAGS is added to EXPERTD_LAUNCH_PROGRAMMATIC (4: EXPERTD_LAUNCH_FEW_ROWS). SEGMENTS is the number of separate runs of rows in host
// memory (default 1); if it is negative, rows and results are in device memory, as those of CUDA sessions. With STEP_BF16_ROWS the
// experts of a rank alone quantise rows themselves.
//
// Prints medians in microseconds since the begin of copy_in, and a hash of all results, which is equal for kernels that give equal bits.
#include <chrono>

#include "../src/step.h"
#include "layer.cuh"
#include "routing.cuh"

using namespace expertd;

template <class T> struct Mapped {
    T* host = nullptr;
    T* device = nullptr;
    explicit Mapped(size_t n) {
        CHECK(cudaHostAlloc(&host, n * sizeof(T), cudaHostAllocMapped));
        std::memset(static_cast<void*>(host), 0, n * sizeof(T));
        CHECK(cudaHostGetDevicePointer(&device, host, 0));
    }
    ~Mapped() { cudaFreeHost(host); }
};

// Lays out a window as layout.rs does. Returns its size in bytes.
uint64_t lay_out(Group& g) {
    uint64_t end = 0;
    auto place = [&](uint64_t size) {
        const uint64_t at = end;
        end = (end + size + 1023) / 1024 * 1024;
        return at;
    };
    const uint64_t ranks = g.ranks, rows = ranks * g.max_tokens;
    g.dispatch_flags = place(ranks * kMaxBlocks * 8);
    g.combine_flags = place(ranks * kMaxBlocks * kMaxChunks * 8);
    g.meet_flags = place(ranks * 8);
    g.written_flags = place(ranks * 8);
    g.counts = place(ranks * 4);
    g.ids = place(rows * g.top_k * 4);
    g.weights = place(rows * g.top_k * 4);
    g.rows = place(rows * g.hidden * 2);
    g.partials = place(rows * g.hidden * 2);
    return end;
}

double median(std::vector<double> v) {
    if (v.empty()) return 0;
    std::nth_element(v.begin(), v.begin() + v.size() / 2, v.end());
    return v[v.size() / 2];
}

// Number of chosen experts that are not among a row's best by logits in f64. Sums in f32 exchange a few that are close.
int wrong_choices(const Model& m, const bf16* rows, const std::vector<bf16>& weight, const int32_t* ids, int tokens) {
    int wrong = 0;
    for (int t = 0; t < tokens; t++) {
        std::vector<double> logits(m.experts, 0.0);
        for (int e = 0; e < m.experts; e++) {
            for (int i = 0; i < m.hidden; i++) {
                logits[e] += double(float(rows[size_t(t) * m.hidden + i])) * double(float(weight[size_t(e) * m.hidden + i]));
            }
        }
        std::vector<double> sorted = logits;
        std::sort(sorted.begin(), sorted.end());
        const double least = sorted[m.experts - m.k] - 1e-3;
        for (int j = 0; j < m.k; j++) {
            const int id = ids[t * m.k + j];
            const bool twice = std::find(ids + t * m.k, ids + t * m.k + j, id) != ids + t * m.k + j;
            wrong += id < 0 || id >= m.experts || twice || logits[id] < least;
        }
    }
    return wrong;
}

uint64_t hash_bytes(uint64_t hash, const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3ull;
    return hash;
}

uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

void time_steps(const Model& m, int ranks, int tokens, int tile_rows, int flags, int runs, uint32_t copy_blocks, int steps) {
    const int local = m.experts / ranks, max_tokens = std::max(tokens, 8);
    const size_t expert_bytes = expertd_experts_matrix_bytes(m.format, EXPERTD_PACK_GATE_UP, m.hidden, m.inter) +
                                expertd_experts_matrix_bytes(m.format, EXPERTD_PACK_DOWN, m.hidden, m.inter);
    const int layer_count = 4;
    std::vector<Layer> layers;
    std::vector<ExpertdLayerWeights> views;
    std::vector<Buffer<bf16>> gates;
    std::vector<GateLayer> gate_layers;
    for (int i = 0; i < layer_count; i++) {
        layers.emplace_back(m, local, false, 128);
        views.push_back(layers.back().view);
        gates.push_back(random_buffer<bf16>(size_t(m.experts) * m.hidden, 1.0f));
        gate_layers.push_back({gates.back().data, nullptr, nullptr, nullptr, nullptr});
    }
    Buffer<ExpertdLayerWeights> table(views);
    Buffer<GateLayer> gate_table(gate_layers);

    Group g{};
    g.generation = 7ull << 40, g.deadline_ns = 2000000000, g.rank = 0, g.ranks = ranks;
    g.hidden = m.hidden, g.top_k = m.k, g.experts = m.experts, g.max_tokens = max_tokens;
    const uint64_t window_bytes = lay_out(g);
    Buffer<uint8_t> window(window_bytes), elsewhere(window_bytes);
    CHECK(cudaMemset(window.data, 0, window.count));
    const int entries = ranks * max_tokens * m.k, panel_rows = (entries + 7 * local + 7) / 8 * 8;
    SlotState first{};
    first.sequence = 1;
    Buffer<SlotState> state(std::vector<SlotState>{first});
    Buffer<bf16> rows(size_t(max_tokens) * m.hidden), y(size_t(entries) * m.hidden), out(2 * size_t(max_tokens) * m.hidden);
    Buffer<bf16> x_panels(size_t(panel_rows) * m.hidden), h(size_t(panel_rows) * m.inter);
    const ScaleWorkspace scales(m, panel_rows);
    Buffer<int32_t> ids(max_tokens * m.k), token_ids(max_tokens);
    Buffer<float> weights(max_tokens * m.k), row_weight(entries);
    Buffer<uint32_t> offsets(local + 1), row_index(entries), position(entries), block_counts(kMaxBlocks * local);
    Buffer<uint32_t> expert_state(expertd_experts_state_words(local));
    Buffer<RowPlace> places(max_tokens);
    CHECK(cudaMemset(expert_state.data, 0, expert_state.count * 4));
    Mapped<StepRequest> request(1);
    constexpr uint32_t MAX_SEGMENTS = 1024;
    Mapped<Segment> segments(MAX_SEGMENTS);
    Mapped<uint8_t> staged(size_t(max_tokens) * m.hidden * 4);
    Mapped<int32_t> staged_ids(max_tokens * m.k), staged_token_ids(max_tokens);
    Mapped<float> staged_weights(max_tokens * m.k);
    Mapped<Completion> completion(1);
    Mapped<uint64_t> experts_done(1), call_number(1), raised(1), host_counts(size_t(layer_count) * m.experts);
    Mapped<uint32_t> word(1);
    Buffer<uint64_t> row_counts(std::vector<uint64_t>(size_t(layer_count) * m.experts, 0));

    g.state = state.data;
    for (int r = 0; r < ranks; r++) g.windows[r] = r == 0 ? window.data : elsewhere.data;

    CopyInParams in{};
    in.state = state.data, in.request = request.device, in.segments = segments.device, in.staged_rows = staged.device;
    in.staged_ids = staged_ids.device, in.staged_weights = staged_weights.device, in.tokens = rows.data;
    in.topk_ids = ids.data, in.topk_weights = weights.data, in.token_ids = token_ids.data, in.places = places.data;
    in.staged_bytes = size_t(max_tokens) * m.hidden * 4, in.hidden = m.hidden, in.top_k = m.k, in.max_tokens = max_tokens;
    in.experts = m.experts, in.max_segments = MAX_SEGMENTS;
    GateParams gate{};
    gate.state = state.data, gate.layers = gate_table.data, gate.tokens = rows.data, gate.token_ids = token_ids.data;
    gate.places = places.data, gate.topk_ids = ids.data, gate.topk_weights = weights.data, gate.hidden = m.hidden, gate.experts = m.experts, gate.top_k = m.k;
    gate.max_tokens = max_tokens, gate.score_fn = kSoftmax, gate.normalise = kSum, gate.scale = 1.0f;
    DispatchParams dispatch{g, rows.data, ids.data, weights.data, offsets.data, row_index.data, row_weight.data, position.data, block_counts.data};
    ExpertdExpertsParams mlp = parameters(m, local);
    mlp.layers = table.data, mlp.layer = &state.data->layer, mlp.error = &state.data->error;
    mlp.expert_offsets = reinterpret_cast<int32_t*>(offsets.data), mlp.row_index = reinterpret_cast<int32_t*>(row_index.data);
    mlp.row_weight = row_weight.data, mlp.x = ranks == 1 ? reinterpret_cast<uint8_t*>(rows.data) : window.data + g.rows, mlp.y = y.data, mlp.x_panels = x_panels.data;
    mlp.h = h.data, mlp.state = expert_state.data, mlp.panel_rows = panel_rows, mlp.flags = EXPERTD_LAUNCH_PROGRAMMATIC | flags;
    mlp.tile_rows = tile_rows, mlp.x_scales = scales.x.data, mlp.h_scales = scales.h.data;
    // As ranks do: with few rows a rank alone leaves them in bf16. The peers that the host plays always send bf16.
    if (fp8_products(m.format) && ranks == 1 && (flags & EXPERTD_LAUNCH_FEW_ROWS) == 0 && std::getenv("STEP_BF16_ROWS") == nullptr) {
        dispatch.fp8_rows = 1;
        mlp.x = window.data + g.rows, mlp.x_format = EXPERTD_ROWS_FP8, mlp.x_stride = fp8_row_bytes(m.hidden);
    }
    CombineParams combine{g, y.data, position.data, ids.data, weights.data, nullptr, places.data, out.data, experts_done.device};
    CopyOutParams back{};
    back.group = g, back.out = out.data, back.topk_ids = ids.data, back.topk_weights = weights.data;
    back.places = places.data, back.assignments = offsets.data + local;
    back.staged_ids = staged_ids.device, back.staged_weights = staged_weights.device, back.completion = completion.device;
    back.hidden = m.hidden, back.top_k = m.k, back.max_tokens = max_tokens, back.raised = raised.device;
    back.expert_offsets = offsets.data, back.row_counts = row_counts.data, back.row_counts_host = host_counts.device;
    back.local_experts = local, back.count_stride = m.experts;

    // As in slot.rs.
    const uint32_t items = tokens * ceil_div(m.hidden, 1024), send = ceil_div(items, items < 256 ? 8 : 4);
    const uint32_t dispatch_blocks = std::max(2u, std::min(128u, send + std::clamp(send / 7, 1u, 16u)));
    const uint32_t units = tokens * ranks * ceil_div(m.hidden, 512);
    const uint32_t combine_blocks = std::max(1u, std::min(ceil_div(units, 4), units < 1024 ? 64u : 128u));

    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    auto enqueue = [&] {
        CHECK(expertd_copy_in(&in, 1, copy_blocks, stream));
        CHECK(expertd_gate(&gate, 1, tokens, stream));
        CHECK(expertd_dispatch(&dispatch, 1, dispatch_blocks, stream));
        CHECK(expertd_experts_launch(&mlp, stream));
        CHECK(expertd_combine(&combine, 1, combine_blocks, stream));
        CHECK(expertd_copy_out(&back, 1, copy_blocks, stream));
    };
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    enqueue();
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));

    std::mt19937 rng(11);
    std::normal_distribution<float> normal;
    std::vector<bf16> pool(std::max(size_t(1) << 20, 2 * size_t(max_tokens) * m.hidden));
    for (auto& v : pool) v = bf16(normal(rng));
    Buffer<bf16> device_pool(pool), results(size_t(max_tokens) * m.hidden);
    uint64_t hash = 0xcbf29ce484222325ull;
    constexpr int STAMPS = 14;
    const char* names[STAMPS] = {"copy_in end", "gate begin", "gate end", "dispatch begin", "lists end", "dispatch end", "combine begin",
                                 "combine end", "copy_out begin", "copy_out end", "host", "gate-combine", "phases", "word"};
    std::vector<double> stamps[STAMPS];
    double active = 0;
    std::vector<std::vector<bf16>> gate_weights;
    const bool check = std::getenv("STEP_CHECK") != nullptr;
    for (const auto& weight : gates) gate_weights.push_back(check ? weight.read() : std::vector<bf16>());
    int wrong = 0, late = 0;
    // With checks results go to host memory, where no element may be as it was when the completion word is raised.
    Mapped<uint32_t> visible(check ? size_t(max_tokens) * m.hidden / 2 : 1);
    const uint64_t result_rows = check ? uint64_t(visible.device) : uint64_t(results.data);
    for (int step = 1; step <= steps; step++) {
        const int count = std::min(std::abs(runs), tokens);
        *request.host = {uint64_t(step), uint32_t(tokens), uint32_t(step % layer_count), 0, kBf16, uint32_t(count), runs < 0, runs < 0};
        request.host->raise[0] = {word.device, call_number.device, uint64_t(step)};
        *word.host = 0;
        if (check) std::memset(visible.host, 0xff, size_t(tokens) * m.hidden * 2);
        const size_t from = rng() % (pool.size() - size_t(tokens) * m.hidden) / 8 * 8;
        const bf16* staged_rows = pool.data() + from;
        for (int i = 0; i < count; i++) {
            const uint32_t row = tokens * i / count, end = tokens * (i + 1) / count;
            const uint64_t at = uint64_t(row) * m.hidden * 2;
            segments.host[i] = {at, 0, row, end - row, kBf16, kSharedExperts, 0, 0};
            if (runs < 0) {
                segments.host[i].byte_offset = uint64_t(device_pool.data + from) + at;
                segments.host[i].output_offset = result_rows + at, segments.host[i].memory = 1;
            }
        }
        if (runs > 0) std::memcpy(staged.host, staged_rows, size_t(tokens) * m.hidden * 2);
        if (ranks > 1) { // the peers have already sent
            std::vector<uint64_t> flags(size_t(ranks) * kMaxBlocks * kMaxChunks, 0);
            const uint64_t flag = g.generation | uint64_t(step);
            std::fill(flags.begin(), flags.end(), flag);
            const size_t d = kMaxBlocks * 8, c = kMaxBlocks * kMaxChunks * 8;
            CHECK(cudaMemcpy(window.data + g.dispatch_flags + d, flags.data(), (ranks - 1) * d, cudaMemcpyHostToDevice));
            CHECK(cudaMemcpy(window.data + g.written_flags + 8, flags.data(), (ranks - 1) * 8, cudaMemcpyHostToDevice));
            CHECK(cudaMemcpy(window.data + g.combine_flags + c, flags.data(), (ranks - 1) * c, cudaMemcpyHostToDevice));
            for (int r = 1; r < ranks; r++) {
                const uint32_t count = tokens;
                CHECK(cudaMemcpy(window.data + g.counts + 4 * r, &count, 4, cudaMemcpyHostToDevice));
                std::vector<int32_t> chosen;
                std::vector<float> weight(tokens * m.k, 0.1f);
                std::vector<int> all(m.experts);
                for (int e = 0; e < m.experts; e++) all[e] = e;
                for (int t = 0; t < tokens; t++) {
                    for (int i = 0; i < m.k; i++) {
                        std::swap(all[i], all[i + rng() % (m.experts - i)]);
                        chosen.push_back(all[i]);
                    }
                }
                const size_t from = size_t(r) * max_tokens;
                CHECK(cudaMemcpy(window.data + g.ids + from * m.k * 4, chosen.data(), chosen.size() * 4, cudaMemcpyHostToDevice));
                CHECK(cudaMemcpy(window.data + g.weights + from * m.k * 4, weight.data(), weight.size() * 4, cudaMemcpyHostToDevice));
                CHECK(cudaMemcpy(window.data + g.rows + from * m.hidden * 2, pool.data(), size_t(tokens) * m.hidden * 2, cudaMemcpyHostToDevice));
            }
        }
        CHECK(cudaDeviceSynchronize());
        const auto begin = std::chrono::steady_clock::now();
        CHECK(cudaGraphLaunch(exec, stream));
        double seen = 0.0; // when the completion word was raised
        const auto since = [&] { return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count(); };
        while (*const_cast<volatile uint64_t*>(&completion.host->step) != uint64_t(step)) {
            if (seen == 0.0 && *const_cast<volatile uint32_t*>(word.host) != 0) {
                seen = since();
                for (size_t i = 0; check && i < size_t(tokens) * m.hidden / 2; i++) late += const_cast<volatile uint32_t*>(visible.host)[i] == ~0u;
            }
            if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(5)) {
                CHECK(cudaStreamSynchronize(stream));
                std::printf("step %d does not end\n", step);
                std::exit(1);
            }
        }
        const double host = since();
        if (runs < 0 && (*word.host != 1 || *call_number.host != uint64_t(step) || *raised.host != uint64_t(step))) std::printf("error: word\n"), std::exit(1);
        if (seen == 0.0) seen = host;
        CHECK(cudaStreamSynchronize(stream));
        const Completion& done = *completion.host;
        if (done.error != 0) std::printf("error %x\n", done.error), std::exit(1);
        const size_t row_bytes = size_t(tokens) * m.hidden * 2;
        if (runs < 0) CHECK(cudaMemcpy(staged.host, reinterpret_cast<void*>(result_rows), row_bytes, cudaMemcpyDefault));
        hash = hash_bytes(hash, staged.host, row_bytes);
        hash = hash_bytes(hash, staged_ids.host, size_t(tokens) * m.k * 4);
        hash = hash_bytes(hash, staged_weights.host, size_t(tokens) * m.k * 4);
        if (check) wrong += wrong_choices(m, staged_rows, gate_weights[step % layer_count], staged_ids.host, tokens);
        if (step <= steps / 5) continue;
        const double zero = double(done.begin_ns[kCopyIn]);
        auto us = [&](uint64_t ns) { return (double(ns) - zero) / 1e3; };
        auto span = [](uint64_t from, uint64_t to) { return to > from ? double(to - from) / 1e3 : 0.0; };
        const double values[STAMPS] = {us(done.end_ns[kCopyIn]), us(done.begin_ns[kGate]), us(done.end_ns[kGate]), us(done.begin_ns[kDispatch]),
                                       us(done.end_ns[kPrepare]), us(done.end_ns[kDispatch]), us(done.begin_ns[kCombine]), us(done.end_ns[kCombine]),
                                       us(done.begin_ns[kCopyOut]), us(done.end_ns[kCopyOut]), host,
                                       us(done.end_ns[kCombine]) - us(done.begin_ns[kGate]),
                                       span(done.begin_ns[kGate], done.end_ns[kGate]) + span(done.end_ns[kDispatch], done.end_ns[kPrepare]) +
                                           span(done.begin_ns[kDispatch], done.end_ns[kDispatch]) +
                                           span(std::max(done.end_ns[kDispatch], done.end_ns[kPrepare]), done.begin_ns[kCombine]) +
                                           span(done.begin_ns[kCombine], done.end_ns[kCombine]), seen};
        for (int i = 0; i < STAMPS; i++) stamps[i].push_back(values[i]);
        const auto counts = offsets.read();
        const auto listed = row_index.read();
        hash = hash_bytes(hash_bytes(hash, counts.data(), counts.size() * 4), listed.data(), counts[local] * 4);
        for (int e = 0; e < local; e++) active += counts[e + 1] > counts[e];
    }
    active /= stamps[0].size();
    hash = hash_bytes(hash, host_counts.host, size_t(layer_count) * m.experts * 8);
    const double floor = active * expert_bytes / HBM * 1e6;
    std::printf("%s ranks %d tokens %d rows %d flags %d segments %d blocks %u: %.1f experts, weights %.1f us |", m.name, ranks, tokens,
                tile_rows, flags, runs, copy_blocks, active, floor);
    for (int i = 0; i < STAMPS; i++) std::printf(" %s %.1f%s", names[i], median(stamps[i]), i + 1 < STAMPS ? "," : "");
    std::printf(", hash %016llx\n", static_cast<unsigned long long>(hash));
    if (check) std::printf("%d wrong choices, %d words of results after the completion word\n", wrong, late);
    std::fflush(stdout);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
}

int main(int argc, char** argv) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        std::printf("no CUDA device\n");
        return 2;
    }
    CHECK(expertd_experts_setup());
    for (int i = 2; i < argc; i++) {
        char name[64];
        int ranks = 1, tokens = 1, rows = 0, flags = 0, runs = 1;
        unsigned copy_blocks = 16;
        std::sscanf(argv[i], "%63[^:]:%d:%d:%d:%d:%d:%u", name, &ranks, &tokens, &rows, &flags, &runs, &copy_blocks);
        for (const Model& m : MODELS) {
            if (std::strcmp(name, m.name) == 0) time_steps(m, ranks, tokens, rows, flags, runs, copy_blocks, std::atoi(argv[1]));
        }
    }
    return 0;
}
