// What the warps of a block of experts_few_kernel do.
//
// Streams bring weights to shared memory in chunks, in order, and need no other data: they fill their ring also while the block waits for
// rows, for h or for sums. One warp brings the rows of x and h, and waits for the h of other blocks. Consumers multiply. Finishers add up
// the consumers' sums of a segment and store h or y.
#pragma once

#include "experts_few_plan.cuh"

namespace expertd {

// Streams the chunks of the stream's items.
template <class Format>
__device__ __forceinline__ void stream_weights(const ExpertdExpertsParams& p, FewShared& shared, const FewShare& share, uint32_t ring, int stream) {
    using Ring = FewRing<Format>;
    FewSegments segments(p, shared.tables, share);
    FewSegment segment;
    const uint64_t once = policy_evict_first(), again = policy_evict_normal();
    const uint32_t ahead = share.paced ? Ring::PACED_SLOTS : Ring::MOST_AHEAD;
    uint32_t items = 0, at = 0; // items of the block before the segment; chunks of the stream so far
    ring += stream * Ring::SLOTS * Ring::SLOT_BYTES;
    while (segments.next(segment)) {
        const int k_blocks = few_k_blocks<Format>(segment.k(p)), all_units = (segment.phase == 0 ? 2 * p.inter : p.hidden) / UNIT_ROWS;
        const int64_t block_bytes = int64_t(all_units) * (Format::UNIT_BYTES + Format::UNIT_SCALE_BYTES); // of a k block of the matrix
        const int first = first_of_stream(items, stream);
        const char* source = static_cast<const char*>(segment.phase == 0 ? shared.layer.gate_up : shared.layer.down) +
                             (segment.expert * int64_t(k_blocks) + first) * block_bytes;
        const int64_t scales = int64_t(all_units) * Format::UNIT_BYTES; // distance from a k block of the matrix to its scales
        const int* tile = &shared.tables.tile[segment.expert];
        const uint64_t policy = tile[1] - tile[0] == 1 ? once : again;
        for (int k = first; k < k_blocks; k += FEW_STREAMS, source += FEW_STREAMS * block_bytes) {
            for (int done = 0; done < segment.units; done += Format::CHUNK_UNITS, at++) {
                const uint32_t slot = at % Ring::SLOTS, place = ring + slot * Ring::SLOT_BYTES;
                uint64_t* full = &shared.full[stream][slot];
                barrier_wait(&shared.empty[stream][slot], at / Ring::SLOTS % 2 ^ 1);
                fence_shared_proxy(); // the consumers' reads of the slot come before the copy
                if (at >= ahead) barrier_wait(&shared.full[stream][(at - ahead) % Ring::SLOTS], (at - ahead) / Ring::SLOTS % 2);
                const int here = min(Format::CHUNK_UNITS, segment.units - done), unit = segment.unit + done;
                barrier_arrive_expect(full, here * (Format::UNIT_BYTES + Format::UNIT_SCALE_BYTES));
                bulk_load(place, source + unit * Format::UNIT_BYTES, here * Format::UNIT_BYTES, full, policy);
                if constexpr (Format::UNIT_SCALE_BYTES != 0) {
                    bulk_load(place + Format::CHUNK_UNITS * Format::UNIT_BYTES, source + scales + unit * Format::UNIT_SCALE_BYTES,
                              here * Format::UNIT_SCALE_BYTES, full, policy);
                }
            }
        }
        items += k_blocks;
    }
    if (stream == 0) let_next_kernel_start();
}

// Whether the segment's rows are e4m3 with scales behind them, and not bf16.
__device__ __forceinline__ bool has_codes(const ExpertdExpertsParams& p, const FewSegment& segment) {
    return segment.phase == 0 && p.x_format == EXPERTD_ROWS_FP8;
}

// Brings the k blocks of x and h that the block's items multiply; what a k block has after the end of a row is zero. The h of a tile is
// awaited first. Afterwards the warp helps to reset the counters.
template <class Format>
__device__ __forceinline__ void bring_rows(const ExpertdExpertsParams& p, FewShared& shared, const FewShare& share, uint32_t rows) {
    constexpr int SLOT_BYTES = FEW_TOKENS * Format::ROW_STRIDE;
    constexpr int MOST = FEW_TOKENS * Format::BLOCK_PANELS * PANEL_ROW_BYTES / 16 / 32; // most pieces of 16 bytes of a lane
    const int lane = threadIdx.x % 32;
    FewSegments segments(p, shared.tables, share);
    FewSegment segment;
    uint32_t items = 0;
    int tile = -1; // the tile whose h has been announced
    while (segments.next(segment)) {
        const bool codes = has_codes(p, segment);
        const int k = segment.k(p), block_bytes = Format::BLOCK_PANELS * PANEL_ROW_BYTES >> codes, row_bytes = 2 * k >> codes;
        const auto row_of = [&](int token) {
            return segment.phase == 0 ? static_cast<const char*>(p.x) + __ldcg(p.row_index + segment.first + token) * p.x_stride
                                      : static_cast<const char*>(p.h) + int64_t(segment.first + token) * row_bytes;
        };
        const char* from[MOST] = {};
        uint32_t to[MOST], within[MOST]; // in a slot of rows; in the k block of a token
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            const int place = (i * 32 + lane) * 16, token = place / block_bytes;
            within[i] = place % block_bytes;
            to[i] = token * Format::ROW_STRIDE + within[i];
            if (token < segment.tokens) from[i] = row_of(token) + within[i];
        }
        const char* scales = codes && lane < segment.tokens ? row_of(lane) + row_bytes : nullptr;
        if (segment.phase == 1 && segment.tile != tile) {
            tile = segment.tile;
            const int tiles = shared.tables.tile[segment.expert + 1] - shared.tables.tile[segment.expert];
            if (lane == 0) await(p, p.state + STATE_READY + segment.expert, uint32_t(tiles) * (2 * p.inter / UNIT_ROWS));
            __syncwarp();
        }
        const int k_blocks = few_k_blocks<Format>(k);
        for (int block = 0; block < k_blocks; block++, items++) {
            const int consumer = items % FEW_CONSUMERS, number = items / FEW_CONSUMERS % Format::ROW_SLOTS, before = block * block_bytes;
            const uint32_t slot = rows + (consumer * Format::ROW_SLOTS + number) * SLOT_BYTES;
            barrier_wait(&shared.rows_empty[consumer][number], items / (FEW_CONSUMERS * Format::ROW_SLOTS) % 2 ^ 1);
#pragma unroll
            for (int i = 0; i < MOST; i++) {
                if (from[i] != nullptr) copy_16(slot + to[i], from[i] + before, before + int(within[i]) < row_bytes);
            }
            if constexpr (Format::ROW_SCALE != 0) {
                if (scales != nullptr) copy_4(slot + lane * Format::ROW_STRIDE + Format::ROW_SCALE, scales + block * sizeof(float));
            }
            barrier_arrive_after_copies(&shared.rows_full[consumer][number]);
        }
    }
    finish(p);
}

// Multiplies the units of a chunk, whose sums begin at `sums`. Units are loaded one ahead, and the slot is released after the last load.
template <class Format>
__device__ __forceinline__ void multiply_chunk(float (*sums)[4], const typename Format::Row& row, uint32_t at, uint32_t scales, int units, uint64_t* empty) {
    typename Format::Unit unit[2];
    unit[0].load(at, scales);
#pragma unroll
    for (int u = 0; u < Format::CHUNK_UNITS; u++) {
        if (u >= units) break;
        if (u + 1 < units && u + 1 < Format::CHUNK_UNITS) {
            unit[(u + 1) % 2].load(at + (u + 1) * Format::UNIT_BYTES, scales + (u + 1) * Format::UNIT_SCALE_BYTES);
        } else {
            __syncwarp(); // all lanes have read the slot
            if (arrives_for_warp()) barrier_arrive(empty);
        }
        unit[u % 2].multiply(sums[u], row);
    }
}

// Multiplies the warp's items.
template <class Format>
__device__ __forceinline__ void consume_few(const ExpertdExpertsParams& p, FewShared& shared, const FewShare& share, uint32_t ring, int warp) {
    using Ring = FewRing<Format>;
    const int stream = warp % FEW_STREAMS, lane = threadIdx.x % 32;
    const uint32_t rows = ring + Ring::ROWS + warp * Format::ROW_SLOTS * Ring::ROW_SLOT_BYTES, place = Format::place(lane);
    ring += stream * Ring::SLOTS * Ring::SLOT_BYTES;
    FewSegments segments(p, shared.tables, share);
    FewSegment segment;
    uint32_t items = 0, chunks = 0; // before the segment: items of the block, chunks of the stream
    uint32_t taken = 0;             // items of the warp
    uint32_t parity = 1;            // of sums_empty
    while (segments.next(segment)) {
        const int k_blocks = few_k_blocks<Format>(segment.k(p)), item_chunks = divide_up(segment.units, Format::CHUNK_UNITS);
        const int residue = residue_of(items, warp);
        float sums[FEW_UNITS][4];
#pragma unroll
        for (int u = 0; u < FEW_UNITS; u++) sums[u][0] = sums[u][1] = sums[u][2] = sums[u][3] = 0.0f;
        uint32_t at = chunks + (residue - first_of_stream(items, stream)) / FEW_STREAMS * item_chunks;
#pragma unroll 1
        for (int k = residue; k < k_blocks; k += FEW_CONSUMERS, at += FEW_CONSUMERS / FEW_STREAMS * item_chunks, taken++) {
            const uint32_t row_slot = taken % Format::ROW_SLOTS;
            barrier_wait(&shared.rows_full[warp][row_slot], taken / Format::ROW_SLOTS % 2);
            const typename Format::Row row(rows + row_slot * Ring::ROW_SLOT_BYTES, has_codes(p, segment), p.power_of_two_scales != 0);
            __syncwarp(); // all lanes have read the slot
            if (arrives_for_warp()) barrier_arrive(&shared.rows_empty[warp][row_slot]);
#pragma unroll
            for (int c = 0; c < Ring::CHUNKS; c++) {
                if (c >= item_chunks) break;
                const uint32_t slot = (at + c) % Ring::SLOTS, slot_place = ring + slot * Ring::SLOT_BYTES;
                barrier_wait(&shared.full[stream][slot], (at + c) / Ring::SLOTS % 2);
                const int units = segment.units - c * Format::CHUNK_UNITS;
                if constexpr (Format::IN_TWOS) {
                    Format::multiply_all(sums + c * Format::CHUNK_UNITS, row, slot_place + place, units, &shared.empty[stream][slot]);
                } else {
                    multiply_chunk<Format>(sums + c * Format::CHUNK_UNITS, row, slot_place + place,
                                           slot_place + Format::CHUNK_UNITS * Format::UNIT_BYTES, units, &shared.empty[stream][slot]);
                }
            }
        }
        chunks += items_of_stream(items, stream, k_blocks) * item_chunks;
        items += k_blocks;

        barrier_wait(&shared.sums_empty, parity);
        parity ^= 1;
#pragma unroll
        for (int u = 0; u < FEW_UNITS; u++) {
            if (u >= segment.units) break;
            shared.sums[residue][u][lane] = make_float4(sums[u][0], sums[u][1], sums[u][2], sums[u][3]);
        }
        __syncwarp();
        if (arrives_for_warp()) barrier_arrive(&shared.sums_full);
    }
}

__device__ __forceinline__ void store_bf16(void* to, int64_t at, float value) {
    static_cast<uint16_t*>(to)[at] = uint16_t(pack_bf16(value, 0.0f));
}

// Adds up the sums of each segment and stores h or y. A warp has every fourth unit.
template <class Format>
__device__ __forceinline__ void finish_few(const ExpertdExpertsParams& p, FewShared& shared, const FewShare& share, int warp) {
    static_assert(FEW_UNITS == 2 * FEW_FINISHERS, "two units of a segment for a warp");
    const int lane = threadIdx.x % 32, row = Format::row(lane), column = lane % 4 * 2;
    const ExpertdLayerWeights& layer = shared.layer;
    const Activation activate(p);
    const bool on_input = p.weight_on_input != 0;
    FewSegments segments(p, shared.tables, share);
    FewSegment segment;
    uint32_t parity = 0;
    while (segments.next(segment)) {
        float weight[2], bias[2][2], scale[2][2];
        for (int t = 0; t < 2; t++) weight[t] = column + t < segment.tokens ? __ldcg(p.row_weight + segment.first + column + t) : 0.0f;
        const float* biases = segment.phase == 0 ? layer.gate_up_bias : layer.down_bias;
        const float* scales = segment.phase == 0 ? layer.gate_up_scale : layer.down_scale;
        const int further = segment.phase == 0 ? p.inter : 8; // distance of the bias and scale of the row eight further
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int u = warp + i * FEW_FINISHERS, unit = segment.unit + u;
            const int64_t place = row + (segment.phase == 0 ? int64_t(segment.expert) * 2 * p.inter + unit * 8
                                                            : int64_t(segment.expert) * p.hidden + unit * UNIT_ROWS);
            bias[i][0] = bias[i][1] = 0.0f, scale[i][0] = scale[i][1] = 1.0f;
            if (u >= segment.units) continue;
            if (biases != nullptr) bias[i][0] = biases[place], bias[i][1] = biases[place + further];
            if constexpr (Format::ROW_SCALES) scale[i][0] = scales[place] * Format::SUM_FACTOR, scale[i][1] = scales[place + further] * Format::SUM_FACTOR;
        }
        barrier_wait(&shared.sums_full, parity);
        parity ^= 1;
        float4 sum[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int u = warp + i * FEW_FINISHERS;
            sum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (u >= segment.units) continue;
#pragma unroll
            for (int r = 0; r < FEW_CONSUMERS; r++) {
                const float4 part = shared.sums[r][u][lane];
                sum[i].x += part.x, sum[i].y += part.y, sum[i].z += part.z, sum[i].w += part.w;
            }
        }
        __syncwarp();
        if (arrives_for_warp()) barrier_arrive(&shared.sums_empty);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int u = warp + i * FEW_FINISHERS, unit = segment.unit + u;
            if (u >= segment.units) continue;
            float low[2] = {sum[i].x, sum[i].y}, high[2] = {sum[i].z, sum[i].w}; // of two tokens
#pragma unroll
            for (int t = 0; t < 2; t++) {
                if (column + t >= segment.tokens) continue;
                const int64_t assignment = segment.first + column + t;
                if constexpr (Format::ROW_SCALES) low[t] *= scale[i][0], high[t] *= scale[i][1];
                if (segment.phase == 0) {
                    const float in = on_input ? weight[t] : 1.0f, out = on_input ? 1.0f : weight[t];
                    store_bf16(p.h, assignment * p.inter + unit * 8 + row, activate(low[t] * in + bias[i][0], high[t] * in + bias[i][1]) * out);
                } else {
                    const float w = on_input ? 1.0f : weight[t];
                    const int64_t to = assignment * p.hidden + unit * UNIT_ROWS + row;
                    store_bf16(p.y, to, low[t] + w * bias[i][0]), store_bf16(p.y, to + 8, high[t] + w * bias[i][1]);
                }
            }
        }
        if (segment.phase == 0) {
            named_sync<32 * FEW_FINISHERS>(STAGING_BARRIER);
            if (warp == 0 && lane == 0) publish(p.state + STATE_READY + segment.expert, segment.units);
        }
    }
}

// Initialises the block's barriers. All threads call it, and a barrier of the block follows.
template <class Format> __device__ __forceinline__ void init_few_barriers(FewShared& shared) {
    constexpr int SLOTS = FewRing<Format>::SLOTS;
    for (int i = threadIdx.x; i < FEW_STREAMS * SLOTS; i += blockDim.x) {
        barrier_init(&shared.full[i / SLOTS][i % SLOTS], 1), barrier_init(&shared.empty[i / SLOTS][i % SLOTS], WARP_ARRIVALS);
    }
    for (int i = threadIdx.x; i < FEW_CONSUMERS * FEW_MOST_ROW_SLOTS; i += blockDim.x) {
        barrier_init(&shared.rows_full[i / FEW_MOST_ROW_SLOTS][i % FEW_MOST_ROW_SLOTS], 32);
        barrier_init(&shared.rows_empty[i / FEW_MOST_ROW_SLOTS][i % FEW_MOST_ROW_SLOTS], WARP_ARRIVALS);
    }
    if (threadIdx.x == 0) {
        barrier_init(&shared.sums_full, FEW_CONSUMERS * WARP_ARRIVALS);
        barrier_init(&shared.sums_empty, FEW_FINISHERS * WARP_ARRIVALS);
    }
    barrier_init_fence();
}

// Computes the block's share. `memory`: the ring, and behind it `shared`; `tiles`: number of all tiles. A warp beyond FEW_ROWS has nothing
// to do.
template <class Format>
__device__ __forceinline__ void run_few(const ExpertdExpertsParams& p, FewShared& shared, unsigned char* memory, int tiles) {
    if (shared.tables.offset[p.experts] > p.panel_rows) {
        if (p.error != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.error = EXPERTD_ERROR_ROWS;
        return;
    }
    const FewShare share = few_share<Format>(p, tiles);
    const uint32_t ring = smem_address(memory);
    const int warp = uniform(threadIdx.x / 32);
    if (warp < FEW_FINISHER) {
        consume_few<Format>(p, shared, share, ring, warp);
    } else if (warp < FEW_STREAM) {
        finish_few<Format>(p, shared, share, warp - FEW_FINISHER);
    } else if (warp < FEW_ROWS) {
        if (threadIdx.x % 32 == 0) stream_weights<Format>(p, shared, share, ring, warp - FEW_STREAM);
    } else if (warp == FEW_ROWS) {
        bring_rows<Format>(p, shared, share, ring + FewRing<Format>::ROWS);
    }
}

} // namespace expertd
