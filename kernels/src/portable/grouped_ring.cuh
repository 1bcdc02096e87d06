// How a block of the grouped product brings the stages of its tiles: cp.async to a ring in shared memory, across the ends of tiles.
#pragma once

#include <cuda_runtime.h>

#include "../experts_block.cuh"
#include "grouped_formats.cuh"
#include "grouped_tiles.cuh"

namespace expertd {

constexpr int GROUPED_MOST_STAGES = 8;

// A tile's division among the warps of a block. A warp has UNITS units of 16 weight rows and up to PAIRS times 16 tokens.
template <class F, int ROW_WARPS_, int TOKEN_WARPS_, int UNITS_, int PAIRS_, int BLOCKS_ = 1> struct GroupedShape {
    using Format = F;
    static constexpr int ROW_WARPS = ROW_WARPS_, TOKEN_WARPS = TOKEN_WARPS_, UNITS = UNITS_, PAIRS = PAIRS_;
    static constexpr int BLOCKS = BLOCKS_; // of a multiprocessor, if they fit
    // Whether the copies of a stage are issued while the second half of another one is multiplied. Either this, or a stage less that is
    // brought ahead, saves warps from waiting for the slowest one after each stage.
    static constexpr bool LATE_COPIES = !Format::ROW_SCALES;
    static constexpr int MOST_STAGES = BLOCKS > 1 ? GROUPED_MOST_STAGES : 4;
    static constexpr int THREADS = 32 * ROW_WARPS * TOKEN_WARPS;
    static constexpr int TILE_UNITS = ROW_WARPS * UNITS, ROWS = TILE_UNITS * UNIT_ROWS;
    static constexpr int TOKENS = TOKEN_WARPS * PAIRS * 16;                 // most tokens of a tile,
    static constexpr int FEWER_TOKENS = 128 < TOKENS ? 128 : TOKENS;        // and where shared memory is small
    static constexpr int SCALES_AT = TILE_UNITS * Format::ELEMENT_BYTES;              // place of the scales in a stage,
    static constexpr int TOKENS_AT = SCALES_AT + TILE_UNITS * Format::SCALE_BYTES;    // and of the tokens
    static constexpr int stage_bytes(int tokens) { return TOKENS_AT + tokens * PANEL_ROW_BYTES; }
    // Copies of a thread for a stage: 16 bytes each of elements, of scales and of tokens.
    static constexpr int ELEMENT_COPIES = SCALES_AT / 16 / THREADS;
    static constexpr int SCALE_COPIES = (TILE_UNITS * Format::SCALE_BYTES / 16 + THREADS - 1) / THREADS;
    static constexpr int TOKEN_STEP = THREADS / 8, TOKEN_COPIES = (TOKENS + TOKEN_STEP - 1) / TOKEN_STEP;
    static constexpr int COPIES = ELEMENT_COPIES + SCALE_COPIES + TOKEN_COPIES;
    static_assert(ELEMENT_COPIES * THREADS * 16 == SCALES_AT && THREADS * 16 % Format::ELEMENT_BYTES == 0 && SCALE_COPIES <= 1);
    static_assert(2 * stage_bytes(FEWER_TOKENS) <= 96 * 1024 && TOKENS_AT % 128 == 0 && TOKEN_WARPS <= 2);
};

constexpr int GROUPED_DRAWS = 16; // remembered draws of a block: more tiles than its warps and copies are apart
// The word in ExpertdExpertsParams::state from which blocks draw the tiles of a phase. A launch of the other phase sets it to zero.
__device__ __forceinline__ uint32_t* drawn_tiles(const ExpertdExpertsParams& p, int phase) { return p.state + 8 + phase * 8; }

// Shared memory before the stages.
struct alignas(128) GroupedShared {
    GroupedTables tables;
    uint64_t full[GROUPED_MOST_STAGES], empty[GROUPED_MOST_STAGES], drawn[GROUPED_DRAWS];
    GroupedTile tiles[GROUPED_DRAWS];
};
static_assert(sizeof(GroupedShared) <= 3 * 1024);

// What the host chooses by the device's shared memory.
struct GroupedRoom {
    int stages, tokens; // of the ring; most tokens of a tile
};
template <class Shape> constexpr int grouped_bytes(const GroupedRoom& room) {
    return int(sizeof(GroupedShared)) + room.stages * Shape::stage_bytes(room.tokens);
}

// What is the same for all tiles of a launch, so that it needs no registers.
struct GroupedPhase {
    int phase;
    int stages, tokens, stage_bytes; // of the ring; most tokens of a tile
    int ahead;                       // stages that are brought ahead
    int panels, units;               // of an expert's matrix
    uint32_t row_bytes;              // of x or h
    int64_t block_bytes;             // of the units of one or two panels
    int strips;                      // of a matrix
    int draws;                       // tiles that a block draws ahead

    template <class Shape> static GroupedPhase of(const ExpertdExpertsParams& p, int phase, const GroupedRoom& room) {
        GroupedPhase of = {phase, room.stages, room.tokens, Shape::stage_bytes(room.tokens)};
        of.ahead = Shape::LATE_COPIES || room.stages < 4 ? room.stages - 1 : room.stages - 2;
        of.panels = (phase == 0 ? p.hidden : p.inter) / PANEL_K, of.units = (phase == 0 ? 2 * p.inter : p.hidden) / UNIT_ROWS;
        of.row_bytes = phase == 0 ? uint32_t(p.x_stride) : uint32_t(p.inter) * 2;
        of.block_bytes = int64_t(of.units) * Shape::Format::UNIT_BYTES;
        of.strips = (of.units + Shape::TILE_UNITS - 1) / Shape::TILE_UNITS;
        of.draws = 2 + of.ahead / of.panels; // one more than the copies may be ahead of the tile that is multiplied
        return of;
    }
};

// A tile's time: that of its products, and of what does not depend on its tokens.
constexpr int TILE_WORK = 64; // in tokens
__device__ __forceinline__ int work_of(const GroupedTile& tile) { return tile.tokens == 0 ? 0 : tile.tokens + TILE_WORK; }

// Stores tile `id` of `all` as the block's `index`th, and returns its work. One warp calls it.
template <class Shape>
__device__ __forceinline__ int store_draw(const ExpertdExpertsParams& p, GroupedShared& shared, const GroupedPhase& of, int all, int index, int id) {
    GroupedTile tile = {};
    if (id < all) tile = find_tile<Shape::ROWS, Shape::TOKENS, Shape::FEWER_TOKENS>(p, shared.tables, of.strips, of.tokens, id);
    if (threadIdx.x % 32 == 0) {
        shared.tiles[index % GROUPED_DRAWS] = tile;
        barrier_arrive(&shared.drawn[index % GROUPED_DRAWS]);
    }
    return work_of(tile);
}
__device__ __forceinline__ GroupedTile drawn_tile(GroupedShared& shared, int index) {
    barrier_wait(&shared.drawn[index % GROUPED_DRAWS], index / GROUPED_DRAWS % 2);
    return shared.tiles[index % GROUPED_DRAWS];
}

// Copies 16 bytes if `there` is true. The distances are parts of the addresses.
template <int TO, int FROM> __device__ __forceinline__ void copy_16_if(uint32_t destination, const void* source, bool there) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16;\n}" ::"r"(destination), "l"(source),
                 "r"(int(there)), "n"(TO), "n"(FROM)
                 : "memory");
}

// The ring of a block. Warps are synchronised by the barriers of stages only, so one that is late does not hold up the others until they
// have read all that is there.
template <class Shape> class GroupedRing {
    using Format = typename Shape::Format;

  public:
    // All threads must call it, after the barriers have been set up.
    __device__ __forceinline__ GroupedRing(const ExpertdExpertsParams& p, const GroupedPhase& phase, const ExpertdLayerWeights& layer,
                                           GroupedShared& shared)
        : p_(p), phase_(phase), layer_(layer), shared_(shared), first_(smem_address(&shared) + sizeof(GroupedShared)) {
        next_tile();
        for (int i = 0; i < phase.ahead; i++) {
            begin_copies(true);
            copies<0, Shape::COPIES>();
            end_copies();
        }
    }

    // Whether the next stage is there, and whether the next copies may begin. To ask early hides the latency of barriers.
    __device__ __forceinline__ bool is_full() const { return barrier_try_wait(&shared_.full[slot_], parity_); }
    __device__ __forceinline__ bool is_empty() const { return barrier_try_wait(&shared_.empty[filled_], filled_parity_); }

    // Waits for the next stage unless it is there, and returns its address.
    __device__ __forceinline__ uint32_t next(bool is_there) {
        if (!is_there) barrier_wait(&shared_.full[slot_], parity_);
        const uint32_t stage = first_ + slot_ * phase_.stage_bytes;
        if (++slot_ == phase_.stages) slot_ = 0, parity_ ^= 1;
        return stage;
    }
    // The warp has read the oldest stage that it has not released.
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (arrives_for_warp()) barrier_arrive(&shared_.empty[reading_]);
        if (++reading_ == phase_.stages) reading_ = 0;
    }

    // The copies of the stage that is brought next, of all threads: begin_copies, all copies in parts, end_copies. There are no branches between
    // products, so that the compiler can mix both; after the last tile copies do nothing.
    __device__ __forceinline__ void begin_copies(bool is_empty) {
        if (!is_empty) barrier_wait(&shared_.empty[filled_], filled_parity_);
        to_ = first_ + filled_ * phase_.stage_bytes + threadIdx.x * 16;
    }
    template <int FROM, int TO> __device__ __forceinline__ void copies() {
        if constexpr (FROM < TO) {
            copy<FROM>();
            copies<FROM + 1, TO>();
        }
    }
    __device__ __forceinline__ void end_copies() {
        barrier_arrive_after_copies(&shared_.full[filled_]);
        if (++filled_ == phase_.stages) filled_ = 0, filled_parity_ ^= 1;
        constexpr int HALVES = Format::BLOCK_PANELS;
        if (HALVES == 1) {
            weights_ += phase_.block_bytes;
        } else {
            half_ ^= 1;
            weights_ += half_ != 0 ? int64_t(Format::ELEMENT_BYTES) : phase_.block_bytes - Format::ELEMENT_BYTES;
            if (half_ == 0) scales_ += phase_.block_bytes;
        }
        panel_ += PANEL_ROW_BYTES;
        if (--left_ == 0) next_tile();
    }

  private:
    template <int AT> __device__ __forceinline__ void copy() {
        constexpr int BEFORE_TOKENS = Shape::ELEMENT_COPIES + Shape::SCALE_COPIES;
        if constexpr (AT < Shape::ELEMENT_COPIES) {
            constexpr int UNITS = Shape::THREADS * 16 / Format::ELEMENT_BYTES; // of a copy of all threads
            copy_16_if<AT * Shape::THREADS * 16, AT * UNITS * Format::UNIT_BYTES>(to_, weights_, AT * UNITS < units_left_);
        } else if constexpr (AT < BEFORE_TOKENS) {
            copy_16_if<Shape::SCALES_AT, 0>(to_, scales_, scales_there_);
        } else {
            constexpr int I = AT - BEFORE_TOKENS;
            constexpr int TOKEN = I * Shape::TOKEN_STEP;
            const char* from = panel_ + uint64_t(uint32_t(rows_[I])) * phase_.row_bytes;
            copy_16_if<Shape::TOKENS_AT + TOKEN * PANEL_ROW_BYTES, 0>(to_, from, TOKEN < tokens_left_);
        }
    }
    __device__ __forceinline__ void next_tile() {
        left_ = phase_.panels, half_ = 0;
        const GroupedTile tile = drawn_tile(shared_, index_++);
        if (tile.tokens == 0) {
            left_ = INT32_MAX, units_left_ = tokens_left_ = 0, scales_there_ = false;
            return;
        }
        const int thread = threadIdx.x, blocks = divide_up(phase_.panels, Format::BLOCK_PANELS);
        const int first = tile.row / UNIT_ROWS, unit = thread * 16 / Format::ELEMENT_BYTES;
        const char* const matrices = static_cast<const char*>(phase_.phase == 0 ? layer_.gate_up : layer_.down);
        const char* const units = matrices + tile.expert * blocks * phase_.block_bytes + int64_t(first) * Format::UNIT_BYTES;
        weights_ = units + unit * Format::UNIT_BYTES + thread * 16 % Format::ELEMENT_BYTES;
        units_left_ = phase_.units - first - unit;
        if constexpr (Shape::SCALE_COPIES != 0) {
            const int of = thread * 16 / Format::SCALE_BYTES;
            scales_ = units + of * Format::UNIT_BYTES + Format::UNIT_BYTES - Format::SCALE_BYTES + thread * 16 % Format::SCALE_BYTES;
            scales_there_ = of < min(Shape::TILE_UNITS, phase_.units - first);
        }
        // Chunks of a row are permuted as in panels. A thread has the same place in its rows, whose numbers differ by multiples of eight.
        panel_ = static_cast<const char*>(phase_.phase == 0 ? p_.x : p_.h) + (thread % 8 ^ thread / 8 % 8) * 16;
        tokens_left_ = tile.tokens - thread / 8;
#pragma unroll
        for (int i = 0; i < Shape::TOKEN_COPIES; i++) {
            const int token = i * Shape::TOKEN_STEP < tokens_left_ ? tile.first + i * Shape::TOKEN_STEP + thread / 8 : tile.first;
            rows_[i] = phase_.phase == 0 ? __ldg(p_.row_index + token) : token;
        }
    }

    const ExpertdExpertsParams& p_;
    const GroupedPhase& phase_;
    const ExpertdLayerWeights& layer_;
    GroupedShared& shared_;
    const uint32_t first_;                    // the first stage
    int slot_ = 0, reading_ = 0, filled_ = 0; // stages that next() waits for, that is released next, and that is brought
    uint32_t parity_ = 0, filled_parity_ = 1;
    uint32_t to_ = 0; // place of the thread's first piece of 16 bytes in the stage that is brought
    // The tile that is brought, from the thread's pieces on.
    int index_ = 0; // of the next tile among those that the block draws
    int left_ = 0, half_ = 0; // left_: number of its panels that are left
    int tokens_left_ = 0, units_left_ = 0;
    bool scales_there_ = false;
    const char* weights_ = nullptr;
    const char* scales_ = nullptr;
    const char* panel_ = nullptr; // the thread's piece of the panel in row 0 of x or h
    int rows_[Shape::TOKEN_COPIES] = {}; // rows of x or h
};

} // namespace expertd
