// Gradients that every expert of a row has: of RouterScores, and of RouterProbs' softmax over all experts. A row's
// logits and gradients are read once, into the registers of its threads, and what comes of them is stored from there.
//
// Thread t of a row's kWarps warps owns the chunks of 8 experts t, t + 32 * kWarps, ...: with four warps it holds the
// contract's partial sum t. One warp has a row alone, and nobody waits for it but at its shuffles.
#pragma once

#include "kernels/training/router_grad_params.cuh"
#include "kernels/training/training_rows.cuh"

namespace ort_moe {

// softmax over all experts, or sigmoid; without a soft cap. A map and a normalisation do not meet. Up to
// kWarps * 32 * kOwned chunks.
template <typename T, bool kSoftmax, int kWarps, int kOwned>
class RowGrad {
 public:
  static constexpr int kThreads = kWarps * kWarp;     // of a row
  static constexpr int kRows = kWarps == 1 ? 4 : 1;   // of a block
  static constexpr int kSums = kPartials / kThreads;  // partial sums of a thread
  static constexpr int kMaxExperts = kThreads * kOwned * kChunk;
  static constexpr int kBlocks = kOwned > 3 ? 2 : kWarps == 1 ? 7 : 5;  // of a multiprocessor, for its registers
  static_assert(kMaxExperts < kMaxTrainingExperts || kOwned == 8);
  static_assert(kWarps == 1 || kSums == 1);

  // Of a block; every exchange of its warps has its own.
  struct Shared {
    uint32_t bests[kWarps];
    float sums[4][kThreads];
  };

  __device__ __forceinline__ RowGrad(const RouterGradParams& p, Shared& shared, int64_t row)
      : p_(p),
        shared_(shared),
        thread_(threadIdx.x % kThreads),
        chunks_((p.experts + kChunk - 1) / kChunk),
        map_(p.map == nullptr ? nullptr : p.map + row * p.map_bytes),
        row_(row) {}

  __device__ __forceinline__ void Compute() {
    Load();
    if constexpr (kSoftmax) {
      const float max = Max();
      float sum[1];
      Sum(0, sum, [&](int c, int i, float (&term)[1]) { v_[c][i] = term[0] = Exp(Add(v_[c][i], -max)); });
      const DivideTerms divide(sum[0]);
      ForEachChunk([&](int c, int32_t) { divide(v_[c]); });
    } else {
      ForEachChunk([&](int c, int32_t) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) v_[c][i] = Sigmoid(v_[c][i]);
      });
    }
    if (ORT_MOE_RARE(p_.experts % kChunk != 0)) ClearOutside();
    float q = 0.0f;
    if (kSoftmax || p_.normalize) {
      float sums[2];
      Sum(1, sums, [&](int c, int i, float (&term)[2]) {
        term[0] = Mul(g_[c][i], v_[c][i]);
        term[1] = v_[c][i];
      });
      q = sums[0];
      if (p_.normalize) {
        const auto normalization = NormalizationOf(p_, sums[1], sums[0]);
        ForEachChunk([&](int c, int32_t) {
#pragma unroll
          for (int i = 0; i < kChunk; ++i) g_[c][i] = Mul(Add(g_[c][i], -normalization.q), normalization.r);
        });
        if constexpr (kSoftmax) {
          float products[1];
          Sum(3, products, [&](int c, int i, float (&term)[1]) { term[0] = Mul(g_[c][i], v_[c][i]); });
          q = products[0];
        }
      }
    }
    Bits<T>* target = static_cast<Bits<T>*>(p_.grad_logits) + row_ * p_.experts;
    ForEachChunk([&](int c, int32_t chunk) {
      float d[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const float v = v_[c][i], g = g_[c][i];
        d[i] = kSoftmax ? Mul(v, Add(g, -q)) : ElementGrad(Score::kSigmoid, 0.0f, v, g);
      }
      if (!ORT_MOE_RARE(!p_.vectors)) {
        WriteChunk<T>(target, chunk, d);
      } else {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          if (chunk * kChunk + i < p_.experts) target[chunk * kChunk + i] = Storage<T>::Round(d[i]);
        }
      }
    });
  }

 private:
  // f(c, chunk) for this thread's chunks.
  template <typename F>
  __device__ __forceinline__ void ForEachChunk(F f) const {
#pragma unroll
    for (int c = 0; c < kOwned; ++c) {
      const int32_t chunk = thread_ + c * kThreads;
      if (chunk < chunks_) f(c, chunk);
    }
  }

  __device__ __forceinline__ void Load() {
    const Bits<T>* logits = static_cast<const Bits<T>*>(p_.logits) + row_ * p_.experts;
    const Bits<T>* grad = static_cast<const Bits<T>*>(p_.grad) + row_ * p_.experts;
    if (!ORT_MOE_RARE(!p_.vectors)) {
      ForEachChunk([&](int c, int32_t chunk) { ReadChunk<T>(logits, chunk, v_[c]); });
      ForEachChunk([&](int c, int32_t chunk) { ReadChunk<T>(grad, chunk, g_[c]); });
    } else {
      ForEachChunk([&](int c, int32_t chunk) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          const int32_t expert = chunk * kChunk + i;
          v_[c][i] = expert < p_.experts ? Storage<T>::Widen(logits[expert]) : -Infinity();
          g_[c][i] = expert < p_.experts ? Storage<T>::Widen(grad[expert]) : 0.0f;
        }
      });
    }
    if (map_ == nullptr) return;
    ForEachChunk([&](int c, int32_t chunk) {
      const uint32_t bits = MapBits(p_.map_format, map_, p_.experts, chunk);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) g_[c][i] = bits >> i & 1u ? ScaledGrad(p_, g_[c][i], chunk * kChunk + i) : 0.0f;
    });
  }

  // What stands for no expert takes part in no sum.
  __device__ __forceinline__ void ClearOutside() {
    ForEachChunk([&](int c, int32_t chunk) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) v_[c][i] = chunk * kChunk + i < p_.experts ? v_[c][i] : 0.0f;
    });
  }

  // Of the logits that are numbers; NaN where none is.
  __device__ __forceinline__ float Max() const {
    float largest = NaN();
    ForEachChunk([&](int c, int32_t) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) largest = fmaxf(largest, v_[c][i]);
    });
    uint32_t best = WarpMax(RankKey(largest));
    if constexpr (kWarps > 1) {
      if (thread_ % kWarp == 0) shared_.bests[thread_ / kWarp] = best;
      __syncthreads();
#pragma unroll
      for (int w = 0; w < kWarps; ++w) best = max(best, shared_.bests[w]);
    }
    return KeyValue(best);
  }

  // The sums over the experts, in the contract's order, of the terms that f(c, i, term) gives for expert i of this
  // thread's chunk c.
  template <int kCount, typename F>
  __device__ __forceinline__ void Sum(int exchange, float (&sum)[kCount], F f) {
    float partial[kCount][4] = {};
    ForEachChunk([&](int c, int32_t) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        float term[kCount];
        f(c, i, term);
#pragma unroll
        for (int n = 0; n < kCount; ++n) partial[n][c % kSums] = Add(partial[n][c % kSums], term[n]);
      }
    });
    if constexpr (kWarps > 1) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) shared_.sums[exchange + n][thread_] = partial[n][0];
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) partial[n][w] = shared_.sums[exchange + n][w * kWarp + thread_ % kWarp];
      }
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) sum[n] = Butterfly(partial[n][0], partial[n][1], partial[n][2], partial[n][3]);
  }

  const RouterGradParams& p_;
  Shared& shared_;
  const int thread_;
  const int32_t chunks_;
  const uint8_t* const map_;
  const int64_t row_;
  float v_[kOwned][kChunk];  // logits, then scores
  float g_[kOwned][kChunk];
};

}  // namespace ort_moe
