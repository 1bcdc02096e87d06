// Thin wrappers around PTX instructions that several kernels use (sm_90a). In builds for the portable path (EXPERTD_PORTABLE), which needs compute
// capability 8.0, some have another form: without clusters, programmatic launches and the copy engine of sm_90.
#pragma once

#include <cstdint>

namespace expertd {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarriers ----

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
#ifndef EXPERTD_PORTABLE // where a barrier of the block is enough
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

#ifdef EXPERTD_PORTABLE
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(smem_address(barrier)) : "memory");
}
#else
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, uint32_t arrivals = 1) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals)
                 : "memory");
}
#endif

__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// The cluster address of the same place in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t peer_address(uint32_t address, uint32_t block) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
    return remote;
}

// Arrives at another block's barrier, at the same shared-memory offset. The arrival announces reads by the tensor cores that
// have already been waited for; a release at cluster scope would add a full memory barrier to every stage.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, uint32_t block, uint32_t arrivals) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;" ::"r"(peer_address(smem_address(barrier), block)), "r"(arrivals)
                 : "memory");
}

// Stores a word to the shared memory of another block of the cluster and completes its bytes on a barrier there. `place` and
// `barrier` are addresses in this block; the same addresses are used in the other one.
__device__ __forceinline__ void store_at(const uint32_t* place, uint32_t block, uint32_t value, uint64_t* barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     peer_address(smem_address(place), block)),
                 "r"(value), "r"(peer_address(smem_address(barrier), block))
                 : "memory");
}

// Arrives once all earlier cp.async copies of this thread have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

__device__ __forceinline__ bool barrier_try_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\n"
#ifdef EXPERTD_PORTABLE
                 "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#else
                 "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
#endif
                 "selp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(smem_address(barrier)), "r"(parity)
                 : "memory");
    return done != 0;
}

// One lane arrives for its warp, after a warp barrier. compute-sanitizer's racecheck does not understand that, so in builds for
// racecheck (EXPERTD_EVERY_LANE_ARRIVES) every lane arrives.
#ifdef EXPERTD_EVERY_LANE_ARRIVES
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif
__device__ __forceinline__ bool arrives_for_warp() { return threadIdx.x % 32 < WARP_ARRIVALS; }

// In debug builds (EXPERTD_SPIN_LIMIT, in clock cycles) a wait that takes too long traps instead of hanging the device.
class SpinLimit {
  public:
    __device__ __forceinline__ void tick() const {
#ifdef EXPERTD_SPIN_LIMIT
        if (cycles() - start_ > (EXPERTD_SPIN_LIMIT)) asm volatile("trap;");
#endif
    }

  private:
#ifdef EXPERTD_SPIN_LIMIT
    static __device__ __forceinline__ int64_t cycles() {
        int64_t value;
        asm volatile("mov.u64 %0, %%clock64;" : "=l"(value));
        return value;
    }
    const int64_t start_ = cycles();
#endif
};

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
    const SpinLimit limit;
    while (!barrier_try_wait(barrier, parity)) limit.tick();
}

// ---- clusters ----

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#ifdef EXPERTD_PORTABLE
// Every block is alone, so that what several blocks of a cluster do is not compiled.
constexpr bool kHasClusters = false;
__device__ __forceinline__ uint32_t cluster_blocks() { return 1; }
__device__ __forceinline__ uint32_t cluster_block() { return 0; }
#else
constexpr bool kHasClusters = true;
__device__ __forceinline__ uint32_t cluster_blocks() {
    uint32_t count;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    return count;
}

// The number of this block in its cluster.
__device__ __forceinline__ uint32_t cluster_block() {
    uint32_t block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    return block;
}
#endif

// The two halves of cluster_sync(). A block has started when it arrives, and its earlier stores are visible to blocks that have waited.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void store_peer(uint32_t address, uint64_t value) {
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}

__device__ __forceinline__ float load_peer(uint32_t address) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

// ---- copies ----

__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

__device__ __forceinline__ uint64_t policy_evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64_t policy_evict_normal() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Copies contiguous bytes from device to shared memory and completes them on the barrier's transaction count.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint64_t* barrier,
                                          uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(destination), "l"(source), "r"(bytes), "r"(smem_address(barrier)), "l"(policy)
                 : "memory");
}

// As bulk_load, but copies to the same place in both blocks of a cluster and completes the bytes on the barrier of each.
__device__ __forceinline__ void bulk_load_both(uint32_t destination, const void* source, uint32_t bytes, uint64_t* barrier,
                                               uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4, %5;" ::"r"(destination),
                 "l"(source), "r"(bytes), "r"(smem_address(barrier)), "h"(uint16_t(3)), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void copy_4(uint32_t destination, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}

// Copies 16 bytes with cp.async, or writes zeros if `there` is false.
__device__ __forceinline__ void copy_16(uint32_t destination, const void* source, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void copies_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Orders ordinary accesses with those of the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_proxy() {
#ifndef EXPERTD_PORTABLE // where there is no copy engine
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
// As fence_async_proxy, for the block's shared memory only.
__device__ __forceinline__ void fence_shared_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The time in nanoseconds, by a clock that all blocks share.
__device__ __forceinline__ uint64_t device_time_ns() {
    uint64_t value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

// ---- device-scope counters ----

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

__device__ __forceinline__ void add_release(uint32_t* p, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

__device__ __forceinline__ void prefetch_to_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// ---- words in shared memory by which threads of a block announce something ----

__device__ __forceinline__ uint32_t load_acquire_shared(const uint32_t* p) {
    uint32_t value;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(smem_address(p)) : "memory");
    return value;
}

__device__ __forceinline__ void store_release_shared(uint32_t* p, uint32_t value) {
    asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(smem_address(p)), "r"(value) : "memory");
}

// Byte i of the result is the one of `low` and `high` (0 to 3, 4 to 7) that bits 4 i to 4 i + 2 of `numbers` name. Bits 4 i + 3 of the lower
// half must be zero.
__device__ __forceinline__ uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t numbers) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(numbers));
    return bytes;
}

// ---- threads ----

template <int REGISTERS> __device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Reads threadIdx.x here. The compiler cannot move values computed from it out of loops, where they would occupy registers.
__device__ __forceinline__ int thread_here() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

template <int COUNT> __device__ __forceinline__ void named_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

// Arrives at a named barrier without waiting; named_sync is the waiting side.
template <int COUNT> __device__ __forceinline__ void named_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#ifndef EXPERTD_PORTABLE // whose kernels begin when the previous one has ended
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#ifndef EXPERTD_PORTABLE
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Stores four 8x8 matrices of 16-bit elements, held by a warp in mma fragment order, transposed. Lane 8m + r gives the
// address of row r (16 bytes) of the transposed matrix m.
__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

// Stores four 8x8 matrices as store_transposed does, but not transposed.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

__device__ __forceinline__ void store_shared_2(uint32_t address, uint16_t value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint32_t load_shared_2(uint32_t address) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float load_shared_f32(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float2 load_shared_2f32(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float4 load_shared_4f32(uint32_t address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

} // namespace expertd
