// RouterProbs, and the forward of RouterScores, a warp to a row: any number of experts whose row fits shared memory.
//
// The logits come into shared memory by a bulk copy while the warp works on the row before. Whatever walks over the
// experts is a loop over chunks of 8, with little code: a warp runs it once per row, so that instructions which are not
// in the cache would cost more than those they save. Lane l owns the chunks l, l + 32, ..., so that the contract's sums
// need no exchange before the butterfly.
//
// listed    up to ListedChoices() choices: the few experts that reach a bound go to a list (router_probs_select.cuh);
//           each counts those before it, and only they are weighed
// marked    any number: the choice is a bit of every expert, and all are walked over once more
// Sigmoids of all experts would cost more than all the rest, so the list is made by estimates of them, whose error is
// bounded: it holds whatever may be among the k best, and those are ranked by the exact scores. Where the estimates do
// not settle it, all are computed. RouterScores computes all. All ways return the same bits. Where only the chosen have
// an output that is not zero, a row of zeros waits in shared memory; they are written into it, it is copied out, and
// they are cleared.
#pragma once

#include "kernels/training/router_probs_listed.cuh"
#include "kernels/training/training_grid.cuh"

namespace ort_moe {

constexpr int kManyForSeconds = 26;  // from so many on the second bests bound better than the bests

template <typename T, ProbsKind kKind, bool kAllScores>
class ProbsRow : public ProbsListed<T, kKind, kAllScores> {
 public:
  using Base = ProbsListed<T, kKind, kAllScores>;
  using Key = typename Base::Key;
  using Base::Base;

  __device__ __forceinline__ void Route() {
    if constexpr (kAllScores) {
      if (p_.stages == 1) LoadBehindLastRow();
    }
    x_ = logits_ + load_ * p_.shared_row_bytes;
    if (p_.bulk) {
      WaitBarrier(SharedAddress(&s_.arrived[load_]), parity_);
    } else {
      CopyRow<2>(x_, Source(row_), p_.row_bytes);
      const int32_t e = p_.experts / kChunk * kChunk + lane_;
      if (lane_ < kChunk && e >= p_.experts && p_.experts % kChunk != 0) {
        reinterpret_cast<Bits<T>*>(x_)[e] = Storage<T>::Round(-Infinity());
      }
      __syncwarp();
    }
    keys_ = kRanksLogits || kFloat ? x_ : reinterpret_cast<unsigned char*>(choice_.end());
    choice_.PointTo(keys_);
    int32_t mine, chosen = 0;
    if constexpr (kEstimates) {
      has_keys_ = false;
      if (p_.listed) chosen = CollectByEstimates(&mine);
    }
    if (!kEstimates || ORT_MOE_RARE(chosen == 0)) {
      has_keys_ = true;
      const float bound = MakeKeys();
      if constexpr (kAllScores) {
        if (p_.stages == 2) LoadBehindLastRow();
      }
      chosen = choice_.Collect(bound, &mine);
      const int32_t limit = p_.listed ? kMaxListed : p_.k;
      if (ORT_MOE_RARE(chosen > limit || chosen < p_.k)) {
        const auto narrowed = RowChoice<Key>::Narrow(choice_, bound, best_, chosen, p_.k, limit);
        chosen = narrowed.all;
        mine = narrowed.mine;
      }
    }
    if (ORT_MOE_RARE(!p_.listed)) {
      StoreMarked(*this);
    } else {
      const int32_t first = List(mine);
      if (chosen <= kWarp) {
        this->template StoreListed<1>(chosen, first, mine);
      } else if (chosen <= 2 * kWarp) {
        this->template StoreListed<2>(chosen, first, mine);
      } else {
        this->template StoreListed<kMaxListed / kWarp>(chosen, first, mine);
      }
    }
    Store();
    row_ += step_;
    if (++load_ == p_.stages) {
      load_ = 0;
      parity_ ^= 1u;
    }
  }

 private:
  using Base::best_;
  using Base::choice_;
  using Base::ForEachChunk;
  using Base::has_keys_;
  using Base::has_nan_;
  using Base::kEstimates;
  using Base::keys_;
  using Base::kFloat;
  using Base::kRanksLogits;
  using Base::lane_;
  using Base::List;
  using Base::load_;
  using Base::LoadBehindLastRow;
  using Base::logits_;
  using Base::p_;
  using Base::parity_;
  using Base::row_;
  using Base::s_;
  using Base::Source;
  using Base::step_;
  using Base::Store;
  using Base::StoreMarked;
  using Base::x_;

  // Keys of all experts where they are not the logits, the best key, whether any logit is NaN; and a key that at least
  // k reach, or -inf.
  __device__ __forceinline__ float MakeKeys() {
    float best = -Infinity(), second = -Infinity(), any = 0.0f;
    const bool seconds = p_.k >= kManyForSeconds;
    ForEachChunk([&](int32_t chunk) {
      float key[kChunk];
      ReadChunk<T>(x_, chunk, key);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(any) : "f"(key[i]));
      if constexpr (!kRanksLogits) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) key[i] = Sigmoid(key[i]);
        if (p_.selection_bias != nullptr) AddBias(chunk, key);
        WriteChunk<float>(keys_, chunk, key);
      }
      if (seconds) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          float lower;
          asm("min.NaN.f32 %0, %1, %2;" : "=f"(lower) : "f"(best), "f"(key[i]));
          second = fmaxf(second, lower);  // NaN is no number's match
          best = fmaxf(best, key[i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) best = fmaxf(best, key[i]);
      }
    });
    has_nan_ = __any_sync(kAllLanes, IsNaN(any));
    best_ = KeyValue(WarpMax(RankKey(best)));
    const int32_t lanes = seconds ? (p_.k + 1) / 2 : p_.k;
    if (lanes > kWarp) return -Infinity();
    return KeyValue(BoundFromBests(RankKey(seconds ? second : best), static_cast<uint32_t>(lanes), s_.bests));
  }

  // Chooses few experts, the k best among them, by scores that are off by no more than kEstimateError; 0 where that
  // does not work out: a logit is NaN, a key is large, or too many are close. What is chosen is ranked by its exact
  // key later.
  __device__ __forceinline__ int32_t CollectByEstimates(int32_t* mine) {
    constexpr float kLargest = 16.0f;  // keys beyond are rounded by more than the rest is off
    constexpr float kEstimateError = 4e-6f;
    const auto estimate = [&](int32_t chunk, float (&key)[kChunk]) {
      ReadChunk<T>(x_, chunk, key);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        float term;  // 2^-22.5 off, relatively
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(term) : "f"(key[i] * -1.44269504f));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(key[i]) : "f"(term + 1.0f));
      }
      if (p_.selection_bias != nullptr) AddBias(chunk, key);
    };
    float best = -Infinity(), second = -Infinity(), largest = 0.0f;
    const bool seconds = p_.k >= kManyForSeconds;
    ForEachChunk([&](int32_t chunk) {
      float key[kChunk];
      estimate(chunk, key);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(key[i])));
        if (seconds) second = fmaxf(second, fminf(best, key[i]));
        best = fmaxf(best, key[i]);
      }
    });
    const int32_t lanes = seconds ? (p_.k + 1) / 2 : p_.k;
    if (__any_sync(kAllLanes, !(largest <= kLargest)) || lanes > kWarp) return 0;
    has_nan_ = false;
    const float bound =
        KeyValue(BoundFromBests(RankKey(seconds ? second : best), static_cast<uint32_t>(lanes), s_.bests));
    const int32_t chosen = choice_.Collect(bound - 2.0f * kEstimateError, mine, estimate);
    return chosen >= p_.k && chosen <= kMaxListed ? chosen : 0;
  }

  __device__ __forceinline__ void AddBias(int32_t chunk, float (&key)[kChunk]) const {
    const float* bias = p_.selection_bias + chunk * kChunk;
    if (p_.aligned_bias && (chunk + 1) * kChunk <= p_.experts) {
      float value[kChunk];
      ReadChunk<float>(bias, 0, value);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) key[i] = Add(key[i], value[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        key[i] = chunk * kChunk + i < p_.experts ? Add(key[i], bias[i]) : -Infinity();
      }
    }
  }
};

// kMostWarps to a multiprocessor, for which registers must suffice.
template <typename T, ProbsKind kKind, bool kAllScores, int kMostWarps>
__global__ void __launch_bounds__(kMaxRowThreads, kMostWarps* kWarp / kMaxRowThreads)
    ProbsRowsKernel(const __grid_constant__ ProbsParams p) {
  using Rows = ProbsRow<T, kKind, kAllScores>;
  extern __shared__ __align__(16) unsigned char shared[];
  WalkOverRows<Rows, ProbsParams, &Rows::Route>(p, shared);
}

}  // namespace ort_moe
