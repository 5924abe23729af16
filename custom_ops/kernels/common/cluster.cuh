// Thread block clusters: blocks that run at the same time and reach each other's shared memory. Before Hopper, and in a
// launch without clusters, a cluster is one block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ort_moe {

__device__ __forceinline__ uint32_t ClusterBlocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
#else
  return 1u;
#endif
}

__device__ __forceinline__ uint32_t ClusterRank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0u;
#endif
}

// The two halves of a barrier of all threads of a cluster; whole warps call it.
__device__ __forceinline__ void ClusterArrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void ClusterWait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// *address = value in the shared memory of the cluster's block `rank`, for the same variable of this block.
__device__ __forceinline__ void StoreInBlock(uint32_t rank, uint64_t* address, uint64_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(address));
  asm volatile(
      "{ .reg .u32 remote; mapa.shared::cluster.u32 remote, %0, %1; st.shared::cluster.u64 [remote], %2; }" ::"r"(
          local),
      "r"(rank), "l"(value)
      : "memory");
#else
  *address = value;
#endif
}

// A barrier of `threads` threads of the block, in whole warps, by its number (0 is __syncthreads). Those that only
// arrive do not wait for the others.
__device__ __forceinline__ void BlockSync(int barrier, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void BlockArrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace ort_moe
