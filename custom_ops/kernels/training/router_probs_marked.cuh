// RouterProbs, a warp to a row: what walks over all experts (router_probs_row.cuh): the sum of a softmax, the scores of
// RouterScores, and the weights where a choice of many is marked and not listed.
#pragma once

#include "kernels/training/router_probs_state.cuh"

namespace ort_moe {

template <typename T, ProbsKind kKind, bool kAllScores>
class ProbsMarked : public ProbsState<T, kKind, kAllScores> {
 protected:
  using Base = ProbsState<T, kKind, kAllScores>;
  using Key = typename Base::Key;
  using Base::Base;
  using Base::best_;
  using Base::choice_;
  using Base::ForEachChunk;
  using Base::has_nan_;
  using Base::keys_;
  using Base::kFloat;
  using Base::kRanksLogits;
  using Base::lane_;
  using Base::LoadNext;
  using Base::map_;
  using Base::p_;
  using Base::probs_;
  using Base::row_;
  using Base::Source;
  using Base::WaitForStores;
  using Base::x_;

  __device__ __forceinline__ float Divisor(float sum) const {
    const float divisor = Add(sum, p_.normalize_eps);
    return divisor < p_.normalize_min ? p_.normalize_min : divisor;
  }

  __device__ __forceinline__ float Scaled(float weight, int32_t expert) const {
    weight = Mul(weight, p_.scale);
    return p_.expert_scale != nullptr ? Mul(weight, p_.expert_scale[expert]) : weight;
  }

  // Sum of f(lap, chunk, i) over the experts, in the contract's order.
  template <typename F>
  __device__ __forceinline__ float SumOfRow(F f) const {
    float p0 = 0.0f, p1 = 0.0f, p2 = 0.0f, p3 = 0.0f;  // the next lap's partial sum is p0
    int lap = 0;
#pragma unroll 1
    for (; lap * kWarp < choice_.chunks() || lap % 4 != 0; ++lap) {
      const int32_t chunk = lane_ + lap * kWarp;
      float sum = p0;
      if (chunk < choice_.chunks()) {
        float term[kChunk];
        f(lap, chunk, term);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sum = Add(sum, term[i]);
      }
      p0 = p1;
      p1 = p2;
      p2 = p3;
      p3 = sum;
    }
    return Butterfly(p0, p1, p2, p3);
  }

  // What scores are made of: e^(x - max) of a softmax, or the sigmoid. Float logits make place for them.
  __device__ __forceinline__ float SumOfTerms() {
    return SumOfRow([&](int, int32_t chunk, float (&term)[kChunk]) {
      ReadChunk<Key>(keys_, chunk, term);
      if constexpr (kRanksLogits) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) term[i] = Exp(Add(term[i], -best_));
        if constexpr (kFloat && kAllScores) WriteChunk<float>(x_, chunk, term);
      }
    });
  }

  __device__ __forceinline__ void ReadScores(int32_t chunk, const DivideTerms& divide, float (&score)[kChunk]) const {
    ReadChunk<Key>(keys_, chunk, score);
    if constexpr (kRanksLogits) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if constexpr (!kFloat) score[i] = Exp(Add(score[i], -best_));
      }
      divide(score);
    }
  }

  __device__ __forceinline__ void StoreScores() {
    const DivideTerms divide(kRanksLogits ? SumOfTerms() : 1.0f);
    float divisor = 1.0f;
    if (p_.normalize) {
      divisor = Add(SumOfRow([&](int, int32_t chunk, float (&term)[kChunk]) { ReadScores(chunk, divide, term); }),
                    p_.normalize_eps);
    }
    WaitForStores();
    ForEachChunk([&](int32_t chunk) {
      float score[kChunk];
      ReadScores(chunk, divide, score);
      if (p_.normalize) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) score[i] = Div(score[i], divisor);
      }
      WriteChunk<T>(x_, chunk, score);
    });
  }

  // The choice is what is marked, all of it. By a copy, so that a listed row's state stays in registers.
  static __device__ __noinline__ void StoreMarked(ProbsMarked row) { row.StoreMarkedHere(); }

  __device__ __forceinline__ void StoreMarkedHere() {
    if (p_.indices != nullptr) StoreIndicesInRounds();
    if constexpr (kAllScores) {
      StoreScores();
    } else {
      // Logits again where keys have taken their place.
      const auto read_values = [&](int32_t chunk, float (&value)[kChunk]) {
        if (kRanksLogits || !kFloat) return ReadChunk<T>(x_, chunk, value);
        const Bits<T>* x = reinterpret_cast<const Bits<T>*>(Source(row_));
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          value[i] = Storage<T>::Widen(x[min(chunk * kChunk + i, p_.experts - 1)]);
        }
      };
      const auto terms = [&](int lap, int32_t chunk, float (&term)[kChunk], bool all) {
        read_values(chunk, term);
        const uint32_t byte = all ? 0xffu : choice_.byte(lap);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          const float value = kRanksLogits ? Exp(Add(term[i], -best_)) : Sigmoid(term[i]);
          term[i] = byte >> i & 1u ? value : 0.0f;
        }
      };
      float sum = 1.0f;
      if constexpr (kRanksLogits) {
        sum = SumOfRow([&](int lap, int32_t chunk, float (&term)[kChunk]) {
          terms(lap, chunk, term, kKind == ProbsKind::kSoftmaxOfExperts);
        });
      }
      const auto scores = [&](int lap, int32_t chunk, float (&score)[kChunk]) {
        terms(lap, chunk, score, false);
        if constexpr (kRanksLogits) {
          const uint32_t byte = choice_.byte(lap);
#pragma unroll
          for (int i = 0; i < kChunk; ++i) score[i] = byte >> i & 1u ? Div(score[i], sum) : 0.0f;
        }
      };
      const float divisor = p_.normalize ? Divisor(SumOfRow(scores)) : 1.0f;
      WaitForStores();
      ForEachChunk([&](int32_t chunk) {
        float weight[kChunk];
        scores(chunk / kWarp, chunk, weight);
        const uint32_t byte = choice_.byte(chunk / kWarp);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          if (!(byte >> i & 1u)) continue;
          if (p_.normalize) weight[i] = Div(weight[i], divisor);
          weight[i] = has_nan_ ? NaN() : Scaled(weight[i], chunk * kChunk + i);
        }
        WriteChunk<T>(probs_, chunk, weight);
      });
      LoadNext();
    }
    ForEachChunk([&](int32_t chunk) {
      const uint32_t byte = choice_.byte(chunk / kWarp);
      if (p_.map_format == MapFormat::kBit) {
        map_[chunk] = static_cast<uint8_t>(byte);
      } else {  // bit i of a nibble to byte i: the products' bits never meet
        const uint32_t low = (byte & 0xfu) * 0x00204081u & 0x01010101u;
        const uint32_t high = (byte >> 4) * 0x00204081u & 0x01010101u;
        reinterpret_cast<uint2*>(map_)[chunk] = make_uint2(low, high);
      }
    });
  }

  // A round over the keys per choice: hardly anyone asks for the indices of so many.
  __device__ __forceinline__ void StoreIndicesInRounds() const {
    uint32_t last_key = 0xffffffffu;
    int32_t last = -1;
#pragma unroll 1
    for (int32_t j = 0; j < p_.k; ++j) {
      uint32_t best_key = 0u;
      int32_t best = 0x7fffffff;
      ForEachChunk([&](int32_t chunk) {
        float keys[kChunk];
        ReadChunk<Key>(keys_, chunk, keys);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          const int32_t expert = chunk * kChunk + i;
          const uint32_t key = expert < p_.experts ? RankKey(keys[i]) : 0u;
          const bool below = key < last_key || (key == last_key && expert > last);
          if (below && key > best_key) {
            best_key = key;
            best = expert;
          }
        }
      });
      last_key = WarpMax(best_key);
      last = static_cast<int32_t>(WarpMin(static_cast<uint32_t>(best_key == last_key ? best : 0x7fffffff)));
      if (lane_ == 0) p_.indices[row_ * p_.k + j] = last;
    }
  }
};

}  // namespace ort_moe
