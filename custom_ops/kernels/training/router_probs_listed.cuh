// RouterProbs, a warp to a row: the choice among a list of few candidates, and the weights of what is chosen
// (router_probs_row.cuh).
#pragma once

#include "kernels/training/router_probs_marked.cuh"

namespace ort_moe {

template <typename T, ProbsKind kKind, bool kAllScores>
class ProbsListed : public ProbsMarked<T, kKind, kAllScores> {
 protected:
  using Base = ProbsMarked<T, kKind, kAllScores>;
  using Key = typename Base::Key;
  using Base::Base;
  using Base::best_;
  using Base::choice_;
  using Base::ClearOutput;
  using Base::Divisor;
  using Base::has_keys_;
  using Base::has_nan_;
  using Base::kEstimates;
  using Base::keys_;
  using Base::kFloat;
  using Base::kRanksLogits;
  using Base::kUnique;
  using Base::lane_;
  using Base::LoadNext;
  using Base::Mark;
  using Base::p_;
  using Base::probs_;
  using Base::row_;
  using Base::s_;
  using Base::Scaled;
  using Base::Source;
  using Base::StoreScores;
  using Base::SumOfTerms;
  using Base::WaitForStores;
  using Base::written_;
  using Base::written_bits_;
  using Base::x_;

  // The marked experts by lane, and ascending within a lane; where this lane's begin.
  __device__ __forceinline__ int32_t List(int32_t mine) {
    int32_t listed;
    const int32_t first = SumBefore(mine, &listed);
    int32_t position = first;
#pragma unroll 1
    for (int word = 0; word < choice_.words(); ++word) {
      uint32_t bits = choice_.bits(word);
#pragma unroll 1
      while (bits != 0u) {
        const uint32_t i = __clz(__brev(bits));
        bits &= bits - 1u;
        s_.experts[position++] = static_cast<uint16_t>(word * 4 * kChunk * kWarp + i / kChunk * kChunk * kWarp +
                                                       lane_ * kChunk + i % kChunk);
      }
    }
    __syncwarp();
    return first;
  }

  // Of up to kSlots * 32 listed: lane l holds numbers l, l + 32, ...
  template <int kSlots>
  __device__ __forceinline__ void StoreListed(int32_t listed, int32_t first, int32_t mine) {
    int32_t expert[kSlots];
    float value[kSlots];
    uint32_t key[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int32_t position = lane_ + s * kWarp;
      expert[s] = s_.experts[min(position, listed - 1)];
      if constexpr (kUnique) {
        const uint16_t bits = reinterpret_cast<const uint16_t*>(x_)[expert[s]];
        value[s] = Storage<T>::Widen(bits);
        key[s] = position < listed ? UniqueKey(bits, value[s], expert[s]) : 0u;
      } else {
        const float ranked = RankedValue(expert[s], &value[s]);
        key[s] = position < listed ? RankKey(ranked) : 0u;
      }
      s_.keys[position] = key[s];
    }
    __syncwarp();
    bool chosen[kSlots];
    ChooseListed<kSlots>(key, expert, chosen, listed);
    if constexpr (kAllScores) {
      StoreScores();
    } else {
      Weigh<kSlots>(value, expert, chosen, first, mine);
      WaitForStores();
    }
    ClearOutput();
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (chosen[s]) {
        if constexpr (!kAllScores) {
          reinterpret_cast<Bits<T>*>(probs_)[expert[s]] = Storage<T>::Round(has_nan_ ? NaN() : value[s]);
        }
        Mark(expert[s]);
        written_bits_ |= 1u << s;
        written_[s] = expert[s];
      }
    }
  }

  // The order of a half-precision logit, then that of its expert; never 0.
  static __device__ __forceinline__ uint32_t UniqueKey(uint32_t bits, float value, int32_t expert) {
    bits = bits == 0x8000u ? 0u : bits;  // -0 = +0
    uint32_t order = bits & 0x8000u ? ~bits : bits | 0x8000u;
    order = IsNaN(value) ? 0u : order;
    return order << 16 | (0xffffu - static_cast<uint32_t>(expert));
  }

  // What ranks a listed expert, and the logit or score from which its weight comes.
  __device__ __forceinline__ float RankedValue(int32_t expert, float* value) const {
    const auto read = [expert](const auto* row) { return row[expert]; };
    if (!kEstimates || has_keys_) {
      const float ranked = Storage<Key>::Widen(read(reinterpret_cast<const Bits<Key>*>(keys_)));
      *value = ranked;
      if (kRanksLogits || kAllScores || p_.selection_bias == nullptr) return ranked;
      // Of float logits keys have taken the place.
      const void* logits = kFloat ? Source(row_) : x_;
      *value = Sigmoid(Storage<T>::Widen(read(static_cast<const Bits<T>*>(logits))));
      return ranked;
    }
    *value = Sigmoid(Storage<T>::Widen(read(reinterpret_cast<const Bits<T>*>(x_))));
    return p_.selection_bias == nullptr ? *value : Add(*value, p_.selection_bias[expert]);
  }

  template <int kSlots>
  __device__ __forceinline__ void ChooseListed(const uint32_t (&key)[kSlots], const int32_t (&expert)[kSlots],
                                               bool (&chosen)[kSlots], int32_t listed) {
    uint32_t better[kSlots] = {};
#pragma unroll 1
    for (int32_t j = 0; j < listed; j += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(s_.keys + j);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        CountIf(four.x, key[s] + 1u, &better[s]);
        CountIf(four.y, key[s] + 1u, &better[s]);
        CountIf(four.z, key[s] + 1u, &better[s]);
        CountIf(four.w, key[s] + 1u, &better[s]);
      }
    }
    int32_t count = 0;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      chosen[s] = better[s] < static_cast<uint32_t>(p_.k) && key[s] != 0u;
      count += __popc(__ballot_sync(kAllLanes, chosen[s]));
    }
    if constexpr (kUnique) {
      if (p_.indices != nullptr) {
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          if (chosen[s]) p_.indices[row_ * p_.k + better[s]] = expert[s];
        }
      }
    } else {
      if (count > p_.k) KeepFirstTies<kSlots>(key, expert, chosen, listed);
      if (p_.indices != nullptr) StoreIndices<kSlots>(key, expert, chosen, listed);
    }
  }

  // Of the chosen with the lowest key, which are too many, those of the lowest experts.
  template <int kSlots>
  __device__ __forceinline__ void KeepFirstTies(const uint32_t (&key)[kSlots], const int32_t (&expert)[kSlots],
                                                bool (&chosen)[kSlots], int32_t listed) {
    uint32_t lowest = 0xffffffffu;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) lowest = min(lowest, chosen[s] ? key[s] : 0xffffffffu);
    lowest = WarpMin(lowest);
    int32_t above = 0;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) above += __popc(__ballot_sync(kAllLanes, key[s] > lowest));
    int32_t before[kSlots] = {};
#pragma unroll 1
    for (int32_t j = 0; j < listed; ++j) {
      const int32_t other = s_.keys[j] == lowest ? s_.experts[j] : 0xffff;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) before[s] += other < expert[s];
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) chosen[s] = chosen[s] && (key[s] > lowest || above + before[s] < p_.k);
  }

  template <int kSlots>
  __device__ __forceinline__ void StoreIndices(const uint32_t (&key)[kSlots], const int32_t (&expert)[kSlots],
                                               const bool (&chosen)[kSlots], int32_t listed) const {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      int32_t rank = 0;
#pragma unroll 1
      for (int32_t j = 0; j < listed; ++j) {
        const uint32_t other = s_.keys[j];
        rank += other > key[s] || (other == key[s] && s_.experts[j] < expert[s]);
      }
      if (chosen[s]) p_.indices[row_ * p_.k + rank] = expert[s];
    }
  }

  // Sum of the chosen in the contract's order: each lane adds those of its own chunks.
  template <int kSlots>
  __device__ __forceinline__ float SumOfListed(const float (&value)[kSlots], const bool (&chosen)[kSlots],
                                               int32_t first, int32_t mine) {
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kSlots; ++s) s_.values[lane_ + s * kWarp] = chosen[s] ? value[s] : 0.0f;
    __syncwarp();
    float partial[4] = {};
#pragma unroll 1
    for (int32_t j = first; j < first + mine; ++j) {
      const int q = s_.experts[j] / (kChunk * kWarp) % 4;
      const float term = s_.values[j];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n == q) partial[n] = Add(partial[n], term);
      }
    }
    return Butterfly(partial[0], partial[1], partial[2], partial[3]);
  }

  template <int kSlots>
  __device__ __forceinline__ void Weigh(float (&value)[kSlots], const int32_t (&expert)[kSlots],
                                        const bool (&chosen)[kSlots], int32_t first, int32_t mine) {
    if constexpr (kKind == ProbsKind::kSoftmaxOfChosen) {
      LoadNext();
#pragma unroll
      for (int s = 0; s < kSlots; ++s) value[s] = Exp(Add(value[s], -best_));
      const float sum = SumOfListed<kSlots>(value, chosen, first, mine);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) value[s] = Div(value[s], sum);
    } else if constexpr (kKind == ProbsKind::kSoftmaxOfExperts) {
      const float sum = SumOfTerms();
      LoadNext();
#pragma unroll
      for (int s = 0; s < kSlots; ++s) value[s] = Div(Exp(Add(value[s], -best_)), sum);
    } else {
      LoadNext();
    }
    if (p_.normalize) {
      const float divisor = Divisor(SumOfListed<kSlots>(value, chosen, first, mine));
#pragma unroll
      for (int s = 0; s < kSlots; ++s) value[s] = Div(value[s], divisor);
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) value[s] = Scaled(value[s], expert[s]);
  }
};

}  // namespace ort_moe
