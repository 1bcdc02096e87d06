// Times replayed graphs.
#pragma once

#include "device.cuh"

class Timer {
  public:
    Timer() {
        for (int i = 0; i < BATCH; i++) {
            CHECK(cudaEventCreate(&from_[i]));
            CHECK(cudaEventCreate(&to_[i]));
        }
    }
    // Median milliseconds of one replay.
    float replay(cudaGraphExec_t graph, cudaStream_t stream, float budget_ms) {
        std::vector<float> times;
        // Run for at least `warm_ms` first, until the clocks have risen. They fall again at the power limit, after some hundred ms.
        const char* longer = std::getenv("EXPERTS_MS");
        const float least = longer != nullptr ? float(std::atof(longer)) : 0;
        budget_ms = std::max(budget_ms, least);
        float total = -std::max(warm_ms, least);
        for (int i = 0; i < 8000 && (times.size() < 5 || total < budget_ms);) {
            // Some replays are queued at a time, because the host may take much longer to wait than the device for a replay.
            const int count = i < 3 ? 1 : total < 0 ? BATCH : 8;
            for (int j = 0; j < count; j++) {
                CHECK(cudaEventRecord(from_[j], stream));
                CHECK(cudaGraphLaunch(graph, stream));
                CHECK(cudaEventRecord(to_[j], stream));
            }
            CHECK(cudaEventSynchronize(to_[count - 1]));
            for (int j = 0; j < count; j++, i++) {
                float ms;
                CHECK(cudaEventElapsedTime(&ms, from_[j], to_[j]));
                if (i >= 3 && total >= 0) times.push_back(ms);
                total += ms;
            }
        }
        std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
        return times[times.size() / 2];
    }

    float warm_ms = 40.0f; // how long a graph is replayed before it is timed

  private:
    static constexpr int BATCH = 32;
    cudaEvent_t from_[BATCH], to_[BATCH];
};
