// Rewrites row-major checkpoint weights that are not bf16 into the units and panels of experts_layout.cuh.
//
// A warp writes the units of 16 rows, one k block after the other; each lane gathers the elements that it will hold in the expert
// kernel. The scale of a row that contains a NaN becomes NaN, because the expert kernel widens the two NaN codes of e4m3 to ±480 and
// the NaN exponent of e8m0 to some power of two; in NVFP4 also that of a row with a NaN scale.
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>

#include "experts.h"
#include "experts_layout.cuh"
#include "experts_pack_host.h"
#include "modules.h"

namespace expertd {
namespace {

constexpr int PACK_WARPS = 8;

// The two rows of lane l in the source: rows l / 4 and l / 4 + 8 of its unit.
struct Rows {
    const uint8_t* codes[2];
    const uint8_t* scales[2];
    int index[2]; // index in row_scales
};

EXPERTD_HD Rows find_rows(const ExpertdPackNarrowParams& p, int unit, int lane, int code_bytes, int scale_bytes) {
    Rows rows;
    for (int i = 0; i < 2; i++) {
        const int row = unit * UNIT_ROWS + lane / 4 + 8 * i;
        bool second = false;
        const int feature = p.kind == EXPERTD_PACK_GATE_UP ? gate_up_feature(row, second) : row;
        rows.codes[i] = static_cast<const uint8_t*>(second ? p.second : p.first) + uint64_t(feature) * code_bytes;
        rows.scales[i] = static_cast<const uint8_t*>(second ? p.second_scales : p.first_scales) + uint64_t(feature) * scale_bytes;
        rows.index[i] = feature + (second ? p.inter : 0);
    }
    return rows;
}

// The largest value of the four lanes that share a row.
__device__ int quad_max(int value) {
    value = max(value, __shfl_xor_sync(0xffffffff, value, 1));
    return max(value, __shfl_xor_sync(0xffffffff, value, 2));
}

EXPERTD_HD void write_row_scale(const ExpertdPackNarrowParams& p, int index, int lane, bool nan, int exponent) {
    if (lane % 4 != 0) return;
    // The same NaN on the host as on the device.
    const uint32_t bits = 0x7FC00000;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    p.row_scales[index] = nan ? scale : ldexpf(p.row_scales_in[index], exponent);
}

// Writes the lane's elements of k block `block` of a unit in e4m3, and sets `nan` for each of the lane's two rows if one is a NaN.
EXPERTD_HD void pack_e4m3(const Rows& rows, uint8_t* out, int block, int lane, int k, bool nan[2]) {
    for (int step = 0; step < BLOCK_K / 16; step++) {
        uint8_t codes[4][2];
        for (int pair = 0; pair < 4; pair++) {
            for (int i = 0; i < 2; i++) {
                const int column = block * BLOCK_K + fragment_k(lane, step, pair) + i;
                const uint8_t code = column < k ? rows.codes[pair % 2][column] : 0;
                nan[pair % 2] |= (code & 0x7F) == 0x7F;
                codes[pair][i] = code;
            }
        }
        // A chunk of 16 bytes holds two steps; a lane has two chunks of a panel.
        uint32_t* words = reinterpret_cast<uint32_t*>(out + step / 2 * 512 + lane * 16) + step % 2 * 2;
        words[0] = fp8_word(codes[0], codes[1]);
        words[1] = fp8_word(codes[2], codes[3]);
    }
}

// Sets `nan` for each of the lane's two rows if the lane's part of it contains a NaN.
EXPERTD_HD Rows pack_fp8(const ExpertdPackNarrowParams& p, int unit, int units, int lane, int k, bool nan[2]) {
    const int blocks = (k + BLOCK_K - 1) / BLOCK_K;
    const Rows rows = find_rows(p, unit, lane, k, blocks * 4);
    nan[0] = nan[1] = false;
    for (int block = 0; block < blocks; block++) {
        uint8_t* out = static_cast<uint8_t*>(p.units) + (uint64_t(block) * units + unit) * FP8_UNIT_BYTES;
        pack_e4m3(rows, out, block, lane, k, nan);
        if (lane % 4 < 2) {
            float* scales = reinterpret_cast<float*>(out + FP8_ELEMENT_BYTES);
            scales[lane / 4 * 2 + lane % 4] = reinterpret_cast<const float*>(rows.scales[lane % 4])[block];
        }
    }
    return rows;
}

// Writes rows of 128 bytes, whose chunks are permuted; the scales of a panel's rows follow all its rows.
EXPERTD_HD void pack_w8a8(const ExpertdPackNarrowParams& p, int unit, int units, int lane, int k) {
    const int blocks = (k + BLOCK_K - 1) / BLOCK_K;
    const uint64_t rows_all = uint64_t(units) * UNIT_ROWS;
    for (int r = 0; r < UNIT_ROWS; r++) {
        const int row = unit * UNIT_ROWS + r;
        bool second = false;
        const int feature = p.kind == EXPERTD_PACK_GATE_UP ? gate_up_feature(row, second) : row;
        const uint8_t* codes = static_cast<const uint8_t*>(second ? p.second : p.first) + uint64_t(feature) * k;
        const float* scales = static_cast<const float*>(second ? p.second_scales : p.first_scales) + uint64_t(feature) * blocks;
        for (int block = 0; block < blocks; block++) {
            uint8_t* out = static_cast<uint8_t*>(p.units) + block * rows_all * (BLOCK_K + 4);
            uint32_t word = 0; // four elements
            for (int i = 0; i < 4; i++) {
                const int column = block * BLOCK_K + lane * 4 + i;
                word |= uint32_t(column < k ? codes[column] : 0) << (8 * i);
            }
            *reinterpret_cast<uint32_t*>(out + uint64_t(row) * BLOCK_K + panel_byte(row, lane * 4)) = word;
            if (lane == 0) reinterpret_cast<float*>(out + rows_all * BLOCK_K)[row] = scales[block];
        }
        if (lane == 0) {
            const int index = feature + (second ? p.inter : 0);
            p.row_scales[index] = p.row_scales_in[index];
        }
    }
}

// The largest exponent of a row among those of the lane.
EXPERTD_HD int largest_exponent(const uint8_t* scales, int lane, int k) {
    int largest = 0;
    for (int j = lane % 4; j < k / 32; j += 4) largest = scales[j] > largest ? scales[j] : largest;
    return largest;
}

// The exponent that a row's scale takes over, given the row's largest exponent and the largest that the format takes.
EXPERTD_HD int row_offset(int largest, int fits) { return largest == 255 || largest < fits ? 0 : largest - fits; }

// `offset` is that of the lane's two rows.
EXPERTD_HD void pack_mxfp4(const ExpertdPackNarrowParams& p, const Rows& rows, const int offset[2], int unit, int units, int lane, int k) {
    const int blocks = (k + BLOCK_K - 1) / BLOCK_K;
    for (int block = 0; block < blocks; block++) {
        uint8_t* out = static_cast<uint8_t*>(p.units) + (uint64_t(block) * units + unit) * MXFP4_UNIT_BYTES;
        for (int panel = 0; panel < 2; panel++) {
            uint32_t words[4];
            for (int half = 0; half < 2; half++) { // each half is 32 k
                uint8_t codes[8][2];
                for (int pair = 0; pair < 8; pair++) {
                    const int step = panel * 4 + half * 2 + pair / 4;
                    const int column = block * BLOCK_K + fragment_k(lane, step, pair % 4);
                    const uint8_t both = column < k ? rows.codes[pair % 2][column / 2] : 0;
                    codes[pair][0] = both & 15;
                    codes[pair][1] = both >> 4;
                }
                mxfp4_words(codes, words + 2 * half);
            }
            *reinterpret_cast<uint4*>(out + panel * 512 + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
        }
        if (lane % 4 < 2) {
            uint8_t fields[4];
            for (int i = 0; i < 4; i++) {
                const int group = block * (BLOCK_K / 32) + i;
                fields[i] = mxfp4_multiplier(group < k / 32 ? rows.scales[lane % 4][group] : 0, offset[lane % 4]);
            }
            reinterpret_cast<uint32_t*>(out + MXFP4_ELEMENT_BYTES)[lane / 4 * 2 + lane % 4] = mxfp4_scales(fields);
        }
    }
}

// Sets `nan` as pack_fp8 does. `offset` is that of the lane's two rows.
EXPERTD_HD void pack_mxfp8(const ExpertdPackNarrowParams& p, const Rows& rows, const int offset[2], int unit, int units, int lane, int k, bool nan[2]) {
    const int blocks = (k + BLOCK_K - 1) / BLOCK_K;
    nan[0] = nan[1] = false;
    for (int block = 0; block < blocks; block++) {
        uint8_t* out = static_cast<uint8_t*>(p.units) + (uint64_t(block) * units + unit) * MXFP8_UNIT_BYTES;
        pack_e4m3(rows, out, block, lane, k, nan);
        if (lane % 4 < 2) {
            uint8_t fields[4];
            for (int i = 0; i < 4; i++) {
                const int group = block * (BLOCK_K / 32) + i;
                fields[i] = mxfp8_multiplier(group < k / 32 ? rows.scales[lane % 4][group] : 0, offset[lane % 4]);
            }
            reinterpret_cast<uint32_t*>(out + FP8_ELEMENT_BYTES)[lane / 4 * 2 + lane % 4] = mxfp4_scales(fields);
        }
    }
}

// Sets `nan` for each of the lane's two rows if one of its scales is a NaN. All lanes of a row find the same.
EXPERTD_HD Rows pack_nvfp4(const ExpertdPackNarrowParams& p, int unit, int units, int lane, int k, bool nan[2]) {
    const int blocks = (k + BLOCK_K - 1) / BLOCK_K, groups = k / NVFP4_GROUP;
    const Rows rows = find_rows(p, unit, lane, k / 2, groups);
    for (int i = 0; i < 2; i++) {
        nan[i] = false;
        for (int group = 0; group < groups; group++) nan[i] |= (rows.scales[i][group] & 0x7F) == 0x7F;
    }
    for (int block = 0; block < blocks; block++) {
        uint8_t* out = static_cast<uint8_t*>(p.units) + (uint64_t(block) * units + unit) * NVFP4_UNIT_BYTES;
        for (int panel = 0; panel < 2; panel++) {
            uint32_t words[4];
            for (int half = 0; half < 2; half++) { // each half is two steps, which are groups
                uint8_t codes[8][2];
                for (int pair = 0; pair < 8; pair++) {
                    const int step = panel * 4 + half * 2 + pair / 4, column = block * BLOCK_K + fragment_k(lane, step, pair % 4);
                    const uint8_t both = column < k ? rows.codes[pair % 2][column / 2] : 0;
                    const uint8_t scale = column < k ? rows.scales[pair % 2][column / NVFP4_GROUP] : 0;
                    codes[pair][0] = nvfp4_element(both & 15, scale);
                    codes[pair][1] = nvfp4_element(both >> 4, scale);
                }
                mxfp4_words(codes, words + 2 * half);
            }
            *reinterpret_cast<uint4*>(out + panel * 512 + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
        }
        // A lane writes one word of scales.
        const int row = lane % 4 / 2, panel = lane % 2;
        uint8_t scales[4];
        for (int i = 0; i < 4; i++) {
            const int group = block * (BLOCK_K / NVFP4_GROUP) + panel * 4 + i;
            const uint8_t code = group < groups ? rows.scales[row][group] : 0;
            scales[i] = (code & 0x7F) == 0 ? 0 : nvfp4_scale(code);
        }
        reinterpret_cast<uint32_t*>(out + MXFP4_ELEMENT_BYTES)[lane] = nvfp4_scales(scales);
    }
    return rows;
}

// The largest exponent of a row among those of the lane, but for scales of zeros only; 255 if one is a NaN.
EXPERTD_HD int largest_used_exponent(const uint8_t* codes, const uint8_t* scales, int lane, int k) {
    int largest = 0;
    for (int group = lane % 4; group < k / 32; group += 4) {
        uint32_t any = 0;
        for (int i = 0; i < 16; i++) any |= codes[group * 16 + i] & 0x77u;
        if ((any != 0 || scales[group] == 255) && scales[group] > largest) largest = scales[group];
    }
    return largest;
}

// `top`: the exponents that count as the largest of the lane's two rows.
EXPERTD_HD void pack_w4a8(const ExpertdPackNarrowParams& p, const Rows& rows, const int top[2], int unit, int units, int lane, int k) {
    const int blocks = (k + BLOCK_K - 1) / BLOCK_K;
    for (int block = 0; block < blocks; block++) {
        uint8_t* out = static_cast<uint8_t*>(p.units) + (uint64_t(block) * units + unit) * W4A8_UNIT_BYTES;
        const int group = block * (BLOCK_K / 32) + lane % 4;
        const bool inside = group < k / 32;
        uint32_t words[2][4];
        for (int i = 0; i < 2; i++) {
            for (int step = 0; step < BLOCK_K / 32; step++) {
                uint8_t codes[8] = {};
                for (int j = 0; j < 8 && inside; j++) codes[j] = rows.codes[i][group * 16 + step * 4 + j / 2] >> (j % 2 * 4) & 15;
                words[step / 2][step % 2 * 2 + i] = w4a8_word(codes);
            }
            const int shift = inside ? top[i] - rows.scales[i][group] : 0;
            out[W4A8_SHIFTS + lane * 2 + i] = uint8_t(shift < 0 ? 0 : shift > W4A8_MOST_SHIFT ? W4A8_MOST_SHIFT : shift);
        }
        for (int chunk = 0; chunk < 2; chunk++) {
            const uint32_t* of = words[chunk];
            *reinterpret_cast<uint4*>(out + chunk * 512 + lane * 16) = make_uint4(of[0], of[1], of[2], of[3]);
        }
    }
}

// The exponent that counts as a row's largest, given the largest one. A row of zeros only has any.
EXPERTD_HD int w4a8_top(int largest) { return largest < W4A8_LEAST_TOP ? W4A8_LEAST_TOP : largest; }
EXPERTD_HD void write_w4a8_scale(const ExpertdPackNarrowParams& p, int index, int lane, int largest) {
    write_row_scale(p, index, lane, largest == 255, largest == 0 ? 0 : w4a8_top(largest) - 127 - W4A8_HEADROOM);
}

// Groups past the last k have scale 0, so their elements are zeros.
EXPERTD_HD void pack_int4(const ExpertdPackNarrowParams& p, int unit, int units, int lane, int k) {
    const bool with_zeros = p.format == EXPERTD_INT4_ZEROS;
    const int blocks = (k + BLOCK_K - 1) / BLOCK_K, unit_bytes = with_zeros ? INT4_ZEROS_UNIT_BYTES : INT4_UNIT_BYTES;
    const Rows rows = find_rows(p, unit, lane, k / 2, k / INT4_GROUP * 2);
    const uint8_t* zeros[2] = {};
    for (int i = 0; i < 2 && with_zeros; i++) {
        const int feature = rows.index[i] < p.inter || p.kind != EXPERTD_PACK_GATE_UP ? rows.index[i] : rows.index[i] - p.inter;
        zeros[i] = static_cast<const uint8_t*>(feature == rows.index[i] ? p.first_zeros : p.second_zeros) + uint64_t(feature) * (k / INT4_GROUP);
    }
    for (int block = 0; block < blocks; block++) {
        uint8_t* out = static_cast<uint8_t*>(p.units) + (uint64_t(block) * units + unit) * unit_bytes;
        for (int panel = 0; panel < 2; panel++) {
            uint32_t words[4];
            for (int step = 0; step < 4; step++) {
                uint8_t codes[4][2];
                for (int pair = 0; pair < 4; pair++) {
                    const int column = block * BLOCK_K + fragment_k(lane, panel * 4 + step, pair);
                    const uint8_t both = column < k ? rows.codes[pair % 2][column / 2] : 0;
                    codes[pair][0] = both & 15, codes[pair][1] = both >> 4;
                }
                words[step] = int4_word(codes);
            }
            *reinterpret_cast<uint4*>(out + panel * 512 + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
        }
        // A lane writes one group's scales and zero points of both rows.
        const int number = lane % 4, group = block * INT4_GROUPS + number;
        const bool inside = group < k / INT4_GROUP;
        uint16_t* scales = reinterpret_cast<uint16_t*>(out + INT4_ELEMENT_BYTES) + lane / 4 * 2 * INT4_GROUPS + number;
        for (int i = 0; i < 2; i++) scales[i * INT4_GROUPS] = inside ? reinterpret_cast<const uint16_t*>(rows.scales[i])[group] : 0;
        if (with_zeros) out[INT4_ZEROS + lane / 4 * INT4_GROUPS + number] = inside ? uint8_t(zeros[0][group] | zeros[1][group] << 4) : 0;
    }
    for (int i = 0; i < 2; i++) write_row_scale(p, rows.index[i], lane, false, int4_row_exponent(i));
}

// Whether the elements are integers of 4 bits.
EXPERTD_HD bool is_int4(int format) { return format == EXPERTD_INT4 || format == EXPERTD_INT4_ZEROS; }

__global__ void pack_narrow_kernel(const ExpertdPackNarrowParams p, int units, int k) {
    const int unit = blockIdx.x * PACK_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (unit >= units) return;
    if (p.format == EXPERTD_FP8) {
        bool nan[2];
        const Rows rows = pack_fp8(p, unit, units, lane, k, nan);
        for (int i = 0; i < 2; i++) write_row_scale(p, rows.index[i], lane, quad_max(nan[i]) != 0, 0);
    } else if (p.format == EXPERTD_W8A8) {
        pack_w8a8(p, unit, units, lane, k);
    } else if (is_int4(p.format)) {
        pack_int4(p, unit, units, lane, k);
    } else if (p.format == EXPERTD_NVFP4) {
        bool nan[2];
        const Rows rows = pack_nvfp4(p, unit, units, lane, k, nan);
        for (int i = 0; i < 2; i++) write_row_scale(p, rows.index[i], lane, nan[i], NVFP4_ROW_EXPONENT);
    } else if (p.format == EXPERTD_W4A8) {
        const Rows rows = find_rows(p, unit, lane, k / 2, k / 32);
        int largest[2], top[2];
        for (int i = 0; i < 2; i++) {
            largest[i] = quad_max(largest_used_exponent(rows.codes[i], rows.scales[i], lane, k));
            top[i] = w4a8_top(largest[i]);
        }
        pack_w4a8(p, rows, top, unit, units, lane, k);
        for (int i = 0; i < 2; i++) write_w4a8_scale(p, rows.index[i], lane, largest[i]);
    } else {
        const bool bytes = p.format == EXPERTD_MXFP8; // otherwise MXFP4
        const Rows rows = find_rows(p, unit, lane, bytes ? k : k / 2, k / 32);
        int largest[2], offset[2];
        for (int i = 0; i < 2; i++) {
            largest[i] = quad_max(largest_exponent(rows.scales[i], lane, k));
            offset[i] = row_offset(largest[i], bytes ? MXFP8_LARGEST : MXFP4_LARGEST);
        }
        bool nan[2] = {false, false};
        if (bytes) pack_mxfp8(p, rows, offset, unit, units, lane, k, nan);
        else pack_mxfp4(p, rows, offset, unit, units, lane, k);
        for (int i = 0; i < 2; i++) write_row_scale(p, rows.index[i], lane, largest[i] == 255 || quad_max(nan[i]) != 0, offset[i]);
    }
}

// The same for all lanes of a unit, on the host.
void pack_unit(const ExpertdPackNarrowParams& p, int unit, int units, int k) {
    constexpr int LANES = 32;
    if (p.format == EXPERTD_W8A8) {
        for (int lane = 0; lane < LANES; lane++) pack_w8a8(p, unit, units, lane, k);
        return;
    }
    if (is_int4(p.format)) {
        for (int lane = 0; lane < LANES; lane++) pack_int4(p, unit, units, lane, k);
        return;
    }
    if (p.format == EXPERTD_NVFP4) {
        for (int lane = 0; lane < LANES; lane++) {
            bool nan[2];
            const Rows rows = pack_nvfp4(p, unit, units, lane, k, nan);
            for (int i = 0; i < 2; i++) write_row_scale(p, rows.index[i], lane, nan[i], NVFP4_ROW_EXPONENT);
        }
        return;
    }
    if (p.format == EXPERTD_W4A8) {
        for (int quad = 0; quad < LANES; quad += 4) {
            const Rows rows = find_rows(p, unit, quad, k / 2, k / 32);
            int largest[2] = {0, 0};
            for (int i = 0; i < 2; i++) {
                for (int lane = quad; lane < quad + 4; lane++) {
                    const int of_lane = largest_used_exponent(rows.codes[i], rows.scales[i], lane, k);
                    largest[i] = of_lane > largest[i] ? of_lane : largest[i];
                }
            }
            const int top[2] = {w4a8_top(largest[0]), w4a8_top(largest[1])};
            for (int lane = quad; lane < quad + 4; lane++) pack_w4a8(p, rows, top, unit, units, lane, k);
            for (int i = 0; i < 2; i++) write_w4a8_scale(p, rows.index[i], quad, largest[i]);
        }
        return;
    }
    for (int quad = 0; quad < LANES; quad += 4) {
        if (p.format == EXPERTD_FP8) {
            bool any[2] = {false, false};
            Rows rows;
            for (int lane = quad; lane < quad + 4; lane++) {
                bool nan[2];
                rows = pack_fp8(p, unit, units, lane, k, nan);
                for (int i = 0; i < 2; i++) any[i] |= nan[i];
            }
            for (int i = 0; i < 2; i++) write_row_scale(p, rows.index[i], quad, any[i], 0);
            continue;
        }
        const bool bytes = p.format == EXPERTD_MXFP8; // otherwise MXFP4
        const Rows rows = find_rows(p, unit, quad, bytes ? k : k / 2, k / 32);
        int offset[2];
        bool any[2];
        for (int i = 0; i < 2; i++) {
            int largest = 0;
            for (int lane = quad; lane < quad + 4; lane++) {
                const int of_lane = largest_exponent(rows.scales[i], lane, k);
                largest = of_lane > largest ? of_lane : largest;
            }
            offset[i] = row_offset(largest, bytes ? MXFP8_LARGEST : MXFP4_LARGEST);
            any[i] = largest == 255;
        }
        for (int lane = quad; lane < quad + 4; lane++) {
            bool nan[2] = {false, false};
            if (bytes) pack_mxfp8(p, rows, offset, unit, units, lane, k, nan);
            else pack_mxfp4(p, rows, offset, unit, units, lane, k);
            for (int i = 0; i < 2; i++) any[i] |= nan[i];
        }
        for (int i = 0; i < 2; i++) write_row_scale(p, rows.index[i], quad, any[i], offset[i]);
    }
}

bool is_valid(const ExpertdPackNarrowParams& p) {
    const bool gate_up = p.kind == EXPERTD_PACK_GATE_UP;
    return p.hidden > 0 && p.hidden % 64 == 0 && p.inter > 0 && p.inter % 64 == 0 &&
           p.format > EXPERTD_BF16 && p.format <= EXPERTD_W4A8 && p.first != nullptr &&
           (p.format != EXPERTD_INT4_ZEROS || (p.first_zeros != nullptr && (!gate_up || p.second_zeros != nullptr))) &&
           p.first_scales != nullptr && (!gate_up || (p.second != nullptr && p.second_scales != nullptr)) && p.row_scales_in != nullptr &&
           p.row_scales != nullptr && p.units != nullptr;
}

const Module module(reinterpret_cast<const void*>(pack_narrow_kernel));

} // namespace
} // namespace expertd

extern "C" int expertd_experts_pack_narrow(const ExpertdPackNarrowParams* params, void* stream) {
    const ExpertdPackNarrowParams& p = *params;
    const bool gate_up = p.kind == EXPERTD_PACK_GATE_UP;
    if (!expertd::is_valid(p)) return cudaErrorInvalidValue;
    const int rows = gate_up ? 2 * p.inter : p.hidden, k = gate_up ? p.hidden : p.inter;
    const int units = rows / expertd::UNIT_ROWS, blocks = (units + expertd::PACK_WARPS - 1) / expertd::PACK_WARPS;
    expertd::pack_narrow_kernel<<<blocks, expertd::PACK_WARPS * 32, 0, static_cast<cudaStream_t>(stream)>>>(p, units, k);
    return cudaGetLastError();
}

extern "C" int expertd_experts_pack_narrow_host(const ExpertdPackNarrowParams* params, uint64_t first, uint64_t count) {
    const ExpertdPackNarrowParams& p = *params;
    const bool gate_up = p.kind == EXPERTD_PACK_GATE_UP;
    const int rows = gate_up ? 2 * p.inter : p.hidden, k = gate_up ? p.hidden : p.inter;
    const uint64_t units = rows / expertd::UNIT_ROWS;
    if (!expertd::is_valid(p) || first > units || count > units - first) return cudaErrorInvalidValue;
    for (uint64_t unit = first; unit < first + count; unit++) expertd::pack_unit(p, int(unit), int(units), k);
    return cudaSuccess;
}

extern "C" uint64_t expertd_experts_matrix_bytes(int32_t format, int32_t kind, int32_t hidden, int32_t inter) {
    const bool gate_up = kind == EXPERTD_PACK_GATE_UP;
    const uint64_t rows = gate_up ? 2 * inter : hidden, k = gate_up ? hidden : inter;
    if (format == EXPERTD_BF16) return rows * k * 2;
    static_assert(expertd::FP8_UNIT_BYTES == expertd::W8A8_UNIT_BYTES, "FP8 takes the same memory in both layouts");
    const uint64_t unit = format == EXPERTD_MXFP4        ? expertd::MXFP4_UNIT_BYTES
                          : format == EXPERTD_INT4       ? expertd::INT4_UNIT_BYTES
                          : format == EXPERTD_INT4_ZEROS ? expertd::INT4_ZEROS_UNIT_BYTES
                          : format == EXPERTD_NVFP4      ? expertd::NVFP4_UNIT_BYTES
                          : format == EXPERTD_MXFP8      ? expertd::MXFP8_UNIT_BYTES
                          : format == EXPERTD_W4A8       ? expertd::W4A8_UNIT_BYTES
                                                         : expertd::FP8_UNIT_BYTES;
    return rows / expertd::UNIT_ROWS * ((k + expertd::BLOCK_K - 1) / expertd::BLOCK_K) * unit;
}
