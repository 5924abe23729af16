// The k best of a row by one warp, k up to 32, in three steps of fixed cost, none of which is a round per choice:
// the k-th best of the lanes' own bests bounds the k-th best of the row from below; the keys that reach it, little more
// than k, go to a list; each counts those before it.
#pragma once

#include "kernels/router/fused_router_row.cuh"

namespace ort_moe {

constexpr int kMaxWarpChosen = kWarp;

// A choice that a lane holds; its rank is k or more where it holds none.
struct Choice {
  int32_t rank = kWarp;
  int32_t expert = 0;
  uint32_t key = 0u;
};

class WarpSelection {
 public:
  static constexpr int kMaxCandidates = 4 * kWarp;
  static constexpr int kMaxOfFew = 2 * kWarp;  // more take longer than a round for each of kFewChosen
  static constexpr int kFewChosen = 16;

  // Of one warp.
  struct Shared {
    uint64_t candidates[kMaxCandidates];  // key over the complement of the expert: its order is the ranking; 0: none
    uint64_t chosen[kMaxWarpChosen];      // by rank, where there are too many candidates for a lane each
    uint32_t bests[kWarp];                // of the lanes
    uint32_t count;                       // of candidates
    uint32_t padding[3];
  };

  __device__ explicit WarpSelection(Shared& shared) : shared_(shared), lane_(threadIdx.x % kWarp) {}

  // Finds the choices among the lanes' keys (0: no expert), whose experts are expert_of(i).
  template <int kOwned, typename ExpertOf>
  __device__ void Choose(const uint32_t (&key)[kOwned], ExpertOf expert_of, int32_t k, Choice* choice) {
    const uint32_t bound = LowerBound(key, k);
    uint32_t mine = 0u;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) mine += key[i] >= bound;
    uint32_t position = mine > 0u ? atomicAdd(&shared_.count, mine) : 0u;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const bool reaches = key[i] >= bound;
      StoreIf(reaches && position < kMaxCandidates, shared_.candidates + position, Candidate(key[i], expert_of(i)));
      position += reaches;
    }
    __syncwarp();
    const uint32_t count = shared_.count;
    if (ORT_MOE_RARE(count > (k > kFewChosen ? kMaxCandidates : kMaxOfFew))) {
      ChooseInRounds(key, expert_of, k, choice);
    } else if (ORT_MOE_RARE(count > kWarp)) {
      RankMany(count, k, choice);
    } else {
      const uint64_t candidate = shared_.candidates[lane_];
      Hold(candidate, candidate == 0u ? kWarp : RankOf(candidate, Rounded(count)), choice);
    }
  }

  // Finds the choices among experts that are known to have the k best among them: bit i of a lane is expert_of(i), and
  // key_of(expert) is called once for each. False where there are more than lanes.
  template <typename ExpertOf, typename KeyOf>
  __device__ __forceinline__ bool ChooseOf(uint32_t reaching, ExpertOf expert_of, KeyOf key_of, Choice* choice) {
    int32_t* const experts = reinterpret_cast<int32_t*>(shared_.chosen);
    uint32_t count = 0u;
#pragma unroll 1
    while (true) {
      const unsigned lanes = __ballot_sync(kAllLanes, reaching != 0u);
      if (lanes == 0u) break;
      const uint32_t place = count + __popc(lanes & ((1u << lane_) - 1u));
      count += __popc(lanes);
      if (ORT_MOE_RARE(count > kWarp)) return false;
      ort_moe::StoreIf(reaching != 0u, experts + place, expert_of(__ffs(static_cast<int>(reaching)) - 1));
      reaching &= reaching - 1u;
    }
    __syncwarp();
    const bool holds = lane_ < count;
    const int32_t expert = holds ? experts[lane_] : 0;
    const uint32_t key = key_of(expert);
    const uint64_t candidate = holds ? Candidate(key, expert) : 0u;
    shared_.candidates[lane_] = candidate;
    __syncwarp();
    Hold(candidate, holds ? RankOf(candidate, Rounded(count)) : kWarp, choice);
    return true;
  }

  // 32 words of shared memory that are free between choices.
  __device__ uint32_t* words() const { return shared_.bests; }

  // Key of the row's best, after Choose.
  __device__ uint32_t best_key() const { return best_key_; }

 private:
  static constexpr uint32_t kAtOnce = 8;  // candidates compared in a loop's step

  static __device__ uint32_t Rounded(uint32_t count) { return (count + kAtOnce - 1) / kAtOnce * kAtOnce; }

  // Predicated, never a branch: a warp would take it once per key.
  static __device__ void StoreIf(bool condition, uint64_t* address, uint64_t value) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.shared.b64 [%1], %2; }" ::"r"(uint32_t{condition}),
                 "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))), "l"(value)
                 : "memory");
  }

  static __device__ uint64_t Candidate(uint32_t key, int32_t expert) {
    return static_cast<uint64_t>(key) << 32 | (0xffffffffu - static_cast<uint32_t>(expert));
  }

  static __device__ void Hold(uint64_t candidate, int32_t rank, Choice* choice) {
    choice->rank = rank;
    choice->expert = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(candidate));
    choice->key = static_cast<uint32_t>(candidate >> 32);
  }

  // A key that at least k experts reach; 1, which all do, where fewer than k lanes own experts. Clears the list.
  template <int kOwned>
  __device__ uint32_t LowerBound(const uint32_t (&key)[kOwned], int32_t k) {
    uint32_t best = 0u;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) best = max(best, key[i]);
    __syncwarp();
    shared_.bests[lane_] = best;
    shared_.candidates[lane_] = 0u;
    if (lane_ == 0) shared_.count = 0u;
    __syncwarp();
    best_key_ = WarpMax(best);
    const int32_t better = CountBetter(shared_.bests, best);
    return max(WarpMin(better < k ? best : 0xffffffffu), 1u);
  }

  // How many of the first `count` candidates rank before this one; count is Rounded, zeros fill it up.
  __device__ int32_t RankOf(uint64_t candidate, uint32_t count) const {
    uint32_t rank = 0u;
#pragma unroll 1
    for (uint32_t other = 0; other < count; other += kAtOnce) {
#pragma unroll
      for (int n = 0; n < kAtOnce / 2; ++n) {
        const ulonglong2 two = reinterpret_cast<const ulonglong2*>(shared_.candidates)[other / 2 + n];
        CountIf64(two.x, candidate + 1u, &rank);
        CountIf64(two.y, candidate + 1u, &rank);
      }
    }
    return static_cast<int32_t>(rank);
  }

  // Where too many equal keys compete: a round per choice, which takes its key away.
  template <int kOwned, typename ExpertOf>
  __device__ void ChooseInRounds(const uint32_t (&key)[kOwned], ExpertOf expert_of, int32_t k, Choice* choice) const {
    constexpr int32_t kNone = 0x7fffffff;
    uint32_t left[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) left[i] = key[i];
    *choice = Choice{};
#pragma unroll 1
    for (int32_t j = 0; j < k; ++j) {
      uint32_t best = 0u;
#pragma unroll
      for (int i = 0; i < kOwned; ++i) best = max(best, left[i]);
      best = WarpMax(best);
      int32_t expert = kNone;
#pragma unroll
      for (int i = kOwned - 1; i >= 0; --i) expert = left[i] == best ? expert_of(i) : expert;
      expert = static_cast<int32_t>(WarpMin(expert));
#pragma unroll
      for (int i = 0; i < kOwned; ++i) left[i] = expert_of(i) == expert ? 0u : left[i];
      if (lane_ == j) *choice = {j, expert, best};
    }
  }

  __device__ void RankMany(uint32_t count, int32_t k, Choice* choice) {
    const uint32_t rounded = Rounded(count);
    if (count + lane_ < rounded) shared_.candidates[count + lane_] = 0u;
    __syncwarp();
#pragma unroll 1
    for (uint32_t n = lane_; n < count; n += kWarp) {
      const uint64_t candidate = shared_.candidates[n];
      const int32_t rank = RankOf(candidate, rounded);
      if (rank < k) shared_.chosen[rank] = candidate;
    }
    __syncwarp();
    *choice = Choice{};  // what lanes behind the k-th held of the row before
    if (lane_ < k) Hold(shared_.chosen[lane_], lane_, choice);
  }

  Shared& shared_;
  const int lane_;
  uint32_t best_key_ = 0u;
};

}  // namespace ort_moe
