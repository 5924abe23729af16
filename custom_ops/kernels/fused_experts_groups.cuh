// Which tokens of FusedExperts a block takes: one expert and up to `chunk` of its tokens, which share its weights'
// read.
#pragma once

#include <cstdint>

#include "kernels/fused_experts_params.cuh"

namespace ort_moe {

struct Group {
  int expert;
  int count;   // 0: nothing to do
  int member;  // lane i < count: the slot of the group's token i
};

// Group that begins at `slot`, if one does: every chunk-th slot of an expert begins one. For at most kMaxDirectSlots
// slots; each warp finds it on its own.
__device__ __forceinline__ Group GroupOfSlot(const int32_t* indices, int slots, int experts, int chunk, int slot) {
  constexpr int kWords = kMaxDirectSlots / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int expert = indices[slot];
  if (expert < 0 || expert >= experts) return Group{expert, 0, 0};
  if (chunk == 1) return Group{expert, 1, slot};
  uint32_t same[kWords];
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    const int other = word * kLanes + lane;
    same[word] = word * kLanes < slots ? __ballot_sync(0xffffffffu, other < slots && indices[other] == expert) : 0u;
  }
  Group group{expert, 0, 0};
  int before = 0;
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    const int first = slot - word * kLanes;  // slots below it come before
    const uint32_t below = first <= 0 ? 0u : first >= kLanes ? ~0u : (1u << first) - 1u;
    before += __popc(same[word] & below);
    same[word] &= ~below;
  }
  if (before % chunk != 0) return group;
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    for (uint32_t rest = same[word]; rest != 0 && group.count < chunk; rest &= rest - 1) {
      if (lane == group.count) group.member = word * kLanes + __ffs(rest) - 1;
      ++group.count;
    }
  }
  return group;
}

// Group of permuted rows [first, first + count) by the maps; the members are slots. Maps of other indices do no harm.
__device__ __forceinline__ Group GroupOfRows(const ExpertsParams& p, int expert, int first, int count) {
  const int lane = threadIdx.x % kLanes;
  Group group{expert, count, 0};
  if (lane < count) {
    const int expanded = min(max(p.maps.permuted_to_unpermuted[first + lane], 0), p.slots - 1);
    group.member = expanded % p.tokens * p.k + expanded / p.tokens;
  }
  return group;
}

}  // namespace ort_moe
