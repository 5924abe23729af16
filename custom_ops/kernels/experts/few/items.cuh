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
    return (1 + kMaxDirectSlots + static_cast<size_t>(slots) * (2 + 2 * chunk)) * sizeof(int32_t);
  }

  __device__ __forceinline__ Items(void* memory, int slots, int chunk) : chunk_(chunk) {
    num_items_ = static_cast<int32_t*>(memory);
    slot_expert_ = num_items_ + 1;
    expert_ = slot_expert_ + kMaxDirectSlots;
    count_ = expert_ + slots;
    members_ = count_ + slots;
    tokens_ = members_ + slots * chunk;
  }

  // By one warp; for all others behind a barrier. chunk is a power of 2 above 1.
  __device__ __forceinline__ void Find(const int32_t* indices, int slots, int k, int experts);

  // The same for up to kLanes choices of one token, each an item: every warp knows them without the others, and the
  // first keeps them for what comes behind a barrier. Lane l has choice l, its expert or -1.
  __device__ __forceinline__ static int Choice(const int32_t* indices, int slots, int experts) {
    const int slot = threadIdx.x % kLanes, expert = slot < slots ? indices[slot] : -1;
    return expert >= 0 && expert < experts ? expert : -1;
  }
  // Returns how many there are; *item_expert becomes the expert of the item that has the lane's number.
  __device__ __forceinline__ int TakeAlone(int choice, int* item_expert) {
    const uint32_t chosen = __ballot_sync(0xffffffffu, choice >= 0);
    const int num_items = __popc(chosen), lane = threadIdx.x % kLanes;
    *item_expert = choice;
    if ((chosen & (chosen + 1u)) != 0) {
      *item_expert = __shfl_sync(0xffffffffu, choice, max(static_cast<int>(__fns(chosen, 0, lane + 1)), 0));
    }
    if (threadIdx.x < kLanes) {
      slot_expert_[lane] = choice;
      if (choice >= 0) {
        const int item = __popc(chosen & ((1u << lane) - 1u));
        expert_[item] = choice;
        count_[item] = 1;
        members_[item] = lane;
        tokens_[item] = 0;
      }
      if (lane == 0) *num_items_ = num_items;
    }
    return num_items;
  }

  __device__ __forceinline__ int NumItems() const { return *num_items_; }
  __device__ __forceinline__ int SlotExpert(int slot) const { return slot_expert_[slot]; }  // -1: none
  __device__ __forceinline__ int Expert(int item) const { return expert_[item]; }
  __device__ __forceinline__ int Count(int item) const { return count_[item]; }
  // Slot and token of member `i` of an item.
  __device__ __forceinline__ int Member(int item, int i) const { return members_[item * chunk_ + i]; }
  __device__ __forceinline__ int Token(int item, int i) const { return tokens_[item * chunk_ + i]; }

 private:
  static constexpr int kWords = kMaxDirectSlots / kLanes;

  int32_t* num_items_;
  int32_t* slot_expert_;  // (kMaxDirectSlots)
  int32_t* expert_;       // (items)
  int32_t* count_;        // (items) tokens
  int32_t* members_;      // (items, chunk) their slots, ascending
  int32_t* tokens_;       // (items, chunk) those slots' tokens
  int chunk_;
};

// Lane l has the slots l, l + 32 and so on, a word of slots each time.
__device__ __forceinline__ void Items::Find(const int32_t* indices, int slots, int k, int experts) {
  constexpr uint32_t kAll = 0xffffffffu;
  const int lane = threadIdx.x % kLanes;
  const uint32_t own = 1u << lane;
  int expert[kWords];
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    const int slot = word * kLanes + lane;
    expert[word] = slot < slots ? indices[slot] : -1;
  }

  // Of each slot: the slots of its expert, a bit each, by their words; those ahead of it, and their number in all.
  uint32_t ahead[kWords][kWords] = {};
  int same[kWords] = {};
  uint32_t leaders[kWords] = {};
  int rank[kWords] = {};
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    if (word * kLanes >= slots) break;
    if (expert[word] < 0 || expert[word] >= experts) expert[word] = -1;
    slot_expert_[word * kLanes + lane] = expert[word];
    const uint32_t in_word = __match_any_sync(kAll, expert[word]);
    same[word] = __popc(in_word);
    ahead[word][word] = in_word & (own - 1u);
    rank[word] = __popc(ahead[word][word]);
#pragma unroll
    for (int before = 0; before < word; ++before) {
      for (int i = 0; i < min(slots - word * kLanes, kLanes); ++i) {
        const bool is_same = expert[before] == __shfl_sync(kAll, expert[word], i);
        const uint32_t matches = __ballot_sync(kAll, is_same);
        if (is_same) ++same[before];
        if (lane == i) ahead[word][before] = matches;
      }
      same[word] += __popc(ahead[word][before]);
      rank[word] += __popc(ahead[word][before]);
    }
    // Where those ahead fill their items, the slot begins another.
    leaders[word] = __ballot_sync(kAll, expert[word] >= 0 && (rank[word] & (chunk_ - 1)) == 0);
  }

  int items = 0;
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    if (word * kLanes >= slots) break;
    if (expert[word] >= 0) {
      // The last leader up to the slot, by how many leaders are ahead of that one.
      int item = 0, leaders_before = 0;
#pragma unroll
      for (int other = 0; other <= word; ++other) {
        const uint32_t candidates = leaders[other] & (other == word ? ahead[word][other] | own : ahead[word][other]);
        if (candidates != 0) {
          const uint32_t last = 1u << (31 - __clz(static_cast<int>(candidates)));
          item = leaders_before + __popc(leaders[other] & (last - 1u));
        }
        leaders_before += __popc(leaders[other]);
      }
      const int slot = word * kLanes + lane, within = rank[word] & (chunk_ - 1);
      if (within == 0) {
        expert_[item] = expert[word];
        count_[item] = min(chunk_, same[word] - rank[word]);
      }
      members_[item * chunk_ + within] = slot;
      tokens_[item * chunk_ + within] = slot / k;
    }
    items += __popc(leaders[word]);
  }
  if (lane == 0) *num_items_ = items;
}

}  // namespace ort_moe
