// Division of the work of experts_few_kernel: which weight rows a block computes, derived from the counts on the device.
//
// A tile is up to eight tokens of an expert (mma's N). A unit is 16 weight rows (mma's M) of a tile over the whole k. All units of gate_up,
// in the order of tiles, and then all units of down are divided among the blocks in contiguous runs of the same number of bytes. A block
// cuts its runs into segments, which belong to one tile and have at most FEW_UNITS units.
//
// Inside a block each k block of a segment is an item. Items are numbered over all segments of the block; item j is multiplied by consumer
// warp j % FEW_CONSUMERS and brought by stream j % FEW_STREAMS. So the warps split k. Their sums are added in the order of k blocks, and the
// bits of a row depend on nothing but its weights.
#pragma once

#include "experts_block.cuh"
#include "experts_few_formats.cuh"

namespace expertd {

constexpr int FEW_TOKENS = 8;
constexpr int FEW_UNITS = 8;     // most units of a segment
constexpr int FEW_CONSUMERS = 8; // warps that multiply
constexpr int FEW_FINISHERS = 4; // warps that add up sums and store h and y
constexpr int FEW_STREAMS = 2;   // warps that bring weights
constexpr int FEW_FINISHER = FEW_CONSUMERS, FEW_STREAM = FEW_FINISHER + FEW_FINISHERS, FEW_ROWS = FEW_STREAM + FEW_STREAMS;
constexpr int FEW_THREADS = 32 * (FEW_ROWS + 1); // the last warp brings rows
static_assert(FEW_CONSUMERS % FEW_STREAMS == 0, "a consumer warp has one stream");

constexpr int FEW_MOST_SLOTS = 32;
constexpr int FEW_MOST_ROW_SLOTS = 2;
constexpr int FEW_PACED_BYTES = 56 * 1024; // weights of a block that are under way at once if weights are paced (PACED_WEIGHTS)

struct FewTables {
    int32_t offset[EXPERTD_MAX_EXPERTS + 1]; // assignments before expert e
    int32_t tile[EXPERTD_MAX_EXPERTS + 1];   // tiles before expert e
};

struct FewShared {
    float4 sums[FEW_CONSUMERS][FEW_UNITS][32]; // of the segment that ended last, by residue of k blocks, unit and lane
    ExpertdLayerWeights layer;
    FewTables tables;
    int32_t warp_tiles[FEW_THREADS / 32];
    uint64_t rows_full[FEW_CONSUMERS][FEW_MOST_ROW_SLOTS], rows_empty[FEW_CONSUMERS][FEW_MOST_ROW_SLOTS];
    uint64_t full[FEW_STREAMS][FEW_MOST_SLOTS], empty[FEW_STREAMS][FEW_MOST_SLOTS];
    uint64_t sums_full, sums_empty;
};

// The ring of a format, in which each stream has its slots. A slot holds a chunk, the part of an item that one copy brings. Behind the ring
// each consumer has slots for the rows of its items.
template <class Format> struct FewRing {
    static constexpr int SLOT_BYTES = Format::CHUNK_UNITS * (Format::UNIT_BYTES + Format::UNIT_SCALE_BYTES);
    static constexpr int ROW_SLOT_BYTES = FEW_TOKENS * Format::ROW_STRIDE;
    static constexpr int ROWS_BYTES = FEW_CONSUMERS * Format::ROW_SLOTS * ROW_SLOT_BYTES;
    static constexpr int FITTING = (227 * 1024 - int(sizeof(FewShared)) - ROWS_BYTES) / (FEW_STREAMS * SLOT_BYTES);
    static constexpr int SLOTS = FITTING < FEW_MOST_SLOTS ? FITTING : FEW_MOST_SLOTS;
    static constexpr int ROWS = FEW_STREAMS * SLOTS * SLOT_BYTES; // place of the rows
    static constexpr int BYTES = ROWS + ROWS_BYTES;
    static constexpr int SHARED_BYTES = BYTES + sizeof(FewShared); // shared memory of a block
    static constexpr int PACED_SLOTS = FEW_PACED_BYTES / (FEW_STREAMS * SLOT_BYTES);
    static constexpr int CHUNKS = FEW_UNITS / Format::CHUNK_UNITS; // most chunks of an item
    // Most chunks of a stream that are under way at once. A parity tells only the last two fills of a slot apart, so when a
    // consumer waits for a chunk, the previous chunk of its slot must be complete. The consumer has had a chunk that is at most
    // (FEW_CONSUMERS / FEW_STREAMS - 1) * CHUNKS + 1 chunks older. When that one was requested, the chunk MOST_AHEAD before it
    // was complete, so MOST_AHEAD is the number of slots less that distance.
    static constexpr int MOST_AHEAD = SLOTS - (FEW_CONSUMERS / FEW_STREAMS - 1) * CHUNKS - 1;
    static_assert(SLOT_BYTES % 128 == 0 && FEW_UNITS % Format::CHUNK_UNITS == 0 && PACED_SLOTS <= MOST_AHEAD &&
                  Format::ROW_SLOTS <= FEW_MOST_ROW_SLOTS);
};

// Computes the prefix sums over experts and returns the number of tiles. All threads must call it; each handles two experts. Sets `failed` in
// all threads if any thread found it set.
__device__ __forceinline__ int make_few_tables(const ExpertdExpertsParams& p, FewShared& shared, bool& failed) {
    const TwoCounts two(p);
    static_assert(2 * FEW_THREADS > EXPERTD_MAX_EXPERTS, "every expert, and the end of the last one");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles[2] = {divide_up(two.count[0], FEW_TOKENS), divide_up(two.count[1], FEW_TOKENS)};
    for (int i = 0; i < 2; i++) {
        const int e = 2 * threadIdx.x + i;
        if (e <= p.experts) shared.tables.offset[e] = two.start[i];
    }
    int before = tiles[0] + tiles[1]; // inclusive, made exclusive below
    for (int delta = 1; delta < 32; delta *= 2) {
        const int other = __shfl_up_sync(0xffffffff, before, delta);
        if (lane >= delta) before += other;
    }
    if (lane == 31) shared.warp_tiles[warp] = before;
    __syncthreads();
    before -= tiles[0] + tiles[1];
    int all = 0;
    for (int w = 0; w < FEW_THREADS / 32; w++) {
        if (w < warp) before += shared.warp_tiles[w];
        all += shared.warp_tiles[w];
    }
    for (int i = 0; i < 2; i++) {
        const int e = 2 * threadIdx.x + i;
        if (e <= p.experts) shared.tables.tile[e] = before;
        before += tiles[i];
    }
    failed = __syncthreads_or(failed) != 0;
    return all;
}

// The block's runs of units of both phases.
struct FewShare {
    uint32_t up, up_end, down, down_end;
    bool paced;
};

struct Run {
    uint32_t first, end;
};

// The block's run if `count` things are divided evenly and the first blocks have one more.
__device__ __forceinline__ Run even_run(uint32_t count, uint32_t block) {
    const uint32_t each = count / gridDim.x, more = count % gridDim.x, first = block * each + min(block, more);
    return {first, first + each + (block < more ? 1 : 0)};
}

// Number of k blocks of a row of `k` elements.
template <class Format> __device__ __forceinline__ int few_k_blocks(int k) { return divide_up(k, Format::BLOCK_PANELS * PANEL_K); }

// Divides the units of the phase with the longer k evenly, and those of the other one such that every block has the same number of
// k blocks of units.
template <class Format> __device__ __forceinline__ FewShare few_share(const ExpertdExpertsParams& p, int tiles) {
    constexpr int BYTES = Format::UNIT_BYTES + Format::UNIT_SCALE_BYTES; // of a k block of a unit
    const uint32_t up_depth = few_k_blocks<Format>(p.hidden), down_depth = few_k_blocks<Format>(p.inter), block = blockIdx.x, blocks = gridDim.x;
    const uint32_t up = tiles * (2 * p.inter / UNIT_ROWS), down = tiles * (p.hidden / UNIT_ROWS);
    const bool up_first = up_depth >= down_depth;
    const uint32_t coarse = up_first ? up : down, coarse_depth = up_first ? up_depth : down_depth;
    const uint32_t fine = up_first ? down : up, fine_depth = up_first ? down_depth : up_depth;
    const uint32_t all = coarse * coarse_depth + fine * fine_depth;
    const Run of_coarse = even_run(coarse, block);
    Run of_fine;
    if (all / blocks > ((coarse + blocks - 1) / blocks) * coarse_depth) {
        auto before = [&](uint32_t b, uint32_t coarse_before) { // units of the finer phase before block b
            const uint32_t depth = b * (all / blocks) + b * (all % blocks) / blocks;
            return (depth - coarse_before * coarse_depth) / fine_depth;
        };
        of_fine = {before(block, of_coarse.first), before(block + 1, of_coarse.end)};
    } else { // one unit is more than an even share: the blocks with fewer coarse units get the remaining fine ones
        const Run reversed = even_run(fine, blocks - 1 - block);
        of_fine = {fine - reversed.end, fine - reversed.first};
    }
    const Run of_up = up_first ? of_coarse : of_fine, of_down = up_first ? of_fine : of_coarse;
    return {of_up.first, of_up.end, of_down.first, of_down.end, all / blocks <= uint32_t(PACED_WEIGHTS / BYTES)};
}

struct FewSegment {
    int phase;  // 0: gate_up, 1: down
    int expert;
    int tile;   // number of the tile among all
    int first;  // first assignment
    int tokens; // number of tokens, 1 to FEW_TOKENS
    int unit;   // first unit of the expert's matrix
    int units;  // number of units, 1 to FEW_UNITS

    __device__ __forceinline__ int k(const ExpertdExpertsParams& p) const { return phase == 0 ? p.hidden : p.inter; }
};

// Returns the block's segments in order. Every warp has one of its own.
class FewSegments {
  public:
    __device__ __forceinline__ FewSegments(const ExpertdExpertsParams& p, const FewTables& tables, const FewShare& share, int phase = 0)
        : p_(p), tables_(tables), share_(share), phase_(phase), at_(phase == 0 ? share.up : share.down), end_(phase == 0 ? share.up_end : share.down_end) {}

    __device__ __forceinline__ bool next(FewSegment& segment) {
        while (at_ == end_) {
            if (phase_ == 1) return false;
            phase_ = 1, expert_ = 0, at_ = share_.down, end_ = share_.down_end;
        }
        const int per_tile = (phase_ == 0 ? 2 * p_.inter : p_.hidden) / UNIT_ROWS;
        const int tile = int(at_) / per_tile, unit = int(at_) - tile * per_tile;
        expert_ = expert_at(tables_.tile, p_.experts, expert_, tile);
        const int in_expert = (tile - tables_.tile[expert_]) * FEW_TOKENS, begin = tables_.offset[expert_];
        const int run = min(per_tile - unit, int(end_ - at_));
        segment.phase = phase_;
        segment.expert = expert_;
        segment.tile = tile;
        segment.first = begin + in_expert;
        segment.tokens = min(FEW_TOKENS, tables_.offset[expert_ + 1] - begin - in_expert);
        segment.unit = unit;
        segment.units = divide_up(run, divide_up(run, FEW_UNITS)); // segments of a run are about equal
        at_ += segment.units;
        return true;
    }

  private:
    const ExpertdExpertsParams& p_;
    const FewTables& tables_;
    const FewShare& share_;
    int phase_, expert_ = 0;
    uint32_t at_, end_;
};

// Position in a segment of the first item that the stream brings. `items`: number of the block's items before the segment.
__device__ __forceinline__ int first_of_stream(uint32_t items, int stream) { return (uint32_t(stream) - items) % FEW_STREAMS; }
// Number of the stream's items in a segment with this number of k blocks.
__device__ __forceinline__ int items_of_stream(uint32_t items, int stream, int k_blocks) {
    return divide_up(k_blocks - first_of_stream(items, stream), FEW_STREAMS);
}
// The k blocks that a consumer warp has of a segment are those with this residue modulo FEW_CONSUMERS.
__device__ __forceinline__ int residue_of(uint32_t items, int warp) { return (uint32_t(warp) - items) % FEW_CONSUMERS; }

} // namespace expertd
