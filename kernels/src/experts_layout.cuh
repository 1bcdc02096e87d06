// The places of elements in weight matrices, x_panels and h, as pure functions of host and device.
//
// A matrix [rows, k], with k a multiple of 64 and rows a multiple of 16, is cut into panels of 64 k, and its rows into units of 16.
// Consecutive units of a panel (or of a k block of two panels) are contiguous, so one plain bulk copy loads a tile of any height, and
// no tensor maps are needed.
//
// bf16: wgmma reads weights from shared memory. The layout is [k / 64][rows][64], 128 bytes per row. In a row the eight 16-byte chunks
// are permuted by the row number, which is the 128-byte swizzle that wgmma expects. x_panels and h have the same layout.
//
// FP8, MXFP4, NVFP4, MXFP8, INT4: wgmma reads weights from registers, after the threads have widened them. The layout is [ceil(k / 128)][rows / 16][unit].
// In a unit the elements of a panel that a lane needs are together in 16-byte chunks, in the order of lanes, so a warp reads its unit
// without bank conflicts. The unit's scales follow its elements. The bits of a chunk's words are arranged so that widening needs few
// instructions (fp8_word, mxfp4_words, int4_word). If k / 64 is odd, the second panel of the last k block is zeros.
//
// W8A8: wgmma reads FP8 weights from shared memory. The layout is [ceil(k / 128)][rows][128], 128 bytes per row, with chunks permuted
// as in bf16; the scales of a panel's rows, f32 [rows], follow its rows. x_panels and h have the same layout, but their scales are in
// separate arrays. Elements past the last k are zeros.
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
constexpr int SWIZZLE_BYTES = 1024;  // alignment of wgmma's operands in shared memory
constexpr int UNIT_ROWS = 16;        // rows of a unit, which are one warp's rows of wgmma's M
constexpr int BLOCK_K = 128;         // elements of k in a unit of a format that is widened, and in a panel of W8A8

// Index of element (row, k) of a bf16 matrix with `rows` rows.
EXPERTD_HD uint64_t panel_index(uint64_t row, uint64_t k, uint64_t rows) {
    uint64_t panel = k / PANEL_K, chunk = (k % PANEL_K) / 8;
    return (panel * rows + row) * PANEL_K + ((chunk ^ (row % 8)) * 8) + k % 8;
}

// The feature of panel row r of gate_up, whose gate (second = false) or up (second = true) the row holds. Eight rows of gate and eight
// rows of up alternate, so that one thread's accumulator fragment holds gate and up of the same feature.
EXPERTD_HD int gate_up_feature(int r, bool& second) {
    second = (r % 16) >= 8;
    return (r / 16) * 8 + r % 8;
}

// Panel row r of down holds output feature r.

// W8A8: place of byte k of a panel's row in that row.
EXPERTD_HD uint32_t panel_byte(uint32_t row, uint32_t k) { return ((k / 16 ^ (row % 8)) * 16) | (k % 16); }
constexpr int W8A8_UNIT_BYTES = UNIT_ROWS * (BLOCK_K + 4); // bytes of 16 rows of one panel with their scales

// ---- wgmma's A operand in registers ----
//
// Of each step of 16 k, lane l holds eight elements in pairs 0 to 3: pair j is row l / 4 + 8 (j % 2) of the unit and
// k = 2 (l % 4) + 8 (j / 2) + {0, 1} of the step.
EXPERTD_HD int fragment_row(int lane, int pair) { return lane / 4 + 8 * (pair % 2); }
EXPERTD_HD int fragment_k(int lane, int step, int pair) { return 16 * step + 2 * (lane % 4) + 8 * (pair / 2); }

// ---- FP8 e4m3: 2048 bytes of elements, [2 panels][2 halves][32 lanes][4 words], then f32 [8][2] scales ----
//
// The scale of row l / 4 + 8 i over these 128 k is at [l / 4][i]. Half h of a panel holds steps 2h and 2h + 1. A step has two words:
// pairs 0 and 1, then pairs 2 and 3.
constexpr int FP8_ELEMENT_BYTES = UNIT_ROWS * BLOCK_K;
constexpr int FP8_UNIT_BYTES = FP8_ELEMENT_BYTES + UNIT_ROWS * 4;

// The bits of a word's even pair are at bf16's sign, low four exponent bits and upper three mantissa bits. The odd pair fills the
// gaps: four bits reach their places by a rotation by 4, three by a shift by 4.
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
// The word [l / 4][j] holds four exponents of row l / 4 + 8 j, each the exponent field of a bf16 multiplier. Those of the first two 32 k
// are at the exponent fields of its halves, those of the last two are there after a rotation to the right by 8 (mxfp4_scales). Two
// words of elements hold two steps, which are one block of 32 k: pair p of step s is pair 4 s + p of eight.
constexpr int MXFP4_ELEMENT_BYTES = UNIT_ROWS * BLOCK_K / 2;
constexpr int MXFP4_UNIT_BYTES = MXFP4_ELEMENT_BYTES + UNIT_ROWS * 4;

// In bf16, the sign, two exponent bits and one mantissa bit of e2m1 are bits 15 and 8 to 6 of each half. Rotations of the first word
// to the right by 0, 4 and 26 bring pairs 0 to 2 there, the same rotations of the second word pairs 3 to 5. The remaining bits of both
// words (MXFP4_LEFT), the second rotated left by 2, form a third word; its rotations by 8 and 30 give pairs 6 and 7. Rotations by 26
// and 30 are shifts to the left by 6 and 2 here, because what they carry around is masked; the integer multiplier can do those, too.
constexpr uint32_t MXFP4_LEFT = 0x60306030;
constexpr int MXFP4_LEFT_ROTATION = 2;
EXPERTD_HD int mxfp4_rotation(int pair) {
    const int rotations[8] = {0, 4, 26, 0, 4, 26, 8, 30};
    return rotations[pair];
}

EXPERTD_HD uint32_t rotated_left(uint32_t word, int bits) { return bits == 0 ? word : word << bits | word >> (32 - bits); }

EXPERTD_HD void mxfp4_words(const uint8_t codes[8][2], uint32_t words[2]) {
    uint32_t three[3] = {0, 0, 0};
#pragma unroll
    for (int pair = 0; pair < 8; pair++) {
        const uint32_t both = codes[pair][0] | uint32_t(codes[pair][1]) << 16;
        three[pair / 3] |= rotated_left((both & 0x00080008) << 12 | (both & 0x00070007) << 6, mxfp4_rotation(pair));
    }
    words[0] = three[0] | (three[2] & MXFP4_LEFT);
    words[1] = three[1] | rotated_left(three[2] & ~MXFP4_LEFT, 32 - MXFP4_LEFT_ROTATION);
}

// Widening turns e2m1 into a bf16 value whose exponent is 126 too low. The multiplier corrects that and contains the scale
// 2^(code - 127): its exponent field is code + 126 - offset. Rows with scales that bf16 cannot represent have an offset.
constexpr int MXFP4_LARGEST = 128; // largest code that needs no offset
EXPERTD_HD uint8_t mxfp4_multiplier(int code, int offset) {
    const int field = code + 126 - offset;
    return uint8_t(field < 0 ? 0 : field);
}

EXPERTD_HD uint32_t mxfp4_scales(const uint8_t fields[4]) {
    const uint32_t word = fields[0] | fields[2] << 8 | fields[1] << 16 | uint32_t(fields[3]) << 24;
    return word << 7 | word >> 25;
}

// ---- NVFP4: elements as in MXFP4, then [8][2][2] words of scales ----
//
// The word [l / 4][i][p] has the scales of row l / 4 + 8 i for the four 16 k of panel p, a byte for each: five bits of exponent and three of
// mantissa, which hold every positive e4m3 value. If a scale is negative, its elements have the other sign, and if it is zero, they are zero.
constexpr int NVFP4_GROUP = 16;
constexpr int NVFP4_UNIT_BYTES = MXFP4_ELEMENT_BYTES + UNIT_ROWS * BLOCK_K / NVFP4_GROUP;

// The magnitude of an e4m3 code that is neither zero nor NaN.
EXPERTD_HD uint8_t nvfp4_scale(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if (exponent != 0) return uint8_t((exponent + 3) << 3 | mantissa);
    int shift = 1; // of the mantissa to the left, so that its leading one is the bit before it
    while ((mantissa << shift & 8) == 0) shift++;
    return uint8_t((4 - shift) << 3 | (mantissa << shift & 7));
}
// The element's code under a scale.
EXPERTD_HD uint8_t nvfp4_element(uint8_t element, uint8_t scale) { return (scale & 0x7F) == 0 ? 0 : element ^ (scale >> 4 & 8); }

// Bytes 0 and 2 are at the exponent and mantissa fields of the halves of a bf16 pair, bytes 1 and 3 after a rotation to the right by 8.
EXPERTD_HD uint32_t nvfp4_scales(const uint8_t scales[4]) {
    const uint32_t word = scales[0] | scales[1] << 8 | scales[2] << 16 | uint32_t(scales[3]) << 24;
    return word << 4 | word >> 28;
}

// With the upper exponent bits set, a byte is 2^107 times the scale as bf16. An element is widened to 2^-126 of its value. The product is
// exact, and a row's scale contains the rest.
constexpr uint32_t NVFP4_SCALE_BITS = 0x0FF00FF0, NVFP4_SCALE_REST = 0x70007000;
constexpr int NVFP4_ROW_EXPONENT = 126 - 107;

// ---- MXFP8: elements as in FP8, then exponents as in MXFP4 ----
//
// Widening gives 2^-120 of an e4m3 value, and the exponent field of its multiplier is code + 120 - offset.
constexpr int MXFP8_UNIT_BYTES = FP8_ELEMENT_BYTES + UNIT_ROWS * 4;
constexpr int MXFP8_LARGEST = 134; // largest code that needs no offset
EXPERTD_HD uint8_t mxfp8_multiplier(int code, int offset) {
    const int field = code + 120 - offset;
    return uint8_t(field < 0 ? 0 : field);
}

// ---- INT4: 1024 bytes of elements, [2 panels][32 lanes][4 words], then f16 [8][2][4] scales, then [8][4] bytes of zero points ----
//
// A word holds a step. Each of its halves has an element of every pair p, at the four bits from int4_place(p) on. The scale of row l / 4 + 8 i and 32 k
// number g is at [l / 4][i][g]; the zero points of both rows are the low and high half of byte [l / 4][g]. Wider groups repeat theirs.
// EXPERTD_INT4 has no zero points in memory: all are INT4_MIDDLE.
constexpr int INT4_MIDDLE = 8;
constexpr int INT4_GROUP = 32;
constexpr int INT4_GROUPS = BLOCK_K / INT4_GROUP; // groups of a row in a unit
constexpr int INT4_ELEMENT_BYTES = UNIT_ROWS * BLOCK_K / 2;
constexpr int INT4_ZEROS = INT4_ELEMENT_BYTES + UNIT_ROWS * INT4_GROUPS * 2; // place of the zero points
constexpr int INT4_UNIT_BYTES = INT4_ZEROS;
constexpr int INT4_ZEROS_UNIT_BYTES = INT4_ZEROS + UNIT_ROWS * INT4_GROUPS / 2;

// Elements of row l / 4 are four bits further than those of row l / 4 + 8, so that one shift serves two pairs. Widening leaves a part of
// their values, and a row's scale contains the rest.
EXPERTD_HD int int4_place(int pair) { return 4 * (pair ^ 1); }
EXPERTD_HD int int4_row_exponent(int i) { return i == 0 ? 2 : 6; } // of row l / 4 + 8 i

EXPERTD_HD uint32_t int4_word(const uint8_t codes[4][2]) {
    uint32_t word = 0;
    for (int pair = 0; pair < 4; pair++) {
        for (int half = 0; half < 2; half++) word |= uint32_t(codes[pair][half]) << (16 * half + int4_place(pair));
    }
    return word;
}

} // namespace expertd
