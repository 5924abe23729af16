// Rows of the training ops, one to a warp, in shared memory, and on their way there and back: by bulk copies
// (hopper_copies.cuh), or by the warp's lanes where rows are not whole 16 bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/hopper_copies.cuh"
#include "kernels/router/fused_router_row.cuh"

namespace ort_moe {

// Bytes that a row takes in shared memory, and bytes between what lies there.
__host__ __device__ constexpr uint32_t WholeVectors(int64_t bytes) {
  return static_cast<uint32_t>((bytes + 15) / 16 * 16);
}

// --- Copies by the lanes of a warp ---

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
