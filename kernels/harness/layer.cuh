// Random weights in every format: packed for the kernel, and dequantised for the reference.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "device.cuh"

// Dequantisation by the definitions of the formats, without code of the kernels.
__device__ double e4m3_value(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double magnitude = exponent == 0 ? mantissa / 8.0 * exp2(-6.0) : (1 + mantissa / 8.0) * exp2(exponent - 7.0);
    return code & 128 ? -magnitude : magnitude;
}
__device__ double e2m1_value(int code) {
    const int exponent = code >> 1 & 3, mantissa = code & 1;
    const double magnitude = exponent == 0 ? mantissa / 2.0 : (1 + mantissa / 2.0) * exp2(exponent - 1.0);
    return code & 8 ? -magnitude : magnitude;
}

__global__ void widen_bf16_kernel(const bf16* in, float* out, size_t n) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) out[i] = float(in[i]);
}

__global__ void dequantise_kernel(int format, const uint8_t* codes, const void* scales, const uint8_t* zeros, const float* row_scales, float* out,
                                  int rows, int k) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < size_t(rows) * k; i += size_t(gridDim.x) * blockDim.x) {
        const size_t row = i / k, column = i % k;
        double value;
        if (format == EXPERTD_MXFP8) {
            value = e4m3_value(codes[i]) * exp2(static_cast<const uint8_t*>(scales)[row * (k / 32) + column / 32] - 127.0);
        } else if (format == EXPERTD_NVFP4) {
            value = e2m1_value(codes[i / 2] >> (i % 2 * 4) & 15) * e4m3_value(static_cast<const uint8_t*>(scales)[row * (k / 16) + column / 16]);
        } else if (fp8_codes(format)) {
            value = e4m3_value(codes[i]) * double(static_cast<const float*>(scales)[row * ((k + 127) / 128) + column / 128]);
        } else if (int4_codes(format)) {
            const size_t group = row * (k / 32) + column / 32;
            const int zero = format == EXPERTD_INT4_ZEROS ? zeros[group] : 8;
            value = ((codes[i / 2] >> (i % 2 * 4) & 15) - zero) * double(float(static_cast<const half*>(scales)[group]));
        } else {
            value = e2m1_value(codes[i / 2] >> (i % 2 * 4) & 15) * exp2(static_cast<const uint8_t*>(scales)[row * (k / 32) + column / 32] - 127.0);
        }
        out[i] = float(value * double(row_scales[row]));
    }
}

// Writes random codes. All codes except NaN are equally likely.
__global__ void codes_kernel(uint8_t* out, size_t n, uint64_t seed, bool fp8) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        const uint8_t code = uint8_t(mix(seed * 0x100000001ull + i) >> 32);
        out[i] = fp8 && (code & 0x7F) == 0x7F ? code ^ 1 : code;
    }
}

// Codes as those of a checkpoint are distributed: a block of 128 x 128 normal values, whose largest is about 4.5 deviations. Codes that
// are all as likely take more power, which at many tokens is what limits an H200.
__global__ void normal_codes_kernel(uint8_t* out, size_t n, uint64_t seed) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        const uint64_t bits = mix(seed * 0x100000001ull + i);
        const float u = (float(bits >> 40) + 1.0f) / float(1 << 24), v = float(bits >> 16 & 0xFFFFFF) / float(1 << 24);
        const float normal = sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
        out[i] = __nv_cvt_float_to_fp8(normal * (448.0f / 4.5f), __NV_SATFINITE, __NV_E4M3);
    }
}

// `columns`: scales of a row; the same for `rows` rows.
__global__ void float_scales_kernel(float* out, size_t n, uint64_t seed, float size, size_t columns = 1, size_t rows = 1) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        const size_t number = i / columns / rows * columns + i % columns;
        out[i] = size * (0.5f + float(mix(seed * 0x100000001ull + number) >> 40) / float(1 << 24));
    }
}

__global__ void exponents_kernel(uint8_t* out, size_t n, uint64_t seed, int largest) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        out[i] = uint8_t(largest - int(mix(seed * 0x100000001ull + i) >> 32) % 4);
    }
}

// NVFP4: scales of 16 k of about `size`. `any`: one in 32 is any code but NaN divided by 256, negative and subnormal ones among them.
__global__ void e4m3_scales_kernel(uint8_t* out, size_t n, uint64_t seed, float size, bool any) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        const uint64_t bits = mix(seed * 0x100000001ull + i);
        const float value = size * (0.5f + float(bits >> 40) / float(1 << 24));
        out[i] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
        if (any && (bits & 31) == 0) out[i] = uint8_t(bits >> 8 & 0x9F); // up to 15/8 times 2^-4
    }
}

// INT4: scales of 32 k and zero points from 0 to 15.
__global__ void groups_kernel(half* scales, uint8_t* zeros, size_t n, uint64_t seed, float size) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        const uint64_t bits = mix(seed * 0x100000001ull + i);
        scales[i] = half(size * (0.5f + float(bits >> 40) / float(1 << 24)));
        zeros[i] = uint8_t(bits & 15);
    }
}

// One matrix [rows, k] that is not bf16 as a checkpoint stores it.
struct Codes {
    Buffer<uint8_t> codes, exponents, zeros; // exponents: NVFP4's scales, too
    Buffer<float> scales;
    Buffer<half> groups;
    int format;

    Codes(int format, int rows, int k) : format(format) {
        const bool fp8 = fp8_codes(format);
        codes = Buffer<uint8_t>(size_t(rows) * k / (fp8 ? 1 : 2));
        if (format == EXPERTD_NVFP4) exponents = Buffer<uint8_t>(size_t(rows) * (k / 16));
        else if (fp8 && format != EXPERTD_MXFP8) scales = Buffer<float>(size_t(rows) * ((k + 127) / 128));
        else if (int4_codes(format)) groups = Buffer<half>(size_t(rows) * (k / 32)), zeros = Buffer<uint8_t>(groups.count);
        else exponents = Buffer<uint8_t>(size_t(rows) * (k / 32));
    }
    // `any_code`: all are as likely; else FP8 codes are those of normal values.
    void fill(int k, float deviation, int scale_rows, bool any_code) {
        const bool fp8 = fp8_codes(format);
        if (any_code || !fp8) codes_kernel<<<2048, 256>>>(codes.data, codes.count, mix(next_seed++), fp8);
        else normal_codes_kernel<<<2048, 256>>>(codes.data, codes.count, mix(next_seed++));
        // The root mean square of all codes is 112 for e4m3 and 2.9 for e2m1.
        if (scales.data != nullptr) {
            float_scales_kernel<<<256, 256>>>(scales.data, scales.count, mix(next_seed++), deviation / 112, (k + 127) / 128, scale_rows);
        } else if (groups.data != nullptr) { // the root mean square of elements minus zero points is 4.6 with zero point 8 and 6.5 with any
            groups_kernel<<<256, 256>>>(groups.data, zeros.data, groups.count, mix(next_seed++), deviation / 5);
        } else if (format == EXPERTD_NVFP4) { // rows' scales are near 1 here, so that of the elements is that of all values
            e4m3_scales_kernel<<<256, 256>>>(exponents.data, exponents.count, mix(next_seed++), deviation / 2.9f, any_code);
        } else {
            exponents_kernel<<<256, 256>>>(exponents.data, exponents.count, mix(next_seed++), 128 + int(std::floor(std::log2(deviation / (fp8 ? 112.0f : 2.9f)))));
        }
        CHECK(cudaGetLastError());
    }
    const void* scale_data() const { return scales.data ? static_cast<const void*>(scales.data) : groups.data ? static_cast<const void*>(groups.data) : exponents.data; }
};

struct Layer {
    Buffer<float> gate, up, down; // row-major and dequantised, allocated for checks only
    Buffer<uint8_t> gate_up_packed, down_packed;
    Buffer<float> gate_up_bias, down_bias, gate_up_scale, down_scale;
    ExpertdLayerWeights view{};
    int scale_rows;

    // `scale_rows`: rows of a matrix that share their FP8 scales.
    Layer(const Model& m, int experts, bool keep, int scale_rows = 1) : scale_rows(scale_rows) {
        const size_t n = size_t(experts) * m.hidden * m.inter;
        const float in = 1.5f / std::sqrt(float(m.hidden)), out = 1.5f / std::sqrt(float(m.inter));
        gate_up_packed = Buffer<uint8_t>(experts * expertd_experts_matrix_bytes(m.format, EXPERTD_PACK_GATE_UP, m.hidden, m.inter));
        down_packed = Buffer<uint8_t>(experts * expertd_experts_matrix_bytes(m.format, EXPERTD_PACK_DOWN, m.hidden, m.inter));
        gate_up_packed.poison();
        down_packed.poison();
        if (keep) gate = Buffer<float>(n), up = Buffer<float>(n), down = Buffer<float>(n);
        if (m.format != EXPERTD_BF16) {
            narrow(m, experts, keep, in, out);
        } else if (keep) {
            bf16_kept(m, experts, n, in, out);
        } else { // the order of random numbers does not matter for timing
            fill_kernel<<<2048, 256>>>(reinterpret_cast<bf16*>(gate_up_packed.data), 2 * n, mix(next_seed++), in);
            fill_kernel<<<2048, 256>>>(reinterpret_cast<bf16*>(down_packed.data), n, mix(next_seed++), out);
        }
        if (m.biases) {
            gate_up_bias = random_buffer<float>(size_t(experts) * 2 * m.inter, 0.5f);
            down_bias = random_buffer<float>(size_t(experts) * m.hidden, 0.5f);
        }
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        view = {gate_up_packed.data, down_packed.data, gate_up_bias.data, down_bias.data, gate_up_scale.data, down_scale.data, scale_rows % 128 == 0};
    }

  private:
    void bf16_kept(const Model& m, int experts, size_t n, float in, float out) {
        auto g = random_buffer<bf16>(n, in), u = random_buffer<bf16>(n, in), d = random_buffer<bf16>(n, out);
        widen_bf16_kernel<<<2048, 256>>>(g.data, gate.data, n);
        widen_bf16_kernel<<<2048, 256>>>(u.data, up.data, n);
        widen_bf16_kernel<<<2048, 256>>>(d.data, down.data, n);
        ExpertdPackParams p{};
        p.hidden = m.hidden, p.inter = m.inter, p.experts = experts;
        p.expert_stride = uint64_t(m.hidden) * m.inter;
        p.first = g.data, p.second = u.data, p.panels = gate_up_packed.data, p.kind = EXPERTD_PACK_GATE_UP;
        CHECK(expertd_experts_pack(&p, nullptr));
        p.first = d.data, p.second = nullptr, p.panels = down_packed.data, p.kind = EXPERTD_PACK_DOWN;
        CHECK(expertd_experts_pack(&p, nullptr));
        CHECK(cudaDeviceSynchronize());
    }

    void narrow(const Model& m, int experts, bool keep, float in, float out) {
        gate_up_scale = Buffer<float>(size_t(experts) * 2 * m.inter);
        down_scale = Buffer<float>(size_t(experts) * m.hidden);
        Buffer<float> row_scales(size_t(2 * m.inter) + m.hidden);
        const size_t matrix = size_t(m.hidden) * m.inter;
        // Checks want every code.
        const bool any_code = keep || std::getenv("EXPERTS_ANY_CODE") != nullptr;
        Codes g(m.format, m.inter, m.hidden), u(m.format, m.inter, m.hidden), d(m.format, m.hidden, m.inter);
        for (int e = 0; e < experts; e++) {
            g.fill(m.hidden, in, scale_rows, any_code), u.fill(m.hidden, in, scale_rows, any_code), d.fill(m.inter, out, scale_rows, any_code);
            float_scales_kernel<<<64, 256>>>(row_scales.data, row_scales.count, mix(next_seed++), 1.0f);
            const float *in_scales = row_scales.data, *out_scales = row_scales.data + 2 * m.inter;
            ExpertdPackNarrowParams p{};
            p.hidden = m.hidden, p.inter = m.inter, p.format = m.format, p.kind = EXPERTD_PACK_GATE_UP;
            p.first = g.codes.data, p.second = u.codes.data, p.first_scales = g.scale_data(), p.second_scales = u.scale_data();
            p.first_zeros = g.zeros.data, p.second_zeros = u.zeros.data;
            p.row_scales_in = in_scales, p.row_scales = gate_up_scale.data + size_t(e) * 2 * m.inter;
            p.units = gate_up_packed.data + gate_up_packed.count / experts * e;
            CHECK(expertd_experts_pack_narrow(&p, nullptr));
            p.kind = EXPERTD_PACK_DOWN, p.first = d.codes.data, p.second = nullptr, p.first_scales = d.scale_data(), p.second_scales = nullptr;
            p.first_zeros = d.zeros.data, p.second_zeros = nullptr;
            p.row_scales_in = out_scales, p.row_scales = down_scale.data + size_t(e) * m.hidden;
            p.units = down_packed.data + down_packed.count / experts * e;
            CHECK(expertd_experts_pack_narrow(&p, nullptr));
            if (keep) {
                dequantise_kernel<<<2048, 256>>>(m.format, g.codes.data, g.scale_data(), g.zeros.data, in_scales, gate.data + e * matrix, m.inter, m.hidden);
                dequantise_kernel<<<2048, 256>>>(m.format, u.codes.data, u.scale_data(), u.zeros.data, in_scales + m.inter, up.data + e * matrix, m.inter, m.hidden);
                dequantise_kernel<<<2048, 256>>>(m.format, d.codes.data, d.scale_data(), d.zeros.data, out_scales, down.data + e * matrix, m.hidden, m.inter);
            }
        }
    }
};

// Quantises rows as dispatch pushes them in FP8: codes, then a scale for every 128 elements.
__global__ void quantise_rows_kernel(const bf16* x, uint8_t* out, int hidden, int stride, bool power_of_two) {
    const bf16* row = x + int64_t(blockIdx.x) * hidden;
    uint8_t* to = out + int64_t(blockIdx.x) * stride;
    for (int g = threadIdx.x; g * 128 < hidden; g += blockDim.x) {
        const int end = min(hidden, (g + 1) * 128);
        float largest = 7.8886091e-31f;
        for (int i = g * 128; i < end; i++) largest = fmaxf(largest, fabsf(float(row[i])));
        float scale = largest / 448.0f;
        if (power_of_two) scale = float(exp2(ceil(log2(double(scale)))));
        reinterpret_cast<float*>(to + hidden)[g] = scale;
        const float inverse = 1.0f / scale;
        for (int i = g * 128; i < end; i++) to[i] = __nv_cvt_float_to_fp8(float(row[i]) * inverse, __NV_SATFINITE, __NV_E4M3);
    }
}

struct Fp8Rows {
    int stride;
    Buffer<uint8_t> data;
    Fp8Rows(const Buffer<bf16>& x, int hidden, bool power_of_two)
        : stride((hidden + (hidden + 127) / 128 * 4 + 15) / 16 * 16), data(x.count / hidden * stride) {
        data.poison();
        if (x.count == 0) return;
        quantise_rows_kernel<<<unsigned(x.count / hidden), 64>>>(x.data, data.data, hidden, stride, power_of_two);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
    }
};

// Workspace for the scales of x and h, which W8A8 needs in addition to the panels, each followed by a group that nothing may write.
struct ScaleWorkspace {
    Buffer<float> x, h;
    size_t group;
    ScaleWorkspace(const Model& m, int panel_rows)
        : x(size_t((m.hidden + 127) / 128 + 1) * panel_rows), h(size_t((m.inter + 127) / 128 + 1) * panel_rows), group(panel_rows) {
        x.poison();
        h.poison();
    }
    bool overrun() const {
        for (const Buffer<float>* scales : {&x, &h}) {
            const auto all = scales->read();
            for (size_t i = all.size() - group; i < all.size(); i++) {
                uint32_t bits;
                std::memcpy(&bits, &all[i], sizeof(bits));
                if (bits != 0xFFFFFFFF) return true;
            }
        }
        return false;
    }
};

ExpertdExpertsParams parameters(const Model& m, int experts) {
    ExpertdExpertsParams p{};
    p.experts = experts, p.hidden = m.hidden, p.inter = m.inter;
    p.x_stride = 2 * m.hidden, p.format = m.format, p.deadline_ns = 2000000000;
    p.activation = m.activation, p.alpha = 1.702f, p.limit = 1.5f; // the limit is low, so that clamping happens
    return p;
}
