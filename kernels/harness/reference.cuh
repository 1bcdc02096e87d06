// The expert MLP in f64, for sampled assignments, and comparisons of whole buffers.
#pragma once

#include "device.cuh"

__device__ double dot(const float* a, const bf16* b, int n) {
    double sum = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32) sum += double(a[i]) * double(float(b[i]));
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffff, sum, d);
    return sum;
}

struct Reference {
    const float *gate, *up, *down; // row-major, dequantised
    const bf16* x;
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
    const float* w = r.down + (e * r.hidden + f) * r.inter;
    double sum = 0;
    for (int i = threadIdx.x % 32; i < r.inter; i += 32) sum += double(w[i]) * r.h[int64_t(s) * r.inter + i];
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
