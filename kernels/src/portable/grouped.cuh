// The experts' products of the portable path for more than a few rows: a grouped product of bf16 with mma.sync, on the same packed weights as
// the other kernels. One launch computes h from gate and up, a second one y from down; h is bf16 [assignments][inter].
//
// Blocks take tiles in turn. The stages of a tile arrive in a ring (grouped_ring.cuh) while the tensor cores multiply earlier ones. A sum is
// added up in the order of k by one warp, so the bits of a row depend neither on the division of work nor on other rows.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "../modules.h"
#include "experts.h"
#include "grouped_ring.cuh"
#include "grouped_store.cuh"

namespace expertd {

// Multiplies a tile, of which each warp has up to PAIRS * 16 tokens.
template <class Shape, int PAIRS>
__device__ __forceinline__ void multiply_tile(GroupedRing<Shape>& ring, float (&sums)[Shape::UNITS][2 * Shape::PAIRS][4], int panels, int row_warp, int token_warp) {
    using Format = typename Shape::Format;
    constexpr int UNITS = Shape::UNITS, STEPS = PANEL_K / 16;
    const int lane = threadIdx.x % 32, row = lane % 8;
    const uint32_t weights = row_warp * UNITS * Format::ELEMENT_BYTES, scales = Shape::SCALES_AT + row_warp * UNITS * Format::SCALE_BYTES;
    // Of a matrix of eight tokens and eight k a lane gives the address of a row: matrices are two groups of tokens by two halves of a step.
    const uint32_t tokens = Shape::TOKENS_AT + (token_warp * PAIRS * 16 + lane / 16 * 8 + row) * PANEL_ROW_BYTES + ((lane / 8 % 2 ^ row) * 16);
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
#pragma unroll
        for (int c = 0; c < 2 * PAIRS; c++) sums[u][c][0] = sums[u][c][1] = sums[u][c][2] = sums[u][c][3] = 0.0f;
    }
    typename Format::template Weights<UNITS> of;
    uint32_t a[UNITS][4];
    uint4 b[2];
    uint32_t stage;
    const auto begin_stage = [&](int panel) {
        stage = ring.next();
        of.load(stage + weights, stage + scales, panel % Format::BLOCK_PANELS);
    };
    begin_stage(0);
#pragma unroll
    for (int u = 0; u < UNITS; u++) of.fragment(0, u, a[u]);
    b[0] = load_matrices(stage + tokens);
#pragma unroll 1
    for (int panel = 0; panel < panels; panel++) {
        const bool more = panel + 1 < panels;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const bool last = step + 1 == STEPS;
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                const int at = step * PAIRS + pair, next = (at + 1) % (STEPS * PAIRS);
                const bool ends = pair + 1 == PAIRS; // a unit's weights of the next step replace those that have been multiplied
                if (last && ends) {
                    ring.release();
                    if (more) begin_stage(panel + 1);
                }
                if (!(last && ends) || more) b[(at + 1) % 2] = load_matrices(((stage + tokens) ^ (next / PAIRS * 32)) + next % PAIRS * 16 * PANEL_ROW_BYTES);
                const uint4 now = b[at % 2];
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    mma_16x8x16(sums[u][2 * pair], a[u], now.x, now.y);
                    mma_16x8x16(sums[u][2 * pair + 1], a[u], now.z, now.w);
                    if (ends && (!last || more)) of.fragment(next / PAIRS, u, a[u]);
                }
                // The copies of a later stage are spread over the steps but the last one.
                constexpr int SLOTS = (STEPS - 1) * PAIRS;
                if (at == 0) ring.begin_copies();
                if (at < SLOTS) {
#pragma unroll
                    for (int c = at * Shape::COPIES / SLOTS; c < (at + 1) * Shape::COPIES / SLOTS; c++) ring.copy(c);
                }
                if (at == SLOTS - 1) ring.end_copies();
            }
        }
    }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::THREADS, Shape::BLOCKS) portable_grouped(const __grid_constant__ ExpertdExpertsParams p, int phase, int stages) {
    extern __shared__ __align__(128) unsigned char memory[];
    GroupedShared& shared = *reinterpret_cast<GroupedShared*>(memory);
    if (threadIdx.x < stages) {
        barrier_init(&shared.full[threadIdx.x], Shape::THREADS);
        barrier_init(&shared.empty[threadIdx.x], Shape::THREADS / 32 * WARP_ARRIVALS);
    }
    // The barriers in there make the above visible, too.
    const int token_tiles = make_grouped_tables<Shape::THREADS, Shape::TOKENS>(p, shared.tables, reinterpret_cast<int32_t*>(memory + sizeof(GroupedShared)));
    if (token_tiles <= 0) return;
    const ExpertdLayerWeights layer = p.layers[p.layer != nullptr ? __ldcg(p.layer) : 0];
    const GroupedMatrix matrix(p, layer, phase);
    const int warp = uniform(threadIdx.x / 32), row_warp = warp % Shape::ROW_WARPS, token_warp = warp / Shape::ROW_WARPS;
    const int strips = matrix.strips<Shape>(), all = token_tiles * strips;
    GroupedRing<Shape> ring(p, shared, matrix, phase, all, stages);
    for (int id = blockIdx.x; id < all; id += gridDim.x) {
        const GroupedTile tile = tile_of<Shape>(p, shared.tables, strips, id);
        const int pairs = divide_up(tile.tokens, 16 * Shape::TOKEN_WARPS);
        float sums[Shape::UNITS][2 * Shape::PAIRS][4];
        const auto multiply = [&](auto of) {
            constexpr int PAIRS = decltype(of)::value;
            multiply_tile<Shape, PAIRS>(ring, sums, matrix.panels, row_warp, token_warp);
            store_tile<Shape, PAIRS>(p, layer, phase, tile, tile.row / UNIT_ROWS + row_warp * Shape::UNITS, matrix.units, token_warp * PAIRS * 16, sums);
        };
        if constexpr (Shape::PAIRS == 8) {
            if (pairs > 6) {
                multiply(Constant<8>());
                continue;
            }
            if (pairs > 4) {
                multiply(Constant<6>());
                continue;
            }
        }
        if (pairs >= 4) multiply(Constant<4>());
        else if (pairs == 3) multiply(Constant<3>());
        else if (pairs == 2) multiply(Constant<2>());
        else multiply(Constant<1>());
    }
    copies_wait_all();
}

// 256 weight rows and 128 tokens are as much as 255 registers of eight warps allow. Where weights are widened, every warp has all tokens, so
// that each element is widened once.
template <class Format> using GroupedUsual = std::conditional_t<Format::ROW_SCALES, GroupedShape<Format, 8, 1, 2, 8>, GroupedShape<Format, 4, 2, 4, 4>>;

struct GroupedFitting {
    int blocks, stages; // no blocks: the kernel does not run on this device
};

// One block of a multiprocessor, with as many stages as fit.
template <class Shape> GroupedFitting grouped_fitting() {
    static const GroupedFitting found = [] {
        GroupedFitting fits = {0, 0};
        int device = 0, processors = 0, shared = 0, each = 0;
        if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
            cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
            return fits;
        }
        // For tests: the shared memory of smaller cards, in bytes.
        if (const char* least = std::getenv("EXPERTD_CUDA_SHARED_BYTES")) shared = std::min(shared, std::atoi(least));
        // The shared memory of a multiprocessor is that of its largest block and 1 KB more, which every block takes besides its own.
        const auto fitting = [&](int blocks) { return std::min(GROUPED_MOST_STAGES, ((shared + 1024) / blocks - 1024 - grouped_bytes<Shape>(0)) / Shape::STAGE_BYTES); };
        const int stages = fitting(Shape::BLOCKS) >= 2 ? fitting(Shape::BLOCKS) : fitting(1);
        if (stages < 2) return fits;
        const int bytes = grouped_bytes<Shape>(stages);
        if (cudaFuncSetAttribute(portable_grouped<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess ||
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, portable_grouped<Shape>, Shape::THREADS, bytes) != cudaSuccess || each == 0) {
            return fits;
        }
        return GroupedFitting{processors * each, stages};
    }();
    return found;
}

template <class Shape> int launch_grouped(const ExpertdExpertsParams& p, cudaStream_t stream) {
    GroupedFitting fits = grouped_fitting<Shape>();
    if (fits.blocks == 0) return cudaErrorInvalidConfiguration;
    if (p.panel_rows / Shape::TOKENS + p.experts > GROUPED_MOST_TILES) return cudaErrorInvalidValue;
    if (p.blocks > 0) fits.blocks = std::min(fits.blocks, int(p.blocks));
    for (int phase = 0; phase < 2; phase++) {
        portable_grouped<Shape><<<fits.blocks, Shape::THREADS, grouped_bytes<Shape>(fits.stages), stream>>>(p, phase, fits.stages);
        const cudaError_t code = cudaGetLastError();
        if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
}

} // namespace expertd
