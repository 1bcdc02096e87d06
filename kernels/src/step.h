// Parameters of the kernels that move a step's tokens: one struct per kernel, passed by value. The Rust structs in src/params mirror
// every struct here, and both sides assert the sizes.
//
// In comments: N ranks; T tokens of one rank, whose number is only known on the device; k experts per token; H elements per row; E experts.
#pragma once
#include <cstdint>

namespace expertd {

constexpr uint32_t kMaxRanks = 8;
constexpr uint32_t kMaxTopK = 32;
// Largest number of blocks that send in one exchange. Each block has its own flag at every peer.
constexpr uint32_t kMaxBlocks = 128;
// Largest number of chunks of a combine block. A block sends and awaits each chunk separately, with a flag of its own.
constexpr uint32_t kMaxChunks = 16;
// Largest number of experts of one layer. The gate keeps a token's scores in the registers of one warp.
constexpr uint32_t kMaxExperts = 512;

// Largest number of completion words that one step raises.
constexpr uint32_t kMaxRaises = 4;

// Number of low bits of a flag that hold the sequence. The other bits hold the generation.
constexpr uint32_t kSequenceBits = 40;

// Element types, with the codes that the API uses.
enum DType : uint32_t { kBf16 = 1, kF16 = 2, kF32 = 3 };

// First byte of the error word. The second byte is the peer (0xff: the host's request, 0xfe: its segments or ids), the third the phase.
enum Fault : uint32_t { kNone = 0, kTimeout = 1, kBadCount = 2, kAhead = 3 };
enum Phase : uint32_t { kCopyIn = 0, kGate, kPrepare, kDispatch, kExperts, kCombine, kCopyOut, kPhases };

// A call of a CUDA session that is complete when the step has ended: its completion word, which becomes 1, and the word that gets the
// call's number before. Both are in mapped memory of the client.
struct Raise {
    uint32_t* word;
    uint64_t* number;
    uint64_t call;
};
static_assert(sizeof(Raise) == 24, "mirrored in src/params");

// One slot's state in device memory. copy_in writes the step's fields. Dispatch reads `sequence` and writes `exchange`, combine
// reads `exchange` and writes `sequence`, so that no kernel changes a number that its own blocks still read.
struct SlotState {
    uint64_t sequence;       // sequence of the next dispatch, starting at 1; combine's first block advances it
    uint32_t error;          // error word: 0, or the fault that ended this generation
    uint32_t tokens;         // rows of this rank in this step
    uint32_t layer;          // index into the device tables
    uint32_t given_routing;  // 1: all of the step's rows came with their routing
    uint32_t received;       // number of rows that arrived for local experts; combine counts them
    uint32_t out_dtype;      // element type of combine's output rows
    uint64_t step;
    uint32_t ticket;         // number of blocks that have finished the running kernel; the last block resets it to 0
    uint32_t epoch;          // state of the barrier between a rank's own blocks; see rank_barrier() in common.cuh
    uint64_t exchange;       // sequence of the next combine, set by dispatch's first block
    uint64_t begin_ns[kPhases];  // readings of globaltimer
    uint64_t end_ns[kPhases];
    uint32_t raises;         // number of entries of `raise`
    uint32_t direct;         // 1: combine stores results at their places, and copy_out copies none
    Raise raise[kMaxRaises];
    uint64_t announced;      // a hint from copy_in to the gate, which may already wait behind it; see announcement() in common.cuh
    uint64_t reserved;       // the size is a multiple of 16
};
static_assert(sizeof(SlotState) == 288, "mirrored in src/params");

// The host's description of a step, in memory mapped into the device.
struct StepRequest {
    uint64_t step;
    uint32_t tokens;
    uint32_t layer;
    uint32_t given_routing;  // 1: all rows came with their routing
    uint32_t out_dtype;      // element type of the result rows in device memory, before copy_out converts them
    uint32_t segments;       // number of entries of the segment table
    uint32_t raises;         // number of entries of `raise`; always 0 at ranks other than rank 0
    uint32_t direct;         // 1: combine stores results at their places; all rows have the element type `out_dtype`
    uint32_t reserved[3];
    Raise raise[kMaxRaises];
};
static_assert(sizeof(StepRequest) == 144, "mirrored in src/params");

// Consecutive rows in staging or in an attached memory, described in mapped memory. Each row of a step belongs to one segment.
// Offsets are multiples of 16, or of the element size with kNarrowRows. If `memory` is not 0, they are device addresses, which the host
// has checked.
struct Segment {
    uint64_t byte_offset;    // of the rows, and in staging of their results
    uint64_t output_offset;  // of the results, if `memory` is not 0
    uint32_t first_row;
    uint32_t rows;
    uint32_t dtype;
    uint32_t flags;
    uint32_t memory;
    uint32_t reserved;
};
static_assert(sizeof(Segment) == 40, "mirrored in src/params");
// kNarrowRows: the rows in memory have CopyInParams::row_elements elements; the kernels pad them with zeros.
enum RowFlags : uint32_t { kGivenRouting = 1, kSharedExperts = 2, kNarrowRows = 4 };

// The place of a row's result, the row's element type, and its segment's flags.
struct RowPlace {
    uint8_t* output;
    uint32_t dtype;
    uint32_t flags;
};
static_assert(sizeof(RowPlace) == 16, "mirrored in src/params");

// Completion record of a step, which the device writes to mapped memory. It stores `step` last, with release ordering.
struct Completion {
    uint64_t step;
    uint32_t error;
    uint32_t received;     // number of rows that arrived for local experts
    uint32_t assignments;  // number of pairs of row and local expert
    uint32_t reserved;
    uint64_t begin_ns[kPhases];
    uint64_t end_ns[kPhases];
};
static_assert(sizeof(Completion) == 136, "mirrored in src/params");

// Number of low bits of an entry of the table of copies that hold a physical expert. The other bits hold the expert's number of copies.
constexpr uint32_t kPhysicalBits = 16;

// One rank's view of the EP group and of one slot's window.
//
// A physical expert is a copy of an expert on a rank. Ranks hold contiguous ranges of physical experts, so the rank and the index
// on it follow from the number by arithmetic. Without a placement physical experts are the layer's experts, and the first E % N ranks
// hold one more than the others. With a placement all ranks have the same number of them, as many as the fullest rank needs.
struct Group {
    uint8_t* windows[kMaxRanks];  // this slot's region at every rank, including this one
    SlotState* state;
    uint64_t generation;          // generation << kSequenceBits
    uint64_t deadline_ns;         // time limit of each wait
    const uint32_t* copies;       // [layers][kMaxExperts][kMaxRanks]: copies of each expert, ascending; null: no placement
    uint32_t rank;
    uint32_t ranks;
    uint32_t hidden;              // multiple of 8
    uint32_t top_k;
    uint32_t experts;             // number of physical experts
    uint32_t max_tokens;          // largest number of tokens per rank
    uint32_t delay_ns;            // for tests: longest random delay of a block before it sends
    uint32_t chunk;               // least number of row pieces that a combine block sends before it sets their flag; 0: default
    // Byte offsets in a window region. Flags are indexed by the rank that sets them.
    uint64_t dispatch_flags;      // u64 [N][kMaxBlocks]
    uint64_t combine_flags;       // u64 [N][kMaxBlocks][kMaxChunks]
    uint64_t meet_flags;          // u64 [N]
    uint64_t written_flags;       // u64 [N], at rank 0: ranks whose results of the step are written
    uint64_t counts;              // u32 [N]: number of tokens of each source rank
    uint64_t ids;                 // i32 [N][max_tokens][k]: chosen physical experts
    uint64_t weights;             // f32 [N][max_tokens][k]
    uint64_t rows;                // bf16 [N][max_tokens][H], or FP8 rows of fp8_row_bytes(H) bytes
    uint64_t partials;            // bf16 [N][max_tokens][H]: this rank's tokens, reduced by each rank over its experts
};
static_assert(sizeof(Group) == 200, "mirrored in src/params");

// Pushes every token's row once to each rank that owns one of its experts, and all ids and weights to every rank. Meanwhile the
// receiving ranks list the rows of each local expert. Row s * max_tokens + t of a window's `rows` is token t of source rank s. In
// a group of one rank nothing is pushed: row t is token t of `tokens` or, with `fp8_rows`, row t of the window.
struct DispatchParams {
    Group group;
    const void* tokens;          // bf16 [T][H]
    const int32_t* topk_ids;     // [T][k]
    const float* topk_weights;   // [T][k]
    uint32_t* expert_offsets;    // [local experts + 1]
    uint32_t* row_index;         // [assignments]: row of each assignment, sorted by expert, then by (source, token, choice)
    float* row_weight;           // [assignments]
    uint32_t* position;          // [N][max_tokens][k]: index in row_index of each local choice; other entries are not written
    uint32_t* block_counts;      // scratch [kMaxBlocks][local experts]
    uint32_t fp8_rows;           // 1: rows are quantised, by a rank alone into its window; a row of the window then takes fp8_row_bytes()
    uint32_t power_of_two_scales;  // 1: the scales of FP8 rows are rounded up to powers of two
};
static_assert(sizeof(DispatchParams) == 272, "mirrored in src/params");

// Bytes of a row that is pushed in FP8: e4m3 [H], then f32 [ceil(H / 128)] scales. H must be a multiple of 64.
inline constexpr uint32_t kScaleElements = 128;
#ifdef __CUDACC__
__host__ __device__
#endif
constexpr uint32_t fp8_row_bytes(uint32_t hidden) {
    return (hidden + (hidden + kScaleElements - 1) / kScaleElements * 4 + 15) / 16 * 16;
}

// Adds up the outputs of a row's local experts in the order of the token's choices, pushes the sum to the row's source rank, and
// adds up the partials of all ranks there, in rank order. All sums are f32; partials travel as bf16. The previous kernel must not
// be dispatch: a rank alone reads what dispatch wrote before the previous kernel has ended.
struct CombineParams {
    Group group;
    const void* expert_out;      // bf16 [assignments][H], already multiplied by the routing weight
    const uint32_t* position;    // from dispatch
    const int32_t* topk_ids;     // [T][k] of this rank's tokens
    const float* topk_weights;   // [T][k]
    const void* shared;          // bf16 [T][H]: outputs of the shared experts, which are added; or null
    const RowPlace* places;      // their flags select the rows to which `shared` is added; null selects all rows, if the step is not direct
    void* out;                   // [T][H] of SlotState::out_dtype, unless the step is direct
    uint64_t* experts_done;      // mapped: set to the step's number when its experts have ended; or null
    uint32_t first_row;          // rows before it are combined by earlier launches
    uint32_t end_row;            // later launches combine the rows from it on; 0: none
    const float* sums;           // mapped: f32 [T][H] of the first CPU rank of a mixed group, in a group of one kernel rank; or null
    uint64_t sums_stride;        // elements from there to the sums of the next CPU rank
    uint32_t sums_count;         // number of CPU ranks
    uint32_t reserved;
};
static_assert(sizeof(CombineParams) == 296, "mirrored in src/params");

// In TierParams::resident: a CPU rank owns the expert. As an index of a resident expert it is out of range.
constexpr uint32_t kAway = 0xffff;

// Divides the gate's choices between this rank alone and the CPU ranks of a mixed group, and sends those the step's rows.
struct TierParams {
    SlotState* state;
    const void* tokens;          // bf16 [T][H]
    const int32_t* topk_ids;     // [T][k]
    const float* topk_weights;   // [T][k]
    const uint32_t* resident;    // [layers][kMaxExperts]: index of each expert among this rank's, or kAway
    int32_t* local_ids;          // [T][k]: these indices
    float* local_weights;        // [T][k]: 0 for experts of CPU ranks
    int32_t* sent_ids;           // mapped, [T][k]: experts of CPU ranks; -1 for the others
    float* sent_weights;         // mapped, [T][k]
    void* sent_rows;             // mapped, bf16 [T][H]
    uint64_t* sent;              // mapped: generation | step, stored last; null: nothing is sent
    uint64_t* failed;            // mapped: step, if it had failed before; CPU ranks are not told of it then
    uint64_t generation;         // generation << kSequenceBits
    uint32_t hidden;
    uint32_t top_k;
    uint32_t max_tokens;
    uint32_t reserved;
};
static_assert(sizeof(TierParams) == 120, "mirrored in src/params");

enum ScoreFn : uint32_t { kSoftmax = 0, kSoftmaxOfChosen = 1, kSigmoid = 2, kSqrtSoftplus = 3, kSparseMixer = 4 };
enum Choice : uint32_t { kByScores = 0, kByLogits = 1, kByTokenIds = 2 };
enum GroupScore : uint32_t { kNoGroups = 0, kGroupMax = 1, kGroupTopTwoSum = 2 };
enum Normalise : uint32_t { kNo = 0, kSum = 1, kSumAtLeast = 2 };

// One layer in the table that the gate reads.
struct GateLayer {
    const void* weight;            // bf16 [E][H]
    const void* weight_low;        // bf16 [E][H]: rounding errors of weights that are stored in more than bf16; null: none
    const float* logit_bias;       // [E] or null
    const float* correction_bias;  // [E] or null
    const int32_t* token_table;    // [vocab][k] or null
};
static_assert(sizeof(GateLayer) == 40, "mirrored in src/params");

// The gate of all layers of one shape. The fields follow the model's gate specification (GateSpec).
struct GateParams {
    SlotState* state;
    const GateLayer* layers;     // indexed by SlotState::layer
    const void* tokens;          // bf16 [T][H]
    const void* tokens_low;      // bf16 [T][H]: row minus `tokens`, for rows that were not bf16; null: rounding errors are not kept
    const int32_t* token_ids;    // [T], for layers that route by token id
    const RowPlace* places;      // their flags mark rows with given routing; null: no row has any
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
    float epsilon;               // kSum: added to the sum; kSumAtLeast: least value of the sum
    float scale;
    float jitter;                // for kSparseMixer
    uint32_t vocab;
};
static_assert(sizeof(GateParams) == 120, "mirrored in src/params");

// Converts rows from mapped host staging to bf16 in device memory, and copies the step's description to SlotState.
struct CopyInParams {
    SlotState* state;
    const StepRequest* request;     // mapped
    const Segment* segments;        // mapped
    uint8_t* staged_rows;           // mapped; results overwrite rows
    const int32_t* staged_ids;      // mapped, [T][k], read for rows with given routing
    const float* staged_weights;    // mapped
    const int32_t* staged_token_ids;  // mapped, [T], or null
    void* tokens;                   // null: copy engines write the rows, which are all bf16
    void* tokens_low;               // bf16 [T][H]: rows minus `tokens`, written if any row of the step is not bf16; or null
    int32_t* topk_ids;
    float* topk_weights;
    int32_t* token_ids;
    RowPlace* places;               // [T]
    uint64_t staged_bytes;          // size of staged_rows
    uint32_t hidden;
    uint32_t top_k;
    uint32_t max_tokens;
    uint32_t experts;
    uint32_t max_segments;          // capacity of `segments`, in entries
    uint32_t row_elements;          // elements of a row of segments with kNarrowRows, at most `hidden`
};
static_assert(sizeof(CopyInParams) == 136, "mirrored in src/params");

// Writes each result row to its token's place in mapped memory, in the token's element type; then the completion record. Adds the
// rows of each local expert to the counts. Rank 0 raises completion words once all ranks have written their results. The previous kernel
// is combine: what earlier ones wrote is read before it has ended.
struct CopyOutParams {
    Group group;
    const void* out;                // [T][H] of SlotState::out_dtype; null: copy engines read the results
    const int32_t* topk_ids;
    const float* topk_weights;
    const RowPlace* places;
    const uint32_t* assignments;    // number of assignments: the last entry of expert_offsets
    int32_t* staged_ids;            // mapped: ids that were used
    float* staged_weights;          // mapped: weights that were used
    Completion* completion;         // mapped
    uint64_t* raised;               // mapped: gets the step's number before its words are raised
    const uint32_t* expert_offsets; // from dispatch; null: rows are not counted
    uint64_t* row_counts;           // [layers][count_stride]: rows of each expert since the service started
    uint64_t* row_counts_host;      // mapped: the same table
    const uint32_t* local_ids;      // [layers][local_experts]: expert of each local one by a placement; null: first_expert and on
    uint32_t hidden;
    uint32_t top_k;
    uint32_t max_tokens;
    uint32_t first_expert;          // index in its layer of the first local expert
    uint32_t local_experts;
    uint32_t count_stride;          // number of experts that a layer has room for in the tables
    uint32_t row_elements;          // elements of a row of segments with kNarrowRows, at most `hidden`
    uint32_t reserved;
};
static_assert(sizeof(CopyOutParams) == 336, "mirrored in src/params");

// Lists the assignments of the shared experts, which process every token: row t is token t.
struct SharedParams {
    const SlotState* state;
    const void* tokens;         // bf16 [T][H]
    const void* const* gates;   // per layer: bf16 [H] or null; a row's weight is the sigmoid of its product with the row
    uint32_t* expert_offsets;   // [2]
    uint32_t* row_index;        // [T]
    float* row_weight;          // [T]
    uint32_t hidden;
    uint32_t max_tokens;
};
static_assert(sizeof(SharedParams) == 56, "mirrored in src/params");

// A stand-in for experts, for tests and for timing the exchange alone: multiplies every assignment's row by its weight and by
// (1 + physical expert / number of physical experts).
struct ScaleParams {
    Group group;
    const void* rows;            // bf16 rows that experts read: in the window or, in a group of one rank, `tokens`
    const uint32_t* expert_offsets;
    const uint32_t* row_index;
    const float* row_weight;
    void* out;                   // bf16 [assignments][H]
};
static_assert(sizeof(ScaleParams) == 240, "mirrored in src/params");

}  // namespace expertd

// Launchers, which return a cudaError_t. `count` is the number of parameter structs: 1 for a single rank, or the number of virtual
// ranks of a loopback group, which run in one launch.
extern "C" {
int expertd_gate(const expertd::GateParams* params, uint32_t count, uint32_t tokens_at_most, void* stream);
int expertd_dispatch(const expertd::DispatchParams* params, uint32_t count, uint32_t blocks, void* stream);
int expertd_combine(const expertd::CombineParams* params, uint32_t count, uint32_t blocks, void* stream);
int expertd_meet(const expertd::Group* groups, uint32_t count, uint32_t blocks, void* stream);
int expertd_scale(const expertd::ScaleParams* params, uint32_t count, uint32_t blocks, void* stream);
int expertd_tier(const expertd::TierParams* params, uint32_t count, uint32_t blocks, void* stream);
int expertd_shared(const expertd::SharedParams* params, uint32_t count, uint32_t blocks, void* stream);
int expertd_copy_in(const expertd::CopyInParams* params, uint32_t count, uint32_t blocks, void* stream);
int expertd_copy_out(const expertd::CopyOutParams* params, uint32_t count, uint32_t blocks, void* stream);
const char* expertd_error_string(int code);
}
