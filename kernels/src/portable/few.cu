// The kernel for few rows of the portable path. It divides work, multiplies and adds up as experts_few.cu does, so a row gets the same bits.
//
// Each consumer has a ring for weights, whose depth follows from the shared memory of the device. In formats whose elements take many
// instructions streams fill it (STREAMED). Otherwise the consumer itself does: its next chunks are under way while it multiplies one, also
// across segments and while it waits for h.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>

#include "../experts_few_roles.cuh"
#include "../modules.h"
#include "experts.h"

namespace expertd {
namespace {

// A format with the chunks and slots of this kernel.
template <class Base, int UNITS, bool STREAMED_ = false> struct Few : Base {
    static constexpr int CHUNK_UNITS = UNITS;
    static constexpr int ROW_SLOTS = 1;
    static constexpr bool STREAMED = STREAMED_;
    // Chunks of a ring: more bytes do not make a multiprocessor of any card faster.
    static constexpr int MOST_DEPTH = 6 * Base::UNIT_BYTES * UNITS <= 16 * 1024 ? 6 : 3;
};

template <class Format> struct Layout {
    static constexpr int CHUNK_BYTES = Format::CHUNK_UNITS * Format::UNIT_BYTES;
    static constexpr int ROW_BYTES = FEW_TOKENS * Format::ROW_STRIDE;        // of a consumer's slot of rows
    static constexpr int ROWS = (int(sizeof(FewShared)) + 127) / 128 * 128; // place of the rows
    static constexpr int RINGS = ROWS + FEW_CONSUMERS * ROW_BYTES;           // place of the rings
    static constexpr int bytes(int depth) { return RINGS + FEW_CONSUMERS * depth * CHUNK_BYTES; }
    static_assert(CHUNK_BYTES % 16 == 0 && RINGS % 16 == 0);
};

// The barriers of a consumer's ring.
constexpr int RING_BARRIERS = FEW_STREAMS * FEW_MOST_SLOTS / FEW_CONSUMERS;
__device__ __forceinline__ uint64_t* full_of(FewShared& shared, int consumer) { return &shared.full[0][0] + consumer * RING_BARRIERS; }
__device__ __forceinline__ uint64_t* empty_of(FewShared& shared, int consumer) { return &shared.empty[0][0] + consumer * RING_BARRIERS; }

// Copies the calling lane's parts of `bytes` bytes; addresses are those of its first part.
template <class Format> __device__ __forceinline__ void copy_chunk(uint32_t to, const char* from, int bytes, uint64_t policy, uint64_t* full) {
    bytes -= threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < (Layout<Format>::CHUNK_BYTES + 511) / 512; i++) {
        if (i * 512 >= bytes) continue;
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to + i * 512), "l"(from + i * 512), "l"(policy) : "memory");
    }
    barrier_arrive_after_copies(full);
}
// Weights that no other tile reads need not stay in L2.
__device__ __forceinline__ uint64_t policy_of(const FewShared& shared, const FewSegment& segment) {
    const int* tile = &shared.tables.tile[segment.expert];
    return tile[1] - tile[0] == 1 ? policy_evict_first() : policy_evict_normal();
}

// The chunks of a consumer's items, in the order in which it multiplies them.
template <class Format> class Chunks {
  public:
    __device__ __forceinline__ Chunks(const ExpertdExpertsParams& p, const FewShared& shared, const FewShare& share, int warp)
        : p_(p), shared_(shared), segments_(p, shared.tables, share), warp_(warp) {
        more_ = !Format::STREAMED && next_segment();
    }

    // Starts to bring the next chunk, if there is one. All lanes must call it.
    __device__ __forceinline__ void bring(uint32_t slot, uint64_t* full) {
        if (!more_) return;
        const int lane = threadIdx.x % 32;
        copy_chunk<Format>(slot + lane * 16, source_ + done_ * Format::UNIT_BYTES + lane * 16, min(Format::CHUNK_UNITS, units_ - done_) * Format::UNIT_BYTES,
                           policy_, full);
        done_ += Format::CHUNK_UNITS;
        if (done_ < units_) return;
        done_ = 0, left_ -= FEW_CONSUMERS, source_ += FEW_CONSUMERS * block_bytes_;
        if (left_ <= 0) more_ = next_segment();
    }

  private:
    // Goes to the next segment of which the consumer has an item.
    __device__ __forceinline__ bool next_segment() {
        FewSegment segment;
        while (segments_.next(segment)) {
            const int first = residue_of(items_, warp_), all_units = (segment.phase == 0 ? 2 * p_.inter : p_.hidden) / UNIT_ROWS;
            const int k_blocks = few_k_blocks<Format>(segment.k(p_));
            items_ += k_blocks;
            if (first >= k_blocks) continue;
            left_ = k_blocks - first;
            units_ = segment.units, policy_ = policy_of(shared_, segment);
            block_bytes_ = all_units * Format::UNIT_BYTES;
            source_ = static_cast<const char*>(segment.phase == 0 ? shared_.layer.gate_up : shared_.layer.down) +
                      (segment.expert * int64_t(k_blocks) + first) * block_bytes_ + int64_t(segment.unit) * Format::UNIT_BYTES;
            return true;
        }
        return false;
    }

    const ExpertdExpertsParams& p_;
    const FewShared& shared_;
    FewSegments segments_;
    const int warp_;
    bool more_;
    uint32_t items_ = 0; // of the block, up to the end of the segment
    int left_;           // k blocks of the segment from the current one on
    int units_, done_ = 0;
    const char* source_;
    int block_bytes_; // of a k block of the matrix
    uint64_t policy_;
};

// Brings the chunks of the stream's items to the rings of their consumers.
template <class Format>
__device__ __forceinline__ void stream_chunks(const ExpertdExpertsParams& p, FewShared& shared, const FewShare& share, uint32_t rings, int depth,
                                              int stream) {
    constexpr int CHUNK_BYTES = Layout<Format>::CHUNK_BYTES;
    const int lane = threadIdx.x % 32;
    FewSegments segments(p, shared.tables, share);
    FewSegment segment;
    uint32_t items = 0;  // of the block before the segment
    int next = 0;        // of lane i: the slot that consumer stream + i * FEW_STREAMS gets next,
    uint32_t parity = 1; // and the parity of its barrier
    while (segments.next(segment)) {
        const int k_blocks = few_k_blocks<Format>(segment.k(p)), all_units = (segment.phase == 0 ? 2 * p.inter : p.hidden) / UNIT_ROWS;
        const int64_t block_bytes = int64_t(all_units) * Format::UNIT_BYTES;
        const int first = first_of_stream(items, stream);
        const char* source = static_cast<const char*>(segment.phase == 0 ? shared.layer.gate_up : shared.layer.down) +
                             (segment.expert * int64_t(k_blocks) + first) * block_bytes + int64_t(segment.unit) * Format::UNIT_BYTES + lane * 16;
        const uint64_t policy = policy_of(shared, segment);
        for (int k = first; k < k_blocks; k += FEW_STREAMS, source += FEW_STREAMS * block_bytes) {
            const int consumer = (items + k) % FEW_CONSUMERS;
            for (int done = 0; done < segment.units; done += Format::CHUNK_UNITS) {
                const int slot = __shfl_sync(0xffffffff, next, consumer / FEW_STREAMS);
                barrier_wait(empty_of(shared, consumer) + slot, __shfl_sync(0xffffffff, parity, consumer / FEW_STREAMS));
                copy_chunk<Format>(rings + (consumer * depth + slot) * CHUNK_BYTES + lane * 16, source + done * Format::UNIT_BYTES,
                                   min(Format::CHUNK_UNITS, segment.units - done) * Format::UNIT_BYTES, policy, full_of(shared, consumer) + slot);
                if (lane == consumer / FEW_STREAMS && ++next == depth) next = 0, parity ^= 1;
            }
        }
        items += k_blocks;
    }
    copies_wait_all();
}

// Multiplies the warp's items, as consume_few does.
template <class Format>
__device__ __forceinline__ void consume(const ExpertdExpertsParams& p, FewShared& shared, const FewShare& share, uint32_t memory, int depth, int warp) {
    using Place = Layout<Format>;
    const int lane = threadIdx.x % 32;
    const uint32_t rows = memory + Place::ROWS + warp * Place::ROW_BYTES, place = Format::place(lane);
    const uint32_t ring = memory + Place::RINGS + warp * depth * Place::CHUNK_BYTES;
    uint64_t *full = full_of(shared, warp), *empty = empty_of(shared, warp);
    Chunks<Format> ahead(p, shared, share, warp); // not used if the ring is filled by a stream
    if constexpr (!Format::STREAMED) {
        for (int i = 0; i < depth; i++) ahead.bring(ring + i * Place::CHUNK_BYTES, &full[i]);
    }
    int slot = 0;
    uint32_t slot_parity = 0, items = 0, taken = 0, parity = 1;
    FewSegments segments(p, shared.tables, share);
    FewSegment segment;
    while (segments.next(segment)) {
        const int k_blocks = few_k_blocks<Format>(segment.k(p)), residue = residue_of(items, warp);
        float sums[FEW_UNITS][4];
#pragma unroll
        for (int u = 0; u < FEW_UNITS; u++) sums[u][0] = sums[u][1] = sums[u][2] = sums[u][3] = 0.0f;
#pragma unroll 1
        for (int k = residue; k < k_blocks; k += FEW_CONSUMERS, taken++) {
            barrier_wait(&shared.rows_full[warp][0], taken % 2);
            const typename Format::Row row(rows, false, false);
            __syncwarp(); // all lanes have read the rows
            if (arrives_for_warp()) barrier_arrive(&shared.rows_empty[warp][0]);
#pragma unroll
            for (int u = 0; u < FEW_UNITS; u += Format::CHUNK_UNITS) {
                if (u >= segment.units) break;
                const uint32_t chunk = ring + slot * Place::CHUNK_BYTES;
                barrier_wait(&full[slot], slot_parity);
                if constexpr (Format::IN_TWOS) {
                    Format::multiply_all(sums + u, row, chunk + place, min(Format::CHUNK_UNITS, segment.units - u),
                                         Format::STREAMED ? &empty[slot] : nullptr);
                    if constexpr (!Format::STREAMED) {
                        __syncwarp(); // all lanes have read the chunk
                        ahead.bring(chunk, &full[slot]);
                    }
                } else {
                    // Of a chunk whose last units do not exist, what is multiplied is not used.
                    typename Format::Unit unit[Format::CHUNK_UNITS];
#pragma unroll
                    for (int i = 0; i < Format::CHUNK_UNITS; i++) unit[i].load(chunk + place + i * Format::UNIT_BYTES, 0);
                    __syncwarp();
                    if constexpr (!Format::STREAMED) ahead.bring(chunk, &full[slot]);
                    else if (arrives_for_warp()) barrier_arrive(&empty[slot]);
#pragma unroll
                    for (int i = 0; i < Format::CHUNK_UNITS; i++) unit[i].multiply(sums[u + i], row);
                }
                if (++slot == depth) slot = 0, slot_parity ^= 1;
            }
        }
        items += k_blocks;

        barrier_wait(&shared.sums_empty, parity);
        parity ^= 1;
#pragma unroll
        for (int u = 0; u < FEW_UNITS; u++) {
            if (u >= segment.units) break;
            shared.sums[residue][u][lane] = make_float4(sums[u][0], sums[u][1], sums[u][2], sums[u][3]);
        }
        __syncwarp();
        if (arrives_for_warp()) barrier_arrive(&shared.sums_full);
    }
    copies_wait_all();
}

template <class Format>
__global__ void __launch_bounds__(FEW_THREADS, 1) portable_few(const __grid_constant__ ExpertdExpertsParams p, int depth) {
    extern __shared__ __align__(128) unsigned char memory[];
    FewShared& shared = *reinterpret_cast<FewShared*>(memory);
    const int warp = uniform(threadIdx.x / 32);
    if (threadIdx.x == 0) {
        for (int c = 0; c < FEW_CONSUMERS; c++) {
            for (int i = 0; i < depth; i++) barrier_init(full_of(shared, c) + i, 32), barrier_init(empty_of(shared, c) + i, WARP_ARRIVALS);
            barrier_init(&shared.rows_full[c][0], 32), barrier_init(&shared.rows_empty[c][0], WARP_ARRIVALS);
        }
        barrier_init(&shared.sums_full, FEW_CONSUMERS * WARP_ARRIVALS);
        barrier_init(&shared.sums_empty, FEW_FINISHERS * WARP_ARRIVALS);
    }
    if (threadIdx.x < sizeof(shared.layer) / sizeof(uint64_t)) {
        const uint32_t index = p.layer != nullptr ? __ldcg(p.layer) : 0;
        reinterpret_cast<uint64_t*>(&shared.layer)[threadIdx.x] = reinterpret_cast<const uint64_t*>(p.layers + index)[threadIdx.x];
    }
    bool failed = p.error != nullptr && __ldcg(p.error) != 0;
    const int tiles = make_few_tables(p, shared, failed); // its barriers also make the above visible
    if (failed) return;
    if (shared.tables.offset[p.experts] > p.panel_rows) {
        if (p.error != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.error = EXPERTD_ERROR_ROWS;
        return;
    }
    const FewShare share = few_share<Format>(p, tiles);
    const uint32_t at = smem_address(memory);
    if (warp < FEW_FINISHER) {
        consume<Format>(p, shared, share, at, depth, warp);
    } else if (warp < FEW_STREAM) {
        finish_few<Format>(p, shared, share, warp - FEW_FINISHER);
    } else if (warp < FEW_ROWS) {
        if constexpr (Format::STREAMED) stream_chunks<Format>(p, shared, share, at + Layout<Format>::RINGS, depth, warp - FEW_STREAM);
    } else {
        bring_rows<Format>(p, shared, share, at + Layout<Format>::ROWS);
    }
}

struct Fitting {
    int blocks, depth; // no blocks: the kernel does not run on this device
};

// Blocks wait for each other's h, so all must be resident: one per multiprocessor. The ring takes what shared memory is left.
template <class Format> Fitting fitting() {
    static const Fitting found = [] {
        Fitting fits = {0, 0};
        int device = 0, processors = 0, shared = 0, each = 0;
        if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
            cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
            return fits;
        }
        // For tests: the shared memory of smaller cards, in bytes.
        if (const char* least = std::getenv("EXPERTD_CUDA_SHARED_BYTES")) shared = std::min(shared, std::atoi(least));
        static_assert(Format::MOST_DEPTH <= RING_BARRIERS);
        const int depth = std::min(Format::MOST_DEPTH, (shared - Layout<Format>::bytes(0)) / (FEW_CONSUMERS * Layout<Format>::CHUNK_BYTES));
        if (depth < 2) return fits;
        const int bytes = Layout<Format>::bytes(depth);
        if (cudaFuncSetAttribute(portable_few<Format>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess ||
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, portable_few<Format>, FEW_THREADS, bytes) != cudaSuccess || each == 0) {
            return fits;
        }
        return Fitting{processors, depth};
    }();
    return found;
}

template <class Format> int launch_of(const ExpertdExpertsParams& p, cudaStream_t stream) {
    Fitting fits = fitting<Format>();
    if (fits.blocks == 0) return cudaErrorInvalidConfiguration;
    if (p.blocks > 0) fits.blocks = std::min(fits.blocks, int(p.blocks));
    void* arguments[] = {const_cast<ExpertdExpertsParams*>(&p), &fits.depth};
    const size_t bytes = Layout<Format>::bytes(fits.depth);
    const auto kernel = reinterpret_cast<const void*>(portable_few<Format>);
    if (p.flags & EXPERTD_LAUNCH_COOPERATIVE) return cudaLaunchCooperativeKernel(kernel, dim3(fits.blocks), dim3(FEW_THREADS), arguments, bytes, stream);
    return cudaLaunchKernel(kernel, dim3(fits.blocks), dim3(FEW_THREADS), arguments, bytes, stream);
}

// The chunks of a format where shared memory has room for two of each consumer, and those that fit the smallest shared memory.
template <class Large, class Small> struct Chunked {
    static_assert(Layout<Small>::bytes(2) <= 99 * 1024);
    static bool fits() { return fitting<Large>().blocks > 0 || fitting<Small>().blocks > 0; }
    static int launch(const ExpertdExpertsParams& p, cudaStream_t stream) {
        return fitting<Large>().blocks > 0 ? launch_of<Large>(p, stream) : launch_of<Small>(p, stream);
    }
};
template <class Format> using Always = Chunked<Format, Format>;
using Bf16Few = Chunked<Few<FewBf16, 2>, Few<FewBf16, 1>>;
using Fp8Few = Always<Few<FewFp8, 1>>;
using Mxfp4Few = Always<Few<FewMxfp4, 2>>;
using Int4Few = Chunked<Few<FewInt4, 4, true>, Few<FewInt4, 2, true>>;
using Int4ZerosFew = Chunked<Few<FewInt4Zeros, 4, true>, Few<FewInt4Zeros, 2, true>>;
using Nvfp4Few = Always<Few<FewNvfp4, 2>>;
using Mxfp8Few = Always<Few<FewMxfp8, 1>>;

const Module module(reinterpret_cast<const void*>(portable_few<Few<FewBf16, 1>>));

} // namespace

int setup_few() {
    const bool fits = Bf16Few::fits() && Fp8Few::fits() && Mxfp4Few::fits() && Int4Few::fits() && Int4ZerosFew::fits() && Nvfp4Few::fits() &&
                      Mxfp8Few::fits();
    return fits ? cudaSuccess : cudaErrorInvalidConfiguration;
}

int launch_few(const ExpertdExpertsParams& p, cudaStream_t stream) {
    switch (p.format) {
    case EXPERTD_BF16: return Bf16Few::launch(p, stream);
    case EXPERTD_FP8: return Fp8Few::launch(p, stream);
    case EXPERTD_MXFP4: return Mxfp4Few::launch(p, stream);
    case EXPERTD_INT4: return Int4Few::launch(p, stream);
    case EXPERTD_INT4_ZEROS: return Int4ZerosFew::launch(p, stream);
    case EXPERTD_NVFP4: return Nvfp4Few::launch(p, stream);
    case EXPERTD_MXFP8: return Mxfp8Few::launch(p, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace expertd
