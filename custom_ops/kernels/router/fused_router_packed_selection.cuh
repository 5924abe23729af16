// The k best of packed keys: of a row whose lanes have 16 each, all unequal; 0 is no key. Keys come as their lane's
// own, ordered within it: LaneBits(lane) less, they are ordered among all.
//
//   sorted    4 lanes, k <= 8           every lane sorts its 8 best, then lanes merge theirs pairwise
//   spread    8 or 16 lanes, k <= 8     every lane sorts its 4 best; lists are merged in place, spread over the lanes
//                                       that they come from; sorted, where a lane has more of the best
//   bounded   a warp, k <= 16           the k-th best of the lanes' own bests bounds the k-th best of the row from
//                                       below; the keys that reach it go to a list, and each counts those before it
// Sorted takes the same time whatever the keys are; the others take longer on rows whose best are in few lanes.
#pragma once

#include "kernels/router/fused_router_row.cuh"

namespace ort_moe {

constexpr int kPackedKeys = 2 * kChunk;  // of a lane
constexpr uint32_t kExpertMask = 0xffffu;
constexpr uint32_t kPackedNaN = ~kExpertMask;  // the least key of a NaN, before it is put last

__device__ __forceinline__ uint32_t LaneBits(int lane) { return static_cast<uint32_t>(lane * kChunk); }

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

// Any 4 keys, into descending order.
__device__ __forceinline__ void SortFour(uint32_t* key) {
  constexpr int kPairs[5][2] = {{0, 1}, {2, 3}, {0, 2}, {1, 3}, {1, 2}};
#pragma unroll
  for (int n = 0; n < 5; ++n) Order(key[kPairs[n][0]], key[kPairs[n][1]]);
}

// 4 keys that first rise and then fall, or the reverse, into descending order.
__device__ __forceinline__ void OrderFour(uint32_t* key) {
  Order(key[0], key[2]);
  Order(key[1], key[3]);
  Order(key[0], key[1]);
  Order(key[2], key[3]);
}

template <int kLanes>
class SortedSelection {
 public:
  static constexpr int kMaxChosen = 8;
  static constexpr int kChoices = kLanes < kMaxChosen ? kMaxChosen / kLanes : 1;
  struct Shared {};

  static bool Fits(int32_t, int32_t k) { return k <= kMaxChosen; }

  __device__ SortedSelection(Shared&, int lane) : lane_(lane) {}

  __device__ void Choose(const uint32_t (&key)[kPackedKeys], int32_t, int32_t) {
    uint32_t second[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      best_[i] = key[i];
      second[i] = key[8 + i];
    }
    SortEight(best_);
    SortEight(second);
    MergeEight(second, best_);
#pragma unroll
    for (int i = 0; i < 8; ++i) best_[i] -= LaneBits(lane_);
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

// A list of 8 in descending order, over groups of 2, 4 and 8 lanes that have 4, 2 and 1 of it: of two such lists, a
// group each, the 8 best. Which of the list a lane has follows from the bits of its number and the pairs that exchange.
template <int kLanes>
class SpreadSelection {
 public:
  static constexpr int kMaxChosen = 8;
  static constexpr int kChoices = 1;
  using Shared = typename SortedSelection<kLanes>::Shared;
  static_assert(kLanes == 8 || kLanes == 16);

  static bool Fits(int32_t, int32_t k) { return k <= kMaxChosen; }

  __device__ SpreadSelection(Shared& shared, int lane)
      : shared_(shared),
        lane_(lane),
        bit0_(lane & 1),
        bit1_(lane & 2),
        bit2_(lane & 4),
        parity2_(bit0_ != bit1_),
        parity3_(parity2_ != bit2_),
        upper_(bit1_ != bit2_) {}

  __device__ void Choose(const uint32_t (&key)[kPackedKeys], int32_t experts, int32_t k) {
    if (k <= kKept || experts >= kManyExperts) {
      const uint32_t last = ChooseSpread(key);
      const uint32_t kth = __shfl_sync(kAllLanes, key_, LaneOfRank(k - 1), kLanes);
      if (!ORT_MOE_RARE(__any_sync(kAllLanes, last > kth)) || !HasAnother(key, last, kth)) {
        best_ = __shfl_sync(kAllLanes, key_, 0, kLanes);
        rank_ = RankOfLane();
        return;
      }
    }
    SortedSelection<kLanes> sorted(shared_, lane_);
    sorted.Choose(key, experts, k);
    sorted.Hold(0, &key_, &rank_);
    best_ = sorted.best();
  }

  __device__ uint32_t best() const { return best_; }

  __device__ void Hold(int, uint32_t* key, int32_t* rank) const {
    *key = key_;
    *rank = rank_;
  }

 private:
  static constexpr int kKept = 4;                      // of a lane's keys
  static constexpr int32_t kManyExperts = 8 * kChunk;  // in so many lanes that hardly one has more than kKept of 8

  __device__ static uint32_t From(uint32_t key, int lanes) { return __shfl_xor_sync(kAllLanes, key, lanes); }
  __device__ static uint32_t Keep(bool least, uint32_t key, uint32_t other) {
    return least ? min(key, other) : max(key, other);
  }

  // Whether any lane's next key after its last one is ahead of the row's k-th.
  __device__ bool HasAnother(const uint32_t (&key)[kPackedKeys], uint32_t last, uint32_t kth) const {
    uint32_t next = 0u;
#pragma unroll
    for (int i = 0; i < kPackedKeys; ++i) next = max(next, key[i] < last + LaneBits(lane_) ? key[i] : 0u);
    return __any_sync(kAllLanes, next > kth + LaneBits(lane_));
  }

  // The list's key of rank RankOfLane(), into key_; returns the last that this lane kept of its own.
  __device__ uint32_t ChooseSpread(const uint32_t (&key)[kPackedKeys]) {
    uint32_t four[4][kKept];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) four[n][i] = key[n * kKept + i];
      SortFour(four[n]);
    }
    BestFour(four[1], four[0]);
    BestFour(four[3], four[2]);
    BestFour(four[2], four[0]);
    uint32_t (&mine)[kKept] = four[0];
#pragma unroll
    for (int i = 0; i < kKept; ++i) mine[i] -= LaneBits(lane_);
    const uint32_t last = mine[kKept - 1];

    // Two lanes: all 8, the lower half in the odd lane.
    uint32_t other[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i) other[i] = From(mine[kKept - 1 - i], 1);
#pragma unroll
    for (int i = 0; i < kKept; ++i) mine[i] = Keep(bit0_, mine[i], other[i]);
    OrderFour(mine);

    // Four lanes, two lists: the i-th of one against the (7 - i)-th of the other. Ranks 0, 2, 4, 6 and the next of each
    // are in lanes 0, 3, 1, 2.
    uint32_t two[2] = {max(mine[0], From(mine[3], 3)), max(mine[1], From(mine[2], 3))};
    other[0] = From(two[0], 1);
    other[1] = From(two[1], 1);
    two[0] = Keep(parity2_, two[0], other[0]);
    two[1] = Keep(parity2_, two[1], other[1]);
    other[0] = From(two[1], 3);
    other[1] = From(two[0], 3);
    two[0] = Keep(bit1_, two[0], other[0]);
    two[1] = Keep(bit1_, two[1], other[1]);
    Order(two[0], two[1]);

    // Eight lanes: ranks 0 to 7 in lanes 0, 6, 3, 5, 1, 7, 2, 4.
    key_ = max(two[0], From(two[1], 6));
    OrderEightLanes();
    if constexpr (kLanes == 16) {
      key_ = max(key_, From(key_, 8 | 4));
      OrderEightLanes();
    }
    return last;
  }

  __device__ static void BestFour(const uint32_t (&other)[kKept], uint32_t (&best)[kKept]) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) best[i] = max(best[i], other[kKept - 1 - i]);
    OrderFour(best);
  }

  __device__ void OrderEightLanes() {
    key_ = Keep(parity3_, key_, From(key_, 1));
    key_ = Keep(upper_, key_, From(key_, 3));
    key_ = Keep(bit2_, key_, From(key_, 6));
  }

  __device__ int32_t RankOfLane() const {
    return (lane_ & 8) + (parity3_ ? 4 : 0) + (upper_ ? 2 : 0) + (bit2_ ? 1 : 0);
  }

  __device__ static int LaneOfRank(int32_t rank) {
    const int32_t neighbours = rank ^ rank >> 1;
    return (rank & 1) << 2 | (neighbours & 1) << 1 | (neighbours >> 1 & 1);
  }

  Shared& shared_;
  const int lane_;
  const bool bit0_, bit1_, bit2_;
  const bool parity2_, parity3_;  // of the lowest 2 and 3 bits
  const bool upper_;              // in the upper half of a half
  uint32_t best_ = 0u;
  uint32_t key_ = 0u;
  int32_t rank_ = 0;
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
  __device__ void Choose(const uint32_t (&key)[kPackedKeys], int32_t, int32_t k) {
    const uint32_t lane_bits = LaneBits(lane_);
    uint32_t own = 0u;  // as the lane has it
#pragma unroll
    for (int i = 0; i < kPackedKeys; ++i) own = max(own, key[i]);
    const uint32_t mine = own - lane_bits;
    __syncwarp();
    shared_.bests[lane_] = mine;
    shared_.candidates[lane_] = 0u;
    __syncwarp();
    best_ = WarpMax(mine);
    if (ORT_MOE_RARE(best_ >= kPackedNaN)) return;
    const int32_t better = CountBetter(shared_.bests, mine);
    const uint32_t bound = WarpMin(better < k ? mine : 0xffffffffu);
    if (better < k) shared_.candidates[better] = mine;
    int32_t count = k;
#pragma unroll 1
    while (true) {  // the lanes' next ones that reach the bound
      uint32_t next = 0u;
#pragma unroll
      for (int i = 0; i < kPackedKeys; ++i) next = max(next, key[i] < own ? key[i] : 0u);
      own = next;
      const bool reaches = next >= bound + lane_bits;
      const unsigned reaching = __ballot_sync(kAllLanes, reaches);
      if (reaching == 0u) break;
      const int32_t place = count + __popc(reaching & ((1u << lane_) - 1u));
      count += __popc(reaching);
      if (ORT_MOE_RARE(count > kWarp)) return ChooseInTurn(key, k);
      if (reaches) shared_.candidates[place] = next - lane_bits;
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
      for (int i = 0; i < kPackedKeys; ++i) {
        const uint32_t among_all = key[i] - LaneBits(lane_);
        next = max(next, among_all < last ? among_all : 0u);
      }
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
