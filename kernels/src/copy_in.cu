// copy_in reads the step's description and copies its rows from mapped host staging, or from the memory of clients, to device memory.
// The host's link limits it, so few blocks suffice.
#include "common.cuh"
#include "modules.h"
#include "ptx.cuh"

namespace expertd {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kUnroll = 4;  // number of 16-byte words in flight per lane

// Loads host memory with plain loads that bypass L1. They are sufficient, because the host writes only before the launch and not
// while the kernel runs; a client that overwrites its rows during the step gets results of some mixture of old and new rows. Relaxed
// loads at system scope are not merged into wide requests: they reached 1 GB/s, plain loads 50.
__device__ __forceinline__ uint4 load_host(const void* address) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

__device__ __forceinline__ uint64_t load_host(const uint64_t* address) {
    uint64_t v;
    asm volatile("ld.global.L1::no_allocate.u64 %0, [%1];" : "=l"(v) : "l"(address));
    return v;
}

__device__ __forceinline__ int32_t load_host(const int32_t* address) {
    int32_t v;
    asm volatile("ld.global.L1::no_allocate.s32 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
}

__device__ __forceinline__ float load_host(const float* address) {
    float v;
    asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(v) : "l"(address));
    return v;
}

// Number of entries of the segment table that a block holds at a time.
constexpr uint32_t kTable = 1024;
constexpr uint32_t kEntryWords = sizeof(Segment) / sizeof(uint64_t);
// Number of entries that are loaded together with the request, before their number is known.
constexpr uint32_t kEarly = kThreads / kEntryWords - 4;
constexpr uint32_t kRequestWords = sizeof(StepRequest) / sizeof(uint64_t);
static_assert(kEarly * kEntryWords + kRequestWords <= kThreads, "a thread each");
// Largest number of blocks of a cluster. Its first block loads the step's description for all of them: loads of one address by several
// multiprocessors follow one another on the host's link.
constexpr uint32_t kCluster = 8;
// Largest number of 16-byte words of a row in memory that a warp copies: a round trip with all of them under way.
constexpr uint32_t kPiece = 32 * 2 * kUnroll;

// The segment that holds `row`, among `count` segments of consecutive rows.
__device__ __forceinline__ Segment segment_of(const Segment* table, uint32_t count, uint32_t row) {
    uint32_t low = 0, high = count;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (table[middle].first_row <= row) low = middle;
        else high = middle;
    }
    return table[low];
}

// The rounding errors of bf16, `v - rounded`, themselves rounded to bf16; 0 for values that are not finite.
__device__ __forceinline__ uint4 rest_of(const float (&v)[8], const uint4& rounded) {
    float sum[8] = {};
    add_bf16x8(sum, rounded);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = isfinite(sum[i]) ? v[i] - sum[i] : 0.0f;
    return pack_bf16x8(sum);
}

__device__ __forceinline__ void widen_f16(const uint4& raw, float (&v)[8]) {
    const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
        v[2 * i] = two.x, v[2 * i + 1] = two.y;
    }
}

// Converts the words from `begin` to `words` of a row from staging to bf16 and, unless `low` is null, stores the rounding errors there.
// One warp runs this.
__device__ void take_row(const uint8_t* from, uint32_t dtype, uint32_t begin, uint32_t words, uint4* to, uint4* low) {
    const uint32_t lane = threadIdx.x % 32;
    if (dtype == kF32) {
        for (uint32_t base = begin; base < words; base += 32 * kUnroll) {
            uint4 a[kUnroll], b[kUnroll];
#pragma unroll
            for (uint32_t i = 0; i < kUnroll; ++i) {
                const uint32_t word = base + i * 32 + lane;
                if (word >= words) continue;
                a[i] = load_host(from + word * 32);
                b[i] = load_host(from + word * 32 + 16);
            }
#pragma unroll
            for (uint32_t i = 0; i < kUnroll; ++i) {
                const uint32_t word = base + i * 32 + lane;
                if (word >= words) continue;
                const float v[8] = {__uint_as_float(a[i].x), __uint_as_float(a[i].y), __uint_as_float(a[i].z),
                                    __uint_as_float(a[i].w), __uint_as_float(b[i].x), __uint_as_float(b[i].y),
                                    __uint_as_float(b[i].z), __uint_as_float(b[i].w)};
                const uint4 rounded = pack_bf16x8(v);
                to[word] = rounded;
                if (low != nullptr) low[word] = rest_of(v, rounded);
            }
        }
        return;
    }
    for (uint32_t base = begin; base < words; base += 32 * 2 * kUnroll) {
        uint4 data[2 * kUnroll];
#pragma unroll
        for (uint32_t i = 0; i < 2 * kUnroll; ++i) {
            const uint32_t word = base + i * 32 + lane;
            if (word < words) data[i] = load_host(from + word * 16);
        }
#pragma unroll
        for (uint32_t i = 0; i < 2 * kUnroll; ++i) {
            const uint32_t word = base + i * 32 + lane;
            if (word >= words) continue;
            if (dtype == kF16) {
                float v[8];
                widen_f16(data[i], v);
                const uint4 rounded = pack_bf16x8(v);
                to[word] = rounded;
                if (low != nullptr) low[word] = rest_of(v, rounded);
            } else {
                to[word] = data[i];
                if (low != nullptr) low[word] = make_uint4(0, 0, 0, 0);
            }
        }
    }
}

// An element of a row that may lie at any multiple of the element size.
__device__ __forceinline__ float load_element(const void* row, uint32_t index, uint32_t dtype) {
    if (dtype == kF32) return load_host(static_cast<const float*>(row) + index);
    uint16_t bits;
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(bits) : "l"(static_cast<const uint16_t*>(row) + index));
    return dtype == kF16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// As take_row, for a row of `row_elements` elements.
__device__ void take_narrow_row(const CopyInParams& p, const void* from, uint32_t dtype, uint32_t begin, uint32_t words, uint4* to,
                                uint4* low) {
    for (uint32_t word = begin + threadIdx.x % 32; word < words; word += 32) {
        float v[8];
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
            const uint32_t index = word * 8 + i;
            v[i] = index < p.row_elements ? load_element(from, index, dtype) : 0.0f;
        }
        const uint4 rounded = pack_bf16x8(v);
        to[word] = rounded;
        if (low != nullptr) low[word] = rest_of(v, rounded);
    }
}

// Copies a piece of a row from staging; with the first piece the row's place and its routing. One warp runs this.
__device__ void take(const CopyInParams& p, const Segment& segment, uint32_t row, uint32_t piece, bool wide) {
    const uint32_t lane = threadIdx.x % 32, words = p.hidden / 8;
    const bool narrow = (segment.flags & kNarrowRows) != 0;
    const uint32_t element_bytes = segment.dtype == kF32 ? 4 : 2, align = narrow ? element_bytes : 16;
    const uint64_t row_bytes = static_cast<uint64_t>(narrow ? p.row_elements : p.hidden) * element_bytes;
    const uint64_t within = (row - segment.first_row) * row_bytes, offset = segment.byte_offset + within;
    const bool attached = segment.memory != 0;
    // The host has checked these values. The check here keeps a fault in between from accessing other memory.
    if (offset % align != 0 || segment.output_offset % align != 0 || (!attached && offset + row_bytes > p.staged_bytes) ||
        row - segment.first_row >= segment.rows || p.row_elements > p.hidden) {
        if (lane == 0) set_error(p.state, kBadCount, 0xfe, kCopyIn);
        return;
    }
    // Load the routing first, so that its loads are under way while those of the row are issued.
    const uint64_t at = static_cast<uint64_t>(row) * p.top_k + lane;
    const bool given = piece == 0 && (segment.flags & kGivenRouting) != 0 && lane < p.top_k;
    const bool named = piece == 0 && p.staged_token_ids != nullptr && lane == 0;
    int32_t id = 0, token_id = 0;
    float weight = 0.0f;
    if (given) {
        id = load_host(p.staged_ids + at);
        weight = load_host(p.staged_weights + at);
    }
    if (named) token_id = load_host(p.staged_token_ids + row);
    const uint64_t first_word = static_cast<uint64_t>(row) * words;
    uint8_t* from = attached ? reinterpret_cast<uint8_t*>(offset) : p.staged_rows + offset;
    if (p.tokens != nullptr) {
        uint4* to = static_cast<uint4*>(p.tokens) + first_word;
        uint4* low = wide && p.tokens_low != nullptr ? static_cast<uint4*>(p.tokens_low) + first_word : nullptr;
        const uint32_t begin = piece * kPiece, end = min(begin + kPiece, words);
        if (narrow) take_narrow_row(p, from, segment.dtype, begin, end, to, low);
        else take_row(from, segment.dtype, begin, end, to, low);
    }
    if (piece == 0 && lane == 0) {
        uint8_t* output = attached ? reinterpret_cast<uint8_t*>(segment.output_offset + within) : from;
        p.places[row] = {output, segment.dtype, segment.flags};
    }
    if (given) {
        // Ids become addresses, so they are checked for the same reason.
        if (id < 0 || id >= static_cast<int32_t>(p.experts)) {
            set_error(p.state, kBadCount, 0xfe, kCopyIn);
            id = 0;
        }
        p.topk_ids[at] = id;
        p.topk_weights[at] = weight;
    }
    if (named) p.token_ids[row] = token_id;
}

// A step's description, in every block's shared memory.
struct Description {
    StepRequest request;
    Segment table[kTable];
};

// Loads the request and the segment table's first entries, in one round trip to the host, and passes on what the other blocks of the
// cluster need. The first block of a cluster runs this.
__device__ __forceinline__ void describe(const CopyInParams& p, Description& description, uint32_t blocks) {
    static_assert(offsetof(Description, table) == kRequestWords * sizeof(uint64_t), "one array of words");
    uint64_t* words = reinterpret_cast<uint64_t*>(&description);
    const uint32_t early = min(p.max_segments, kEarly), at = threadIdx.x;
    const bool any = at < kRequestWords + early * kEntryWords;
    uint64_t word = 0;
    if (any) {
        const uint64_t* from = at < kRequestWords ? reinterpret_cast<const uint64_t*>(p.request) + at
                                                  : reinterpret_cast<const uint64_t*>(p.segments) + (at - kRequestWords);
        word = load_host(from);
        words[at] = word;
    }
    __syncthreads();
    if (blocks == 1) return;
    cluster_wait();  // the other blocks have started
    if (any && at < kRequestWords + min(description.request.segments, early) * kEntryWords) {
        for (uint32_t block = 1; block < blocks; ++block) store_peer(peer_address(smem_address(words + at), block), word);
    }
    __syncwarp();
    cluster_arrive();
}

template <int Count>
__global__ void __launch_bounds__(kThreads) copy_in(const __grid_constant__ Ranks<CopyInParams, Count> all) {
    const CopyInParams& p = all.rank[Count == 1 ? 0 : blockIdx.y];
    __shared__ __align__(16) Description description;
    const uint32_t blocks = cluster_blocks();
    if (blocks != 1) cluster_arrive();
    begin_kernel();
    const uint64_t begin = now_ns();
    // Not changed before combine.
    const uint64_t sequence = load_word(&p.state->sequence);
    // The description takes one round trip to the host, the rows a second one. Segments are looked up in shared memory, which takes none.
    const bool first_block = cluster_block() == 0;
    if (first_block) {
        describe(p, description, blocks);
    } else {
        cluster_wait();
        cluster_arrive();
        cluster_wait();
    }
    const StepRequest& request = description.request;
    const bool possible = request.tokens <= p.max_tokens && request.segments <= p.max_segments;
    const uint32_t tokens = possible ? request.tokens : 0, segments = possible ? request.segments : 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        if (possible) *static_cast<volatile uint64_t*>(&p.state->announced) = announcement(sequence, tokens, request.layer);
        if (!possible) set_error(p.state, kBadCount, 0xff, kCopyIn);
        p.state->tokens = tokens;
        p.state->layer = request.layer;
        p.state->given_routing = request.given_routing;
        p.state->received = 0;
        p.state->out_dtype = request.out_dtype;
        p.state->step = request.step;
        p.state->begin_ns[kCopyIn] = begin;
        p.state->raises = min(request.raises, kMaxRaises);
        p.state->direct = request.direct;
        for (uint32_t i = 0; i < kMaxRaises; ++i) p.state->raise[i] = request.raise[i];
    }
    // Neighbouring pieces belong to different blocks, so that few rows are spread over many SMs.
    const uint32_t pieces = (p.hidden / 8 + kPiece - 1) / kPiece;
    const uint32_t first = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    const uint32_t early = min(p.max_segments, kEarly);
    Segment* table = description.table;
    uint32_t covered = 0;
    for (uint32_t entry = 0; entry < segments; entry += kTable) {
        const uint32_t count = min(kTable, segments - entry);
        if (count > early || entry != 0) {
            if (entry != 0) __syncthreads();
            const uint64_t* entries = reinterpret_cast<const uint64_t*>(p.segments + entry);
            for (uint32_t word = (entry == 0 ? early * kEntryWords : 0) + threadIdx.x; word < count * kEntryWords; word += kThreads) {
                reinterpret_cast<uint64_t*>(table)[word] = load_host(entries + word);
            }
            __syncthreads();
        }
        const Segment& last = table[count - 1];
        // Segments must be consecutive; otherwise some rows would not be copied.
        if (table[0].first_row != covered) break;
        const uint32_t end = min(tokens, last.first_row + last.rows);
        for (uint32_t item = covered * pieces + first; item < end * pieces; item += gridDim.x * kWarps) {
            const uint32_t row = item / pieces;
            take(p, segment_of(table, count, row), row, item - row * pieces, request.out_dtype != kBf16);
        }
        covered = end;
    }
    if (covered != tokens && blockIdx.x == 0 && threadIdx.x == 0) set_error(p.state, kBadCount, 0xfe, kCopyIn);
    stamp_end(p.state, kCopyIn);
    __syncwarp();
    if (first_block && blocks != 1) cluster_wait();
}

const Module module(reinterpret_cast<const void*>(copy_in<1>));

}  // namespace
}  // namespace expertd

extern "C" int expertd_copy_in(const expertd::CopyInParams* params, uint32_t count, uint32_t blocks, void* stream) {
    using namespace expertd;
    uint32_t cluster = kHasClusters && count == 1 ? kCluster : 1;
    while (cluster > 1 && blocks % cluster != 0) cluster /= 2;
    return launch(copy_in<1>, copy_in<kMaxRanks>, params, count, blocks, kThreads, false, stream, 0, cluster);
}
