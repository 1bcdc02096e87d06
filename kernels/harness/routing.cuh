// Random routing.
#pragma once

#include "device.cuh"

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

// The routing that rank 0 of `ranks` receives if every rank has `tokens` tokens with uniform routing.
Routing draw(const Model& m, int tokens, std::mt19937& rng) {
    const int local = m.experts / ranks;
    std::vector<std::vector<int>> by_expert(local);
    Routing r;
    std::vector<int> ids(m.experts);
    for (int e = 0; e < m.experts; e++) ids[e] = e;
    for (int t = 0; t < ranks * tokens; t++) {
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

int panel_rows_for(int assignments, int experts) { return (assignments + 7 * experts + 8) / 8 * 8; }

