// What the warps of a block of experts_few_kernel do.
//
// Streams bring weights to shared memory in chunks, in order, and need no other data: they fill their ring also while the block waits for
// rows, for h or for sums. Consumers multiply. Their second operand, the rows of x or h, comes from L2 straight to registers, one item
// ahead. Finishers add up the consumers' sums of a segment and store h or y. The watcher waits for the h of other blocks.
//
// Lane l of a consumer multiplies row l / 4 of mma's A with column l / 4 of B; q = l % 4. In a panel it takes the 16-byte chunks q and
// 4 + q of its weight rows and of its token. Each chunk is a lane's k of two steps of mma: which k a step has does not matter, as long as
// both operands agree. A's row r is the unit's row r / 2 + 4 (r % 2), so that eight lanes read from all banks of shared memory.
#pragma once

#include "experts_few_plan.cuh"
#include "mma.cuh"

namespace expertd {

// The row of a unit's eight rows of gate or up (or of either half, in down) that a lane has sums of.
__device__ __forceinline__ int few_row(int lane) { return lane / 8 + 4 * (lane / 4 % 2); }

// Streams the chunks of the stream's items.
__device__ __forceinline__ void stream_weights(const ExpertdExpertsParams& p, FewShared& shared, const FewShare& share, uint32_t ring, int stream) {
    FewSegments segments(p, shared.tables, share);
    FewSegment segment;
    const uint64_t once = policy_evict_first(), again = policy_evict_normal();
#ifdef EXPERTD_FEW_TUNE
    const uint32_t ahead = (p.flags >> 8 & 31) != 0 ? uint32_t(p.flags >> 8 & 31) : share.paced ? FEW_PACED_SLOTS : FEW_SLOTS;
#else
    const uint32_t ahead = share.paced ? FEW_PACED_SLOTS : FEW_SLOTS;
#endif
    uint32_t items = 0, at = 0; // items of the block before the segment; chunks of the stream so far
    ring += stream * FEW_SLOTS * FEW_CHUNK_BYTES;
    while (segments.next(segment)) {
        const int panels = segment.panels(p), all_rows = segment.phase == 0 ? 2 * p.inter : p.hidden;
        const int64_t panel_bytes = int64_t(all_rows) * PANEL_ROW_BYTES;
        const char* source = static_cast<const char*>(segment.phase == 0 ? shared.layer.gate_up : shared.layer.down) +
                             segment.expert * (panels * panel_bytes) + segment.unit * UNIT_PANEL_BYTES;
        const int* tile = &shared.tables.tile[segment.expert];
        const uint64_t policy = tile[1] - tile[0] == 1 ? once : again;
        const int first = first_of_stream(items, stream), bytes = segment.units * UNIT_PANEL_BYTES;
        source += first * panel_bytes;
        for (int panel = first; panel < panels; panel += FEW_STREAMS, source += FEW_STREAMS * panel_bytes) {
            for (int done = 0; done < bytes; done += FEW_CHUNK_BYTES, at++) {
                const uint32_t slot = at % FEW_SLOTS;
                barrier_wait(&shared.empty[stream][slot], at / FEW_SLOTS % 2 ^ 1);
                fence_shared_proxy(); // the consumers' reads of the slot come before the copy
                if (at >= ahead) barrier_wait(&shared.full[stream][(at - ahead) % FEW_SLOTS], (at - ahead) / FEW_SLOTS % 2);
                const int here = min(FEW_CHUNK_BYTES, bytes - done);
                barrier_arrive_expect(&shared.full[stream][slot], here);
                bulk_load(ring + slot * FEW_CHUNK_BYTES, source + done, here, &shared.full[stream][slot], policy);
            }
        }
        items += panels;
    }
    if (stream == 0) let_next_kernel_start();
}

// A lane's part of a panel of the rows: the chunks q and 4 + q of its token.
struct FewRow {
    uint4 low, high;
    __device__ __forceinline__ void load(const char* row, int panel, bool there) {
        low = high = make_uint4(0, 0, 0, 0);
        if (!there) return;
        const uint4* source = reinterpret_cast<const uint4*>(row + int64_t(panel) * PANEL_ROW_BYTES);
        low = __ldcg(source), high = __ldcg(source + 4);
    }
};

// Adds the products of a unit's panel at `address`, where the lane's chunk q is.
struct FewUnit {
    uint4 low, low_8, high, high_8; // chunks q and 4 + q of the lane's row and of the row eight further
    __device__ __forceinline__ void load(uint32_t address) {
        low = load_shared_16(address), low_8 = load_shared_16(address + 8 * PANEL_ROW_BYTES);
        high = load_shared_16(address ^ 64), high_8 = load_shared_16((address ^ 64) + 8 * PANEL_ROW_BYTES);
    }
    __device__ __forceinline__ void multiply(float (&sums)[4], const FewRow& row) const {
        const uint32_t a[4][4] = {{low.x, low_8.x, low.y, low_8.y}, {low.z, low_8.z, low.w, low_8.w},
                                  {high.x, high_8.x, high.y, high_8.y}, {high.z, high_8.z, high.w, high_8.w}};
        mma_16x8x16(sums, a[0], row.low.x, row.low.y);
        mma_16x8x16(sums, a[1], row.low.z, row.low.w);
        mma_16x8x16(sums, a[2], row.high.x, row.high.y);
        mma_16x8x16(sums, a[3], row.high.z, row.high.w);
    }
};

// Multiplies the warp's items.
__device__ __forceinline__ void consume_few(const ExpertdExpertsParams& p, FewShared& shared, const FewShare& share, uint32_t ring, int warp) {
    const int stream = warp % FEW_STREAMS, lane = threadIdx.x % 32, token = lane / 4;
    const int row_here = few_row(lane);
    ring += stream * FEW_SLOTS * FEW_CHUNK_BYTES + row_here * PANEL_ROW_BYTES + (lane % 4 ^ row_here) * 16;
    FewSegments segments(p, shared.tables, share);
    FewSegment segment;
    uint32_t items = 0, chunks = 0; // before the segment: items of the block, chunks of the stream
    uint32_t wanted = 0;            // tiles whose h the block has needed so far
    int tile = -1;
    uint32_t parity = 1; // of sums_empty
    while (segments.next(segment)) {
        const int panels = segment.panels(p), item_chunks = segment.chunks();
        const int residue = (uint32_t(warp) - items) % FEW_CONSUMERS; // the warp has the panels with this residue
        const bool there = token < segment.tokens;
        const char* row;
        if (segment.phase == 0) {
            row = static_cast<const char*>(p.x) + (there ? uint64_t(__ldcg(p.row_index + segment.first + token)) * p.x_stride : 0);
        } else {
            if (segment.tile != tile) tile = segment.tile, wanted++;
            const SpinLimit limit;
            while (load_acquire_shared(&shared.tiles_ready) < wanted) limit.tick();
            row = static_cast<const char*>(p.h) + int64_t(segment.first + token) * p.inter * 2;
        }
        row += lane % 4 * 16;

        float sums[FEW_UNITS][4];
#pragma unroll
        for (int u = 0; u < FEW_UNITS; u++) sums[u][0] = sums[u][1] = sums[u][2] = sums[u][3] = 0.0f;
        uint32_t at = chunks + (residue - first_of_stream(items, stream)) / FEW_STREAMS * item_chunks;
        FewRow here, next;
        next.load(row, residue, there && residue < panels);
#pragma unroll 1
        for (int panel = residue; panel < panels; panel += FEW_CONSUMERS, at += FEW_CONSUMERS / FEW_STREAMS * item_chunks) {
            here = next;
            next.load(row, panel + FEW_CONSUMERS, there && panel + FEW_CONSUMERS < panels);
#pragma unroll
            for (int c = 0; c < FEW_CHUNKS; c++) {
                if (c >= item_chunks) break;
                const uint32_t slot = (at + c) % FEW_SLOTS;
                barrier_wait(&shared.full[stream][slot], (at + c) / FEW_SLOTS % 2);
                const uint32_t address = ring + slot * FEW_CHUNK_BYTES;
                const bool both = FEW_CHUNK_UNITS * c + 1 < segment.units;
                FewUnit first, second;
                first.load(address);
                if (both) second.load(address + UNIT_PANEL_BYTES);
                first.multiply(sums[2 * c], here);
                if (both) second.multiply(sums[2 * c + 1], here);
                __syncwarp(); // all lanes have read the slot
                if (arrives_for_warp()) barrier_arrive(&shared.empty[stream][slot]);
            }
        }
        chunks += items_of_stream(items, stream, panels) * item_chunks;
        items += panels;

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
__device__ __forceinline__ void finish_few(const ExpertdExpertsParams& p, FewShared& shared, const FewShare& share, int warp) {
    static_assert(FEW_UNITS == 2 * FEW_FINISHERS, "two units of a segment for a warp");
    const int lane = threadIdx.x % 32, row = few_row(lane), column = lane % 4 * 2;
    const ExpertdLayerWeights& layer = shared.layer;
    const Activation activate(p);
    const bool on_input = p.weight_on_input != 0;
    FewSegments segments(p, shared.tables, share);
    FewSegment segment;
    uint32_t parity = 0;
    while (segments.next(segment)) {
        float weight[2], bias[2][2];
        for (int t = 0; t < 2; t++) weight[t] = column + t < segment.tokens ? __ldcg(p.row_weight + segment.first + column + t) : 0.0f;
        const float* biases = segment.phase == 0 ? layer.gate_up_bias : layer.down_bias;
        const int further = segment.phase == 0 ? p.inter : 8; // distance of the bias of the row eight further
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int u = warp + i * FEW_FINISHERS, unit = segment.unit + u;
            bias[i][0] = bias[i][1] = 0.0f;
            if (biases == nullptr || u >= segment.units) continue;
            const float* of_unit = biases + (segment.phase == 0 ? int64_t(segment.expert) * 2 * p.inter + unit * 8
                                                                : int64_t(segment.expert) * p.hidden + unit * UNIT_ROWS);
            bias[i][0] = of_unit[row], bias[i][1] = of_unit[row + further];
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
            const float low[2] = {sum[i].x, sum[i].y}, high[2] = {sum[i].z, sum[i].w}; // of two tokens
#pragma unroll
            for (int t = 0; t < 2; t++) {
                if (column + t >= segment.tokens) continue;
                const int64_t assignment = segment.first + column + t;
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

// Waits for the h of the block's tiles of down, then helps to reset the counters.
__device__ __forceinline__ void watch_few(const ExpertdExpertsParams& p, FewShared& shared, const FewShare& share) {
    FewSegments segments(p, shared.tables, share, 1);
    FewSegment segment;
    uint32_t ready = 0;
    int tile = -1;
    while (segments.next(segment)) {
        if (segment.tile == tile) continue;
        tile = segment.tile;
        const int tiles = shared.tables.tile[segment.expert + 1] - shared.tables.tile[segment.expert];
        if (threadIdx.x % 32 == 0) {
            await(p, p.state + STATE_READY + segment.expert, uint32_t(tiles) * (2 * p.inter / UNIT_ROWS));
            store_release_shared(&shared.tiles_ready, ++ready);
        }
    }
    finish(p);
}

} // namespace expertd
