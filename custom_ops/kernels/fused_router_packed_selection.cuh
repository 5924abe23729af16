// The k best of packed keys: of a row whose lanes have 16 each, all unequal; 0 is no key.
//
//   sorted    4 to 16 lanes, k <= 8     every lane sorts its 8 best, then lanes merge theirs pairwise
//   bounded   a warp, k <= 16           the k-th best of the lanes' own bests bounds the k-th best of the row from
//                                       below; the keys that reach it go to a list, and each counts those before it
// Sorted takes the same time whatever the keys are; bounded takes rows whose best are in few lanes in turn.
#pragma once

#include "kernels/fused_router_row.cuh"

namespace ort_moe {

constexpr int kPackedKeys = 2 * kChunk;  // of a lane
constexpr uint32_t kExpertMask = 0xffffu;
constexpr uint32_t kPackedNaN = ~kExpertMask;  // the least key of a NaN, before it is put last

// The greater first.
__device__ __forceinline__ void Order(uint32_t& first, uint32_t& second) {
  const uint32_t greater = max(first, second);
  second = min(first, second);
  first = greater;
}

// Any 8 keys, into descending order: a network of 19 comparisons, the fewest there are.
__device__ __forceinline__ void SortEight(uint32_t* key) {
  constexpr int kPairs[19][2] = {{0, 2}, {1, 3}, {4, 6}, {5, 7}, {0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 1}, {2, 3},
                                 {4, 5}, {6, 7}, {2, 4}, {3, 5}, {1, 4}, {3, 6}, {1, 2}, {3, 4}, {5, 6}};
#pragma unroll
  for (int n = 0; n < 19; ++n) Order(key[kPairs[n][0]], key[kPairs[n][1]]);
}

// best = the 8 best of two descending lists, in descending order.
__device__ __forceinline__ void MergeEight(const uint32_t* other, uint32_t (&best)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) best[i] = max(best[i], other[7 - i]);  // first rising, then falling, or the reverse
#pragma unroll
  for (int stride = 4; stride > 0; stride /= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & stride) == 0) Order(best[i], best[i + stride]);
    }
  }
}

template <int kLanes>
class SortedSelection {
 public:
  static constexpr int kMaxChosen = 8;
  static constexpr int kChoices = kLanes < kMaxChosen ? kMaxChosen / kLanes : 1;
  struct Shared {};

  static bool Fits(int32_t, int32_t k) { return k <= kMaxChosen; }

  __device__ SortedSelection(Shared&, int lane) : lane_(lane) {}

  __device__ void Choose(const uint32_t (&key)[kPackedKeys], int32_t) {
    uint32_t second[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      best_[i] = key[i];
      second[i] = key[8 + i];
    }
    SortEight(best_);
    SortEight(second);
    MergeEight(second, best_);
#pragma unroll 1
    for (int stride = 1; stride < kLanes; stride *= 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) second[i] = __shfl_xor_sync(kAllLanes, best_[i], stride);
      MergeEight(second, best_);
    }
  }

  __device__ uint32_t best() const { return best_[0]; }

  // The lane's n-th choice.
  __device__ void Hold(int n, uint32_t* key, int32_t* rank) const {
    *rank = lane_ + n * kLanes;
    uint32_t of_rank[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) of_rank[i] = best_[i];
#pragma unroll
    for (int bit = 4; bit > 0; bit /= 2) {  // a tree of selections: an index that varies would cost a branch per key
      const bool upper = (*rank & bit) != 0;
#pragma unroll
      for (int i = 0; i < bit; ++i) of_rank[i] = upper ? of_rank[i + bit] : of_rank[i];
    }
    *key = of_rank[0];
  }

 private:
  const int lane_;
  uint32_t best_[8];
};

class BoundedSelection {
 public:
  static constexpr int kMaxChosen = 16;  // more would often have more candidates than lanes
  static constexpr int kChoices = 1;
  struct Shared {
    uint32_t bests[kWarp];
    uint32_t candidates[kWarp];
  };

  // Where k of the lanes that own experts are more than half of them, the bound is low and candidates are many.
  static bool Fits(int32_t experts, int32_t k) { return k <= kMaxChosen && experts >= 2 * k * kChunk; }

  __device__ BoundedSelection(Shared& shared, int lane) : shared_(shared), lane_(lane) {}

  // Nothing where a NaN leads: the row comes again.
  __device__ void Choose(const uint32_t (&key)[kPackedKeys], int32_t k) {
    uint32_t mine = 0u;
#pragma unroll
    for (int i = 0; i < kPackedKeys; ++i) mine = max(mine, key[i]);
    __syncwarp();
    shared_.bests[lane_] = mine;
    shared_.candidates[lane_] = 0u;
    __syncwarp();
    best_ = WarpMax(mine);
    if (ORT_MOE_RARE(best_ >= kPackedNaN)) return;
    int32_t better = 0;  // lanes with a better best
#pragma unroll
    for (int v = 0; v < kWarp / 4; ++v) {
      const uint4 bests = reinterpret_cast<const uint4*>(shared_.bests)[v];
      better += (bests.x > mine) + (bests.y > mine) + (bests.z > mine) + (bests.w > mine);
    }
    const uint32_t bound = WarpMin(better < k ? mine : 0xffffffffu);
    if (better < k) shared_.candidates[better] = mine;
    int32_t count = k;
#pragma unroll 1
    while (true) {  // the lanes' next ones that reach the bound
      uint32_t next = 0u;
#pragma unroll
      for (int i = 0; i < kPackedKeys; ++i) next = max(next, key[i] < mine ? key[i] : 0u);
      mine = next;
      const unsigned reaching = __ballot_sync(kAllLanes, next >= bound);
      if (reaching == 0u) break;
      const int32_t place = count + __popc(reaching & ((1u << lane_) - 1u));
      count += __popc(reaching);
      if (ORT_MOE_RARE(count > kWarp)) return ChooseInTurn(key, k);
      if (next >= bound) shared_.candidates[place] = next;
    }
    __syncwarp();
    Rank(count);
  }

  __device__ uint32_t best() const { return best_; }

  __device__ void Hold(int, uint32_t* key, int32_t* rank) const {
    *key = key_;
    *rank = rank_;
  }

 private:
  __device__ void Rank(int32_t count) {
    constexpr int32_t kAtOnce = 8;
    key_ = shared_.candidates[lane_];
    rank_ = key_ == 0u ? kWarp : 0;
#pragma unroll 1
    for (int32_t other = 0; other < count; other += kAtOnce) {
#pragma unroll
      for (int v = 0; v < kAtOnce / 4; ++v) {
        const uint4 four = reinterpret_cast<const uint4*>(shared_.candidates)[other / 4 + v];
        rank_ += (four.x > key_) + (four.y > key_) + (four.z > key_) + (four.w > key_);
      }
    }
  }

  // A round per choice: each lane's best below the last choice.
  __device__ void ChooseInTurn(const uint32_t (&key)[kPackedKeys], int32_t k) {
    rank_ = kWarp;
    key_ = 0u;
    uint32_t last = 0xffffffffu;
#pragma unroll 1
    for (int32_t n = 0; n < k; ++n) {
      uint32_t next = 0u;
#pragma unroll
      for (int i = 0; i < kPackedKeys; ++i) next = max(next, key[i] < last ? key[i] : 0u);
      last = WarpMax(next);
      if (lane_ == n) {
        rank_ = n;
        key_ = last;
      }
    }
  }

  Shared& shared_;
  const int lane_;
  uint32_t best_ = 0u;
  uint32_t key_ = 0u;
  int32_t rank_ = kWarp;
};

}  // namespace ort_moe
