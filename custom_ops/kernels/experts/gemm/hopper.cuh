// Hopper's instructions around wgmma: the bulk tensor copy, copies that arrive at a barrier, registers handed between
// roles. Barriers themselves and how shared memory is addressed: hopper_copies.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/hopper_copies.cuh"

namespace ort_moe {

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of a tensor of five dimensions into shared memory; its bytes arrive at the barrier.
__device__ __forceinline__ void CopyBox(uint32_t target, const CUtensorMap* map, uint32_t barrier, int c0, int c1,
                                        int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// 16 bytes by this thread's asynchronous copies, where `wanted`; zeros where `bytes` is 0.
__device__ __forceinline__ void CopyVector(bool wanted, uint32_t target, const void* source, int bytes) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p cp.async.cg.shared.global [%1], [%2], 16, %3;\n}\n" ::"r"(
                   static_cast<int>(wanted)),
               "r"(target), "l"(source), "r"(bytes)
               : "memory");
}

// An arrival, expected from each thread, once all copies that this thread has issued are complete.
__device__ __forceinline__ void ArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// Ahead of a warpgroup's first product, and after its registers have changed.
__device__ __forceinline__ void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void WgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps reads and writes of the registers on their side of a wait.
template <typename T, int kCount>
__device__ __forceinline__ void PinRegisters(T (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(T) == 4 && static_cast<T>(0.5) != T{0}) {
      asm volatile("" : "+f"(values[i])::"memory");
    } else {
      asm volatile("" : "+r"(values[i])::"memory");
    }
  }
}

// wgmma's view of rows of 128 bytes, in groups of 8 with swizzled 16-byte vectors; `address` is aligned to 1024 but for
// the 32 bytes of each step along a row.
__device__ __forceinline__ uint64_t SwizzledMatrix(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kGroupBytes = 1024;
  return kSwizzle128 | (kGroupBytes >> 4) << 32 | uint64_t{1} << 16 | (address & 0x3ffffu) >> 4;
}

}  // namespace ort_moe
