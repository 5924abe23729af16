// Rows of the training ops, one to a warp, on their way between global and shared memory: by bulk copies, which run in
// the background and take whole lines, or by the warp's lanes where rows are not whole 16 bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/fused_router_row.cuh"

namespace ort_moe {

__device__ __forceinline__ uint32_t SharedNumber(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Bytes that a row takes in shared memory, and bytes between what lies there.
__host__ __device__ constexpr uint32_t WholeVectors(int64_t bytes) {
  return static_cast<uint32_t>((bytes + 15) / 16 * 16);
}

// --- Bulk copies, from Hopper on. All addresses and sizes are multiples of 16 bytes. ---

__device__ __forceinline__ void InitRowBarrier(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedNumber(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// By one lane, ahead of its copies: how many bytes the barrier's phase waits for.
__device__ __forceinline__ void ExpectBytes(uint64_t* barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedNumber(barrier)), "r"(bytes)
               : "memory");
#endif
}

// By the same lane, when the warp is done with what lies there.
__device__ __forceinline__ void BulkLoadRow(void* shared, const void* source, uint32_t bytes, uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   SharedNumber(shared)),
               "l"(source), "r"(bytes), "r"(SharedNumber(barrier))
               : "memory");
#endif
}

__device__ __forceinline__ void WaitForRow(uint64_t* barrier, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p;\nROW_WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra ROW_DONE;\n"
      "bra ROW_WAIT;\nROW_DONE:\n}\n" ::"r"(SharedNumber(barrier)),
      "r"(parity)
      : "memory");
#endif
}

__device__ __forceinline__ void BulkStoreRow(void* target, const void* shared, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(SharedNumber(shared)),
               "r"(bytes)
               : "memory");
#endif
}

__device__ __forceinline__ void CommitBulkStores() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Until this lane's bulk stores have read their shared memory.
__device__ __forceinline__ void WaitForBulkReads() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

// By every lane that wrote to shared memory, ahead of the __syncwarp behind which one lane copies it.
__device__ __forceinline__ void ShowToBulkCopies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// --- By the lanes of a warp ---

template <typename Unit>
__device__ __forceinline__ void CopyUnits(void* target, const void* source, uint32_t bytes) {
#pragma unroll 4
  for (uint32_t i = threadIdx.x % kWarp; i < bytes / sizeof(Unit); i += kWarp) {
    static_cast<Unit*>(target)[i] = static_cast<const Unit*>(source)[i];
  }
}

// Between shared memory, aligned to 16 bytes, and global memory, aligned to kElement as `bytes` are.
template <int kElement>
__device__ __forceinline__ void CopyRow(void* target, const void* source, uint32_t bytes) {
  const uint64_t alignment = reinterpret_cast<uint64_t>(target) | reinterpret_cast<uint64_t>(source) | bytes;
  if (alignment % 16 == 0) {
    CopyUnits<uint4>(target, source, bytes);
  } else if (alignment % 4 == 0) {
    CopyUnits<uint32_t>(target, source, bytes);
  } else if (kElement == 1 && alignment % 2 != 0) {
    CopyUnits<uint8_t>(target, source, bytes);
  } else {
    CopyUnits<uint16_t>(target, source, bytes);
  }
}

__device__ __forceinline__ void ZeroShared(void* shared, uint32_t bytes) {
#pragma unroll 4
  for (uint32_t i = threadIdx.x % kWarp; i < bytes / sizeof(uint4); i += kWarp) {
    static_cast<uint4*>(shared)[i] = make_uint4(0u, 0u, 0u, 0u);
  }
}

// --- Chunks of a row in shared memory ---

// Div(x, divisor) of terms e^y of a softmax by their sum. Terms and sum are far from the ends of the format, mostly:
// then a product with the reciprocal, corrected twice by the exact remainder, is the rounded quotient (Markstein,
// "IA-64 and Elementary Functions", theorem 8.3: the first correction makes it faithful), for a third of the
// instructions of a division.
class DivideTerms {
 public:
  __device__ __forceinline__ explicit DivideTerms(float divisor)
      : divisor_(divisor), reciprocal_(Div(1.0f, divisor)), plain_(!(divisor >= 0.5f && divisor <= 0x1p60f)) {}

  __device__ __forceinline__ void operator()(float (&x)[kChunk]) const {
    constexpr uint32_t kSmallest = 0x12800000u;  // 2^-90
    uint32_t least = 0xffffffffu;                // of those that are not 0
#pragma unroll
    for (int i = 0; i < kChunk; ++i) least = min(least, FloatBits(x[i]) - 1u);
    if (ORT_MOE_RARE(plain_ || least < kSmallest - 1u)) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) x[i] = Div(x[i], divisor_);
      return;
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float quotient = Mul(x[i], reciprocal_);
      quotient = Fma(Fma(-quotient, divisor_, x[i]), reciprocal_, quotient);
      x[i] = Fma(Fma(-quotient, divisor_, x[i]), reciprocal_, quotient);
    }
  }

 private:
  float divisor_;
  float reciprocal_;
  bool plain_;
};

template <typename T>
__device__ __forceinline__ void ReadChunk(const void* row, int32_t chunk, float* x) {
  union {
    uint4 vectors[sizeof(Bits<T>) * kChunk / sizeof(uint4)];
    Bits<T> bits[kChunk];
  } loaded;
  constexpr int kVectors = sizeof(loaded) / sizeof(uint4);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) loaded.vectors[v] = static_cast<const uint4*>(row)[chunk * kVectors + v];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = Storage<T>::Widen(loaded.bits[i]);
}

template <typename T>
__device__ __forceinline__ void WriteChunk(void* row, int32_t chunk, const float* x) {
  union {
    uint4 vectors[sizeof(Bits<T>) * kChunk / sizeof(uint4)];
    Bits<T> bits[kChunk];
  } stored;
  constexpr int kVectors = sizeof(stored) / sizeof(uint4);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) stored.bits[i] = Storage<T>::Round(x[i]);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) static_cast<uint4*>(row)[chunk * kVectors + v] = stored.vectors[v];
}

}  // namespace ort_moe
