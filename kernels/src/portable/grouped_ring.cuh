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
    static constexpr int TOKENS_AT = TILE_UNITS * Format::STAGE_UNIT_BYTES; // place of the tokens in a stage
    static constexpr int STAGE_BYTES = TOKENS_AT + TOKENS * PANEL_ROW_BYTES;
    static constexpr int UNIT_PIECES = Format::STAGE_UNIT_BYTES / 16, PIECES = TILE_UNITS * UNIT_PIECES;
    static constexpr int PIECE_ROUNDS = (PIECES + THREADS - 1) / THREADS; // pieces of weights of a thread
    static constexpr int TOKEN_STEP = THREADS / 8, TOKEN_ROUNDS = TOKENS / TOKEN_STEP;
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
    static constexpr int PARTS = PANEL_K / 16 - 1; // of a stage that is brought

    // All threads must call it, after the barriers have been set up.
    __device__ __forceinline__ GroupedRing(const ExpertdExpertsParams& p, GroupedShared& shared, const GroupedMatrix& matrix, int phase, int all, int stages)
        : p_(p), shared_(shared), matrix_(matrix), phase_(phase), all_(all), stages_(stages), first_(smem_address(&shared) + sizeof(GroupedShared)),
          id_(blockIdx.x - gridDim.x) {
        next_tile();
        for (int i = 0; i < stages - 1; i++) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) bring(part);
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

    // Starts to bring a part of the stage that is next to be brought, if there is one. Parts are brought in order.
    __device__ __forceinline__ void bring(int part) {
        if (left_ == 0) return;
        if (part == 0) barrier_wait(&shared_.empty[filled_], filled_parity_);
        const int thread = threadIdx.x, chunk = thread % 8;
        const uint32_t stage = first_ + filled_ * Shape::STAGE_BYTES;
        const bool second = Format::BLOCK_PANELS == 2 && (matrix_.panels - left_) % 2 != 0;
#pragma unroll
        for (int i = part * Shape::PIECE_ROUNDS / PARTS; i < (part + 1) * Shape::PIECE_ROUNDS / PARTS; i++) {
            const int at = i * Shape::THREADS + thread, unit = at / Shape::UNIT_PIECES, piece = at % Shape::UNIT_PIECES;
            if (unit < units_) {
                copy_16(stage + unit * Format::STAGE_UNIT_BYTES + piece * 16, weights_ + unit * Format::UNIT_BYTES + Format::piece_source(piece, second), true);
            }
        }
        const uint32_t place = stage + Shape::TOKENS_AT + thread / 8 * PANEL_ROW_BYTES + ((chunk ^ (thread / 8 % 8)) * 16);
#pragma unroll
        for (int i = part * Shape::TOKEN_ROUNDS / PARTS; i < (part + 1) * Shape::TOKEN_ROUNDS / PARTS; i++) {
            if (i * Shape::TOKEN_STEP + thread / 8 < tokens_) copy_16(place + i * Shape::TOKEN_STEP * PANEL_ROW_BYTES, from_ + rows_[i] * matrix_.row_bytes, true);
        }
        if (part != PARTS - 1) return;
        barrier_arrive_after_copies(&shared_.full[filled_]);
        if (++filled_ == stages_) filled_ = 0, filled_parity_ ^= 1;
        from_ += PANEL_ROW_BYTES;
        if (Format::BLOCK_PANELS == 1 || second) weights_ += int64_t(matrix_.units) * Format::UNIT_BYTES;
        if (--left_ == 0) next_tile();
    }

  private:
    __device__ __forceinline__ void next_tile() {
        id_ += gridDim.x;
        if (id_ >= all_) return;
        const GroupedTile tile = tile_of<Shape>(p_, shared_.tables, matrix_.strips<Shape>(), id_);
        const int blocks = divide_up(matrix_.panels, Format::BLOCK_PANELS), unit = tile.row / UNIT_ROWS;
        left_ = matrix_.panels, tokens_ = tile.tokens, units_ = min(Shape::TILE_UNITS, matrix_.units - unit);
        weights_ = matrix_.weights + (int64_t(tile.expert) * blocks * matrix_.units + unit) * Format::UNIT_BYTES;
        from_ = matrix_.rows + threadIdx.x % 8 * 16;
#pragma unroll
        for (int i = 0; i < Shape::TOKEN_ROUNDS; i++) {
            const int token = i * Shape::TOKEN_STEP + int(threadIdx.x) / 8;
            rows_[i] = token >= tokens_ ? 0 : phase_ == 0 ? __ldg(p_.row_index + tile.first + token) : tile.first + token;
        }
    }

    const ExpertdExpertsParams& p_;
    GroupedShared& shared_;
    const GroupedMatrix& matrix_;
    const int phase_, all_, stages_;
    const uint32_t first_; // the first stage
    int slot_ = 0, reading_ = 0, filled_ = 0; // stages that next() waits for, that is read, and that is brought
    uint32_t parity_ = 0, filled_parity_ = 1;
    // The tile that is brought.
    int id_, left_ = 0; // number of its panels that are left; 0 if there is no further tile
    int tokens_ = 0, units_ = 0;
    const char* weights_ = nullptr;
    const char* from_ = nullptr; // the thread's piece of the panel of row 0
    int rows_[Shape::TOKEN_ROUNDS] = {};
};

} // namespace expertd
