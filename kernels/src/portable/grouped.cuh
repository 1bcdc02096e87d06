// The experts' products of the portable path for more than a few rows: a grouped product of bf16 with mma.sync, on the same packed weights as
// the other kernels. One launch computes h from gate and up, a second one y from down; h is bf16 [assignments][inter].
//
// Blocks take tiles in turn. cp.async fills the stages of a ring, across the ends of tiles, while the tensor cores multiply earlier ones.
// A sum is added up in the order of k by one warp, so the bits of a row depend neither on the division of work nor on other rows.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "../experts_block.cuh"
#include "../modules.h"
#include "experts.h"
#include "grouped_formats.cuh"
#include "grouped_tiles.cuh"

namespace expertd {

template <class Format> struct GroupedShape {
    static constexpr int TILE_UNITS = GROUPED_ROWS / UNIT_ROWS;
    static constexpr int TOKENS_AT = TILE_UNITS * Format::STAGE_UNIT_BYTES; // place of the tokens in a stage
    static constexpr int STAGE_BYTES = TOKENS_AT + GROUPED_TOKENS * PANEL_ROW_BYTES;
    static constexpr int TABLES = Format::STAGES * STAGE_BYTES;
    static constexpr int BYTES = TABLES + sizeof(GroupedTables);
    static constexpr int UNITS = TILE_UNITS / Format::ROW_WARPS;             // units of a warp
    static constexpr int TOKEN_WARPS = GROUPED_THREADS / 32 / Format::ROW_WARPS;
    static constexpr int COLUMNS = GROUPED_TOKENS / TOKEN_WARPS / 8;         // columns of eight tokens of a warp
    static_assert(BYTES <= 99 * 1024 && STAGE_BYTES % 128 == 0 && TOKENS_AT % 128 == 0 && COLUMNS % 4 == 0);
};

// The matrix of a phase.
struct GroupedMatrix {
    const char* weights;
    const char* rows; // of x or h
    int64_t row_bytes;
    int k, units;     // units: of an expert's matrix

    __device__ __forceinline__ GroupedMatrix(const ExpertdExpertsParams& p, const ExpertdLayerWeights& layer, int phase)
        : weights(static_cast<const char*>(phase == 0 ? layer.gate_up : layer.down)), rows(static_cast<const char*>(phase == 0 ? p.x : p.h)),
          row_bytes(phase == 0 ? int64_t(p.x_stride) : int64_t(p.inter) * 2), k(phase == 0 ? p.hidden : p.inter),
          units((phase == 0 ? 2 * p.inter : p.hidden) / UNIT_ROWS) {}
    __device__ __forceinline__ int strips() const { return divide_up(units * UNIT_ROWS, GROUPED_ROWS); }
};

// Brings the stages of the block's tiles in order.
template <class Format> class GroupedLoader {
    using Shape = GroupedShape<Format>;
    static constexpr int TOKEN_STEP = GROUPED_THREADS / 8, TOKENS = GROUPED_TOKENS / TOKEN_STEP; // tokens of a thread
    static constexpr int UNIT_PIECES = Format::STAGE_UNIT_BYTES / 16, PIECES = Shape::TILE_UNITS * UNIT_PIECES;

  public:
    __device__ __forceinline__ GroupedLoader(const ExpertdExpertsParams& p, const GroupedTables& tables, const GroupedMatrix& matrix, int phase, int all)
        : p_(p), tables_(tables), matrix_(matrix), phase_(phase), all_(all), id_(blockIdx.x), panels_(matrix.k / PANEL_K) {
        look_ahead();
        next_tile();
    }

    // Starts to bring the next stage, or nothing after the last one.
    __device__ __forceinline__ void bring(uint32_t stage) {
        if (there_) {
            const int thread = threadIdx.x, chunk = thread % 8, half = panel_ % Format::BLOCK_PANELS;
            const char* from = weights_ + int64_t(panel_ / Format::BLOCK_PANELS) * matrix_.units * Format::UNIT_BYTES;
#pragma unroll
            for (int i = 0; i < divide_up_constant(PIECES, GROUPED_THREADS); i++) {
                const int at = i * GROUPED_THREADS + thread, unit = at / UNIT_PIECES, piece = at % UNIT_PIECES;
                if (unit < units_) {
                    copy_16(stage + unit * Format::STAGE_UNIT_BYTES + piece * 16, from + unit * Format::UNIT_BYTES + Format::piece_source(piece, half), true);
                }
            }
#pragma unroll
            for (int i = 0; i < TOKENS; i++) {
                const int token = i * TOKEN_STEP + thread / 8;
                if (token < tokens_) {
                    copy_16(stage + Shape::TOKENS_AT + token * PANEL_ROW_BYTES + ((chunk ^ (token % 8)) * 16), rows_[i] + panel_ * PANEL_ROW_BYTES, true);
                }
            }
            if (++panel_ == panels_) next_tile();
        }
        copies_commit();
    }

  private:
    static constexpr int divide_up_constant(int a, int b) { return (a + b - 1) / b; }

    // Finds the tile after the current one and loads the numbers of its rows, which arrive by the time it begins.
    __device__ __forceinline__ void look_ahead() {
        ahead_.tokens = 0;
        if (id_ >= all_) return;
        ahead_ = find_tile(p_, tables_, matrix_.strips(), id_);
        id_ += gridDim.x;
#pragma unroll
        for (int i = 0; i < TOKENS; i++) {
            const int token = i * TOKEN_STEP + int(threadIdx.x) / 8;
            row_[i] = token >= ahead_.tokens ? 0 : phase_ == 0 ? __ldg(p_.row_index + ahead_.first + token) : ahead_.first + token;
        }
    }
    __device__ __forceinline__ void next_tile() {
        there_ = ahead_.tokens != 0;
        if (!there_) return;
        panel_ = 0, tokens_ = ahead_.tokens, units_ = min(Shape::TILE_UNITS, matrix_.units - ahead_.row / UNIT_ROWS);
        const int blocks = divide_up(panels_, Format::BLOCK_PANELS);
        weights_ = matrix_.weights + (int64_t(ahead_.expert) * blocks * matrix_.units + ahead_.row / UNIT_ROWS) * Format::UNIT_BYTES;
#pragma unroll
        for (int i = 0; i < TOKENS; i++) rows_[i] = matrix_.rows + row_[i] * matrix_.row_bytes + threadIdx.x % 8 * 16;
        look_ahead();
    }

    const ExpertdExpertsParams& p_;
    const GroupedTables& tables_;
    const GroupedMatrix& matrix_;
    const int phase_, all_;
    int id_;
    const int panels_;
    GroupedTile ahead_;
    int row_[TOKENS];
    bool there_;
    int panel_, tokens_, units_;
    const char* weights_;
    const char* rows_[TOKENS];
};

// Adds the products of a stage. `weights` and `tokens` are the addresses of the warp's first unit and first token; `fours` is the number of
// its groups of four columns that have tokens.
template <class Format, int UNITS, int COLUMNS>
__device__ __forceinline__ void multiply_stage(float (&sums)[UNITS][COLUMNS][4], uint32_t weights, uint32_t tokens, int half, int fours) {
    const int lane = threadIdx.x % 32, row = lane % 8;
    // Of a matrix of eight tokens and eight k a lane gives the address of a row: matrices are two columns by two halves of a step.
    const uint32_t token = tokens + (lane / 16 * 8 + row) * PANEL_ROW_BYTES;
    typename Format::Scales scales[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) scales[u] = Format::load_scales(weights + u * Format::STAGE_UNIT_BYTES);
#pragma unroll
    for (int first = 0; first < PANEL_K / 16; first += Format::STEPS) {
        uint32_t a[UNITS][Format::STEPS][4];
#pragma unroll
        for (int u = 0; u < UNITS; u++) Format::load(weights + u * Format::STAGE_UNIT_BYTES, scales[u], half, first, a[u]);
#pragma unroll
        for (int s = 0; s < Format::STEPS; s++) {
            const uint32_t chunk = ((2 * (first + s) + lane / 8 % 2) ^ row) * 16;
#pragma unroll
            for (int four = 0; four < COLUMNS / 4; four++) {
                if (four >= fours) break;
                const uint4 low = load_matrices(token + four * 32 * PANEL_ROW_BYTES + chunk);
                const uint4 high = load_matrices(token + (four * 32 + 16) * PANEL_ROW_BYTES + chunk);
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    mma_16x8x16(sums[u][four * 4], a[u][s], low.x, low.y);
                    mma_16x8x16(sums[u][four * 4 + 1], a[u][s], low.z, low.w);
                    mma_16x8x16(sums[u][four * 4 + 2], a[u][s], high.x, high.y);
                    mma_16x8x16(sums[u][four * 4 + 3], a[u][s], high.z, high.w);
                }
            }
        }
    }
}

// Transposes an 8x8 matrix of 16-bit elements that a warp holds in fragments.
__device__ __forceinline__ uint32_t transposed(uint32_t fragment) {
    uint32_t result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
    return result;
}

// Stores h or y of a unit. Sums are features by tokens, memory is tokens by features.
template <class Format, int COLUMNS>
__device__ __forceinline__ void store_unit(const ExpertdExpertsParams& p, const ExpertdLayerWeights& layer, int phase, const GroupedTile& tile, int unit,
                                           int first_token, const float (&sums)[COLUMNS][4]) {
    const int lane = threadIdx.x % 32, feature = lane / 4, pair = lane % 4 * 2;
    const bool on_input = p.weight_on_input != 0;
    const Activation activate(p);
    const int64_t at = feature + (phase == 0 ? int64_t(tile.expert) * 2 * p.inter + unit * 8 : int64_t(tile.expert) * p.hidden + unit * UNIT_ROWS);
    const int further = phase == 0 ? p.inter : 8;
    const float* biases = phase == 0 ? layer.gate_up_bias : layer.down_bias;
    const float* scales = phase == 0 ? layer.gate_up_scale : layer.down_scale;
    float2 scale = make_float2(1.0f, 1.0f), bias = make_float2(0.0f, 0.0f);
    if constexpr (Format::ROW_SCALES) scale = make_float2(__ldg(scales + at), __ldg(scales + at + further));
    if (biases != nullptr) bias = make_float2(__ldg(biases + at), __ldg(biases + at + further));
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        const int token = first_token + column * 8;
        if (token >= tile.tokens) break;
        float weight[2], low[2] = {sums[column][0], sums[column][1]}, high[2] = {sums[column][2], sums[column][3]};
#pragma unroll
        for (int t = 0; t < 2; t++) {
            weight[t] = token + pair + t < tile.tokens ? __ldg(p.row_weight + tile.first + token + pair + t) : 0.0f;
            if constexpr (Format::ROW_SCALES) low[t] *= scale.x, high[t] *= scale.y;
        }
        const bool there = token + feature < tile.tokens; // after the transposition a lane has features of token l / 4
        const int64_t assignment = tile.first + token + feature;
        if (phase == 0) {
            float h[2];
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const float in = on_input ? weight[t] : 1.0f, out = on_input ? 1.0f : weight[t];
                h[t] = activate(low[t] * in + bias.x, high[t] * in + bias.y) * out;
            }
            const uint32_t two = transposed(pack_bf16(h[0], h[1]));
            if (there) *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.h) + assignment * p.inter + unit * 8 + pair) = two;
        } else {
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const float w = on_input ? 1.0f : weight[t];
                low[t] += w * bias.x, high[t] += w * bias.y;
            }
            const uint32_t two = transposed(pack_bf16(low[0], low[1])), further_two = transposed(pack_bf16(high[0], high[1]));
            uint16_t* y = static_cast<uint16_t*>(p.y) + assignment * p.hidden + unit * UNIT_ROWS + pair;
            if (there) *reinterpret_cast<uint32_t*>(y) = two, *reinterpret_cast<uint32_t*>(y + 8) = further_two;
        }
    }
}

template <class Format>
__global__ void __launch_bounds__(GROUPED_THREADS, 2) portable_grouped(const __grid_constant__ ExpertdExpertsParams p, int phase) {
    using Shape = GroupedShape<Format>;
    extern __shared__ __align__(128) unsigned char memory[];
    GroupedTables& tables = *reinterpret_cast<GroupedTables*>(memory + Shape::TABLES);
    const int token_tiles = make_grouped_tables(p, tables, reinterpret_cast<int32_t*>(memory));
    if (token_tiles <= 0) return;
    const ExpertdLayerWeights layer = p.layers[p.layer != nullptr ? __ldcg(p.layer) : 0];
    const GroupedMatrix matrix(p, layer, phase);
    const int warp = uniform(threadIdx.x / 32), row_warp = warp % Format::ROW_WARPS, token_warp = warp / Format::ROW_WARPS;
    const int strips = matrix.strips(), all = token_tiles * strips, panels = matrix.k / PANEL_K;
    const uint32_t ring = smem_address(memory);
    GroupedLoader<Format> loader(p, tables, matrix, phase, all);
    for (int i = 0; i < Format::STAGES - 1; i++) loader.bring(ring + i * Shape::STAGE_BYTES);
    int slot = 0;
    for (int id = blockIdx.x; id < all; id += gridDim.x) {
        const GroupedTile tile = find_tile(p, tables, strips, id);
        const int unit = tile.row / UNIT_ROWS + row_warp * Shape::UNITS, first_token = token_warp * Shape::COLUMNS * 8;
        const int fours = unit < matrix.units ? divide_up(max(tile.tokens - first_token, 0), 32) : 0;
        float sums[Shape::UNITS][Shape::COLUMNS][4];
#pragma unroll
        for (int u = 0; u < Shape::UNITS; u++) {
#pragma unroll
            for (int c = 0; c < Shape::COLUMNS; c++) sums[u][c][0] = sums[u][c][1] = sums[u][c][2] = sums[u][c][3] = 0.0f;
        }
#pragma unroll 1
        for (int panel = 0; panel < panels; panel++) {
            copies_wait<Format::STAGES - 2>();
            __syncthreads(); // the stage has arrived for all threads, and all have read the one before it
            loader.bring(ring + (slot == 0 ? Format::STAGES - 1 : slot - 1) * Shape::STAGE_BYTES);
            const uint32_t stage = ring + slot * Shape::STAGE_BYTES;
            multiply_stage<Format>(sums, stage + row_warp * Shape::UNITS * Format::STAGE_UNIT_BYTES,
                                   stage + Shape::TOKENS_AT + first_token * PANEL_ROW_BYTES, panel % Format::BLOCK_PANELS, fours);
            if (++slot == Format::STAGES) slot = 0;
        }
#pragma unroll
        for (int u = 0; u < Shape::UNITS; u++) {
            if (unit + u < matrix.units) store_unit<Format>(p, layer, phase, tile, unit + u, first_token, sums[u]);
        }
    }
    copies_wait_all();
}

// Blocks that run at once.
template <class Format> int grouped_blocks() {
    static const int count = [] {
        int device = 0, processors = 0, each = 0;
        constexpr int BYTES = GroupedShape<Format>::BYTES;
        if (cudaFuncSetAttribute(portable_grouped<Format>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES) != cudaSuccess ||
            cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, portable_grouped<Format>, GROUPED_THREADS, BYTES) != cudaSuccess) {
            return 0;
        }
        return processors * each;
    }();
    return count;
}

template <class Format> int launch_grouped(const ExpertdExpertsParams& p, cudaStream_t stream) {
    int blocks = grouped_blocks<Format>();
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    if (p.panel_rows / GROUPED_TOKENS + p.experts > GROUPED_MOST_TILES) return cudaErrorInvalidValue;
    if (p.blocks > 0) blocks = std::min(blocks, int(p.blocks));
    for (int phase = 0; phase < 2; phase++) {
        portable_grouped<Format><<<blocks, GROUPED_THREADS, GroupedShape<Format>::BYTES, stream>>>(p, phase);
        const cudaError_t code = cudaGetLastError();
        if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
}

} // namespace expertd
