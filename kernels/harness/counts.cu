// Times the expert kernel for given numbers of rows per expert.
//
//   counts MODEL EXPERTS FILE [rounds] [window rows]
//
// Each line of FILE is a launch: a label and the number of rows of each of EXPERTS experts. The launches of a label are one graph; labels
// take turns, `rounds` times (default 3). An expert's rows are different rows of the window (default 4096 rows), in ascending order.
// Prints the median and the range of the rounds, in microseconds per launch. EXPERTS_FLAGS (values of ExpertdExpertsParams.flags) and
// EXPERTS_TILES (values of tile_rows and tile_tokens such as `0x0,0x32`) are lists whose combinations take turns within a label.
//
// README.md in this folder says how to build `experts`; this program takes the place of harness/experts.cu.
#include <fstream>
#include <map>
#include <sstream>

#include "bench.cuh"

namespace {

// The words of a list in the environment, such as `1,5`.
std::vector<std::string> words(const char* variable, const char* otherwise) {
    std::vector<std::string> all;
    const char* list = std::getenv(variable);
    std::istringstream in(list != nullptr ? list : otherwise);
    for (std::string word; std::getline(in, word, ',');) all.push_back(word);
    return all;
}

using Counts = std::vector<int>;

struct Launches {
    std::string label;
    std::vector<Counts> counts;
};

std::vector<Launches> read_launches(const char* path, int experts) {
    std::vector<Launches> all;
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) {
        std::istringstream words(line);
        std::string label;
        words >> label;
        Counts counts;
        for (int n; words >> n;) counts.push_back(n);
        if (int(counts.size()) != experts) {
            std::printf("%s: expected %d counts after `%s`, found %zu\n", path, experts, label.c_str(), counts.size());
            std::exit(64);
        }
        if (all.empty() || all.back().label != label) all.push_back({label, {}});
        all.back().counts.push_back(counts);
    }
    return all;
}

Routing routing_of(const Counts& counts, int window, std::mt19937& rng) {
    Routing r;
    r.offsets.push_back(0);
    r.window_rows = window;
    std::vector<int> rows(window);
    for (int i = 0; i < window; i++) rows[i] = i;
    for (int n : counts) {
        for (int i = 0; i < n; i++) std::swap(rows[i], rows[i + rng() % (window - i)]);
        std::vector<int> mine(rows.begin(), rows.begin() + n);
        std::sort(mine.begin(), mine.end());
        for (int row : mine) r.rows.push_back(row), r.weights.push_back(0.1f);
        r.offsets.push_back(int(r.rows.size()));
        r.active += n > 0;
    }
    return r;
}

} // namespace

int main(int argc, char** argv) {
    const Model* model = nullptr;
    for (const Model& m : MODELS) {
        if (argc > 3 && std::strcmp(m.name, argv[1]) == 0) model = &m;
    }
    if (model == nullptr) {
        std::printf("usage: counts MODEL EXPERTS FILE [rounds] [window rows]; models as for `experts`\n");
        return 64;
    }
    CHECK(expertd_experts_setup());
    const Model& m = *model;
    const int experts = std::atoi(argv[2]), rounds = argc > 4 ? std::atoi(argv[4]) : 3, window = argc > 5 ? std::atoi(argv[5]) : 4096;
    const std::vector<Launches> all = read_launches(argv[3], experts);
    constexpr int LAYERS = 3;
    const TimedLayers layers(m, experts, LAYERS);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));

    int most = 0;
    for (const Launches& l : all) {
        for (const Counts& counts : l.counts) {
            int sum = 0;
            for (int n : counts) sum += n;
            most = std::max(most, sum);
        }
    }
    const TimedRows rows(m, experts, most, window);
    std::mt19937 rng(7);
    Timer timer;
    struct Variant {
        int flags, rows, tokens;
        std::map<std::string, std::vector<double>> times; // by label
    };
    std::vector<Variant> variants;
    for (const std::string& flags : words("EXPERTS_FLAGS", "0")) {
        for (const std::string& tiles : words("EXPERTS_TILES", "0x0")) {
            Variant v{std::atoi(flags.c_str()), std::atoi(tiles.c_str()), std::atoi(tiles.c_str() + tiles.find('x') + 1), {}};
            const bool tiled = (v.flags & EXPERTD_LAUNCH_FEW_ROWS) == 0;
            if (tiled || variants.empty() || variants.back().flags != v.flags) variants.push_back(v);
        }
    }
    for (int round = 0; round < rounds; round++) {
        for (const Launches& l : all) {
            std::vector<DeviceRouting> device;
            for (const Counts& counts : l.counts) device.emplace_back(routing_of(counts, window, rng));
            for (Variant& v : variants) {
                cudaGraph_t graph;
                cudaGraphExec_t exec;
                CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
                for (size_t i = 0; i < device.size(); i++) {
                    ExpertdExpertsParams p = timed_launch(m, experts, layers, rows, device[i], i, fp8_products(m.format));
                    p.flags = v.flags, p.tile_rows = v.rows, p.tile_tokens = v.tokens;
                    CHECK(expertd_experts_launch(&p, stream));
                }
                CHECK(cudaStreamEndCapture(stream, &graph));
                CHECK(cudaGraphInstantiate(&exec, graph, 0));
                v.times[l.label].push_back(timer.replay(exec, stream, 12) * 1e3 / device.size());
                timer.warm_ms = 10.0f; // the GPU has been busy
                CHECK(cudaGraphExecDestroy(exec));
                CHECK(cudaGraphDestroy(graph));
            }
        }
    }
    for (const Launches& l : all) {
        for (Variant& v : variants) {
            std::vector<double>& us = v.times[l.label];
            std::sort(us.begin(), us.end());
            std::printf("%-28s flags %d tiles %dx%d %8.1f us (%.1f .. %.1f)\n", l.label.c_str(), v.flags, v.rows, v.tokens, us[us.size() / 2], us.front(), us.back());
        }
    }
    return 0;
}
