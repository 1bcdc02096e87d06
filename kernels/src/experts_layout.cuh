// Where an element of a weight matrix, of x_panels and of h lies, as pure functions of host and device.
//
// A matrix [rows, k] (k a multiple of 64, rows of 16) is cut into panels of 64 k. Its rows are taken in units of 16, and
// any run of units of a panel (or of a k block of two panels) is contiguous, so that one plain bulk copy loads any tile
// height: no tensor maps.
//
// bf16: wgmma reads weights from shared memory. [k / 64][rows][64], 128 bytes per row; in a row the eight 16-byte chunks are
// permuted by the row number, which is the 128-byte swizzle that wgmma expects. x_panels and h have the same layout.
//
// FP8, MXFP4: wgmma reads weights from registers, widened by the threads that hold them. [ceil(k / 128)][rows / 16][unit]:
// what a lane needs of a panel stands together in 16-byte chunks, lane beside lane, so a warp reads its unit without bank
// conflicts; the scales of the unit follow its elements. The bits of a chunk's words are spread such that widening needs
// few instructions (fp8_word, mxfp4_words). Where k / 64 is odd, the second panel of the last k block is zeros.
//
// W8A8: wgmma reads FP8 weights from shared memory. [ceil(k / 128)][rows][128], 128 bytes per row with the same permutation of
// chunks as in bf16; behind the rows of each panel stand their scales, f32 [rows]. x_panels and h have the same layout, their
// scales are arrays of their own. Elements of k behind the last are zeros.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define EXPERTD_HD __host__ __device__ __forceinline__
#else
#define EXPERTD_HD inline
#endif

namespace expertd {

constexpr int PANEL_K = 64;          // elements of k in a panel
constexpr int PANEL_ROW_BYTES = 128; // bytes of a bf16 row in a panel
constexpr int SWIZZLE_BYTES = 1024;  // alignment of what wgmma reads from shared memory
constexpr int UNIT_ROWS = 16;        // rows of a unit: those of one warp in wgmma's M
constexpr int BLOCK_K = 128;         // elements of k in an FP8 or MXFP4 unit, and in a panel of W8A8

// Element (row, k) of a bf16 matrix with `rows` rows.
EXPERTD_HD uint64_t panel_index(uint64_t row, uint64_t k, uint64_t rows) {
    uint64_t panel = k / PANEL_K, chunk = (k % PANEL_K) / 8;
    return (panel * rows + row) * PANEL_K + ((chunk ^ (row % 8)) * 8) + k % 8;
}

// gate_up: panel row r holds gate (second = false) or up (second = true) of one feature. Eights of gate and up alternate,
// so that one thread's accumulator fragment holds gate and up of the same feature.
EXPERTD_HD int gate_up_feature(int r, bool& second) {
    second = (r % 16) >= 8;
    return (r / 16) * 8 + r % 8;
}

// down: panel row r holds output feature r.

// W8A8: where byte k of a panel's row stands in that row.
EXPERTD_HD uint32_t panel_byte(uint32_t row, uint32_t k) { return ((k / 16 ^ (row % 8)) * 16) | (k % 16); }
constexpr int W8A8_UNIT_BYTES = UNIT_ROWS * (BLOCK_K + 4); // of 16 rows and one panel, scales included

// ---- wgmma's A operand in registers ----
//
// For every 16 k (a step), lane l holds eight elements: pairs 0 ... 3, of which pair j is row l / 4 + 8 (j % 2) of the unit,
// k = 2 (l % 4) + 8 (j / 2) + {0, 1} of the step.
EXPERTD_HD int fragment_row(int lane, int pair) { return lane / 4 + 8 * (pair % 2); }
EXPERTD_HD int fragment_k(int lane, int step, int pair) { return 16 * step + 2 * (lane % 4) + 8 * (pair / 2); }

// ---- FP8 e4m3: 2048 bytes of elements, [2 panels][2 halves][32 lanes][4 words], then f32 [8][2] scales ----
//
// The scale of row l / 4 + 8 i over these 128 k is number [l / 4][i]. Half h of a panel holds its steps 2h and 2h + 1, a
// step two words: pairs 0 and 1, pairs 2 and 3.
constexpr int FP8_ELEMENT_BYTES = UNIT_ROWS * BLOCK_K;
constexpr int FP8_UNIT_BYTES = FP8_ELEMENT_BYTES + UNIT_ROWS * 4;

// The even pair of a word stands where bf16 has its sign, the low four exponent bits and the upper three of the mantissa;
// the odd pair fills the gaps: four bits where they come right when rotated by 4, three when shifted by 4.
EXPERTD_HD uint32_t fp8_word(const uint8_t even[2], const uint8_t odd[2]) {
    uint32_t word = 0;
    for (int half = 0; half < 2; half++) {
        const uint32_t a = even[half], b = odd[half];
        word |= ((a & 0x80) << 8 | (a & 0x7F) << 4) << (16 * half);
        word |= ((b & 0x78) << 8 | (b & 0x07)) << (16 * half);
        word |= (b >> 7) << (half == 0 ? 19 : 3);
    }
    return word;
}

// ---- MXFP4: 1024 bytes of elements, [2 panels][32 lanes][4 words], then [8][2][4] exponents ----
//
// The exponent of 32 k number i of row l / 4 + 8 j is number [l / 4][j][i], as the exponent field of a bf16 multiplier.
// Two words hold two steps, which are one block of 32 k: pair p of step s is number 4 s + p of eight pairs.
constexpr int MXFP4_ELEMENT_BYTES = UNIT_ROWS * BLOCK_K / 2;
constexpr int MXFP4_UNIT_BYTES = MXFP4_ELEMENT_BYTES + UNIT_ROWS * 4;

// In bf16, sign, two exponent bits and one of the mantissa of e2m1 belong to bits 15 and 8 ... 6 of each half. Pairs 0 to 2
// come there from the first word rotated right by 0, 4, 10, pairs 3 to 5 from the second; the bits that are left in both
// words (MXFP4_LEFT) make a third word, when the second is rotated left by 2, that gives pairs 6 and 7 rotated by 8 and 14.
constexpr uint32_t MXFP4_LEFT = 0x60306030;
constexpr int MXFP4_LEFT_ROTATION = 2;
EXPERTD_HD int mxfp4_rotation(int pair) {
    const int rotations[8] = {0, 4, 10, 0, 4, 10, 8, 14};
    return rotations[pair];
}

EXPERTD_HD void mxfp4_words(const uint8_t codes[8][2], uint32_t words[2]) {
    words[0] = words[1] = 0;
    for (int pair = 0; pair < 8; pair++) {
        for (int half = 0; half < 2; half++) {
            for (int bit = 0; bit < 4; bit++) {
                const int at = (16 * half + (bit == 3 ? 15 : 6 + bit) + mxfp4_rotation(pair)) % 32;
                const uint32_t value = codes[pair][half] >> bit & 1;
                if (pair < 6) {
                    words[pair / 3] |= value << at;
                } else if (MXFP4_LEFT >> at & 1) {
                    words[0] |= value << at;
                } else {
                    words[1] |= value << (at + 32 - MXFP4_LEFT_ROTATION) % 32;
                }
            }
        }
    }
}

// Widening puts e2m1 behind a bf16 exponent that is 126 too low; the multiplier makes up for it and carries the scale
// 2^(code - 127): exponent field code + 126 - offset, with the row's offset for scales that bf16 cannot carry.
constexpr int MXFP4_LARGEST = 128; // largest code without an offset
EXPERTD_HD uint8_t mxfp4_multiplier(int code, int offset) {
    const int field = code + 126 - offset;
    return uint8_t(field < 0 ? 0 : field);
}

} // namespace expertd
