// Quantisation to e4m3, which is the same for rows at the sending rank, for x and for h, and on CPU ranks (docs/models.md, "FP8
// products").
//
// A group of elements shares the scale s = largest magnitude / 448, rounded up to a power of two if the checkpoint asks for it. A code
// is element * (1 / s), rounded to nearest even. A NaN stays NaN. In a group with an infinity, either all elements become NaN or all
// finite elements become zero. Groups whose largest magnitude is below 2^-100 have the scale 2^-100 / 448.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "experts_layout.cuh"
#include "ptx.cuh"

namespace expertd {

constexpr float E4M3_LARGEST = 448.0f;
constexpr float SMALLEST_MAXIMUM = 7.8886091e-31f; // 2^-100

struct GroupScale {
    float scale, inverse;
};

__device__ __forceinline__ GroupScale group_scale(float largest, bool power_of_two) {
    float scale = __fdiv_rn(fmaxf(largest, SMALLEST_MAXIMUM), E4M3_LARGEST);
    if (power_of_two) scale = __uint_as_float((__float_as_uint(scale) + 0x7FFFFFu) & 0x7F800000u);
    return {scale, __frcp_rn(scale)};
}

// Converts two, or four, values to codes, the first in the low byte.
#ifdef EXPERTD_PORTABLE // in many instructions, and not used by ranks
static __device__ __noinline__ uint16_t pack_2_e4m3(float a, float b) {
    return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
}
#else
__device__ __forceinline__ uint16_t pack_2_e4m3(float a, float b) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
    return codes;
}
#endif
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
    return uint32_t(pack_2_e4m3(c, d)) << 16 | pack_2_e4m3(a, b);
}

// bf16 is the upper half of an f32.
__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// The largest magnitude of eight bf16. NaNs are ignored.
__device__ __forceinline__ float largest_of(const uint4& v) {
    uint32_t largest = 0;
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        asm("max.bf16x2 %0, %0, %1;" : "+r"(largest) : "r"(pairs[i] & 0x7FFF7FFFu));
    }
    return fmaxf(low_bf16(largest), high_bf16(largest));
}

// Converts eight bf16 to eight codes.
__device__ __forceinline__ uint2 quantise(const uint4& v, float inverse) {
    return make_uint2(pack_e4m3(low_bf16(v.x) * inverse, high_bf16(v.x) * inverse, low_bf16(v.y) * inverse, high_bf16(v.y) * inverse),
                      pack_e4m3(low_bf16(v.z) * inverse, high_bf16(v.z) * inverse, low_bf16(v.w) * inverse, high_bf16(v.w) * inverse));
}

// W4A8: stores 4 `COUNT` elements from `k` on of a panel's row, in the order of w4a8_token_byte.
template <int COUNT> __device__ __forceinline__ void store_permuted(uint8_t* row_start, uint32_t row, uint32_t k, const uint32_t (&words)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) *reinterpret_cast<uint32_t*>(row_start + panel_byte(row, w4a8_token_byte(k + 4 * i))) = words[i];
}

// The largest value of LANES neighbouring lanes.
template <int LANES> __device__ __forceinline__ float lanes_max(float value) {
#pragma unroll
    for (int by = 1; by < LANES; by *= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, by));
    return value;
}

} // namespace expertd
