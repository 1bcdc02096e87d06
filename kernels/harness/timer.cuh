// Times replayed graphs.
#pragma once

#include "device.cuh"

struct Timer {
    cudaEvent_t from, to;
    Timer() {
        CHECK(cudaEventCreate(&from));
        CHECK(cudaEventCreate(&to));
    }
    // Median milliseconds of one replay.
    float replay(cudaGraphExec_t graph, cudaStream_t stream, float budget_ms) {
        std::vector<float> times;
        float total = -40; // run for at least 40 ms first, until the clocks have risen
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
