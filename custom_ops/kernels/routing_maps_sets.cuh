// Routing maps of a few tokens, each of which has chosen distinct experts, from a set of experts per token in shared
// memory: a bit an expert, and the choice's rank beside it.
//
// An expert's offset is the number of bits of lower experts, in any of the sets; so nothing is counted and scanned
// before it is written, and no barrier is needed but the one that closes the sets.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/routing_maps.h"

namespace ort_moe {

constexpr int32_t kMaxSetTokens = 4;
constexpr int32_t kSetWords = 32;
constexpr int32_t kMaxSetExperts = 32 * kSetWords;

// Used by kThreads threads of a block, which count from 0; Add() by others. Clear(), a barrier, Add(), a barrier,
// Write().
template <int kThreads>
class MapsFromSets {
 public:
  __host__ __device__ static size_t SharedBytes(int32_t tokens, int32_t experts) {
    return (static_cast<size_t>(tokens) * (kSetWords + experts) + 3) / 4 * 4 * sizeof(uint32_t);  // whole vectors
  }

  __device__ MapsFromSets(const RoutingMaps& maps, int32_t tokens, int32_t experts, unsigned char* shared)
      : maps_(maps),
        tokens_(tokens),
        experts_(experts),
        sets_(reinterpret_cast<uint32_t*>(shared)),
        ranks_(reinterpret_cast<int32_t*>(sets_ + tokens * kSetWords)) {}

  __device__ void Clear(int thread) {
    for (int32_t i = thread; i < tokens_ * kSetWords; i += kThreads) sets_[i] = 0u;
  }

  __device__ void Add(int32_t token, int32_t rank, int32_t expert) {
    atomicOr(sets_ + token * kSetWords + expert / 32, 1u << expert % 32);
    ranks_[token * experts_ + expert] = rank;
  }

  // Lane l of a warp has the bits of experts 32 * l and up; a warp writes those of one word after another.
  __device__ void Write(int thread) {
    constexpr unsigned kAll = 0xffffffffu;
    const int lane = thread % 32;
    int32_t own = 0;
#pragma unroll 1
    for (int32_t t = 0; t < tokens_; ++t) own += __popc(sets_[t * kSetWords + lane]);
#pragma unroll 4
    for (int32_t word = thread / 32; word <= experts_ / 32; word += kThreads / 32) {
      const int32_t expert = word * 32 + lane;
      int32_t position = __reduce_add_sync(kAll, lane < word ? own : 0);
      uint32_t chose = 0u;  // bit t: token t did
#pragma unroll 1
      for (int32_t t = 0; t < tokens_; ++t) {
        const uint32_t set = word < kSetWords ? sets_[t * kSetWords + word] : 0u;
        position += __popc(set & ((1u << lane) - 1u));
        chose |= (set >> lane & 1u) << t;
      }
      if (expert <= experts_) maps_.expert_first_token_offset[expert] = position;
#pragma unroll 1
      for (; chose != 0u; chose &= chose - 1u, ++position) {
        const int32_t token = __ffs(chose) - 1, row = ranks_[token * experts_ + expert] * tokens_ + token;
        maps_.permuted_to_unpermuted[position] = row;
        maps_.unpermuted_to_permuted[row] = position;
        maps_.permuted_to_expert[position] = expert;
      }
    }
  }

 private:
  const RoutingMaps& maps_;
  const int32_t tokens_;
  const int32_t experts_;
  uint32_t* const sets_;
  int32_t* const ranks_;
};

}  // namespace ort_moe
