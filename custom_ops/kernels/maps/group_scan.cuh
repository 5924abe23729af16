// Exclusive sums over some of a block's threads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/cluster.cuh"

namespace ort_moe {

// Sum of the values of all threads before this one. `thread` counts from 0 within kThreads threads, whole warps that
// share the barrier; `of_warps` is shared memory that nobody else uses before their next barrier.
template <int kThreads>
__device__ __forceinline__ int32_t ExclusiveSum(int32_t value, int thread, int barrier,
                                                int32_t (&of_warps)[kThreads / 32]) {
  constexpr int kLanes = 32;
  static_assert(kThreads % kLanes == 0);
  const int lane = thread % kLanes, warp = thread / kLanes;
  int32_t sum = value;
#pragma unroll
  for (int stride = 1; stride < kLanes; stride *= 2) {
    const int32_t before = __shfl_up_sync(0xffffffffu, sum, stride);
    if (lane >= stride) sum += before;
  }
  if (lane == kLanes - 1) of_warps[warp] = sum;
  BlockSync(barrier, kThreads);
  int32_t before = 0;
#pragma unroll
  for (int w = 0; w < kThreads / kLanes; ++w) before += w < warp ? of_warps[w] : 0;
  return before + sum - value;
}

}  // namespace ort_moe
