// The producers of the expert kernel, which stream weights and token rows (x for gate_up, h for down) to shared memory.
#pragma once

#include "experts_block.cuh"
#include "experts_rows.cuh"

namespace expertd {

// Draws the block's segments and streams their weights as far ahead as the ring allows. One thread runs this.
template <class Format>
__device__ __forceinline__ void produce_weights(const Block<Format>& block) {
    const ExpertdExpertsParams& p = block.p;
    Shared& shared = block.shared;
    Scheduler scheduler(p, shared.tables, block.plan, shared.drawn);
    Cursor slot, stage, landing; // landing: the oldest paced stage that is under way
    int under_way = 0;
    const uint64_t once = policy_evict_first(), again = policy_evict_normal();
    // Load rows first: every block waits for rows, and after 200 KB of weights per SM in the memory system they would be late.
    barrier_wait(&shared.rows_loaded, 0);
    bool more = true;
    while (more) {
        Segment segment;
        more = scheduler.next(segment);
        if (!more) segment.phase = 2;
        barrier_wait(&shared.segment_empty[slot.slot], slot.parity ^ 1);
        shared.segments[slot.slot] = segment;
        barrier_arrive(&shared.segment_full[slot.slot]);
        slot.advance(SEGMENT_SLOTS);
        if (!more) break;

        const int all_rows = segment.phase == 0 ? 2 * p.inter : p.hidden;
        const int blocks = block.k_blocks(segment), per_stage = block.per_stage(segment);
        const int64_t elements = int64_t(all_rows / UNIT_ROWS) * Format::UNIT_BYTES; // bytes of all rows of a k block, without scales
        const int64_t block_bytes = elements + int64_t(all_rows / UNIT_ROWS) * Format::UNIT_SCALE_BYTES;
        const char* source = static_cast<const char*>(segment.phase == 0 ? block.layer.gate_up : block.layer.down) +
                             int64_t(segment.expert) * blocks * block_bytes + int64_t(segment.row / UNIT_ROWS) * Format::UNIT_BYTES;
        const uint32_t bytes = segment.rows / UNIT_ROWS * Format::UNIT_BYTES;
        const uint32_t scale_bytes = segment.rows / UNIT_ROWS * Format::UNIT_SCALE_BYTES;
        // Distance from the elements of the segment's rows to their scales.
        const int64_t to_scales = elements - int64_t(segment.row / UNIT_ROWS) * (Format::UNIT_BYTES - Format::UNIT_SCALE_BYTES);
        const int* tile = &shared.tables.tile[segment.expert];
        const bool in_pair = Format::TOKEN_ROWS && block.plan.share_weights, sharing = in_pair && segment.alone == 0;
        const uint64_t policy = tile[1] - tile[0] == (in_pair ? 2 : 1) ? once : again; // keep the rows in L2 only if another token tile needs them
        // If a pair shares weights, each block loads half of the segment's rows for both blocks.
        const uint32_t half = segment.rows / 2 / UNIT_ROWS * UNIT_ROWS, mine_from = blockIdx.x % 2 == 0 ? 0 : half;
        const uint32_t mine = blockIdx.x % 2 == 0 ? half : segment.rows - half;
        for (int k = 0; k < blocks; k += per_stage) {
            const int here = min(per_stage, blocks - k);
            const int empty = stage.slot + (Format::WIDENS ? WIDENED_STAGES : 0);
            barrier_wait(in_pair ? &shared.pair_empty[empty] : &shared.stage_empty[empty], stage.parity ^ 1);
            // Order the threads' reads of the stage before the copies that fill it again.
            if (Format::THREADS_READ) fence_shared_proxy();
            uint64_t* arrived = &shared.full[stage.slot];
            if (block.paced()) {
                if (under_way == divide_up(PACED_BYTES, block.plan.stage_blocks * stage_weight_bytes<Format>(block.plan.block_rows))) {
                    barrier_wait(&shared.weights_full[landing.slot], landing.parity);
                    landing.advance(block.plan.stages);
                    under_way--;
                }
                under_way++;
            }
            if (Format::WIDENS || block.paced()) {
                if (!Format::WIDENS) barrier_arrive(arrived);
                arrived = &shared.weights_full[stage.slot];
            }
            barrier_arrive_expect(arrived, (bytes + scale_bytes) * here);
            for (int i = 0; i < here && bytes != 0; i++) {
                if (sharing) {
                    const uint32_t mine_at = mine_from / UNIT_ROWS * Format::UNIT_BYTES;
                    bulk_load_both(block.weight_stage(stage.slot) + mine_at, source + mine_at, mine / UNIT_ROWS * Format::UNIT_BYTES, arrived, policy);
                    if (Format::UNIT_SCALE_BYTES != 0) {
                        bulk_load_both(block.scale_stage(stage.slot) + mine_from * 4, source + to_scales + mine_from * 4, mine * 4, arrived, policy);
                    }
                    source += block_bytes;
                    continue;
                }
                bulk_load(block.weight_stage(stage.slot) + i * bytes, source, bytes, arrived, policy);
                if (Format::UNIT_SCALE_BYTES != 0) {
                    bulk_load(block.scale_stage(stage.slot) + i * scale_bytes, source + to_scales, scale_bytes, arrived, policy);
                }
                source += block_bytes;
            }
            stage.advance(block.plan.stages);
        }
    }
    let_next_kernel_start();
}

// Loads each segment's routing weights and streams its token rows: x for gate_up, h for down. One warp runs this; its first lane
// streams the rows.
template <class Format>
__device__ __forceinline__ void produce_tokens(const Block<Format>& block) {
    const ExpertdExpertsParams& p = block.p;
    Shared& shared = block.shared;
    const int lane = threadIdx.x % 32;
    const uint64_t policy = policy_evict_normal();
    Cursor slot, stage;
    int ready_phase = -1, ready_expert = -1;
    while (true) {
        barrier_wait(&shared.segment_full[slot.slot], slot.parity);
        const Segment segment = shared.segments[slot.slot];
        if (segment.phase == 2) break;
        for (int i = lane; i < segment.tokens; i += 32) {
            copy_4(smem_address(&shared.weights[slot.slot][i]), p.row_weight + segment.first + i);
        }
        barrier_arrive_after_copies(&shared.routing_full[slot.slot]);
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(&shared.segment_empty[slot.slot]);
            if (segment.expert != ready_expert || segment.phase != ready_phase) {
                const int e = segment.expert;
                if (segment.phase == 0) {
                    const int octets = (shared.tables.row[e + 1] - shared.tables.row[e]) / 8;
                    await(p, block.x_ready(e), uint32_t(octets) * copy_slices(p));
                } else {
                    await(p, block.h_ready(e), uint32_t(block.tiles(e)) * (2 * p.inter / UNIT_ROWS));
                }
                ready_expert = e, ready_phase = segment.phase;
            }
            const int panels = block.k_panels(segment), per_stage = block.per_stage(segment) * Format::BLOCK_PANELS;
            const uint32_t bytes = round_up_8(segment.tokens) * PANEL_ROW_BYTES;
            const char* source = static_cast<const char*>(segment.phase == 0 ? p.x_panels : p.h) + int64_t(segment.panel_row) * PANEL_ROW_BYTES;
            constexpr bool SCALED = Format::SCALE_STAGE_BYTES != 0;
            // If a pair shares tokens, the first block loads the first half of them for both blocks, the second block the second half.
            const bool sharing = block.plan.pairs && (!(Format::TOKEN_ROWS && block.plan.share_weights) || segment.alone != 0);
            const uint32_t half = (bytes / 2 + 1023) / 1024 * 1024;
            const uint32_t mine_from = sharing && blockIdx.x % 2 == 1 ? half : 0;
            const uint32_t mine = !sharing ? bytes : mine_from == 0 ? half : bytes - half;
            // W8A8: one scale per token and panel.
            const uint32_t scale_bytes = SCALED ? bytes / PANEL_ROW_BYTES * 4 : 0;
            const float* scale_source = (segment.phase == 0 ? p.x_scales : p.h_scales) + segment.panel_row;
            for (int panel = 0; panel < panels; panel += per_stage) {
                const int here = min(per_stage, panels - panel);
                // Needed also if this segment shares nothing, because a barrier's parity tells only two rounds of the ring apart.
                barrier_wait(block.plan.pairs ? &shared.pair_empty[stage.slot] : &shared.stage_empty[stage.slot], stage.parity ^ 1);
                if (SCALED) fence_shared_proxy(); // as for weights
                uint64_t* full = &shared.full[stage.slot];
                barrier_arrive_expect(full, (bytes + scale_bytes) * here);
                for (int i = 0; i < here; i++) {
                    if (!sharing) {
                        if (bytes != 0) bulk_load(block.token_stage(stage.slot) + i * bytes, source, bytes, full, policy);
                    } else if (mine != 0) {
                        bulk_load_both(block.token_stage(stage.slot) + i * bytes + mine_from, source + mine_from, mine, full, policy);
                    }
                    source += int64_t(p.panel_rows) * PANEL_ROW_BYTES;
                    if (SCALED) {
                        if (bytes != 0) bulk_load(block.token_scales(stage.slot) + i * scale_bytes, scale_source, scale_bytes, full, policy);
                        scale_source += p.panel_rows;
                    }
                }
                stage.advance(block.plan.stages);
            }
        } else if (arrives_for_warp()) {
            barrier_arrive(&shared.segment_empty[slot.slot]);
        }
        __syncwarp();
        slot.advance(SEGMENT_SLOTS);
    }
}

} // namespace expertd
