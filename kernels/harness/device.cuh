// Poisoned device memory, random numbers, and the shapes of models.
#pragma once

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
    int format;
};

const Model MODELS[] = {
    {"qwen3-30b", 2048, 768, 128, 8, EXPERTD_SWIGLU, false, EXPERTD_BF16},
    {"deepseek-v3", 7168, 2048, 256, 8, EXPERTD_SWIGLU, false, EXPERTD_BF16},
    {"mixtral-8x7b", 4096, 14336, 8, 2, EXPERTD_SWIGLU, false, EXPERTD_BF16},
    {"olmoe-7b", 2048, 1024, 64, 8, EXPERTD_SWIGLU, false, EXPERTD_BF16},
    {"gpt-oss-120b", 2880, 2880, 128, 4, EXPERTD_SWIGLU_OAI, true, EXPERTD_BF16},
    {"qwen3-30b-fp8", 2048, 768, 128, 8, EXPERTD_SWIGLU, false, EXPERTD_FP8},
    {"deepseek-v3-fp8", 7168, 2048, 256, 8, EXPERTD_SWIGLU, false, EXPERTD_FP8},
    {"mixtral-fp8", 4096, 14336, 8, 2, EXPERTD_SWIGLU, false, EXPERTD_FP8},
    {"gpt-oss-fp8", 2880, 2880, 128, 4, EXPERTD_SWIGLU_OAI, true, EXPERTD_FP8},
    {"gpt-oss-mxfp4", 2880, 2880, 128, 4, EXPERTD_SWIGLU_OAI, true, EXPERTD_MXFP4},
    {"deepseek-mxfp4", 7168, 2048, 256, 8, EXPERTD_SWIGLU, false, EXPERTD_MXFP4},
    {"qwen3-30b-int4", 2048, 768, 128, 8, EXPERTD_SWIGLU, false, EXPERTD_INT4},
    {"qwen3-30b-int4z", 2048, 768, 128, 8, EXPERTD_SWIGLU, false, EXPERTD_INT4_ZEROS},
    {"deepseek-int4", 7168, 2048, 256, 8, EXPERTD_SWIGLU, false, EXPERTD_INT4},
    {"gpt-oss-int4z", 2880, 2880, 128, 4, EXPERTD_SWIGLU_OAI, true, EXPERTD_INT4_ZEROS},
    {"qwen3-30b-nvfp4", 2048, 768, 128, 8, EXPERTD_SWIGLU, false, EXPERTD_NVFP4},
    {"deepseek-nvfp4", 7168, 2048, 256, 8, EXPERTD_SWIGLU, false, EXPERTD_NVFP4},
    {"qwen3-30b-mxfp8", 2048, 768, 128, 8, EXPERTD_SWIGLU, false, EXPERTD_MXFP8},
    {"gpt-oss-mxfp8", 2880, 2880, 128, 4, EXPERTD_SWIGLU_OAI, true, EXPERTD_MXFP8},
    {"qwen3-30b-w8a8", 2048, 768, 128, 8, EXPERTD_SWIGLU, false, EXPERTD_W8A8},
    {"deepseek-v3-w8a8", 7168, 2048, 256, 8, EXPERTD_SWIGLU, false, EXPERTD_W8A8},
    {"mixtral-w8a8", 4096, 14336, 8, 2, EXPERTD_SWIGLU, false, EXPERTD_W8A8},
    {"gpt-oss-w4a8", 2880, 2944, 128, 4, EXPERTD_SWIGLU_OAI, true, EXPERTD_W4A8},
    {"qwen3-30b-w4a8", 2048, 768, 128, 8, EXPERTD_SWIGLU, false, EXPERTD_W4A8},
    {"gpt-oss-w8a8", 2880, 2944, 128, 4, EXPERTD_SWIGLU_OAI, true, EXPERTD_W8A8}, // inter is padded, as loaders do
};
constexpr const char* FORMATS[] = {"bf16", "fp8", "mxfp4", "w8a8", "int4", "int4z", "nvfp4", "mxfp8", "w4a8"}; // by enum ExpertdFormat
__host__ __device__ inline bool fp8_codes(int format) { return format == EXPERTD_FP8 || format == EXPERTD_W8A8 || format == EXPERTD_MXFP8; }
__host__ __device__ inline bool int4_codes(int format) { return format == EXPERTD_INT4 || format == EXPERTD_INT4_ZEROS; }
// Rows and h are quantised to e4m3, and inter is a multiple of 128.
__host__ __device__ inline bool fp8_products(int format) { return format == EXPERTD_W8A8 || format == EXPERTD_W4A8; }
inline int ranks = 4; // number of ranks of the group whose load is timed
constexpr double HBM = 4.2e12, TENSOR = 650e12; // the rates of the floors in docs/measurements/gpu-steps.md

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
        // The sum of four uniform numbers is close to a normal distribution of deviation 1.
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

