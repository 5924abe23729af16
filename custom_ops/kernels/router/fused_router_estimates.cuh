// FusedRouter: which experts may be among the k best of a row of sigmoids, by one warp, from estimates whose error is
// bounded. Sigmoids of all experts would cost more than all the rest; of the few found here they are computed, and rank
// those.
//
// An estimate is an integer, in units of 2^-18, so that integer instructions compare it: the mantissa of a float in
// [2^23, 2^24). It is off the exact key by no more than kError: half a unit for the rounding of the bias and half for
// that of the sum; and less than a quarter for 2^-22.5 of the exponential and 2^-23 of the reciprocal, by PTX, for the
// rounding in between, for the 3 ulp of the exact sigmoid, and for the rounding of the exact key, up to 16.
#pragma once

#include "kernels/router/fused_router_row.cuh"

namespace ort_moe {

// The two greatest of some keys.
struct BestTwo {
  uint32_t first = 0u;
  uint32_t second = 0u;

  __device__ __forceinline__ void Add(const BestTwo& other) {
    second = max(min(first, other.first), max(second, other.second));
    first = max(first, other.first);
  }
};

template <int kOwned>
class SigmoidEstimates {
 public:
  static constexpr bool kGroups = kOwned == kChunk;  // a lane's keys are in one group

  static bool Fits(const RouterParams& p) { return p.few_reach_bound && (kGroups || !p.grouped); }

  // Of the chunks lane, lane + 32, ...
  __device__ __forceinline__ void SetBias(const RouterParams& p, int lane) {
    const bool whole = reinterpret_cast<uintptr_t>(p.selection_bias) % sizeof(float4) == 0;  // as experts are
    bool usable = true;
#pragma unroll
    for (int i = 0; i < kOwned; i += 4) {
      const int32_t first = (lane + i / kChunk * kWarp) * kChunk + i % kChunk;
      const bool owned = first < p.experts;
      float bias[4] = {};
      if (p.selection_bias != nullptr && owned) {
        if (whole) {
          const float4 four = *reinterpret_cast<const float4*>(p.selection_bias + first);
          bias[0] = four.x, bias[1] = four.y, bias[2] = four.z, bias[3] = four.w;
        } else {
#pragma unroll
          for (int n = 0; n < 4; ++n) bias[n] = p.selection_bias[first + n];
        }
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        usable &= fabsf(bias[n]) <= kLargestBias;
        shifted_[i + n] = owned ? Units(bias[n]) : kLeast;
      }
    }
    if (!usable) shifted_[0] = NaN();
    const float fill = p.group_fill;
    above_fill_ = fill < -kLargestBias ? 0u : fill > kLargestBias ? 0xffffffffu : FloatBits(Units(fill)) + kApart;
  }

  // A bit of each of this lane's experts that may be among the k best. False where estimates do not tell: a logit is
  // NaN, a bias is large, or groups are close. `logits` are -inf past the last expert; `shared` has
  // 32 words.
  template <typename Loaded>
  __device__ __forceinline__ bool Reaching(const RouterParams& p, const Loaded& logits, uint32_t* shared,
                                           uint32_t* reaching) const {
    uint32_t key[kOwned];
    float sum = 0.0f;  // NaN if any is
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      float e, s;
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(Mul(logits[i], -1.44269504f)));
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(Add(e, 1.0f)));
      const float estimate = Fma(s, kUnits, shifted_[i]);
      sum = Add(sum, estimate);
      key[i] = FloatBits(estimate);
    }
    if (ORT_MOE_RARE(__any_sync(kAllLanes, IsNaN(sum)))) return false;
    BestTwo best = Best(key);
    bool kept = true;
    uint32_t bound;
    if (kGroups && p.grouped) {
      BestTwo of_group = best;
#pragma unroll 1
      for (int32_t stride = 1; stride < 1 << p.log2_group_chunks; stride *= 2) {
        of_group.Add(
            {__shfl_xor_sync(kAllLanes, of_group.first, stride), __shfl_xor_sync(kAllLanes, of_group.second, stride)});
      }
      if (ORT_MOE_RARE(!Keep(p, of_group, &kept))) return false;
      // The kept groups' two best are 2 * topk_groups keys.
      bound = p.group_score_top == 2 && p.k <= 2 * p.topk_groups ? WarpMin(kept ? of_group.second : 0xffffffffu)
                                                                 : BoundFromBests(kept ? best.first : 0u, p.k, shared);
      if (ORT_MOE_RARE(bound < above_fill_)) return false;
    } else {
      bound = BoundFromBests(best.first, p.k, shared);
    }
    // k keys reach the bound less the error, and whatever reaches them has an estimate that is less by the error again.
    uint32_t bits = 0u;
#pragma unroll
    for (int i = kOwned - 1; i >= 0; --i) ShiftIn(key[i], bound - kApart, &bits);
    *reaching = kept ? bits : 0u;
    return true;
  }

 private:
  static constexpr float kUnits = 0x1p18f;
  static constexpr float kZero = 0x1.8p23f;
  static constexpr float kLeast = 0x1p23f;      // of no expert
  static constexpr float kLargestBias = 15.0f;  // leaves all estimates above kLeast
  static constexpr float kError = 1.25f;        // units
  static constexpr uint32_t kApart = 3;         // > 2 * kError
  static constexpr uint32_t kGroupsApart = 6;   // > 4 * kError + the rounding of two sums, half a unit

  static __device__ float Units(float value) { return Fma(value, kUnits, kZero); }

  static __device__ __forceinline__ BestTwo Best(const uint32_t (&key)[kOwned]) {
    BestTwo best[kOwned / 2];
#pragma unroll
    for (int i = 0; i < kOwned / 2; ++i) best[i] = {max(key[2 * i], key[2 * i + 1]), min(key[2 * i], key[2 * i + 1])};
#pragma unroll
    for (int stride = kOwned / 4; stride > 0; stride /= 2) {
#pragma unroll
      for (int i = 0; i < stride; ++i) best[i].Add(best[i + stride]);
    }
    return best[0];
  }

  // bits = 2 * bits + (key >= least)
  static __device__ __forceinline__ void ShiftIn(uint32_t key, uint32_t least, uint32_t* bits) {
    asm("{ .reg .u32 rest; sub.cc.u32 rest, %1, %2; addc.u32 %0, %0, %0; }" : "+r"(*bits) : "r"(key), "r"(least));
  }

  // Whether this lane's group stays; false where the exact scores of groups may have another order.
  static __device__ __forceinline__ bool Keep(const RouterParams& p, const BestTwo& best, bool* kept) {
    const int32_t chunks = 1 << p.log2_group_chunks;
    const uint32_t score = p.group_score_top == 2 ? best.first + best.second : best.first;
    uint32_t better = 0u;  // lanes 0, chunks, 2 * chunks, ..., of which 4 at least: fewer groups come several times
#pragma unroll 1
    for (int32_t other = 0; other < kWarp; other += 4 * chunks) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        CountIf(__shfl_sync(kAllLanes, score, other + n * chunks), score + 1u, &better);
      }
    }
    *kept = better < p.topk_groups * max(4 * chunks / kWarp, 1);
    const int32_t lanes = __popc(__ballot_sync(kAllLanes, *kept));
    const uint32_t lowest = WarpMin(*kept ? score : 0xffffffffu), highest = WarpMax(*kept ? 0u : score);
    return lanes == p.topk_groups * chunks && lowest - highest >= kGroupsApart;
  }

  float shifted_[kOwned];  // the bias as an estimate
  uint32_t above_fill_;    // what a bound must reach to be above group_fill
};

}  // namespace ort_moe
