// Routing maps of one token, whose experts are known to differ, from the set of them in shared memory: a bit an expert,
// and its rank beside it.
//
// An expert's offset is the number of bits below its own, so nothing is counted and scanned ahead, and there is no
// barrier but the one that closes the set.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/maps/routing_maps.h"

namespace ort_moe {

// Filled by one warp, Clear() and then Add(); written by some warps, which count from 0, behind a barrier of all.
class MapsFromSet {
 public:
  static constexpr int32_t kWords = 32;
  static constexpr int32_t kMaxExperts = 32 * kWords;

  // In whole vectors.
  __host__ __device__ static size_t SharedBytes(int32_t experts) {
    return static_cast<size_t>(kWords + (experts + 3) / 4 * 4) * sizeof(uint32_t);
  }
  // To write with: a word each, or a few.
  __host__ __device__ static constexpr int Warps(int32_t experts) {
    return experts <= kMaxExperts / 2 ? (experts + 31) / 32 : kWords / 2 - 1;
  }

  __device__ MapsFromSet(const RoutingMaps& maps, int32_t experts, unsigned char* shared)
      : maps_(maps),
        experts_(experts),
        words_(reinterpret_cast<uint32_t*>(shared)),
        ranks_(reinterpret_cast<int32_t*>(words_ + kWords)) {}

  __device__ void Clear() {
    words_[threadIdx.x % 32] = 0u;
    __syncwarp();
  }

  __device__ void Add(int32_t rank, int32_t expert) {
    atomicOr(words_ + expert / 32, 1u << expert % 32);
    ranks_[expert] = rank;
  }

  __device__ void Write(int warp, int warps, int32_t chosen) {
    const int lane = threadIdx.x % 32;
    const int of_lane = __popc(words_[lane]);
#pragma unroll 1
    for (int32_t first = warp; first * 32 < experts_; first += warps) {
      const int32_t expert = first * 32 + lane;
      const uint32_t word = words_[first];
      const int32_t position =
          __reduce_add_sync(0xffffffffu, lane < first ? of_lane : 0) + __popc(word & ((1u << lane) - 1u));
      if (expert < experts_) maps_.expert_first_token_offset[expert] = position;
      if ((word >> lane & 1u) == 0u) continue;
      const int32_t rank = ranks_[expert];
      maps_.permuted_to_unpermuted[position] = rank;
      maps_.unpermuted_to_permuted[rank] = position;
      maps_.permuted_to_expert[position] = expert;
    }
    if (warp == 0 && lane == 0) maps_.expert_first_token_offset[experts_] = chosen;
  }

 private:
  const RoutingMaps& maps_;
  const int32_t experts_;
  uint32_t* const words_;
  int32_t* const ranks_;  // of the set's experts
};

}  // namespace ort_moe
