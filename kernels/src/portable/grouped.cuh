// The experts' products of the portable path for more than a few rows: a grouped product of bf16 with mma.sync, on the same packed weights as
// the other kernels. One launch computes h from gate and up, a second one y from down; h is bf16 [assignments][inter].
//
// Blocks draw tiles from a counter, so that blocks with neighbouring tiles read the same weights at the same time. The stages of a tile arrive
// in a ring (grouped_ring.cuh) while the tensor cores multiply earlier ones. A sum is added up in the order of k by one warp, so the bits of a
// row depend neither on the division of work nor on other rows.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "../modules.h"
#include "experts.h"
#include "grouped_ring.cuh"
#include "grouped_store.cuh"

namespace expertd {

// Calls `f` with the constants from 0 on.
template <int COUNT, int I = 0, class F> __device__ __forceinline__ void unrolled(const F& f) {
    if constexpr (I < COUNT) {
        f(Constant<I>());
        unrolled<COUNT, I + 1>(f);
    }
}

// Multiplies a tile, of which the warp has up to PAIRS * 16 tokens, beginning at `first`. A unit's weights are loaded while the one before is
// multiplied, and the tokens of a step as soon as those of the step before have been used. Few fragments are held at a time, as registers are
// short.
template <class Shape, int PAIRS>
__device__ __forceinline__ void multiply_tile(GroupedRing<Shape>& ring, float (&sums)[Shape::UNITS][Shape::PAIRS][2][4], int panels, int row_warp,
                                              int first) {
    using Format = typename Shape::Format;
    constexpr int UNITS = Shape::UNITS, PARTS = PANEL_K / 16 * UNITS; // a part is a unit times a step of 16 k
    const int lane = threadIdx.x % 32, row = lane % 8;
    const uint32_t weights = row_warp * UNITS * Format::ELEMENT_BYTES, scales = Shape::SCALES_AT + row_warp * UNITS * Format::SCALE_BYTES;
    // Of a matrix of eight tokens and eight k a lane gives the address of a row: matrices are two halves of a step by two groups of tokens.
    const uint32_t tokens = Shape::TOKENS_AT + (first + lane / 8 % 2 * 8 + row) * PANEL_ROW_BYTES + ((lane / 16 ^ row) * 16);
    const auto load_tokens = [&](uint32_t stage, int step, int pair) {
        return load_matrices(((stage + tokens) ^ (step * 32)) + pair * 16 * PANEL_ROW_BYTES);
    };
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++) {
            float* of = sums[u][i / 2][i % 2];
            of[0] = of[1] = of[2] = of[3] = 0.0f;
        }
    }
    typename Format::template Weights<UNITS> of;
    uint32_t a[2][4];
    uint4 b[PAIRS];
    uint32_t stage = ring.next(false), next_stage = stage;
    of.load(stage + weights, stage + scales, 0);
    of.fragment(0, 0, a[0]);
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) b[pair] = load_tokens(stage, 0, pair);
    int half = 0; // of a block of two panels
    bool may_copy = false;
#pragma unroll 1
    for (int left = panels; left > 0; left--) {
        const bool more = left > 1;
        bool is_there = false;
        unrolled<PARTS>([&](auto index) {
            constexpr int at = decltype(index)::value, step = at / UNITS, u = at % UNITS, next = at + 1;
            constexpr bool ends = next == PARTS; // the stage has been read
            constexpr int FIRST = Shape::LATE_COPIES ? PARTS / 2 : 0, SLOTS = PARTS - 1 - FIRST, slot = at - FIRST; // over which copies are spread
            if constexpr (next == FIRST) may_copy = ring.is_empty();
            if constexpr (at == FIRST) ring.begin_copies(may_copy);
            if constexpr (at + 2 == PARTS) is_there = ring.is_full();
            if constexpr (ends) {
                ring.release();
                ring.end_copies();
                if constexpr (FIRST == 0) may_copy = ring.is_empty();
                if (more) {
                    next_stage = ring.next(is_there);
                    if (Format::BLOCK_PANELS > 1) half ^= 1;
                    of.load(next_stage + weights, next_stage + scales, half);
                }
            }
            if constexpr (!ends) of.fragment(next / UNITS, next % UNITS, a[next % 2]);
            else if (more) of.fragment(0, 0, a[next % 2]);
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                const uint32_t(&w)[4] = a[at % 2];
                const uint32_t t[4] = {b[pair].x, b[pair].y, b[pair].z, b[pair].w};
                mma_16x8x16(sums[u][pair][0], t, w[0], w[2]);
                mma_16x8x16(sums[u][pair][1], t, w[1], w[3]);
                if constexpr (u + 1 == UNITS) {
                    if constexpr (!ends) b[pair] = load_tokens(stage, step + 1, pair);
                    else if (more) b[pair] = load_tokens(next_stage, 0, pair);
                }
            }
            if constexpr (slot >= 0 && slot < SLOTS) ring.template copies<slot * Shape::COPIES / SLOTS, (slot + 1) * Shape::COPIES / SLOTS>();
        });
        stage = next_stage;
    }
}

// Calls `multiply` with the constant `pairs`, which is at least 1.
template <int PAIRS, class F> __device__ __forceinline__ void with_pairs(int pairs, const F& multiply) {
    if constexpr (PAIRS > 1) {
        if (pairs < PAIRS) {
            with_pairs<PAIRS - 1>(pairs, multiply);
            return;
        }
    }
    multiply(Constant<PAIRS>());
}

// Adds 1 to a counter if `adds` is true, and returns in `before` what it was. The compiler makes branches of atom.add, behind which it awaits the
// value; this one is awaited where it is used.
__device__ __forceinline__ void add_one_if(uint32_t* counter, bool adds, uint32_t& before) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;\n}" : "+r"(before) : "l"(counter), "r"(int(adds))
                 : "memory");
}

template <class Shape>
__global__ void __launch_bounds__(Shape::THREADS, Shape::BLOCKS)
    portable_grouped(const __grid_constant__ ExpertdExpertsParams p, const __grid_constant__ GroupedPhase phase) {
    extern __shared__ __align__(128) unsigned char memory[];
    GroupedShared& shared = *reinterpret_cast<GroupedShared*>(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < phase.stages; i++) {
            barrier_init(&shared.full[i], Shape::THREADS);
            barrier_init(&shared.empty[i], Shape::THREADS / 32 * WARP_ARRIVALS);
        }
        for (int i = 0; i < GROUPED_DRAWS; i++) barrier_init(&shared.drawn[i], 1);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *drawn_tiles(p, 1 - phase.phase) = 0;
    // The barriers in there make the above visible, too.
    int32_t* const scratch = reinterpret_cast<int32_t*>(memory + sizeof(GroupedShared));
    const int token_tiles = make_grouped_tables<Shape::THREADS>(p, shared.tables, scratch, phase.tokens);
    if (token_tiles <= 0) return;
    const ExpertdLayerWeights layer = p.layers[p.layer != nullptr ? __ldcg(p.layer) : 0];
    const int warp = uniform(threadIdx.x / 32), row_warp = warp % Shape::ROW_WARPS, token_warp = warp / Shape::ROW_WARPS;
    const int tiles = token_tiles * phase.strips;
    if (warp < phase.draws) store_draw<Shape>(p, shared, phase, tiles, warp, blockIdx.x + warp * gridDim.x);
    const bool plain = phase.phase == 0 ? layer.gate_up_bias == nullptr && p.activation == EXPERTD_SWIGLU && p.weight_on_input == 0
                                        : layer.down_bias == nullptr;
    GroupedRing<Shape> ring(p, phase, layer, shared);
    // A block draws until it has its share of the work, so all tiles are drawn. One whose tiles are small takes more of them.
    const int assignments = shared.tables.end[p.experts - 1] - __ldcg(p.expert_offsets);
    const int64_t all_work = int64_t(phase.strips) * (assignments + token_tiles * int64_t(TILE_WORK));
    const int share = int((all_work + gridDim.x - 1) / gridDim.x);
    int work = 0; // of the tiles that the block has drawn, in warp 0
    if (warp == 0) {
        for (int i = 0; i < phase.draws; i++) work += work_of(drawn_tile(shared, i));
    }
    for (int index = 0;; index++) {
        const GroupedTile tile = drawn_tile(shared, index);
        if (tile.tokens == 0) break;
        const bool draws = warp == 0 && work < share;
        uint32_t drawn = 0; // needed when this tile has been multiplied
        add_one_if(drawn_tiles(p, phase.phase), draws && threadIdx.x == 0, drawn);
        // The first token warps have one more pair of eight tokens if the number is odd. Warps that share a scheduler have both kinds.
        const int all = divide_up(tile.tokens, 16), pairs = divide_up(all - token_warp, Shape::TOKEN_WARPS);
        const int first = token_warp * divide_up(all, Shape::TOKEN_WARPS) * 16;
        float sums[Shape::UNITS][Shape::PAIRS][2][4];
        with_pairs<Shape::PAIRS>(pairs, [&](auto of) {
            multiply_tile<Shape, decltype(of)::value>(ring, sums, phase.panels, row_warp, first);
        });
        if (warp == 0) work += store_draw<Shape>(p, shared, phase, tiles, index + phase.draws, draws ? phase.draws * gridDim.x + uniform(drawn) : tiles);
        const int unit = tile.row / UNIT_ROWS + row_warp * Shape::UNITS;
        if (phase.phase == 0 && plain) store_tile<Shape, 0, true>(p, layer, tile, unit, phase.units, first, pairs, sums);
        else if (phase.phase == 0) store_tile<Shape, 0, false>(p, layer, tile, unit, phase.units, first, pairs, sums);
        else if (plain) store_tile<Shape, 1, true>(p, layer, tile, unit, phase.units, first, pairs, sums);
        else store_tile<Shape, 1, false>(p, layer, tile, unit, phase.units, first, pairs, sums);
    }
    copies_wait_all();
}

// 256 weight rows and 160 tokens are as much as 255 registers of eight warps allow, and two tiles then hold an expert of 256 tokens and some
// more. Where weights are widened, every warp has all tokens, so that each element is widened once, and 144 are the most.
template <class Format>
using GroupedUsual = std::conditional_t<Format::ROW_SCALES, GroupedShape<Format, 8, 1, 2, 9>, GroupedShape<Format, 4, 2, 4, 5>>;

// For experts with few tokens: widening weights takes longer than products, and the warps of two blocks hide each other's latencies.
template <class Format> using GroupedSmall = GroupedShape<Format, 8, 1, 2, 3, 2>;

struct GroupedFitting {
    int blocks; // 0: the kernel does not run on this device
    GroupedRoom room;
};

// One block of a multiprocessor, with the widest tiles and as many stages as fit.
template <class Shape> GroupedFitting grouped_fitting() {
    static const GroupedFitting found = [] {
        const GroupedFitting none = {};
        int device = 0, processors = 0, shared = 0, each = 0;
        if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
            cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
            return none;
        }
        // For tests: the shared memory of smaller cards, in bytes.
        if (const char* least = std::getenv("EXPERTD_CUDA_SHARED_BYTES")) shared = std::min(shared, std::atoi(least));
        // The shared memory of a multiprocessor is that of its largest block and 1 KB more, which every block takes besides its own.
        const auto fitting = [&](int blocks, int tokens) {
            return std::min(Shape::MOST_STAGES, ((shared + 1024) / blocks - 1024 - grouped_bytes<Shape>({0, tokens})) / Shape::stage_bytes(tokens));
        };
        GroupedRoom room = {};
        for (int blocks = Shape::BLOCKS; blocks >= 1 && room.stages < 2; blocks--) {
            for (const int tokens : {Shape::TOKENS, Shape::FEWER_TOKENS}) {
                if (room.stages < 2) room = {fitting(blocks, tokens), tokens};
            }
        }
        if (room.stages < 2) return none;
        const int bytes = grouped_bytes<Shape>(room);
        if (cudaFuncSetAttribute(portable_grouped<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess ||
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, portable_grouped<Shape>, Shape::THREADS, bytes) != cudaSuccess || each == 0) {
            return none;
        }
        return GroupedFitting{processors * each, room};
    }();
    return found;
}

template <class Shape> int launch_grouped(const ExpertdExpertsParams& p, cudaStream_t stream) {
    GroupedFitting fits = grouped_fitting<Shape>();
    if (fits.blocks == 0) return cudaErrorInvalidConfiguration;
    if (p.panel_rows / fits.room.tokens + p.experts > GROUPED_MOST_TILES) return cudaErrorInvalidValue;
    if (p.blocks > 0) fits.blocks = std::min(fits.blocks, int(p.blocks));
    for (int phase = 0; phase < 2; phase++) {
        const GroupedPhase of = GroupedPhase::of<Shape>(p, phase, fits.room);
        portable_grouped<Shape><<<fits.blocks, Shape::THREADS, grouped_bytes<Shape>(fits.room), stream>>>(p, of);
        const cudaError_t code = cudaGetLastError();
        if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
}

// bf16 has one shape.
template <class Format> int setup_grouped() {
    bool fits = grouped_fitting<GroupedUsual<Format>>().blocks > 0;
    if constexpr (Format::ROW_SCALES) fits = fits && grouped_fitting<GroupedSmall<Format>>().blocks > 0;
    return fits ? cudaSuccess : cudaErrorInvalidConfiguration;
}

template <class Format> int launch_grouped_format(const ExpertdExpertsParams& p, cudaStream_t stream) {
    if constexpr (Format::ROW_SCALES) {
        if (p.tile_tokens > 0 && p.tile_tokens <= GroupedSmall<Format>::TOKENS) return launch_grouped<GroupedSmall<Format>>(p, stream);
    }
    return launch_grouped<GroupedUsual<Format>>(p, stream);
}

} // namespace expertd
