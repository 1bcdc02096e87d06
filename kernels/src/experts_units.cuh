// Packs rows that are not bf16 into the units and panels of experts_layout.cuh, wherever their elements are read from.
//
// A warp packs units of 16 rows, one k block after the other; each lane gathers the elements that it will hold in the expert kernel.
// The scale of a row that contains a NaN becomes NaN, because the expert kernel widens the two NaN codes of e4m3 to ±480 and the NaN
// exponent of e8m0 to some power of two; in NVFP4 also that of a row with a NaN scale.
//
// A source `s` has a format, its rows of units, columns and features, and returns rows of the destination: `s.row(r)` is panel row r.
// Rows have, for columns within k and from a multiple of two on, `nibbles` (two elements of four bits, the first one low) and `bytes`
// (two of eight bits); `multiplier` of 128 k, `exponent` and `zero` of 32 k, and `e4m3` of 16 k, each with the number of the
// group; `half_scale` of 32 k and `row_scale`, which may need what `find` has found in all of the row; and `index`, the place of their row scale.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

#include "experts.h"
#include "experts_layout.cuh"

namespace expertd {

constexpr int QUAD = 4;   // lanes that share a row
constexpr int LANES = 32; // of a warp

EXPERTD_HD float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// 2^exponent, for exponents from -126 to 127.
EXPERTD_HD float power_of_two(int exponent) { return as_float(uint32_t(exponent + 127) << 23); }

EXPERTD_HD bool is_int4(int format) { return format == EXPERTD_INT4 || format == EXPERTD_INT4_ZEROS; }

EXPERTD_HD int unit_bytes(int format) {
    switch (format) {
    case EXPERTD_MXFP4: return MXFP4_UNIT_BYTES;
    case EXPERTD_INT4: return INT4_UNIT_BYTES;
    case EXPERTD_INT4_ZEROS: return INT4_ZEROS_UNIT_BYTES;
    case EXPERTD_NVFP4: return NVFP4_UNIT_BYTES;
    case EXPERTD_MXFP8: return MXFP8_UNIT_BYTES;
    case EXPERTD_W4A8: return W4A8_UNIT_BYTES;
    default: return FP8_UNIT_BYTES;
    }
}

// What is found in the scales of a row before it is packed. Those of two parts are merged by the larger value of each.
struct RowFacts {
    int largest = 0; // exponent of MXFP4 and MXFP8, in W4A8 of groups that have values; 255 if one is a NaN; 1 for a NaN of NVFP4; INT4: bits of the largest finite scale, if the source needs it
    int differs = 0; // INT4: whether a scale is not that of the first group, if the source needs it
};

// The exponent that a row's scale takes over, given the row's largest exponent and the largest that the format takes.
EXPERTD_HD int row_offset(int largest, int fits) { return largest == 255 || largest < fits ? 0 : largest - fits; }

// Lane `part` of a row's four finds the facts of its groups.
template <class Row> EXPERTD_HD RowFacts find_facts(const Row& row, int format, int part, int k) {
    RowFacts facts;
    if (format == EXPERTD_MXFP4 || format == EXPERTD_MXFP8) {
#pragma unroll 4
        for (int group = part; group < k / 32; group += QUAD) {
            const int exponent = row.exponent(group);
            facts.largest = exponent > facts.largest ? exponent : facts.largest;
        }
    } else if (format == EXPERTD_W4A8) {
        for (int group = part; group < k / 32; group += QUAD) {
            uint32_t any = 0;
#pragma unroll 4
            for (int i = 0; i < 16; i++) any |= row.nibbles(group * 32 + 2 * i) & 0x77;
            const int exponent = row.exponent(group);
            if ((any != 0 || exponent == 255) && exponent > facts.largest) facts.largest = exponent;
        }
    } else if (format == EXPERTD_NVFP4) {
#pragma unroll 4
        for (int group = part; group < k / NVFP4_GROUP; group += QUAD) facts.largest |= (row.e4m3(group) & 0x7F) == 0x7F;
    } else if (is_int4(format)) {
        row.find(part, facts);
    }
    return facts;
}

// Writes the lane's elements of k block `block` of a unit in e4m3, and sets `nan` for each of the lane's two rows if one is a NaN.
template <class Row> EXPERTD_HD void pack_e4m3(const Row rows[2], uint8_t* out, int block, int lane, int k, bool nan[2]) {
    for (int step = 0; step < BLOCK_K / 16; step++) {
        uint8_t codes[4][2];
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            const int column = block * BLOCK_K + fragment_k(lane, step, pair);
            const uint16_t both = column < k ? rows[pair % 2].bytes(column) : 0;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                codes[pair][i] = uint8_t(both >> (8 * i));
                nan[pair % 2] |= (codes[pair][i] & 0x7F) == 0x7F;
            }
        }
        // A chunk of 16 bytes holds two steps; a lane has two chunks of a panel.
        uint32_t* words = reinterpret_cast<uint32_t*>(out + step / 2 * 512 + lane * 16) + step % 2 * 2;
        words[0] = fp8_word(codes[0], codes[1]);
        words[1] = fp8_word(codes[2], codes[3]);
    }
}

template <class Row> EXPERTD_HD void pack_fp8(const Row rows[2], uint8_t* out, int block, int lane, int k, bool nan[2]) {
    pack_e4m3(rows, out, block, lane, k, nan);
    float* scales = reinterpret_cast<float*>(out + FP8_ELEMENT_BYTES) + lane / QUAD * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (lane % QUAD == i) scales[i] = rows[i].multiplier(block);
    }
}

// Writes the lane's two elements of each pair of a block of 16 × 128 in e2m1, each changed by `element(code, step, row)`, where the row is 0
// or 1.
template <class Row, class Element>
EXPERTD_HD void pack_e2m1(const Row rows[2], uint8_t* out, int block, int lane, int k, Element element) {
#pragma unroll
    for (int panel = 0; panel < 2; panel++) {
        uint32_t words[4];
#pragma unroll
        for (int half = 0; half < 2; half++) { // each half is 32 k
            uint8_t codes[8][2];
#pragma unroll
            for (int pair = 0; pair < 8; pair++) {
                const int step = panel * 4 + half * 2 + pair / 4, column = block * BLOCK_K + fragment_k(lane, step, pair % 4);
                const uint8_t both = column < k ? rows[pair % 2].nibbles(column) : 0;
                codes[pair][0] = element(both & 15, step, pair % 2);
                codes[pair][1] = element(both >> 4, step, pair % 2);
            }
            mxfp4_words(codes, words + 2 * half);
        }
        *reinterpret_cast<uint4*>(out + panel * 512 + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Writes the exponents of the lane's row of MXFP4 or MXFP8 behind its unit's elements.
template <class Row> EXPERTD_HD void pack_exponents(const Row rows[2], const RowFacts facts[2], int format, uint8_t* to, int block, int lane, int k) {
    const bool bytes = format == EXPERTD_MXFP8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (lane % QUAD != i) continue;
        const int offset = row_offset(facts[i].largest, bytes ? MXFP8_LARGEST : MXFP4_LARGEST);
        uint8_t fields[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int group = block * (BLOCK_K / 32) + j, exponent = group < k / 32 ? rows[i].exponent(group) : 0;
            fields[j] = bytes ? mxfp8_multiplier(exponent, offset) : mxfp4_multiplier(exponent, offset);
        }
        reinterpret_cast<uint32_t*>(to)[lane / QUAD * 2 + i] = mxfp4_scales(fields);
    }
}

template <class Row> EXPERTD_HD void pack_nvfp4(const Row rows[2], uint8_t* out, int block, int lane, int k) {
    uint8_t of_steps[BLOCK_K / NVFP4_GROUP][2]; // a step is a group
#pragma unroll
    for (int step = 0; step < BLOCK_K / NVFP4_GROUP; step++) {
        const int group = block * (BLOCK_K / NVFP4_GROUP) + step;
#pragma unroll
        for (int i = 0; i < 2; i++) of_steps[step][i] = group < k / NVFP4_GROUP ? rows[i].e4m3(group) : 0;
    }
    pack_e2m1(rows, out, block, lane, k, [&](uint8_t code, int step, int row) { return nvfp4_element(code, of_steps[step][row]); });
    // A lane writes one word of scales.
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (lane % QUAD / 2 != i) continue;
        uint8_t scales[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int group = block * (BLOCK_K / NVFP4_GROUP) + lane % 2 * 4 + j;
            const uint8_t code = group < k / NVFP4_GROUP ? rows[i].e4m3(group) : 0;
            scales[j] = (code & 0x7F) == 0 ? 0 : nvfp4_scale(code);
        }
        reinterpret_cast<uint32_t*>(out + MXFP4_ELEMENT_BYTES)[lane] = nvfp4_scales(scales);
    }
}

// The exponent that counts as the largest of a row.
EXPERTD_HD int w4a8_top(const RowFacts& facts) { return facts.largest < W4A8_LEAST_TOP ? W4A8_LEAST_TOP : facts.largest; }

template <class Row> EXPERTD_HD void pack_w4a8(const Row rows[2], const RowFacts facts[2], uint8_t* out, int block, int lane, int k) {
    const int group = block * (BLOCK_K / 32) + lane % QUAD;
    const bool inside = group < k / 32;
    uint32_t words[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int step = 0; step < BLOCK_K / 32; step++) {
            uint8_t codes[8];
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const uint8_t both = inside ? rows[i].nibbles(group * 32 + step * 8 + j) : 0;
                codes[j] = both & 15, codes[j + 1] = both >> 4;
            }
            words[step / 2][step % 2 * 2 + i] = w4a8_word(codes);
        }
        const int shift = inside ? w4a8_top(facts[i]) - rows[i].exponent(group) : 0;
        out[W4A8_SHIFTS + lane * 2 + i] = uint8_t(shift < 0 ? 0 : shift > W4A8_MOST_SHIFT ? W4A8_MOST_SHIFT : shift);
    }
#pragma unroll
    for (int chunk = 0; chunk < 2; chunk++) {
        const uint32_t* of = words[chunk];
        *reinterpret_cast<uint4*>(out + chunk * 512 + lane * 16) = make_uint4(of[0], of[1], of[2], of[3]);
    }
}

// Groups past the last k have scale 0, so their elements are zeros.
template <class Row>
EXPERTD_HD void pack_int4(const Row rows[2], const RowFacts facts[2], int format, uint8_t* out, int block, int lane, int k) {
#pragma unroll
    for (int panel = 0; panel < 2; panel++) {
        uint32_t words[4];
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint8_t codes[4][2];
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                const int column = block * BLOCK_K + fragment_k(lane, panel * 4 + step, pair);
                const uint8_t both = column < k ? rows[pair % 2].nibbles(column) : 0;
                codes[pair][0] = both & 15, codes[pair][1] = both >> 4;
            }
            words[step] = int4_word(codes);
        }
        *reinterpret_cast<uint4*>(out + panel * 512 + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    // A lane writes one group's scales and zero points of both rows.
    const int number = lane % QUAD, group = block * INT4_GROUPS + number;
    const bool inside = group < k / INT4_GROUP;
    uint16_t* scales = reinterpret_cast<uint16_t*>(out + INT4_ELEMENT_BYTES) + lane / QUAD * 2 * INT4_GROUPS + number;
#pragma unroll
    for (int i = 0; i < 2; i++) scales[i * INT4_GROUPS] = inside ? rows[i].half_scale(group, facts[i]) : 0;
    if (format != EXPERTD_INT4_ZEROS) return;
    out[INT4_ZEROS + lane / QUAD * INT4_GROUPS + number] = inside ? uint8_t(rows[0].zero(group) | rows[1].zero(group) << 4) : 0;
}

// The lane's part of one k block of a unit, in any format but W8A8.
template <class Row>
EXPERTD_HD void pack_block(const Row rows[2], const RowFacts facts[2], int format, uint8_t* out, int block, int lane, int k, bool nan[2]) {
    switch (format) {
    case EXPERTD_FP8: pack_fp8(rows, out, block, lane, k, nan); break;
    case EXPERTD_NVFP4: pack_nvfp4(rows, out, block, lane, k); break;
    case EXPERTD_W4A8: pack_w4a8(rows, facts, out, block, lane, k); break;
    case EXPERTD_MXFP4:
        pack_e2m1(rows, out, block, lane, k, [](uint8_t code, int, int) { return code; });
        pack_exponents(rows, facts, format, out + MXFP4_ELEMENT_BYTES, block, lane, k);
        break;
    case EXPERTD_MXFP8:
        pack_e4m3(rows, out, block, lane, k, nan);
        pack_exponents(rows, facts, format, out + FP8_ELEMENT_BYTES, block, lane, k);
        break;
    default: pack_int4(rows, facts, format, out, block, lane, k);
    }
}

// The scale of one of the lane's rows, which is row i of its two.
template <class Row> EXPERTD_HD void write_row_scale(const Row& row, const RowFacts& facts, int format, int i, bool nan, float* row_scales) {
    int exponent = 0;
    if (format == EXPERTD_MXFP4) exponent = row_offset(facts.largest, MXFP4_LARGEST), nan |= facts.largest == 255;
    if (format == EXPERTD_MXFP8) exponent = row_offset(facts.largest, MXFP8_LARGEST), nan |= facts.largest == 255;
    if (format == EXPERTD_W4A8) exponent = w4a8_top(facts) - 127 - W4A8_HEADROOM, nan |= facts.largest == 255;
    if (format == EXPERTD_NVFP4) exponent = NVFP4_ROW_EXPONENT, nan |= facts.largest != 0;
    if (is_int4(format)) exponent = int4_row_exponent(i);
    // The same NaN on the host as on the device.
    row_scales[row.index] = nan ? as_float(0x7FC00000) : row.row_scale(facts) * power_of_two(exponent);
}

// W8A8: a lane's part of 16 rows of k blocks from `first` to `last`. Rows of 128 bytes have permuted chunks; the scales of a panel's rows
// follow all its rows.
template <class Source> EXPERTD_HD void pack_w8a8(const Source& source, uint8_t* to, float* row_scales, int unit, int first, int last, int lane) {
    const uint64_t rows = uint64_t(source.units) * UNIT_ROWS;
    for (int r = 0; r < UNIT_ROWS; r++) {
        const int at = unit * UNIT_ROWS + r;
        const auto row = source.row(at);
        for (int block = first; block < last; block++) {
            uint8_t* out = to + block * rows * (BLOCK_K + 4);
            const int column = block * BLOCK_K + lane * 4;
            const uint32_t word = column < source.k ? row.bytes(column) | uint32_t(row.bytes(column + 2)) << 16 : 0;
            *reinterpret_cast<uint32_t*>(out + uint64_t(at) * BLOCK_K + panel_byte(at, lane * 4)) = word;
            if (lane == 0) reinterpret_cast<float*>(out + rows * BLOCK_K)[at] = row.multiplier(block);
        }
        if (lane == 0 && first == 0) row_scales[row.index] = row.row_scale(RowFacts());
    }
}

// The largest value of the four lanes that share a row.
__device__ __forceinline__ int quad_max(int value) {
    value = max(value, __shfl_xor_sync(0xffffffff, value, 1));
    return max(value, __shfl_xor_sync(0xffffffff, value, 2));
}

// A warp packs k blocks from `first` to `last` of a unit, and with the first of them the scales of its rows.
template <class Source> __device__ __forceinline__ void pack_unit(const Source& source, uint8_t* to, float* row_scales, int unit, int first, int last) {
    const int lane = threadIdx.x % LANES, format = source.format, k = source.k;
    if (format == EXPERTD_W8A8) return pack_w8a8(source, to, row_scales, unit, first, last, lane);
    const typename Source::Row rows[2] = {source.row(unit * UNIT_ROWS + lane / QUAD), source.row(unit * UNIT_ROWS + lane / QUAD + 8)};
    RowFacts facts[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        facts[i] = find_facts(rows[i], format, lane % QUAD, k);
        facts[i].largest = quad_max(facts[i].largest), facts[i].differs = quad_max(facts[i].differs);
    }
    bool nan[2] = {false, false};
    for (int block = first; block < last; block++) {
        pack_block(rows, facts, format, to + (uint64_t(block) * source.units + unit) * unit_bytes(format), block, lane, k, nan);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool any = quad_max(nan[i]) != 0;
        if (first == 0 && lane % QUAD == 0) write_row_scale(rows[i], facts[i], format, i, any, row_scales);
    }
}

// The same for all lanes and all of k on the host.
template <class Source> void pack_unit_on_host(const Source& source, uint8_t* to, float* row_scales, int unit) {
    const int format = source.format, k = source.k, blocks = (k + BLOCK_K - 1) / BLOCK_K;
    for (int lane = 0; lane < LANES && format == EXPERTD_W8A8; lane++) pack_w8a8(source, to, row_scales, unit, 0, blocks, lane);
    for (int quad = 0; quad < LANES && format != EXPERTD_W8A8; quad += QUAD) {
        const typename Source::Row rows[2] = {source.row(unit * UNIT_ROWS + quad / QUAD), source.row(unit * UNIT_ROWS + quad / QUAD + 8)};
        RowFacts facts[2];
        for (int i = 0; i < 2; i++) {
            for (int part = 0; part < QUAD; part++) {
                const RowFacts of_part = find_facts(rows[i], format, part, k);
                facts[i].largest = of_part.largest > facts[i].largest ? of_part.largest : facts[i].largest;
                facts[i].differs |= of_part.differs;
            }
        }
        bool nan[2] = {false, false};
        for (int block = 0; block < blocks; block++) {
            uint8_t* out = to + (uint64_t(block) * source.units + unit) * unit_bytes(format);
            for (int lane = quad; lane < quad + QUAD; lane++) pack_block(rows, facts, format, out, block, lane, k, nan);
        }
        for (int i = 0; i < 2; i++) write_row_scale(rows[i], facts[i], format, i, nan[i], row_scales);
    }
}

} // namespace expertd
