// How a block of the grouped product brings the stages of its tiles: cp.async to a ring in shared memory, across the ends of tiles.
#pragma once

#include <cuda_runtime.h>

#include "../experts_block.cuh"
#include "grouped_formats.cuh"
#include "grouped_tiles.cuh"

namespace expertd {

// A tile's division among the warps of a block. A warp has UNITS units of 16 weight rows and up to PAIRS times 16 tokens.
template <class F, int ROW_WARPS_, int TOKEN_WARPS_, int UNITS_, int PAIRS_, int BLOCKS_ = 1> struct GroupedShape {
    using Format = F;
    static constexpr int ROW_WARPS = ROW_WARPS_, TOKEN_WARPS = TOKEN_WARPS_, UNITS = UNITS_, PAIRS = PAIRS_;
    static constexpr int BLOCKS = BLOCKS_; // of a multiprocessor, if they fit
    static constexpr int THREADS = 32 * ROW_WARPS * TOKEN_WARPS;
    static constexpr int TILE_UNITS = ROW_WARPS * UNITS, ROWS = TILE_UNITS * UNIT_ROWS;
    static constexpr int TOKENS = TOKEN_WARPS * PAIRS * 16;                 // most tokens of a tile
    static constexpr int SCALES_AT = TILE_UNITS * Format::ELEMENT_BYTES;              // place of the scales in a stage,
    static constexpr int TOKENS_AT = SCALES_AT + TILE_UNITS * Format::SCALE_BYTES;    // and of the tokens
    static constexpr int STAGE_BYTES = TOKENS_AT + TOKENS * PANEL_ROW_BYTES;
    // Copies of a thread for a stage: 16 bytes each of elements, of scales and of tokens.
    static constexpr int ELEMENT_COPIES = SCALES_AT / 16 / THREADS;
    static constexpr int SCALE_COPIES = (TILE_UNITS * Format::SCALE_BYTES / 16 + THREADS - 1) / THREADS;
    static constexpr int TOKEN_STEP = THREADS / 8, TOKEN_COPIES = TOKENS / TOKEN_STEP;
    static constexpr int COPIES = ELEMENT_COPIES + SCALE_COPIES + TOKEN_COPIES;
    static_assert(ELEMENT_COPIES * THREADS * 16 == SCALES_AT && THREADS * 16 % Format::ELEMENT_BYTES == 0 && SCALE_COPIES <= 1);
    static_assert(2 * STAGE_BYTES <= 96 * 1024 && STAGE_BYTES % 128 == 0 && TOKENS_AT % 128 == 0 && TOKENS % TOKEN_STEP == 0);
};

constexpr int GROUPED_MOST_STAGES = 4;

// Shared memory before the stages.
struct alignas(128) GroupedShared {
    GroupedTables tables;
    uint64_t full[GROUPED_MOST_STAGES], empty[GROUPED_MOST_STAGES];
};
static_assert(sizeof(GroupedShared) <= 3 * 1024);
template <class Shape> constexpr int grouped_bytes(int stages) { return int(sizeof(GroupedShared)) + stages * Shape::STAGE_BYTES; }

// The matrix of a phase.
struct GroupedMatrix {
    const char* weights;
    const char* rows; // of x or h
    int64_t row_bytes;
    int panels, units; // units: of an expert's matrix

    __device__ __forceinline__ GroupedMatrix(const ExpertdExpertsParams& p, const ExpertdLayerWeights& layer, int phase)
        : weights(static_cast<const char*>(phase == 0 ? layer.gate_up : layer.down)), rows(static_cast<const char*>(phase == 0 ? p.x : p.h)),
          row_bytes(phase == 0 ? int64_t(p.x_stride) : int64_t(p.inter) * 2), panels((phase == 0 ? p.hidden : p.inter) / PANEL_K),
          units((phase == 0 ? 2 * p.inter : p.hidden) / UNIT_ROWS) {}
    template <class Shape> __device__ __forceinline__ int strips() const { return divide_up(units, Shape::TILE_UNITS); }
};

template <class Shape> __device__ __forceinline__ GroupedTile tile_of(const ExpertdExpertsParams& p, const GroupedTables& tables, int strips, int id) {
    return find_tile<Shape::ROWS, Shape::TOKENS, 16 * Shape::TOKEN_WARPS>(p, tables, strips, id);
}

// The ring of a block. Warps are synchronised by the barriers of stages only, so one that is late does not hold up the others until they
// have read all that is there.
template <class Shape> class GroupedRing {
    using Format = typename Shape::Format;

  public:
    // All threads must call it, after the barriers have been set up.
    __device__ __forceinline__ GroupedRing(const ExpertdExpertsParams& p, GroupedShared& shared, const GroupedMatrix& matrix, int phase, int all, int stages)
        : p_(p), shared_(shared), matrix_(matrix), phase_(phase), all_(all), stages_(stages), first_(smem_address(&shared) + sizeof(GroupedShared)),
          id_(blockIdx.x - gridDim.x) {
        const int thread = threadIdx.x;
        unit_ = thread * 16 / Format::ELEMENT_BYTES;
        element_ = unit_ * Format::UNIT_BYTES + thread * 16 % Format::ELEMENT_BYTES;
        if constexpr (Shape::SCALE_COPIES != 0) scale_unit_ = thread * 16 / Format::SCALE_BYTES;
        token_place_ = Shape::TOKENS_AT + thread / 8 * PANEL_ROW_BYTES + ((thread % 8 ^ (thread / 8 % 8)) * 16);
        next_tile();
        for (int i = 0; i < stages - 1; i++) {
            begin_copies();
#pragma unroll
            for (int c = 0; c < Shape::COPIES; c++) copy(c);
            end_copies();
        }
    }

    // Waits for the next stage and returns its address.
    __device__ __forceinline__ uint32_t next() {
        barrier_wait(&shared_.full[slot_], parity_);
        reading_ = slot_;
        if (++slot_ == stages_) slot_ = 0, parity_ ^= 1;
        return first_ + reading_ * Shape::STAGE_BYTES;
    }
    // The warp has read the stage.
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (arrives_for_warp()) barrier_arrive(&shared_.empty[reading_]);
    }

    // The copies of the stage that is brought next, of all threads: begin_copies, each copy, end_copies. There are no branches between products,
    // so that the compiler can mix both; after the last tile copies do nothing.
    __device__ __forceinline__ void begin_copies() {
        barrier_wait(&shared_.empty[filled_], filled_parity_);
        to_ = first_ + filled_ * Shape::STAGE_BYTES;
    }
    __device__ __forceinline__ void copy(int at) {
        constexpr int BEFORE_TOKENS = Shape::ELEMENT_COPIES + Shape::SCALE_COPIES;
        if (at < Shape::ELEMENT_COPIES) {
            constexpr int UNITS = Shape::THREADS * 16 / Format::ELEMENT_BYTES; // of a copy of all threads
            if (at * UNITS < units_left_) copy_16(to_ + threadIdx.x * 16 + at * Shape::THREADS * 16, weights_ + at * UNITS * Format::UNIT_BYTES, true);
        } else if (at < BEFORE_TOKENS) {
            if (scales_there_) copy_16(to_ + Shape::SCALES_AT + threadIdx.x * 16, scales_, true);
        } else {
            const int i = at - BEFORE_TOKENS;
            if (i * Shape::TOKEN_STEP < tokens_left_) copy_16(to_ + token_place_ + i * Shape::TOKEN_STEP * PANEL_ROW_BYTES, rows_[i], true);
            rows_[i] += PANEL_ROW_BYTES;
        }
    }
    __device__ __forceinline__ void end_copies() {
        barrier_arrive_after_copies(&shared_.full[filled_]);
        if (++filled_ == stages_) filled_ = 0, filled_parity_ ^= 1;
        constexpr int HALVES = Format::BLOCK_PANELS;
        const int64_t block = int64_t(matrix_.units) * Format::UNIT_BYTES;
        if (HALVES == 1) {
            weights_ += block;
        } else {
            half_ ^= 1;
            weights_ += half_ != 0 ? int64_t(Format::ELEMENT_BYTES) : block - Format::ELEMENT_BYTES;
            if (half_ == 0) scales_ += block;
        }
        if (--left_ == 0) next_tile();
    }

  private:
    __device__ __forceinline__ void next_tile() {
        id_ += gridDim.x;
        left_ = matrix_.panels, half_ = 0;
        if (id_ >= all_) {
            units_left_ = tokens_left_ = 0, scales_there_ = false;
            return;
        }
        const GroupedTile tile = tile_of<Shape>(p_, shared_.tables, matrix_.strips<Shape>(), id_);
        const int blocks = divide_up(matrix_.panels, Format::BLOCK_PANELS), unit = tile.row / UNIT_ROWS;
        const char* units = matrix_.weights + (int64_t(tile.expert) * blocks * matrix_.units + unit) * Format::UNIT_BYTES;
        weights_ = units + element_;
        units_left_ = matrix_.units - unit - unit_;
        if constexpr (Shape::SCALE_COPIES != 0) {
            constexpr int OF_UNIT = Format::SCALE_BYTES / 16;
            scales_ = units + scale_unit_ * Format::UNIT_BYTES + Format::UNIT_BYTES - Format::SCALE_BYTES + (threadIdx.x - scale_unit_ * OF_UNIT) * 16;
            scales_there_ = scale_unit_ < min(Shape::TILE_UNITS, matrix_.units - unit);
        }
        tokens_left_ = tile.tokens - int(threadIdx.x) / 8;
#pragma unroll
        for (int i = 0; i < Shape::TOKEN_COPIES; i++) {
            const int token = i * Shape::TOKEN_STEP < tokens_left_ ? tile.first + i * Shape::TOKEN_STEP + int(threadIdx.x) / 8 : tile.first;
            rows_[i] = matrix_.rows + (phase_ == 0 ? __ldg(p_.row_index + token) : token) * matrix_.row_bytes + threadIdx.x % 8 * 16;
        }
    }

    const ExpertdExpertsParams& p_;
    GroupedShared& shared_;
    const GroupedMatrix& matrix_;
    const int phase_, all_, stages_;
    const uint32_t first_; // the first stage
    int slot_ = 0, reading_ = 0, filled_ = 0; // stages that next() waits for, that is read, and that is brought
    uint32_t parity_ = 0, filled_parity_ = 1;
    // The thread's pieces of 16 bytes of a stage: the first unit of its elements and their distance from the tile, the unit of its scales, and
    // the place of its first token.
    int unit_, element_, scale_unit_ = 0;
    uint32_t token_place_;
    uint32_t to_ = 0; // the stage that is brought
    // The tile that is brought, from the thread's pieces on.
    int id_, left_ = 0, half_ = 0; // left_: number of its panels that are left
    int tokens_left_ = 0, units_left_ = 0;
    bool scales_there_ = false;
    const char* weights_ = nullptr;
    const char* scales_ = nullptr;
    const char* rows_[Shape::TOKEN_COPIES] = {};
};

} // namespace expertd
