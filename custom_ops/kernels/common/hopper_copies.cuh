// Hopper's barriers in shared memory, and its bulk copies from and to shared memory, which run in the background and
// take multiples of 16 bytes.
//
// Shared memory is addressed by 32-bit numbers here (SharedAddress), as the instructions take them. In code for older
// devices, which takes other ways, the calls do nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ort_moe {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- Barriers ---

__device__ __forceinline__ void InitBarrier(uint32_t barrier, int arrivals) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void FenceBarrierInit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void Arrive(uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Ahead of the copies: how many bytes the barrier's phase waits for.
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// Waits until the phase of parity `parity` has ended.
__device__ __forceinline__ void WaitBarrier(uint32_t barrier, int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\n"
      "DONE:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Shared memory that this thread has written, or has seen written, becomes visible to wgmma and the copy engine.
__device__ __forceinline__ void FenceForAsyncProxy() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// --- Bulk copies ---

// The bytes arrive at the barrier.
__device__ __forceinline__ void CopyBulk(uint32_t target, const void* source, int bytes, uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}

// One of a group that this thread closes.
__device__ __forceinline__ void StoreBulk(void* target, uint32_t source, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
               : "memory");
#endif
}

// The same, of lines that make place for others first.
__device__ __forceinline__ void StoreBulkOnce(void* target, uint32_t source, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(target),
               "r"(source), "r"(bytes), "l"(policy)
               : "memory");
#endif
}

__device__ __forceinline__ void CommitBulkStores() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Until this thread's groups of bulk stores have read their shared memory.
__device__ __forceinline__ void WaitForBulkReads() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

}  // namespace ort_moe
