// The expert MLP in f64 for sampled assignments, and checks of whole buffers.
#pragma once

#include "layer.cuh"

template <class T> __device__ double dot(const float* a, const T* b, int n) {
    double sum = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32) sum += double(a[i]) * double(float(b[i]));
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffff, sum, d);
    return sum;
}

struct Reference {
    const float *gate, *up, *down; // row-major, dequantised
    const bf16* x;
    const float* quantised; // [sample][hidden]: x after quantisation, or null
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
    const float *gate = r.gate + (e * r.inter + f) * r.hidden, *up = r.up + (e * r.inter + f) * r.hidden;
    const float* quantised = r.quantised + int64_t(s) * r.hidden;
    double g = r.quantised ? dot(gate, quantised, r.hidden) : dot(gate, x, r.hidden);
    double u = r.quantised ? dot(up, quantised, r.hidden) : dot(up, x, r.hidden);
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

// Rounds values to bf16, then to the values that quantisation to e4m3 in groups gives.
__device__ void quantise_row(double* row, int n, int group, bool power_of_two) {
    for (int g = threadIdx.x; g * group < n; g += blockDim.x) {
        const int from = g * group, to = min(n, from + group);
        float largest = 0;
        for (int i = from; i < to; i++) largest = fmaxf(largest, fabsf(float(bf16(float(row[i])))));
        float scale = largest / 448.0f;
        if (power_of_two) scale = float(exp2(ceil(log2(double(scale)))));
        const float inverse = 1.0f / scale;
        for (int i = from; i < to; i++) {
            const __nv_fp8_storage_t code = __nv_cvt_float_to_fp8(float(bf16(float(row[i]))) * inverse, __NV_SATFINITE, __NV_E4M3);
            row[i] = largest == 0 ? 0.0 : e4m3_value(code) * double(scale);
        }
    }
}

__global__ void quantise_h(Reference r, int group, bool power_of_two) {
    quantise_row(r.h + int64_t(blockIdx.x) * r.inter, r.inter, group, power_of_two);
}

__global__ void quantise_x(Reference r, double* scratch, float* out, bool power_of_two) {
    const int64_t s = blockIdx.x;
    const bf16* x = r.x + int64_t(r.sample_row[s]) * r.hidden;
    for (int i = threadIdx.x; i < r.hidden; i += blockDim.x) scratch[s * r.hidden + i] = double(float(x[i]));
    __syncthreads();
    quantise_row(scratch + s * r.hidden, r.hidden, 128, power_of_two);
    __syncthreads();
    for (int i = threadIdx.x; i < r.hidden; i += blockDim.x) out[s * r.hidden + i] = float(scratch[s * r.hidden + i]);
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

// Counts NaNs in the rows that must be written, and values after them that are not poison.
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
