// Parameters of the kernels that move a step's tokens, shared with Rust (params.rs mirrors every struct here, and both
// sides assert the sizes). One struct per kernel, passed by value.
//
// Words: N ranks, T tokens of one rank (counts live on the device), k choices per token, H elements per row, E experts.
#pragma once
#include <cstdint>

namespace expertd {

constexpr uint32_t kMaxRanks = 8;
constexpr uint32_t kMaxTopK = 32;
// Blocks that send in one exchange, at most: each has its own flag at every peer.
constexpr uint32_t kMaxBlocks = 128;
// Parts that a block of combine sends and awaits on their own, at most: each has its own flag.
constexpr uint32_t kMaxChunks = 16;
// Experts of one layer, at most (the gate keeps a token's scores in registers of one warp).
constexpr uint32_t kMaxExperts = 512;

// Low bits of a flag: the sequence; the others are the generation.
constexpr uint32_t kSequenceBits = 40;

// Element types as on the wire (types.rs).
enum DType : uint32_t { kBf16 = 1, kF16 = 2, kF32 = 3 };

// First byte of the error word; the second is the peer (or 0xff), the third the phase.
enum Fault : uint32_t { kNone = 0, kTimeout = 1, kBadCount = 2, kAhead = 3 };
enum Phase : uint32_t { kCopyIn = 0, kGate, kPrepare, kDispatch, kExperts, kCombine, kCopyOut, kPhases };

// One slot's state in device memory. copy_in writes the step's fields. Dispatch and combine each read a sequence of
// their own and write the other's, so that no block can see a number change under it.
struct SlotState {
    uint64_t sequence;       // of the next dispatch, starting at 1; combine's first block advances it
    uint32_t error;          // 0, or what ended this generation
    uint32_t tokens;         // rows of this rank in this step
    uint32_t layer;          // index into device tables
    uint32_t given_routing;  // 1: all of the step's rows came with their routing
    uint32_t received;       // rows that arrived for local experts; counted by combine
    uint32_t out_dtype;      // of combine's rows
    uint64_t step;
    uint32_t ticket;         // blocks that are done with the running kernel; the last one sets it back to 0
    uint32_t epoch;          // passes of the barrier between a rank's own blocks
    uint64_t exchange;       // sequence of the next combine; dispatch's first block sets it
    uint64_t begin_ns[kPhases];  // globaltimer stamps
    uint64_t end_ns[kPhases];
};
static_assert(sizeof(SlotState) == 168, "mirrored in params.rs");

// The host's description of a step, in memory mapped into the device.
struct StepRequest {
    uint64_t step;
    uint32_t tokens;
    uint32_t layer;
    uint32_t given_routing;  // 1: all rows came with their routing
    uint32_t out_dtype;      // of the rows in device memory before copy_out
    uint32_t segments;       // entries of the segment table
    uint32_t reserved;
};
static_assert(sizeof(StepRequest) == 32, "mirrored in params.rs");

// A run of rows in staging, in mapped memory. All rows of a step belong to one.
struct Segment {
    uint64_t byte_offset;  // multiple of 16
    uint32_t first_row;
    uint32_t rows;
    uint32_t dtype;
    uint32_t flags;
};
static_assert(sizeof(Segment) == 24, "mirrored in params.rs");
enum RowFlags : uint32_t { kGivenRouting = 1, kSharedExperts = 2 };

// Where a row stands in staging, what it is, and its segment's flags.
struct RowPlace {
    uint64_t byte_offset;
    uint32_t dtype;
    uint32_t flags;
};
static_assert(sizeof(RowPlace) == 16, "mirrored in params.rs");

// What the device tells the host, in mapped memory: `step` is stored last, with release.
struct Completion {
    uint64_t step;
    uint32_t error;
    uint32_t received;     // rows that arrived for local experts
    uint32_t assignments;  // pairs of row and local expert
    uint32_t reserved;
    uint64_t begin_ns[kPhases];
    uint64_t end_ns[kPhases];
};
static_assert(sizeof(Completion) == 136, "mirrored in params.rs");

// One rank's view of the EP group and of one slot's window.
struct Group {
    uint8_t* windows[kMaxRanks];  // this slot's region at every rank, own one included
    SlotState* state;
    uint64_t generation;          // already shifted: generation << kSequenceBits
    uint64_t deadline_ns;         // of each wait
    uint32_t rank;
    uint32_t ranks;
    uint32_t hidden;              // multiple of 8
    uint32_t top_k;
    uint32_t experts;             // contiguous ranges; the first E % N ranks own one more
    uint32_t max_tokens;          // per rank
    uint32_t delay_ns;            // for tests: blocks wait up to this long, at random, before they send
    uint32_t chunk;               // pieces of rows that a block of combine sends before it flags them, at least; 0: default
    // Offsets in a window region, bytes.
    uint64_t dispatch_flags;      // u64 [N][kMaxBlocks], by source
    uint64_t combine_flags;       // u64 [N][kMaxBlocks][kMaxChunks], by source
    uint64_t meet_flags;          // u64 [N], by source
    uint64_t counts;              // u32 [N]: tokens of every source
    uint64_t ids;                 // i32 [N][max_tokens][k]
    uint64_t weights;             // f32 [N][max_tokens][k]
    uint64_t rows;                // bf16 [N][max_tokens][H], or FP8 rows, which are shorter
    uint64_t partials;            // bf16 [N][max_tokens][H]: own tokens, reduced by each expert rank
};
static_assert(sizeof(Group) == 184, "mirrored in params.rs");

// Pushes every token's row once to each rank that owns one of its experts, ids and weights to all; lists meanwhile, on
// the receiving side, the rows of every local expert. Row s * max_tokens + t of a window's `rows` is token t of source s.
// In a group of one rank nothing is pushed: row t is token t, where it stands.
struct DispatchParams {
    Group group;
    const void* tokens;          // bf16 [T][H]
    const int32_t* topk_ids;     // [T][k]
    const float* topk_weights;   // [T][k]
    uint32_t* expert_offsets;    // [local experts + 1]
    uint32_t* row_index;         // [assignments]: row of each, experts in order, then (source, token, choice)
    float* row_weight;           // [assignments]
    uint32_t* position;          // [N][max_tokens][k]: place of a local choice in row_index; others untouched
    uint32_t* block_counts;      // scratch [kMaxBlocks][local experts]
    uint32_t fp8_rows;           // 1: rows are quantised as they are sent; a row of the window then takes fp8_row_bytes()
    uint32_t power_of_two_scales;  // of these rows
};
static_assert(sizeof(DispatchParams) == 256, "mirrored in params.rs");

// Bytes of a row that is pushed in FP8: e4m3 [H], then f32 [ceil(H / 128)] scales. H is a multiple of 64 then.
inline constexpr uint32_t kScaleElements = 128;
#ifdef __CUDACC__
__host__ __device__
#endif
constexpr uint32_t fp8_row_bytes(uint32_t hidden) {
    return (hidden + (hidden + kScaleElements - 1) / kScaleElements * 4 + 15) / 16 * 16;
}

// Reduces expert outputs per row over the local experts, in the order of a token's choices, pushes them to the source
// ranks, and reduces there over ranks, in rank order. All sums are f32; partials travel as bf16.
struct CombineParams {
    Group group;
    const void* expert_out;      // [assignments][H], bf16, routing weight included
    const uint32_t* position;    // from dispatch
    const int32_t* topk_ids;     // own tokens' [T][k]
    const void* shared;          // bf16 [T][H] to be added, or null
    const RowPlace* places;      // tells which rows want the shared experts; null: all
    void* out;                   // [T][H] of SlotState::out_dtype
    uint64_t* experts_done;      // mapped, gets the step's number when its experts have ended; or null
};
static_assert(sizeof(CombineParams) == 240, "mirrored in params.rs");

enum ScoreFn : uint32_t { kSoftmax = 0, kSoftmaxOfChosen = 1, kSigmoid = 2, kSqrtSoftplus = 3, kSparseMixer = 4 };
enum Choice : uint32_t { kByScores = 0, kByLogits = 1, kByTokenIds = 2 };
enum GroupScore : uint32_t { kNoGroups = 0, kGroupMax = 1, kGroupTopTwoSum = 2 };
enum Normalise : uint32_t { kNo = 0, kSum = 1, kSumAtLeast = 2 };

// One layer of the table that the gate reads.
struct GateLayer {
    const void* weight;            // bf16 [E][H]
    const void* weight_low;        // bf16 [E][H]: what rounding took from weights that are stored in more than bf16; null: nothing
    const float* logit_bias;       // [E] or null
    const float* correction_bias;  // [E] or null
    const int32_t* token_table;    // [vocab][k] or null
};
static_assert(sizeof(GateLayer) == 40, "mirrored in params.rs");

// Routing function of a shape of layers, in the terms of GateSpec.
struct GateParams {
    SlotState* state;
    const GateLayer* layers;     // indexed by SlotState::layer
    const void* tokens;          // bf16 [T][H]
    const void* tokens_low;      // bf16 [T][H]: what rounding took from rows that came in more than bf16; null: not known
    const int32_t* token_ids;    // [T], for layers that route by id
    float* logits;               // scratch [max_tokens][E]
    uint32_t* tickets;           // scratch, zero before the first step: [tiles of tokens]
    const RowPlace* places;      // tells which rows brought their routing; null: none
    int32_t* topk_ids;
    float* topk_weights;
    uint32_t hidden;
    uint32_t experts;
    uint32_t top_k;
    uint32_t max_tokens;
    uint32_t score_fn;
    uint32_t choice;
    uint32_t group_score;
    uint32_t groups;
    uint32_t groups_kept;
    uint32_t normalise;
    float epsilon;               // of kSum; the floor of kSumAtLeast
    float scale;
    float jitter;                // of kSparseMixer
    uint32_t vocab;
};
static_assert(sizeof(GateParams) == 136, "mirrored in params.rs");

// Rows from mapped host staging to bf16 in device memory; the step's description to SlotState.
struct CopyInParams {
    SlotState* state;
    const StepRequest* request;     // mapped
    const Segment* segments;        // mapped
    const uint8_t* staged_rows;     // mapped
    const int32_t* staged_ids;      // mapped, [T][k], read for rows that bring their routing
    const float* staged_weights;    // mapped
    const int32_t* staged_token_ids;  // mapped, [T], or null
    void* tokens;
    void* tokens_low;               // bf16 [T][H]: rows minus `tokens`, or null; written where a row of the step is not bf16
    int32_t* topk_ids;
    float* topk_weights;
    int32_t* token_ids;
    RowPlace* places;               // [T]
    uint64_t staged_bytes;          // of staged_rows
    uint32_t hidden;
    uint32_t top_k;
    uint32_t max_tokens;
    uint32_t experts;
    uint32_t max_segments;          // entries that may be read at `segments`
    uint32_t reserved;
};
static_assert(sizeof(CopyInParams) == 136, "mirrored in params.rs");

// Result rows to where their tokens stood in mapped host staging, in their dtype; then the completion record.
struct CopyOutParams {
    SlotState* state;
    const void* out;                // [T][H] of out_dtype
    const int32_t* topk_ids;
    const float* topk_weights;
    const RowPlace* places;
    const uint32_t* assignments;    // their number: the last of expert_offsets
    uint8_t* staged_rows;           // mapped
    int32_t* staged_ids;            // mapped: the routing that was used
    float* staged_weights;          // mapped
    Completion* completion;         // mapped
    uint32_t hidden;
    uint32_t top_k;
    uint32_t max_tokens;
    uint32_t reserved;
};
static_assert(sizeof(CopyOutParams) == 96, "mirrored in params.rs");

// Assignments of the shared experts, which see every token: row t is token t.
struct SharedParams {
    const SlotState* state;
    const void* tokens;         // bf16 [T][H]
    const void* const* gates;   // per layer: bf16 [H], the output is multiplied with the sigmoid of its product; or null
    uint32_t* expert_offsets;   // [2]
    uint32_t* row_index;        // [T]
    float* row_weight;          // [T]
    uint32_t hidden;
    uint32_t max_tokens;
};
static_assert(sizeof(SharedParams) == 56, "mirrored in params.rs");

// A stand-in for experts, for tests and for timing the exchange alone: every assignment's row times its weight and
// (1 + global expert / E).
struct ScaleParams {
    Group group;
    const void* rows;            // bf16, where the experts read them: the window's or, of a group of one rank, its tokens
    const uint32_t* expert_offsets;
    const uint32_t* row_index;
    const float* row_weight;
    void* out;                   // bf16 [assignments][H]
};
static_assert(sizeof(ScaleParams) == 224, "mirrored in params.rs");

}  // namespace expertd

// Launchers. `count` parameter structs: 1 for a rank of its own, or one per virtual rank of a loopback group, whose
// blocks then run in one launch. They return cudaError_t.
extern "C" {
int expertd_gate(const expertd::GateParams* params, uint32_t count, uint32_t tokens_at_most, void* stream);
int expertd_dispatch(const expertd::DispatchParams* params, uint32_t count, uint32_t blocks, void* stream);
int expertd_combine(const expertd::CombineParams* params, uint32_t count, uint32_t blocks, void* stream);
int expertd_meet(const expertd::Group* groups, uint32_t count, uint32_t blocks, void* stream);
int expertd_scale(const expertd::ScaleParams* params, uint32_t count, uint32_t blocks, void* stream);
int expertd_shared(const expertd::SharedParams* params, uint32_t count, uint32_t blocks, void* stream);
int expertd_copy_in(const expertd::CopyInParams* params, uint32_t count, uint32_t blocks, void* stream);
int expertd_copy_out(const expertd::CopyOutParams* params, uint32_t count, uint32_t blocks, void* stream);
const char* expertd_error_string(int code);
}
