// Layers, workspaces and parameters for timed launches of the experts' kernel.
#pragma once

#include "layer.cuh"
#include "routing.cuh"

// Layers that launches use in turn, so that no launch finds its weights in the L2 cache.
struct TimedLayers {
    std::vector<Layer> layers;
    Buffer<ExpertdLayerWeights> table;
    Buffer<uint32_t> indices;
    Buffer<uint32_t> state;

    TimedLayers(const Model& m, int experts, int count) : state(expertd_experts_state_words(experts)) {
        std::vector<ExpertdLayerWeights> views;
        std::vector<uint32_t> all;
        for (int i = 0; i < count; i++) layers.emplace_back(m, experts, false, 128), all.push_back(i);
        for (const Layer& layer : layers) views.push_back(layer.view);
        table = Buffer<ExpertdLayerWeights>(views);
        indices = Buffer<uint32_t>(all);
        CHECK(cudaMemset(state.data, 0, state.count * 4));
    }
};

// Rows of a window and the workspaces for at most `most` assignments.
struct TimedRows {
    Buffer<bf16> x;
    const int panel_rows;
    Buffer<bf16> y, h, x_panels;
    const ScaleWorkspace scales;
    const Fp8Rows quantised;

    TimedRows(const Model& m, int experts, int most, int window)
        : x(random_buffer<bf16>(size_t(window) * m.hidden, 1.0f)),
          panel_rows(panel_rows_for(most, experts)),
          y(size_t(most) * m.hidden),
          h(size_t(panel_rows) * m.inter),
          x_panels(size_t(panel_rows) * m.hidden),
          scales(m, panel_rows),
          quantised(x, m.hidden, false) {
        h.poison();
        x_panels.poison();
    }
};

// The parameters of the `index`th launch of a graph. `fp8_rows`: the kernel reads the rows as FP8, as dispatch delivers them.
ExpertdExpertsParams timed_launch(const Model& m, int experts, const TimedLayers& layers, const TimedRows& rows,
                                  const DeviceRouting& routing, size_t index, bool fp8_rows) {
    ExpertdExpertsParams p = parameters(m, experts);
    p.limit = 7.0f;
    p.layers = layers.table.data, p.layer = layers.indices.data + index % layers.layers.size(), p.state = layers.state.data;
    p.expert_offsets = routing.offsets.data, p.row_index = routing.rows.data, p.row_weight = routing.weights.data;
    p.x = rows.x.data, p.y = rows.y.data, p.h = rows.h.data, p.x_panels = rows.x_panels.data, p.panel_rows = rows.panel_rows;
    p.x_scales = rows.scales.x.data, p.h_scales = rows.scales.h.data;
    if (fp8_rows) p.x = rows.quantised.data.data, p.x_stride = rows.quantised.stride, p.x_format = EXPERTD_ROWS_FP8;
    return p;
}
