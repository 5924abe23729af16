// Which tokens of FusedExperts are computed together, where there are few: one expert and up to `chunk` of its tokens,
// which share its weights' read. Every block finds the same items in the same order from the indices alone.
#pragma once

#include <cstdint>

#include "kernels/experts/params.cuh"

namespace ort_moe {

// The items in a block's shared memory, in order of their first slot.
class Items {
 public:
  static __host__ __device__ __forceinline__ size_t Bytes(int slots, int chunk) {
    return (kMaxDirectSlots + static_cast<size_t>(Padded(slots)) * (2 + 2 * chunk)) * sizeof(int32_t) +
           kWords * sizeof(uint32_t);
  }

  __device__ __forceinline__ Items(void* memory, int slots, int chunk) : chunk_(chunk) {
    slot_expert_ = static_cast<int32_t*>(memory);
    expert_ = slot_expert_ + kMaxDirectSlots;
    count_ = expert_ + Padded(slots);
    members_ = count_ + Padded(slots);
    tokens_ = members_ + Padded(slots) * chunk;
    leaders_ = reinterpret_cast<uint32_t*>(tokens_ + Padded(slots) * chunk);
  }

  // chunk is a power of 2, at most kFewChunk. By all threads of a block of kMaxDirectSlots at least; `meanwhile()` is
  // called while the indices are on their way. Ends with a barrier. Returns the number of items.
  template <typename Meanwhile>
  __device__ __forceinline__ int Find(const int32_t* indices, int slots, int k, int experts, Meanwhile meanwhile);

  __device__ __forceinline__ int SlotExpert(int slot) const { return slot_expert_[slot]; }  // -1: none
  __device__ __forceinline__ int Expert(int item) const { return expert_[item]; }
  __device__ __forceinline__ int Count(int item) const { return count_[item]; }
  // Slot and token of member `i` of an item.
  __device__ __forceinline__ int Member(int item, int i) const { return members_[item * chunk_ + i]; }
  __device__ __forceinline__ int Token(int item, int i) const { return tokens_[item * chunk_ + i]; }

 private:
  static constexpr int kWords = kMaxDirectSlots / kLanes;

  static __host__ __device__ __forceinline__ int Padded(int slots) { return (slots + 3) / 4 * 4; }

  int32_t* slot_expert_;  // (kMaxDirectSlots)
  int32_t* expert_;       // (items)
  int32_t* count_;        // (items) tokens
  int32_t* members_;      // (items, chunk) their slots, ascending
  int32_t* tokens_;       // (items, chunk) those slots' tokens
  uint32_t* leaders_;     // (kWords) bit of a slot: it is the first of an item
  int chunk_;
};

template <typename Meanwhile>
__device__ __forceinline__ int Items::Find(const int32_t* indices, int slots, int k, int experts, Meanwhile meanwhile) {
  const int slot = threadIdx.x;
  int expert = slot < slots ? indices[slot] : -1;
  meanwhile();
  if (expert >= experts) expert = -1;
  if (slot < kMaxDirectSlots) {
    if (slot < slots) count_[slot] = 0;
    slot_expert_[slot] = max(expert, -1);
  }
  expert = max(expert, -1);
  if (chunk_ == 1 && slots <= kLanes) {
    // One warp knows them all, and every slot is an item.
    if (slot < kLanes) {
      const uint32_t valid = __ballot_sync(0xffffffffu, expert >= 0);
      if (expert >= 0) {
        const int item = __popc(valid & ((1u << slot) - 1u));
        expert_[item] = expert;
        count_[item] = 1;
        members_[item] = slot;
        tokens_[item] = slot / k;
      }
      if (slot == 0) leaders_[0] = valid;
    }
    __syncthreads();
    return __popc(leaders_[0]);
  }
  __syncthreads();

  // Which slots ahead of this one have its expert, a word at a time; the last one that begins an item leads this one.
  int rank = 0, leader = slot;
  if (chunk_ > 1 && slot < slots) {
#pragma unroll 1
    for (int word = 0; word * kLanes < slot; ++word) {
      uint32_t same = 0;
#pragma unroll
      for (int i = 0; i < kLanes / 4; ++i) {
        const int4 others = reinterpret_cast<const int4*>(slot_expert_)[word * (kLanes / 4) + i];
        same |= (others.x == expert ? 1u : 0u) << (4 * i) | (others.y == expert ? 2u : 0u) << (4 * i) |
                (others.z == expert ? 4u : 0u) << (4 * i) | (others.w == expert ? 8u : 0u) << (4 * i);
      }
      const int ahead = slot - word * kLanes;
      if (ahead < kLanes) same &= (1u << ahead) - 1u;
      for (; same != 0; same &= same - 1) {
        if ((rank & (chunk_ - 1)) == 0) leader = word * kLanes + __ffs(same) - 1;
        ++rank;
      }
    }
    if ((rank & (chunk_ - 1)) == 0) leader = slot;
  }
  const bool leads = expert >= 0 && leader == slot;
  const uint32_t leading = __ballot_sync(0xffffffffu, leads);
  if (slot < kMaxDirectSlots && slot % kLanes == 0) leaders_[slot / kLanes] = leading;
  __syncthreads();

  if (expert >= 0) {
    int item = __popc(leaders_[leader / kLanes] & ((1u << leader % kLanes) - 1u));
    for (int word = 0; word < leader / kLanes; ++word) item += __popc(leaders_[word]);
    if (leads) expert_[item] = expert;
    members_[item * chunk_ + (rank & (chunk_ - 1))] = slot;
    tokens_[item * chunk_ + (rank & (chunk_ - 1))] = slot / k;
    atomicMax(&count_[item], (rank & (chunk_ - 1)) + 1);
  }
  __syncthreads();
  int items = 0;
#pragma unroll
  for (int word = 0; word < kWords; ++word) items += __popc(leaders_[word]);
  return items;
}

}  // namespace ort_moe
