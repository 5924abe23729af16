// What the kernels of PermuteTokens take, and how they touch rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/maps/routing_maps_counted.cuh"

namespace ort_moe {

struct PermuteParams : Choices {
  const void* x;
  void* permuted_x;
  int64_t vectors;  // of a row
  // Of a block that does all at once.
  int32_t block_tokens;
  int32_t block_vectors;

  __host__ __device__ int32_t block_choices() const { return block_tokens * k; }
};

// Rows are read once, past the first-level cache.
template <typename Vector>
__device__ __forceinline__ Vector LoadOnce(const void* rows, int64_t at) {
  return __ldcg(static_cast<const Vector*>(rows) + at);
}

// Rows are written once, and make place for others first.
template <typename Vector>
__device__ __forceinline__ void StoreOnce(void* rows, int64_t at, const Vector& value) {
  __stcs(static_cast<Vector*>(rows) + at, value);
}

}  // namespace ort_moe
