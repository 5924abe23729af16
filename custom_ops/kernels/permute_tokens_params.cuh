// What the kernels of PermuteTokens take, and how they touch rows.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/routing_maps.h"

namespace ort_moe {

struct PermuteParams {
  const void* x;
  const int32_t* indices;
  void* permuted_x;
  RoutingMaps maps;
  int64_t vectors;  // of a row
  int32_t tokens;
  int32_t k;
  int32_t experts;
  // Of a block that does all at once.
  int32_t block_tokens;
  int32_t block_vectors;

  __host__ __device__ int32_t choices() const { return tokens * k; }
  __host__ __device__ int32_t block_choices() const { return block_tokens * k; }
  __host__ __device__ size_t SharedBytes() const {
    return (2 * (static_cast<size_t>(experts) + 1) + 2 * static_cast<size_t>(block_choices())) * sizeof(int32_t);
  }
  __device__ int32_t ExpertOf(int32_t index) const { return index >= 0 && index < experts ? index : experts; }
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
