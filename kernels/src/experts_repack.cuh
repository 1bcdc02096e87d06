// Rows of matrices that are packed for processors (server/compute/src/linalg/packed.rs), as functions of host and device: a row of the
// kernels' layout, and where its elements, scales and zero points lie in the panels. Rows and columns that only the kernels' layout has are
// what a loader pads with.
#pragma once

#include <cuda_fp16.h>

#include "experts_repack.h"
#include "experts_units.cuh"

namespace expertd {

constexpr int BLOCK_32 = 32;      // elements of k in a block of the source
constexpr int OCTET = 8;          // elements of k in a word of four bits
constexpr int INT4_LARGEST = 9;   // INT4 scales of a row are below this power of two, see server/rank-cuda/src/experts/int4.rs
constexpr float FP8_BIAS = 256.f; // factor of the source's FP8 scales

EXPERTD_HD uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
EXPERTD_HD float half_value(uint16_t bits) {
    __half_raw raw;
    raw.x = bits;
    return __half2float(__half(raw));
}
EXPERTD_HD uint16_t half_bits(float value) { return static_cast<__half_raw>(__float2half_rn(value)).x; }

// To nearest, ties to even, with the payload of a NaN cut off, as loaders round on the host.
EXPERTD_HD uint16_t bf16_bits(float value) {
    const uint32_t bits = as_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Values of codes that are no NaN.
EXPERTD_HD float e4m3_value(uint8_t code) { return as_float(uint32_t(code & 0x80) << 24 | uint32_t(code & 0x7F) << 20) * 0x1p120f; }
EXPERTD_HD float e2m1_value(uint8_t code) { return as_float(uint32_t(code & 8) << 28 | uint32_t(code & 7) << 22) * 0x1p126f; }

// The e4m3 code whose value an f16 holds.
EXPERTD_HD uint8_t e4m3_of_half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023, sign = bits >> 8 & 0x80;
    if ((bits & 0x7FFF) == 0) return uint8_t(sign);
    if (exponent == 31) return uint8_t(sign | 0x7F);
    if (exponent > 8) return uint8_t(sign | (exponent - 8) << 3 | mantissa >> 7);
    return uint8_t(sign | (1024 | mantissa) >> (16 - exponent));
}

// The format of the source where that of the destination, `Format`, decides on it.
EXPERTD_HD constexpr int source_of(int format, int any) {
    switch (format) {
    case EXPERTD_BF16: return any;
    case EXPERTD_MXFP4: return EXPERTD_FROM_MXFP4;
    case EXPERTD_NVFP4: return EXPERTD_FROM_NVFP4;
    case EXPERTD_MXFP8: return EXPERTD_FROM_MXFP8;
    case EXPERTD_INT4:
    case EXPERTD_INT4_ZEROS: return EXPERTD_FROM_INT4;
    default: return EXPERTD_FROM_FP8;
    }
}

template <int Format> struct PanelRows;

// A row of the destination; `blocks` is null if the source has no such row.
template <int Format> struct PanelRow {
    const PanelRows<Format>& s;
    const uint8_t* blocks; // first block of its panel
    const float* scales;   // its scale in the first vector of scales
    int column;            // its place in the panel
    int index;

    EXPERTD_HD bool has(int k) const;
    EXPERTD_HD uint8_t nibbles(int k) const;
    EXPERTD_HD uint16_t bytes(int k) const;
    EXPERTD_HD float multiplier(int block) const;
    EXPERTD_HD uint8_t exponent(int group) const;
    EXPERTD_HD uint8_t e4m3(int group) const;
    EXPERTD_HD uint16_t half_scale(int group, const RowFacts& facts) const;
    EXPERTD_HD uint8_t zero(int group) const;
    EXPERTD_HD float row_scale(const RowFacts& facts) const;
    EXPERTD_HD void find(int part, RowFacts& facts) const;
    EXPERTD_HD uint16_t bf16(int k) const;

    EXPERTD_HD const uint8_t* block(int k) const;
    EXPERTD_HD const uint8_t* group(int k) const;
    EXPERTD_HD uint16_t small_scale(int k) const;
    EXPERTD_HD float scale(int k) const;
    EXPERTD_HD int zero_point(int k) const;
};

// A source of `pack_unit`.
template <int Format> struct PanelRows {
    using Row = PanelRow<Format>;
    static constexpr int format = Format;
    const ExpertdRepackParams& p;
    const uint8_t* panels; // of the expert
    const float* scales;
    int k, units;
    int blocks;      // of a panel of the source
    int of_panel;    // features of each projection in a panel of the source
    int group_bytes; // scales and zero points of a group
    int header;      // bytes before a block's elements
    int block_bytes;
    int vectors; // of scales of a panel, apart from the blocks

    EXPERTD_HD PanelRows(const ExpertdRepackParams& params, uint64_t expert) : p(params) {
        const bool gate_up = p.kind == EXPERTD_PACK_GATE_UP;
        k = gate_up ? p.hidden : p.inter;
        units = (gate_up ? 2 * p.inter : p.hidden) / UNIT_ROWS;
        blocks = (p.source_k + BLOCK_32 - 1) / BLOCK_32;
        of_panel = gate_up ? p.width / 2 : p.width;
        const int from = source_format();
        const int bits = from == EXPERTD_FROM_F32                                           ? 32
                         : from <= EXPERTD_FROM_F16                                         ? 16
                         : from == EXPERTD_FROM_FP8 || from == EXPERTD_FROM_MXFP8           ? 8
                                                                                            : 4;
        group_bytes = p.block_groups == 0 ? 0 : p.width * (scale_bytes() + (p.has_zeros != 0));
        header = p.block_groups * group_bytes;
        block_bytes = header + BLOCK_32 * p.width * bits / 8;
        vectors = from == EXPERTD_FROM_FP8 ? (blocks + p.scale_blocks - 1) / p.scale_blocks : 1;
        panels = static_cast<const uint8_t*>(p.source) + expert * p.source_stride;
        scales = reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(p.scales) + expert * p.source_stride);
    }

    EXPERTD_HD int source_format() const { return source_of(Format, p.source_format); }
    EXPERTD_HD int scale_type() const {
        const int from = source_format();
        return from == EXPERTD_FROM_MXFP4 || from == EXPERTD_FROM_MXFP8 ? int(EXPERTD_SCALES_BF16) : p.scale_type;
    }
    EXPERTD_HD int scale_bytes() const { return scale_type() == EXPERTD_SCALES_F32 ? 4 : 2; }

    EXPERTD_HD Row row(int r) const {
        bool second = false;
        const int feature = p.kind == EXPERTD_PACK_GATE_UP ? gate_up_feature(r, second) : r, index = feature + (second ? p.inter : 0);
        if (feature >= p.source_features) return {*this, nullptr, nullptr, 0, index};
        const int panel = feature / of_panel, column = feature % of_panel + (second ? of_panel : 0);
        return {*this, panels + uint64_t(panel) * blocks * block_bytes, scales + uint64_t(panel) * vectors * p.width + column, column, index};
    }
};

// Whether the source has the element of column `k`.
template <int Format> EXPERTD_HD bool PanelRow<Format>::has(int k) const { return blocks != nullptr && k < s.p.source_k; }
template <int Format> EXPERTD_HD const uint8_t* PanelRow<Format>::block(int k) const { return blocks + uint64_t(k / BLOCK_32) * s.block_bytes; }
template <int Format> EXPERTD_HD const uint8_t* PanelRow<Format>::group(int k) const { return block(k) + k % BLOCK_32 * s.p.block_groups / BLOCK_32 * s.group_bytes; }

// Two elements of four bits; padding of INT4 is the zero point of its group, or 8 in groups without scales.
template <int Format> EXPERTD_HD uint8_t PanelRow<Format>::nibbles(int k) const {
    const bool integers = s.source_format() == EXPERTD_FROM_INT4;
    if (!has(k)) return integers ? uint8_t(zero(k / INT4_GROUP) * 0x11) : 0;
    const uint8_t* word = block(k) + s.header + (k % BLOCK_32 / OCTET * s.p.width + column) * 4;
    const uint32_t both = *reinterpret_cast<const uint32_t*>(word) >> (24 - k % OCTET * 4) & 0xFF;
    const uint8_t codes = uint8_t(both >> 4 | both << 4);
    if (!integers) return codes;
    return has(k + 1) ? codes ^ 0x88 : uint8_t((codes & 15) ^ 8 | zero(k / INT4_GROUP) << 4);
}

template <int Format> EXPERTD_HD uint16_t PanelRow<Format>::bytes(int k) const {
    if (!has(k)) return 0;
    return *reinterpret_cast<const uint16_t*>(block(k) + s.header + (k % BLOCK_32 / 2 * s.p.width + column) * 2);
}

// The scale of FP8 in the blocks of 128 k; 1 if one scale spans all of k, which is the row's then.
template <int Format> EXPERTD_HD float PanelRow<Format>::multiplier(int block) const {
    if (blocks == nullptr || s.vectors == 1) return 1.f;
    return scales[block * (BLOCK_K / BLOCK_32) / s.p.scale_blocks * s.p.width] / FP8_BIAS;
}

template <int Format> EXPERTD_HD uint16_t PanelRow<Format>::small_scale(int k) const { return reinterpret_cast<const uint16_t*>(group(k))[column]; }

// The scale in the blocks, with the row's factor.
template <int Format> EXPERTD_HD float PanelRow<Format>::scale(int k) const {
    switch (s.scale_type()) {
    case EXPERTD_SCALES_BF16: return as_float(uint32_t(small_scale(k)) << 16);
    case EXPERTD_SCALES_F16: return half_value(small_scale(k)) * *scales;
    default: return reinterpret_cast<const float*>(group(k))[column];
    }
}

template <int Format> EXPERTD_HD int PanelRow<Format>::zero_point(int k) const {
    const int zero = s.p.has_zeros == 0 ? 0 : reinterpret_cast<const int8_t*>(group(k) + s.p.width * s.scale_bytes())[column];
    return zero + INT4_MIDDLE;
}

template <int Format> EXPERTD_HD uint8_t PanelRow<Format>::exponent(int group) const {
    return has(group * BLOCK_32) ? uint8_t(small_scale(group * BLOCK_32) >> 7 & 0xFF) : 0;
}

template <int Format> EXPERTD_HD uint8_t PanelRow<Format>::e4m3(int group) const {
    return has(group * NVFP4_GROUP) ? e4m3_of_half(small_scale(group * NVFP4_GROUP)) : 0;
}

template <int Format> EXPERTD_HD uint8_t PanelRow<Format>::zero(int group) const {
    return has(group * INT4_GROUP) ? uint8_t(zero_point(group * INT4_GROUP)) : uint8_t(INT4_MIDDLE);
}

// The exponent of the power of two by which INT4 scales of a row are divided, given the bits of the largest.
EXPERTD_HD int int4_shift(int largest) {
    const int exponent = (largest >> 23) - 127 + 1 - INT4_LARGEST;
    return largest == 0 ? 0 : exponent < -126 ? -126 : exponent;
}

template <int Format> EXPERTD_HD void PanelRow<Format>::find(int part, RowFacts& facts) const {
    const uint32_t first = has(0) ? as_bits(scale(0)) : 0;
    const int blocks_of_row = blocks == nullptr ? 0 : s.blocks;
#pragma unroll 4
    for (int block = part; block < blocks_of_row; block += QUAD) {
        const int k = block * BLOCK_32;
        const uint32_t bits = as_bits(scale(k));
        const int magnitude = int(bits & 0x7FFFFFFF);
        facts.differs |= bits != first;
        if (magnitude < 0x7F800000 && magnitude > facts.largest) facts.largest = magnitude;
    }
}

template <int Format> EXPERTD_HD uint16_t PanelRow<Format>::half_scale(int group, const RowFacts& facts) const {
    if (!has(group * INT4_GROUP)) return 0;
    return half_bits(facts.differs == 0 ? 1.f : scale(group * INT4_GROUP) * power_of_two(-int4_shift(facts.largest)));
}

template <int Format> EXPERTD_HD float PanelRow<Format>::row_scale(const RowFacts& facts) const {
    if (blocks == nullptr) return 1.f;
    switch (s.source_format()) {
    case EXPERTD_FROM_FP8: return s.vectors == 1 ? *scales / FP8_BIAS : 1.f;
    case EXPERTD_FROM_NVFP4: return *scales;
    case EXPERTD_FROM_INT4: return facts.differs == 0 ? scale(0) : power_of_two(int4_shift(facts.largest));
    default: return 1.f;
    }
}

// The value of an element, rounded once.
template <int Format> EXPERTD_HD uint16_t PanelRow<Format>::bf16(int k) const {
    if (!has(k)) return 0;
    const int from = s.source_format(), even = k / 2 * 2;
    if (from <= EXPERTD_FROM_F32) {
        const uint8_t* elements = block(k);
        const int at = k % BLOCK_32 * s.p.width + column;
        if (from == EXPERTD_FROM_BF16) return reinterpret_cast<const uint16_t*>(elements)[(k % BLOCK_32 / 2 * s.p.width + column) * 2 + k % 2];
        return bf16_bits(from == EXPERTD_FROM_F16 ? half_value(reinterpret_cast<const uint16_t*>(elements)[at]) : reinterpret_cast<const float*>(elements)[at]);
    }
    if (from == EXPERTD_FROM_FP8 || from == EXPERTD_FROM_MXFP8) {
        const uint8_t code = uint8_t(bytes(even) >> (k % 2 * 8));
        return bf16_bits(e4m3_value(code) * (from == EXPERTD_FROM_FP8 ? scales[k / BLOCK_32 / s.p.scale_blocks * s.p.width] / FP8_BIAS : scale(k)));
    }
    const uint8_t code = nibbles(even) >> (k % 2 * 4) & 15;
    return bf16_bits((from == EXPERTD_FROM_INT4 ? float(code - zero_point(k)) : e2m1_value(code)) * scale(k));
}

} // namespace expertd
