// The warpgroup that widens MXFP4 weights to e4m3 in shared memory, where the mainloops of W8A8 read them: a row's largest scale is a factor
// of the row, and its other scales are part of the e4m3 codes. Widened once, a weight serves all tokens of the segment.
#pragma once

#include "experts_block.cuh"

namespace expertd {

// e4m3 codes of the magnitudes of e2m1 for one row: 0, 0.5, 1, 1.5; 2, 3, 4, 6, each times 2^(6 - d), rounded to nearest even, where 2^-d is
// the group's scale divided by the row's largest.
struct RowMagnitudes {
    uint32_t low, high;
};

constexpr uint32_t W4A8_LOW = 0x6C686000, W4A8_HIGH = 0x7C787470; // for d = 0
constexpr int W4A8_EXACT = 11;                                    // largest d for which all codes are normal numbers

// As long as the codes are normal, the exponent is all that changes.
__device__ __forceinline__ RowMagnitudes exact_magnitudes(uint32_t d) { return {W4A8_LOW - d * 0x08080800, W4A8_HIGH - d * 0x08080808}; }

// For any d.
__device__ __forceinline__ RowMagnitudes any_magnitudes(uint32_t d) {
    const float scale = __uint_as_float((127 + W4A8_HEADROOM - d) << 23);
    return {pack_e4m3(0.0f, 0.5f * scale, scale, 1.5f * scale), pack_e4m3(2.0f * scale, 3.0f * scale, 4.0f * scale, 6.0f * scale)};
}

// Widens two steps of a unit's rows l / 4 and l / 4 + 8 and stores them at rows of 128 bytes, whose chunks are permuted as in a panel.
// `to`: where the lane's row of step 0 begins (for stmatrix); step s is at the same address with s in bits 5 and 6 flipped.
__device__ __forceinline__ void widen_steps(const uint4& chunk, const RowMagnitudes (&rows)[2], uint32_t to, int first_step) {
#pragma unroll
    for (int s = 0; s < 2; s++) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t word = s == 0 ? (i == 0 ? chunk.x : chunk.y) : (i == 0 ? chunk.z : chunk.w);
            const uint32_t numbers = word & 0x77777777;
            a[i] = mask_or(word, 0x80808080, select_bytes(rows[i].low, rows[i].high, numbers));
            a[2 + i] = mask_or(word << 4, 0x80808080, select_bytes(rows[i].low, rows[i].high, numbers >> 16));
        }
        store_matrices(to ^ ((first_step + s) * 32), a[0], a[1], a[2], a[3]);
    }
}

// Widens the weights of all segments of the block, as far ahead as there is room.
__device__ __forceinline__ void widen_weights(const Block<W4a8Rows>& block) {
    constexpr int UNITS = TALL_ROWS / UNIT_ROWS / W4a8Rows::WIDENER_WARPS; // of a warp: every fourth
    constexpr uint32_t FROM_STEP = W4a8Rows::WIDENER_WARPS * W4A8_UNIT_BYTES, TO_STEP = W4a8Rows::WIDENER_WARPS * UNIT_ROWS * BLOCK_K;
    Shared& shared = block.shared;
    const int warp = uniform(threadIdx.x / 32) - W4a8Rows::CONSUMER_WARPS, lane = threadIdx.x % 32;
    // The lane's row of the unit and its chunk of step 0, for stmatrix: matrix lane / 8 has the rows l / 4 + 8 i and half h of a step,
    // where 2 h + i is its number.
    const uint32_t row = lane / 8 % 2 * 8 + lane % 8;
    const uint32_t to_first = block.widened + (warp * UNIT_ROWS + row) * BLOCK_K + (lane / 16 ^ row % 8) * 16;
    const uint32_t from_first = block.weight_ring + warp * W4A8_UNIT_BYTES + lane * 16;
    const uint32_t shifts_first = block.weight_ring + warp * W4A8_UNIT_BYTES + W4A8_SHIFTS + lane * 2;
    Cursor slot, stage, room;
    while (true) {
        barrier_wait(&shared.segment_full[slot.slot], slot.parity);
        const int phase = shared.segments[slot.slot].phase;
        __syncwarp();
        if (phase == 2) break;
        if (arrives_for_warp()) barrier_arrive(&shared.segment_empty[slot.slot]);
        slot.advance(SEGMENT_SLOTS);
        for (int panels = divide_up(phase == 0 ? block.p.hidden : block.p.inter, BLOCK_K); panels > 0; panels--) {
            const uint32_t from = from_first + stage.slot * (TALL_ROWS / UNIT_ROWS * W4A8_UNIT_BYTES);
            const uint32_t shifts_from = shifts_first + stage.slot * (TALL_ROWS / UNIT_ROWS * W4A8_UNIT_BYTES);
            const uint32_t to = to_first + room.slot * (TALL_ROWS * BLOCK_K);
            barrier_wait(&shared.weights_full[stage.slot], stage.parity);
            // Units that the segment does not have are widened as well, from old bytes of the stage; their results are not stored.
            uint32_t shifts[UNITS];
#pragma unroll
            for (int i = 0; i < UNITS; i++) shifts[i] = load_shared_2(shifts_from + i * FROM_STEP);
            uint4 words[2] = {load_shared_16(from), load_shared_16(from + 512)};
            barrier_wait(&shared.widened_empty[room.slot], room.parity ^ 1);
            const uint32_t any = shifts[0] | shifts[1] | shifts[2] | shifts[3];
            static_assert(UNITS == 4 && W4A8_EXACT == 11, "a bit above 8, or 8 and 4");
            const bool exact = __all_sync(0xffffffff, ((any & 0xF0F0) | (any & any << 1 & 0x0808)) == 0);
            const auto widen_all = [&](auto magnitudes) {
#pragma unroll
                for (int i = 0; i < UNITS; i++) {
                    const RowMagnitudes rows_of[2] = {magnitudes(shifts[i] & 31), magnitudes(shifts[i] >> 8)};
                    widen_steps(words[0], rows_of, to + i * TO_STEP, 0);
                    if (i + 1 < UNITS) words[0] = load_shared_16(from + (i + 1) * FROM_STEP);
                    widen_steps(words[1], rows_of, to + i * TO_STEP, 2);
                    if (i + 1 < UNITS) words[1] = load_shared_16(from + (i + 1) * FROM_STEP + 512);
                }
            };
            if (exact) widen_all([](uint32_t d) { return exact_magnitudes(d); });
            else widen_all([](uint32_t d) { return any_magnitudes(d); });
            fence_shared_proxy(); // before wgmma reads it
            __syncwarp();
            if (arrives_for_warp()) {
                barrier_arrive(&shared.widened_full[room.slot]);
                barrier_arrive(&shared.stage_empty[WIDENED_STAGES + stage.slot]);
                if (block.plan.pairs) {
                    barrier_arrive_at(&shared.pair_empty[WIDENED_STAGES + stage.slot], 0, 1);
                    barrier_arrive_at(&shared.pair_empty[WIDENED_STAGES + stage.slot], 1, 1);
                }
            }
            stage.advance(block.plan.stages);
            room.advance(W4a8Rows::WIDENED_BLOCKS);
        }
    }
}

} // namespace expertd
