// Checks correctness: sampled rows against f64, unwritten and overwritten elements, determinism, every tile shape.
#pragma once

#include "layer.cuh"
#include "reference.cuh"
#include "routing.cuh"

bool check_case(const Model& m, int experts, const Routing& routing, Layer& layer, const char* what, bool variants) {
    const int a = routing.assignments(), panel_rows = panel_rows_for(a, experts);
    const size_t y_written = size_t(a) * m.hidden, y_all = y_written + 64 * size_t(m.hidden);
    auto x = random_buffer<bf16>(size_t(routing.window_rows) * m.hidden, 1.0f);
    DeviceRouting dr(routing);
    Buffer<bf16> y(y_all), first(y_all), first_on_input(y_all), first_few(y_all), first_few_on_input(y_all), h(size_t(panel_rows) * m.inter), x_panels(size_t(panel_rows) * m.hidden);
    Buffer<uint32_t> state(expertd_experts_state_words(experts));
    CHECK(cudaMemset(state.data, 0, state.count * 4));
    Buffer<ExpertdLayerWeights> table(std::vector<ExpertdLayerWeights>{ExpertdLayerWeights{}, layer.view});
    Buffer<uint32_t> layer_index(std::vector<uint32_t>{1}), error(std::vector<uint32_t>{0});
    Buffer<unsigned long long> bad(std::vector<unsigned long long>{0, 0});

    ExpertdExpertsParams p = parameters(m, experts);
    p.layers = table.data, p.layer = layer_index.data, p.error = error.data;
    p.expert_offsets = dr.offsets.data, p.row_index = dr.rows.data, p.row_weight = dr.weights.data;
    p.x = x.data, p.h = h.data, p.x_panels = x_panels.data, p.state = state.data, p.panel_rows = panel_rows;
    const ScaleWorkspace scales(m, panel_rows);
    p.x_scales = scales.x.data, p.h_scales = scales.h.data;
    const bool w8a8 = fp8_products(m.format), w4a8 = m.format == EXPERTD_W4A8;

    struct Variant {
        int rows, width, blocks, weight_on_input, power_of_two = 0, fp8_rows = 0, flags = 0;
    };
    std::vector<Variant> list = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    if (variants && w8a8) {
        const int blocks = m.hidden > 512 ? 0 : 4;
        for (int w : {32, 64, 128})
            list.push_back({0, w, blocks, 0});
        for (int r : {256, int(EXPERTD_TILE_TALL)})
            for (int w : {0, 32, 64})
                if (!w4a8 || r != 256) list.push_back({r, w, blocks, 0});
        if (!w4a8 && layer.view.block_scales != 0) {
            for (int rows : {EXPERTD_TILE_TOKEN_ROWS, EXPERTD_TILE_TOKEN_PAIRS}) {
                list.push_back({rows, 0, blocks, 0}), list.push_back({rows, 0, 7, 0}), list.push_back({rows, 0, blocks, 1});
                list.push_back({rows, 0, blocks, 0, 1}), list.push_back({rows, 0, blocks, 0, 0, 1}), list.push_back({rows, 0, blocks, 0, 1, 1});
            }
        }
        list.push_back({0, 0, 7, 0}), list.push_back({0, 0, blocks, 1}), list.push_back({0, 0, blocks, 0, 1}), list.push_back({0, 0, blocks, 0, 0, 1}), list.push_back({0, 0, blocks, 0, 1, 1});
        for (int rows : {0, int(EXPERTD_TILE_TOKEN_ROWS), int(EXPERTD_TILE_TOKEN_PAIRS)}) {
            if (!w4a8) break;
            for (int on_input : {0, 1}) list.push_back({rows, 0, blocks, on_input, 0, 0, EXPERTD_LAUNCH_MANY_ROWS});
            list.push_back({rows, 0, 7, 0, 0, 0, EXPERTD_LAUNCH_MANY_ROWS});
            for (int fp8_rows : {0, 1}) list.push_back({rows, 0, blocks, 0, 1, fp8_rows, EXPERTD_LAUNCH_MANY_ROWS}), list.push_back({rows, 0, blocks, 0, 0, fp8_rows, EXPERTD_LAUNCH_MANY_ROWS});
        }
    } else if (variants) {
        const int widest = m.format == EXPERTD_BF16 ? 256 : 128;
        const int blocks = m.hidden > 512 ? 0 : 4; // few blocks for small matrices, so that each block goes round its rings
        for (int w : {32, 64, 128, 192, 256})
            if (w <= widest) list.push_back({0, w, blocks, 0});
        for (int r : {16, 32, 64, 128, 256}) list.push_back({r, 0, blocks, 0});
        for (int w : {32, widest}) list.push_back({128, w, blocks, 0}), list.push_back({256, w, blocks, 0});
        for (int w : {32, widest}) list.push_back({32, w, blocks, 0});
        if (m.format == EXPERTD_BF16)
            for (int r : {EXPERTD_TILE_TALL, EXPERTD_TILE_TURNS})
                for (int w : {0, 32, 64, 128}) list.push_back({r, w, blocks, 0});
        if (m.format == EXPERTD_BF16)
            for (int r : {EXPERTD_TILE_TOKEN_ROWS, EXPERTD_TILE_TOKEN_PAIRS})
                list.push_back({r, 0, blocks, 0}), list.push_back({r, 0, 7, 0}), list.push_back({r, 0, blocks, 1});
        list.push_back({0, 0, 7, 0});
        list.push_back({0, 0, blocks, 1});
    }
    if (a <= 4096 && !w4a8) {
        for (int blocks : {0, 0, 7, a <= 256 ? 1 : 50}) list.push_back({0, 0, blocks, 0, 0, 0, EXPERTD_LAUNCH_FEW_ROWS});
        for (int blocks : {0, 5}) list.push_back({0, 0, blocks, 1, 0, 0, EXPERTD_LAUNCH_FEW_ROWS});
        if (w8a8) {
            for (int fp8_rows : {0, 1}) list.push_back({0, 0, 0, 0, 1, fp8_rows, EXPERTD_LAUNCH_FEW_ROWS});
            for (int blocks : {0, 7}) list.push_back({0, 0, blocks, 0, 0, 1, EXPERTD_LAUNCH_FEW_ROWS});
        }
    }
    bool good = true, seen[4] = {};
    unsigned long long differing = 0;
    double worst = 0, worst_exact = 0, worst_model = 0, mean_relative = 0, mean_exact = 0, mean_model = 0;
    int compared = 0;
    for (size_t v = 0; v < list.size(); v++) {
        p.tile_rows = list[v].rows, p.tile_tokens = list[v].width, p.blocks = list[v].blocks, p.flags = list[v].flags;
        const bool few = (p.flags & EXPERTD_LAUNCH_FEW_ROWS) != 0;
        p.weight_on_input = list[v].weight_on_input, p.power_of_two_scales = list[v].power_of_two;
        const Fp8Rows quantised_rows(x, m.hidden, p.power_of_two_scales != 0);
        p.x = x.data, p.x_stride = 2 * m.hidden, p.x_format = list[v].fp8_rows;
        if (p.x_format != 0) p.x = quantised_rows.data.data, p.x_stride = quantised_rows.stride;
        // Outputs are compared with the first one of the same kind.
        bool& kind_seen = seen[(few ? 2 : 0) + (p.weight_on_input ? 1 : 0)];
        const bool is_first = !kind_seen;
        Buffer<bf16>& reference = few ? (p.weight_on_input ? first_few_on_input : first_few) : p.weight_on_input ? first_on_input : first;
        kind_seen = true;
        Buffer<bf16>& out = is_first ? reference : y;
        out.poison();
        h.poison();
        x_panels.poison();
        CHECK(cudaMemset(bad.data, 0, 16));
        p.y = out.data;
        CHECK(expertd_experts_launch(&p, nullptr));
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        scan_kernel<<<1024, 256>>>(reinterpret_cast<uint16_t*>(out.data), y_written, y_all, bad.data);
        if (!is_first && !p.power_of_two_scales) differ_kernel<<<1024, 256>>>(reinterpret_cast<uint16_t*>(out.data), reinterpret_cast<uint16_t*>(reference.data), y_written, bad.data + 1);
        const auto found = bad.read();
        const auto left = state.read();
        const bool clean = std::all_of(left.begin(), left.end(), [](uint32_t w) { return w == 0; });
        differing += found[1];
        const bool many = (p.flags & EXPERTD_LAUNCH_MANY_ROWS) != 0;
        const bool same = v == 1 || few || (many && !p.power_of_two_scales) || (list[v].fp8_rows && !p.power_of_two_scales && p.blocks == 0); // whether the bits must be equal
        const bool overrun = w8a8 && scales.overrun();
        if (found[0] != 0 || !clean || overrun || (same && found[1] != 0)) {
            std::printf("  variant rows %d tokens %d blocks %d flags %d: %llu bad elements, %llu differ, state %s%s\n", p.tile_rows,
                        p.tile_tokens, p.blocks, p.flags, found[0], found[1], clean ? "clean" : "DIRTY", overrun ? ", scales behind the last" : "");
            good = false;
        }
        if (a == 0) continue;

        // A sample of assignments that includes the first and last one of each expert.
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
        Reference r{layer.gate.data, layer.up.data, layer.down.data, x.data, nullptr, layer.gate_up_bias.data, layer.down_bias.data,
                    d_row.data, d_expert.data, d_weight.data, ref_h.data, ref_y.data, m.hidden, m.inter, m.activation,
                    p.weight_on_input, p.alpha, p.limit};
        reference_h<<<dim3(samples, m.inter / 8), 256>>>(r);
        reference_y<<<dim3(samples, m.hidden / 8), 256>>>(r);
        CHECK(cudaGetLastError());
        const auto exact = ref_y.read();
        auto expected = exact;
        if (w8a8) { // as above, with x and h quantised
            Buffer<double> scratch(size_t(samples) * m.hidden);
            Buffer<float> quantised(size_t(samples) * m.hidden);
            quantise_x<<<samples, 128>>>(r, scratch.data, quantised.data, p.power_of_two_scales != 0);
            r.quantised = quantised.data;
            reference_h<<<dim3(samples, m.inter / 8), 256>>>(r);
            quantise_h<<<samples, 128>>>(r, 128, p.power_of_two_scales != 0);
            reference_y<<<dim3(samples, m.hidden / 8), 256>>>(r);
            CHECK(cudaGetLastError());
            expected = ref_y.read();
        }
        const bool whole = y_all <= size_t(1) << 25; // few copies take less time than many
        const std::vector<bf16> all_rows = whole ? out.read() : std::vector<bf16>();
        std::vector<bf16> row(m.hidden);
        for (int s = 0; s < samples; s++) {
            const size_t from = size_t(index[s]) * m.hidden;
            if (whole) std::copy_n(all_rows.begin() + from, m.hidden, row.begin());
            else CHECK(cudaMemcpy(row.data(), out.data + from, m.hidden * 2, cudaMemcpyDeviceToHost));
            double error2 = 0, norm2 = 0, exact2 = 0, model2 = 0;
            for (int f = 0; f < m.hidden; f++) {
                const double want = expected[size_t(s) * m.hidden + f], got = double(float(row[f]));
                error2 += (got - want) * (got - want), norm2 += want * want;
                const double e = exact[size_t(s) * m.hidden + f];
                exact2 += (got - e) * (got - e), model2 += (want - e) * (want - e);
            }
            const double relative = std::sqrt(error2 / norm2);
            // W8A8: an error in the last bit of a sum can move an element of h to the next code, or the scale of its group to
            // the next power of two.
            const double own = std::sqrt(exact2 / norm2), model = std::sqrt(model2 / norm2);
            const double limit = !w8a8 ? 1e-2 : p.power_of_two_scales ? 8e-2 : 5e-2;
            // Twice the scale is twice the error, and small shapes have two groups of h.
            const double worse = p.power_of_two_scales ? 2.0 : 1.25;
            if (!(relative <= limit) || (w8a8 && !(own <= model * worse + 5e-3))) {
                if (good) std::printf("  assignment %d expert %d: relative error %g, %g without quantisation where the reference has %g (rows %d tokens %d variant %zu)\n", index[s], sample_expert[s], relative, own, model, p.tile_rows, p.tile_tokens, v);
                good = false;
            }
            worst = std::max(worst, std::isnan(relative) ? 1e9 : relative);
            worst_exact = std::max(worst_exact, std::sqrt(exact2 / norm2)), worst_model = std::max(worst_model, std::sqrt(model2 / norm2));
            mean_relative += relative * relative, mean_exact += exact2 / norm2, mean_model += model2 / norm2, compared++;
        }
    }
    std::printf("%-13s %s %-34s A=%-6d worst row error %.2e, %zu runs, %llu elements differ between variants: %s\n", m.name, FORMATS[m.format], what, a,
                worst, list.size(), differing, good ? "ok" : "FAILED");
    if (w8a8 && compared > 0)
        std::printf("    against f64 without quantisation, worst row and root mean square: %.2e %.2e; of the quantised reference %.2e %.2e; between the two %.2e\n",
                    worst_exact, std::sqrt(mean_exact / compared), worst_model, std::sqrt(mean_model / compared), std::sqrt(mean_relative / compared));
    std::fflush(stdout);
    return good;
}

// Experts with few rows each, for the models of which `only` is one, or all, and for small odd shapes. `only_format`: -1 runs all formats.
bool check_few_rows(const char* only, bool small_only, int only_format) {
    std::mt19937 rng(std::random_device{}());
    bool good = true;
    for (const Model& m : MODELS) {
        if (small_only || (only_format >= 0 && m.format != only_format) || (only != nullptr && std::strcmp(only, m.name) != 0)) continue;
        const int experts = m.experts / ranks;
        Layer layer(m, experts, true);
        auto counts_case = [&](const char* what, std::vector<int> counts, int window) {
            counts.resize(experts, 0);
            good &= check_case(m, experts, from_counts(counts, window, rng), layer, what, false);
        };
        counts_case("few: one row on the last expert", [&] { std::vector<int> c(experts, 0); c.back() = 1; return c; }(), 3);
        counts_case("few: up to 8 rows with zeros", {3, 0, 8, 1, 0, 7, 2, 8, 5, 1, 1, 6, 4, 0, 8, 1}, 11);
        counts_case("few: up to 35 rows", {9, 35, 1, 0, 17}, 40);
        // 64 tokens have so many tiles that the kernel has as many chunks under way as it may (FewRing::MOST_AHEAD).
        for (int tokens : {1, 2, 8, 64}) good &= check_case(m, experts, draw(m, tokens, rng), layer, ("few: uniform routing, T=" + std::to_string(tokens)).c_str(), false);
    }
    for (int format : {EXPERTD_BF16, EXPERTD_FP8, EXPERTD_MXFP4, EXPERTD_W8A8, EXPERTD_INT4, EXPERTD_INT4_ZEROS, EXPERTD_NVFP4, EXPERTD_MXFP8, EXPERTD_W4A8}) {
        if (only != nullptr) break;
        if (only_format >= 0 && format != only_format) continue;
        const bool w8a8 = fp8_products(format); // inter is a multiple of 128
        Model clamped{"clamped", small_only ? 512 : 2048, small_only ? 256 : 1024, 20, 8, EXPERTD_SWIGLU_CLAMPED, false, format};
        Layer layer(clamped, 5, true);
        good &= check_case(clamped, 5, from_counts({8, 0, 7, 1, 2}, 12, rng), layer, "few: 5 experts, clamped", false);
        Model oai{"oai", 448, w8a8 ? 384 : 320, 20, 2, EXPERTD_SWIGLU_OAI, true, format};
        Layer biased(oai, 17, true);
        good &= check_case(oai, 17, from_counts({0, 3, 8, 1, 0, 0, 9, 2, 17, 1, 1, 4, 0, 5, 6, 8, 0}, 19, rng), biased, "few: hidden 448, inter 320 or 384, biases", false);
        good &= check_case(oai, 17, from_counts({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0}, 1, rng), biased, "few: the same, one row", false);
        good &= check_case(oai, 17, from_counts(std::vector<int>(17, 0), 1, rng), biased, "few: the same, no rows", false);
        Model small{"small", 64, w8a8 ? 128 : 64, 8, 2, EXPERTD_SWIGLU, true, format};
        Layer tiny(small, 3, true);
        good &= check_case(small, 3, from_counts({5, 0, 40}, 41, rng), tiny, "few: hidden 64, inter 64 or 128, biases", false);
    }
    return good;
}

// `only_format` limits the small checks to one format; -1 runs all.
int check_all(bool small_only, const char* only, int only_format) {
    std::mt19937 rng(std::random_device{}());
    bool good = check_few_rows(only, small_only, only_format);
    for (const Model& m : MODELS) {
        if (small_only || (only != nullptr && std::strcmp(only, m.name) != 0)) continue;
        const int experts = m.experts / ranks;
        Layer layer(m, experts, true, m.format == EXPERTD_W8A8 ? 128 : 1);
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
    for (int format : {EXPERTD_BF16, EXPERTD_FP8, EXPERTD_MXFP4, EXPERTD_W8A8, EXPERTD_INT4, EXPERTD_INT4_ZEROS, EXPERTD_NVFP4, EXPERTD_MXFP8, EXPERTD_W4A8}) {
        if (only != nullptr) break;
        if (only_format >= 0 && format != only_format) continue;
        Model clamped{"clamped", small_only ? 512 : 2048, small_only ? 256 : 1024, 20, 8, EXPERTD_SWIGLU_CLAMPED, false, format};
        Layer layer(clamped, 5, true);
        good &= check_case(clamped, 5, from_counts({40, 0, 7, 300, 2}, 333, rng), layer, "5 experts, clamped", true);
        if (format == EXPERTD_W8A8) {
            Layer blocks(clamped, 5, true, 128);
            good &= check_case(clamped, 5, from_counts({140, 0, 97, 300, 70}, 333, rng), blocks, "5 experts, clamped, 128 x 128 scales", true);
            Model odd{"odd", 320, 384, 8, 2, EXPERTD_SWIGLU_OAI, true, format};
            Layer odd_blocks(odd, 3, true, 128);
            good &= check_case(odd, 3, from_counts({129, 260, 1}, 300, rng), odd_blocks, "hidden 320, biases, 128 x 128 scales", true);
        }
        Model small{"small", 64, fp8_products(format) ? 256 : 192, 8, 2, EXPERTD_SWIGLU, true, format};
        Layer tiny(small, 3, true);
        good &= check_case(small, 3, from_counts({5, 0, 40}, 41, rng), tiny, "hidden 64, inter 192 or 256, biases", true);
    }
    std::printf(good ? "ALL GOOD\n" : "SOME FAILED\n");
    return good ? 0 : 1;
}
