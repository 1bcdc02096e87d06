// The kernel for experts with few rows each: steps whose time is that of reading weights (EXPERTD_LAUNCH_FEW_ROWS).
//
// It computes the same as experts_kernel (experts_kernel.cuh) for any counts, but reads an expert's weights once for every eight rows.
// Where experts_kernel gives a block segments of 64 or 128 weight rows, a block here has one contiguous run of rows of the same number of
// bytes as the others, and nothing stops its stream of weights: not the step's first rows, not the hand-over of h, not the end of a
// segment. experts_few_plan.cuh says how work is divided, experts_few_roles.cuh what warps do, experts_few_formats.cuh how they multiply.
//
// h is bf16 [assignments][inter] here in every format; x_panels and the scales of x and h are not used.
#include <cuda_runtime.h>

#include "experts_few_roles.cuh"
#include "experts_launch.h"
#include "modules.h"

namespace expertd {
namespace {

template <class Format>
__global__ void __launch_bounds__(FEW_THREADS, 1) experts_few_kernel(const __grid_constant__ ExpertdExpertsParams p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    FewShared& shared = *reinterpret_cast<FewShared*>(memory + FewRing<Format>::BYTES);
    const int warp = uniform(threadIdx.x / 32);
    if (threadIdx.x == 0) {
        for (int s = 0; s < FEW_STREAMS; s++) {
            for (int i = 0; i < FewRing<Format>::SLOTS; i++) barrier_init(&shared.full[s][i], 1), barrier_init(&shared.empty[s][i], WARP_ARRIVALS);
        }
        for (int c = 0; c < FEW_CONSUMERS; c++) {
            for (int i = 0; i < FEW_MOST_ROW_SLOTS; i++) barrier_init(&shared.rows_full[c][i], 32), barrier_init(&shared.rows_empty[c][i], WARP_ARRIVALS);
        }
        barrier_init(&shared.sums_full, FEW_CONSUMERS * WARP_ARRIVALS);
        barrier_init(&shared.sums_empty, FEW_FINISHERS * WARP_ARRIVALS);
        barrier_init_fence();
    }
    if (threadIdx.x < sizeof(shared.layer) / sizeof(uint64_t)) {
        const uint32_t index = p.layer != nullptr ? __ldcg(p.layer) : 0;
        reinterpret_cast<uint64_t*>(&shared.layer)[threadIdx.x] = reinterpret_cast<const uint64_t*>(p.layers + index)[threadIdx.x];
    }
    wait_for_previous_kernel();
    bool failed = p.error != nullptr && __ldcg(p.error) != 0;
    const int tiles = make_few_tables(p, shared, failed); // its barriers also make the above visible
    if (failed) return;
    if (shared.tables.offset[p.experts] > p.panel_rows) {
        if (p.error != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.error = EXPERTD_ERROR_ROWS;
        return;
    }
    const FewShare share = few_share<Format>(p, tiles);
    const uint32_t ring = smem_address(memory);
    if (warp < FEW_FINISHER) {
        consume_few<Format>(p, shared, share, ring, warp);
    } else if (warp < FEW_STREAM) {
        finish_few<Format>(p, shared, share, warp - FEW_FINISHER);
    } else if (warp < FEW_ROWS) {
        if (threadIdx.x % 32 == 0) stream_weights<Format>(p, shared, share, ring, warp - FEW_STREAM);
    } else {
        bring_rows<Format>(p, shared, share, ring + FewRing<Format>::ROWS);
    }
}

// Blocks wait for each other's h, so all must be resident: one per SM.
template <class Format> int resident_few_blocks() {
    static const int count = [] {
        constexpr int BYTES = FewRing<Format>::SHARED_BYTES;
        int device = 0, processors = 0, each = 0;
        if (cudaFuncSetAttribute(experts_few_kernel<Format>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES) != cudaSuccess ||
            cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, experts_few_kernel<Format>, FEW_THREADS, BYTES) != cudaSuccess) {
            return 0;
        }
        return each > 0 ? processors : 0;
    }();
    return count;
}

template <class Format> int launch_few_of(const ExpertdExpertsParams& p, cudaStream_t stream) {
    int blocks = resident_few_blocks<Format>();
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    if (p.blocks > 0 && p.blocks < blocks) blocks = p.blocks;
    return launch_resident(experts_few_kernel<Format>, p, blocks, FEW_THREADS, FewRing<Format>::SHARED_BYTES, stream);
}

const Module module(reinterpret_cast<const void*>(experts_few_kernel<FewBf16>));

} // namespace

int launch_few(const ExpertdExpertsParams& p, cudaStream_t stream) {
    switch (p.format) {
    case EXPERTD_BF16: return launch_few_of<FewBf16>(p, stream);
    case EXPERTD_FP8: return launch_few_of<FewFp8>(p, stream);
    case EXPERTD_MXFP4: return launch_few_of<FewMxfp4>(p, stream);
    case EXPERTD_W8A8: return launch_few_of<FewW8a8>(p, stream);
    case EXPERTD_INT4: return launch_few_of<FewInt4>(p, stream);
    case EXPERTD_INT4_ZEROS: return launch_few_of<FewInt4Zeros>(p, stream);
    case EXPERTD_NVFP4: return launch_few_of<FewNvfp4>(p, stream);
    case EXPERTD_MXFP8: return launch_few_of<FewMxfp8>(p, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace expertd
