// Routing maps of up to 32768 choices without a launch between counting and placing: every block counts all choices by
// expert, and so finds the places of its own without waiting for another block.
//
// Counting is one shared-memory atomic a choice; 10240 choices take 1024 threads some 2 us, where three launches
// take 8.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/maps/group_scan.cuh"
#include "kernels/maps/routing_maps.h"

namespace ort_moe {

constexpr int64_t kMaxCounted = 1 << 15;      // choices
constexpr int64_t kMaxBlockChoices = 1 << 9;  // whose order is found pair by pair
constexpr size_t kMaxCountBytes = 64 << 10;

// All choices of a call and the maps of them.
struct Choices {
  RoutingMaps maps;
  const int32_t* indices;
  int32_t tokens;
  int32_t k;
  int32_t experts;

  __host__ __device__ int32_t count() const { return tokens * k; }
  // Number E where there is none.
  __device__ int32_t ExpertOf(int32_t index) const { return index >= 0 && index < experts ? index : experts; }
};

// Shared memory of a block that places block_choices.
__host__ __device__ inline size_t CountingBytes(const Choices& p, int32_t block_choices) {
  return (2 * (static_cast<size_t>(p.experts) + 1) + 2 * static_cast<size_t>(block_choices)) * sizeof(int32_t);
}

inline bool FitsCounting(const Choices& p, int32_t block_choices) {
  return p.count() <= kMaxCounted && block_choices <= kMaxBlockChoices &&
         CountingBytes(p, block_choices) <= kMaxCountBytes;
}

// Where the rows of a block's choices, [begin, end), go, from counts of all choices by expert.
template <int kThreads>
struct Places {
  const Choices& p;
  const int thread;
  int32_t* before;     // (E + 1) choices ahead of the block's; then the place of the block's first
  int32_t* after;      // (E + 1) the block's and those behind
  int32_t* expert_of;  // (block_choices)
  int32_t* place_of;   // (block_choices) the place; its complement where there is no expert

  __device__ Places(const Choices& p, int32_t block_choices, int32_t* shared, int thread)
      : p(p),
        thread(thread),
        before(shared),
        after(before + p.experts + 1),
        expert_of(after + p.experts + 1),
        place_of(expert_of + block_choices) {}

  __device__ void Clear() {
    for (int32_t e = thread; e < 2 * (p.experts + 1); e += kThreads) before[e] = 0;
  }

  __device__ void Count(int32_t begin, int32_t end) {
    const auto count = [&](int32_t slot, int32_t index) {
      const int32_t expert = p.ExpertOf(index);
      atomicAdd((slot < begin ? before : after) + expert, 1);
      if (slot >= begin && slot < end) expert_of[slot - begin] = expert;
    };
    const int32_t vectors = reinterpret_cast<uintptr_t>(p.indices) % sizeof(int4) == 0 ? p.count() / 4 : 0;
#pragma unroll 2
    for (int32_t i = thread; i < vectors; i += kThreads) {
      const int4 four = reinterpret_cast<const int4*>(p.indices)[i];
      count(4 * i, four.x);
      count(4 * i + 1, four.y);
      count(4 * i + 2, four.z);
      count(4 * i + 3, four.w);
    }
    for (int32_t slot = 4 * vectors + thread; slot < p.count(); slot += kThreads) count(slot, p.indices[slot]);
  }

  // A thread's experts are neighbours.
  __device__ void Sum(bool writes_offsets) {
    constexpr int kBarrier = 1;
    __shared__ int32_t of_warps[kThreads / 32];
    const int32_t per_thread = (p.experts + kThreads) / kThreads;
    const int32_t first = min(thread * per_thread, p.experts + 1), last = min(first + per_thread, p.experts + 1);
    int32_t count = 0;
    for (int32_t e = first; e < last; ++e) count += before[e] + after[e];
    int32_t start = ExclusiveSum<kThreads>(count, thread, kBarrier, of_warps);
    for (int32_t e = first; e < last; ++e) {
      if (writes_offsets) p.maps.expert_first_token_offset[e] = start;
      const int32_t ahead = before[e];
      before[e] = start + ahead;
      start += ahead + after[e];
    }
  }

  // A warp takes a choice: behind the block's earlier ones of its expert.
  __device__ void Find(int32_t begin, int32_t end, bool writes_maps) {
    const int lane = thread % 32;
    for (int32_t i = thread / 32; i < end - begin; i += kThreads / 32) {
      const int32_t expert = expert_of[i];
      int32_t place = before[expert];
      for (int32_t base = 0; base < i; base += 32) {
        const int32_t other = base + lane;
        place += __popc(__ballot_sync(0xffffffffu, other < i && expert_of[other] == expert));
      }
      if (lane != 0) continue;
      const bool has_expert = expert < p.experts;
      place_of[i] = has_expert ? place : ~place;
      if (!writes_maps) continue;
      const int32_t slot = begin + i, token = slot / p.k;
      const int32_t row = (slot - token * p.k) * p.tokens + token;
      p.maps.permuted_to_unpermuted[place] = row;
      p.maps.unpermuted_to_permuted[row] = has_expert ? place : -1;
      p.maps.permuted_to_expert[place] = expert;
    }
  }
};

}  // namespace ort_moe
