// What the counts of a launch decide: the shapes of segments (Scheme) and the width of token tiles. All of it is here.
#pragma once

#include "experts.h"
#include "experts_formats.cuh"
#include "experts_layout.cuh"
#include "ptx.cuh"

namespace expertd {

constexpr int TILE_ROWS = 128;       // weight rows of a usual segment, 64 for each of two warpgroups (MXFP4: Mxfp4::TILE_ROWS)
constexpr int LOW_ROWS = 64;         // weight rows of a low segment, used if there are few experts
constexpr int LOW_SEGMENT_TOKENS = 32; // widest token tile of low segments
constexpr int TALL_ROWS = 256;       // weight rows of a tall segment, 128 per consumer warpgroup; halves the reads of tokens from L2
constexpr int PAIR_ROWS = 256;       // weight rows of a segment that the two blocks of a cluster share, half each

__device__ __forceinline__ int round_up_8(int n) { return (n + 7) & ~7; }
__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// How the persistent kernel divides weights and tokens into segments.
enum class Scheme : int32_t {
    STRIPS,          // a block has TILE_ROWS weight rows (LOW_ROWS where there are few segments) and a token tile
    TALL,            // a block has TALL_ROWS
    TOKENS_SHARED,   // the blocks of a pair have TILE_ROWS each and the same token tile, of which each loads half for both
    TURNS,           // the same, and each warpgroup has segments of its own
    WEIGHTS_SHARED,  // as TALL; the blocks of a pair have neighbouring token tiles, and each loads half of the weights for both
    TOKEN_ROWS,      // tokens are wgmma's M: ROW_TILE_TOKENS tokens and TALL_ROWS weight rows
    TOKEN_ROW_PAIRS, // the same in pairs that share weights
};
// The limits of schemes, each the number of rows from which the scheme was faster than the one that would run otherwise. Measured on one H200,
// `tune` and `counts` of the harness; EP4 is the load of one rank of four. Experts' kernel, the other scheme -> the scheme:
//
//   scheme           where                                       gain
//   STRIPS, low      few experts with at most 32 tokens          no figure of its own
//   TALL             bf16, 4 to 272 tokens an expert             10 % at 128 tokens, 4 % at 256; Qwen3 300 rows 304.7 -> 300.0
//   TOKENS_SHARED    tiles above 64 tokens, k from 2048 on       Mixtral 512 rows 10 %; with k of 768 4 % slower
//   TURNS            bf16, few wide experts, up to 64 tokens     Mixtral EP4 8 and 32 rows 211 -> 173 and 215.9 -> 193.8
//   WEIGHTS_SHARED   W8A8 without block_scales, two tiles        Qwen3 EP4 512 rows 102 -> 95; one tile for most experts: 42 % slower
//   TOKEN_ROWS       W8A8, 96 tokens an expert or crowded ones   Qwen3, Zipf 1.0, 512 and 1024 rows 205 -> 189 and 261 -> 234
//   TOKEN_ROW_PAIRS  bf16 and W8A8, from 224 tokens on           Qwen3 bf16 at 260 and 1029 tokens 195 -> 186, 633 -> 592; FP8 at 256 136 -> 132
constexpr int TALL_TOKENS = 144;     // TALL: widest token tile (registers)
constexpr int TALL_LEAST_MEAN = 4;   // least mean number of tokens of an expert, if none has more than LOW_SEGMENT_TOKENS
constexpr int TALL_MEAN = 272;       // largest mean number of tokens of an expert (two tiles)
constexpr int TALL_SEGMENTS = 5;     // least number of tall segments of down for every two SMs
constexpr int PAIR_TOKENS = 64;      // TOKENS_SHARED: if token tiles are wider than this
constexpr int PAIR_K = 2048;         // least k of every product; with less the coarser division costs more than it saves in L2
constexpr int WIDE_TOKENS = 64;      // TURNS: widest token tile
constexpr int WIDE_K = 4096;         // least k; down has at most one strip of TILE_ROWS per SM
constexpr int SHARED_MEAN = 112;     // WEIGHTS_SHARED: least mean number of tokens of an expert
constexpr int ROW_TILE_TOKENS = 128; // TOKEN_ROWS: tokens of a full tile
constexpr int ROW_TILE_MEAN = 96;    // W8A8: least mean number of tokens of an expert
constexpr int CROWDED_PART = 5;      // W8A8: or if experts of more than one tile have at least this part of all tokens
constexpr int ROW_TILE_LEAST = 80;   // tiles of at most this many tokens keep weights as M
constexpr int ROW_PAIR_MEAN = 224;   // TOKEN_ROW_PAIRS: least mean number of tokens of an expert
constexpr int ROW_PAIR_WIDE_MEAN = 384;  // bf16: that mean where pairs would otherwise share tokens (PAIR_K)
constexpr int ROW_PAIR_FEW_MEAN = 1024;  // bf16: that mean with fewer than ROW_PAIR_EXPERTS experts, whose last tiles weigh more
constexpr int ROW_PAIR_EXPERTS = 16;

constexpr int PACED_BYTES = 64 * 1024; // bytes of weights that a block has under way at once if weights are paced: tiles are narrow,
constexpr int PACED_WEIGHTS = 2500000; // and an SM reads at most this many bytes of weights in the step

// Of the rank's experts, in all threads.
struct Counts {
    int longest; // largest number of tokens of an expert
    int active;  // number of experts with tokens
    int all;     // number of tokens of all experts
    int tiles_64, tiles_128; // numbers of tiles of up to that many tokens (FEW_TOKENS_ALONE)
    int crowded;                      // number of tokens of experts with more than one tile of MAX_TOKENS (W8A8)
};

// Whether rows are FP8.
template <class Format> constexpr bool FP8_ROWS = Format::PANEL_ELEMENTS == BLOCK_K;

constexpr bool rows_are_tokens(Scheme s) { return s == Scheme::TOKEN_ROWS || s == Scheme::TOKEN_ROW_PAIRS; }
constexpr bool weights_are_shared(Scheme s) { return s == Scheme::WEIGHTS_SHARED || s == Scheme::TOKEN_ROW_PAIRS; }
constexpr bool in_pairs(Scheme s) { return weights_are_shared(s) || s == Scheme::TOKENS_SHARED || s == Scheme::TURNS; }
constexpr bool is_tall(Scheme s) { return s == Scheme::TALL || s == Scheme::WEIGHTS_SHARED || rows_are_tokens(s); }

// The scheme that p.tile_rows asks for.
template <class Format> __device__ __forceinline__ Scheme given_scheme(int tile_rows, bool token_rows) {
    if (tile_rows == EXPERTD_TILE_TOKEN_ROWS && token_rows) return Scheme::TOKEN_ROWS;
    if (tile_rows == EXPERTD_TILE_TOKEN_PAIRS && token_rows) return Scheme::TOKEN_ROW_PAIRS;
    if (FP8_ROWS<Format>) return tile_rows == PAIR_ROWS && Format::TOKEN_ROWS ? Scheme::WEIGHTS_SHARED : Scheme::TALL;
    return tile_rows == EXPERTD_TILE_TALL ? Scheme::TALL : tile_rows == EXPERTD_TILE_TURNS ? Scheme::TURNS : tile_rows == PAIR_ROWS ? Scheme::TOKENS_SHARED : Scheme::STRIPS;
}

// Whether tokens are wgmma's M, which is faster for many tokens. In W8A8 it is enough that many tokens are of crowded experts, since small
// tiles keep weights as M.
template <class Format> __device__ __forceinline__ bool tokens_as_rows(const ExpertdExpertsParams& p, const Counts& c) {
    if (c.active == 0) return false;
    if (FP8_ROWS<Format>) return c.all >= ROW_TILE_MEAN * c.active || c.crowded * CROWDED_PART >= c.all;
    const int wide = c.active < ROW_PAIR_EXPERTS ? ROW_PAIR_FEW_MEAN : ROW_PAIR_WIDE_MEAN;
    return c.all >= (min(p.hidden, p.inter) >= PAIR_K ? wide : ROW_PAIR_MEAN) * c.active;
}

// Whether segments are tall. They save reads of tokens from L2, which limit steps of a few hundred tokens per expert; with few
// tokens they are about 1 % faster. With more tokens, wide token tiles read no more than tall segments do; with too few tall
// segments, SMs would be idle.
__device__ __forceinline__ bool tall_segments(const ExpertdExpertsParams& p, const Counts& c) {
    const bool few = c.longest <= LOW_SEGMENT_TOKENS && c.all < TALL_LEAST_MEAN * c.active;
    if (few || c.all > TALL_MEAN * c.active) return false;
    const int tiles = c.active * (2 * c.all > TALL_MEAN * c.active ? 2 : 1);
    return 2 * tiles * (p.hidden / TALL_ROWS) >= TALL_SEGMENTS * int(gridDim.x);
}

// A model of the time that weights of 4 and 8 bits take where FEW_TOKENS_ALONE: ns of an SM for a unit of weights (16 rows of 128 k) of a tile,
// and further ns for each of the tile's tokens. Fitted to launches with even, skewed (Zipf 1.0) and equal counts on one H200
// (docs/measurements/gpu-experts.md, "Skewed routing").
struct Cost {
    float tile, token;
    __host__ __device__ constexpr float of(int tiles, int tokens) const { return tile * tiles + token * tokens; }
};
struct Costs {
    Cost narrow; // tiles of up to 64 tokens
    Cost wide;   // tiles of up to 128, which leave room for one k block in a stage
};
template <class Format> constexpr Costs costs_of();
template <> constexpr Costs costs_of<Int4>() { return {{47.5f, 0.95f}, {86, 0.6f}}; }
template <> constexpr Costs costs_of<Int4Zeros>() { return costs_of<Int4>(); }
template <> constexpr Costs costs_of<Nvfp4>() { return {{50.5f, 0.95f}, {71.5f, 0.75f}}; }
template <> constexpr Costs costs_of<Mxfp4>() { return {{50.5f, 0.65f}, {63, 0.75f}}; }
template <> constexpr Costs costs_of<Mxfp8>() { return {{66, 1.9f}, {94, 1.4f}}; }

// The widest token tile of a scheme with weights as M if nothing is given.
template <class Format> __device__ __forceinline__ int tile_tokens_for(const Counts& c, Scheme scheme) {
    const int longest = c.longest;
    if (scheme == Scheme::TALL && !FP8_ROWS<Format>) return longest <= 64 ? 64 : longest <= 128 ? 128 : TALL_TOKENS;
    if constexpr (Format::FEW_TOKENS_ALONE) {
        if (longest > 64) {
            constexpr Costs COSTS = costs_of<Format>();
            if (COSTS.narrow.of(c.tiles_64, c.all) <= COSTS.wide.of(c.tiles_128, c.all)) return 64;
            return min(divide_up(longest, 16) * 16, Format::MAX_TOKENS);
        }
    }
    if (!Format::TOKEN_ROWS && FP8_ROWS<Format> && longest > 32) return min(round_up_8(longest), Format::MAX_TOKENS);
    const int tile = longest <= 32 ? 32 : longest <= 64 ? 64 : longest <= 128 ? 128 : longest <= 192 ? 192 : 256;
    return min(tile, Format::MAX_TOKENS);
}

template <class Format>
__device__ __forceinline__ Scheme scheme_for(const ExpertdExpertsParams& p, const ExpertdLayerWeights& layer, const Counts& c) {
    if (Format::WIDENS) { // the kernel for many rows
        const bool pairs = p.tile_rows != 0 ? p.tile_rows == EXPERTD_TILE_TOKEN_PAIRS : c.all >= ROW_PAIR_MEAN * c.active;
        return pairs ? Scheme::TOKEN_ROW_PAIRS : Scheme::TOKEN_ROWS;
    }
    // W8A8 needs 128 neighbouring weight rows with the same scales for tokens as M.
    const bool token_rows = Format::TOKEN_ROWS && (!FP8_ROWS<Format> || layer.block_scales != 0);
    if (p.tile_rows != 0) return given_scheme<Format>(p.tile_rows, token_rows);
    if (token_rows && p.tile_tokens == 0 && tokens_as_rows<Format>(p, c)) {
        return c.all >= ROW_PAIR_MEAN * c.active ? Scheme::TOKEN_ROW_PAIRS : Scheme::TOKEN_ROWS;
    }
    if (FP8_ROWS<Format>) {
        // Sharing weights pays off for two token tiles per expert. With more tiles, rounding their number up to an even one costs more than
        // is saved in L2; with one, which most experts have if a few have many tokens, halving it does.
        return Format::TOKEN_ROWS && c.longest > Format::MAX_TOKENS && c.longest <= 2 * Format::MAX_TOKENS && c.all >= SHARED_MEAN * c.active ? Scheme::WEIGHTS_SHARED : Scheme::TALL;
    }
    if (Format::FEW_TOKENS_ALONE) return Scheme::STRIPS;
    if (Format::HALVES && p.tile_tokens == 0 && tall_segments(p, c)) return Scheme::TALL;
    const int k = min(p.hidden, p.inter);
    if (Format::HALVES && c.longest <= WIDE_TOKENS && k >= WIDE_K && c.active * divide_up(p.hidden, TILE_ROWS) <= int(gridDim.x)) return Scheme::TURNS;
    const int tile = p.tile_tokens != 0 ? p.tile_tokens : tile_tokens_for<Format>(c, Scheme::STRIPS);
    return tile > PAIR_TOKENS && k >= PAIR_K ? Scheme::TOKENS_SHARED : Scheme::STRIPS;
}

} // namespace expertd
