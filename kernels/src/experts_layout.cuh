// The panel layout of weights and of h, as pure functions: the loader on the host mirrors them.
//
// A matrix [rows, k] of bf16 (k a multiple of 64, rows of 8) is stored as k / 64 panels, each [rows][64]: 128 bytes per
// row. Inside a row the eight 16-byte chunks are permuted by the row number, which is exactly the 128-byte swizzle that
// wgmma expects in shared memory. Therefore any run of rows (from a multiple of 8) of one panel is contiguous in device
// memory and lands ready to use with one plain bulk copy: no tensor maps, any tile height.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define EXPERTD_HD __host__ __device__ __forceinline__
#else
#define EXPERTD_HD inline
#endif

namespace expertd {

constexpr int PANEL_K = 64;          // elements of k in a panel
constexpr int PANEL_ROW_BYTES = 128; // bytes of a row in a panel

// Element (row, k) of a matrix with `rows` rows.
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

} // namespace expertd
