// Gradients of RouterProbs and RouterScores in the plainest way: a warp to a row, every score, any number of experts
// and of marks. It walks over the row once per sum and recomputes the scores each time, so it is there for what the
// other kernels leave: soft caps, scores that are rare, rows with very many marks.
#pragma once

#include "kernels/training/router_grad_params.cuh"
#include "kernels/training/training_rows.cuh"

namespace ort_moe {

template <typename T>
class GradInTurn {
 public:
  __device__ GradInTurn(const RouterGradParams& p, int64_t row)
      : p_(p),
        lane_(threadIdx.x % kWarp),
        logits_(static_cast<const Bits<T>*>(p.logits) + row * p.experts),
        grad_(static_cast<const Bits<T>*>(p.grad) + row * p.experts),
        grad_logits_(static_cast<Bits<T>*>(p.grad_logits) + row * p.experts),
        map_(p.map == nullptr ? nullptr : p.map + row * p.map_bytes) {}

  // In device memory; by a warp.
  __device__ __forceinline__ void Compute() {
    const bool softmax = p_.score == Score::kSoftmax;
    if (softmax) {
      uint32_t best = 0u;
      ForEach([&](int32_t e, bool marked) {
        if (marked || p_.over_experts) best = max(best, RankKey(X(e)));
      });
      max_ = KeyValue(WarpMax(best));
      sum_ = Sum([&](int32_t e, bool marked) { return marked || p_.over_experts ? Exp(Add(X(e), -max_)) : 0.0f; });
    }
    if (p_.normalize) {
      const float sum = Sum([&](int32_t e, bool marked) { return marked ? V(e) : 0.0f; });
      const float products = Sum([&](int32_t e, bool marked) { return marked ? Mul(G(e), V(e)) : 0.0f; });
      normalization_ = NormalizationOf(p_, sum, products);
      normalized_ = true;
    }
    const float q = softmax ? Sum([&](int32_t e, bool marked) { return marked ? Mul(G(e), V(e)) : 0.0f; }) : 0.0f;
    ForEach([&](int32_t e, bool marked) {
      float d = 0.0f;
      if (softmax && (marked || p_.over_experts)) {
        d = Mul(V(e), marked ? Add(G(e), -q) : -q);
      } else if (marked) {
        d = ElementGrad(p_.score, X(e), V(e), G(e));
      }
      if (p_.softcap > 0.0f && (marked || p_.over_experts)) {
        const float t = Tanh(Div(Storage<T>::Widen(logits_[e]), p_.softcap));
        d = Mul(d, Add(1.0f, -Mul(t, t)));
      }
      grad_logits_[e] = Storage<T>::Round(d);
    });
  }

 private:
  __device__ __noinline__ static float SoftcappedX(float x, float softcap) {
    return Mul(softcap, Tanh(Div(x, softcap)));
  }
  __device__ __forceinline__ float X(int32_t e) const {
    const float x = Storage<T>::Widen(logits_[e]);
    return p_.softcap > 0.0f ? SoftcappedX(x, p_.softcap) : x;
  }
  __device__ __forceinline__ float V(int32_t e) const {
    return p_.score == Score::kSoftmax ? Div(Exp(Add(X(e), -max_)), sum_) : ElementScore(p_.score, X(e));
  }
  __device__ __forceinline__ float G(int32_t e) const {
    const float g = ScaledGrad(p_, Storage<T>::Widen(grad_[e]), e);
    return normalized_ ? Mul(Add(g, -normalization_.q), normalization_.r) : g;
  }

  // f(expert, marked) for this lane's experts.
  template <typename F>
  __device__ __forceinline__ void ForEach(F f) const {
#pragma unroll 1
    for (int32_t chunk = lane_; chunk * kChunk < p_.experts; chunk += kWarp) {
      const uint32_t bits = map_ == nullptr ? 0xffu : MapBits(p_.map_format, map_, p_.experts, chunk);
#pragma unroll 1
      for (int i = 0; i < min(kChunk, p_.experts - chunk * kChunk); ++i) f(chunk * kChunk + i, bits >> i & 1u);
    }
  }

  // In the contract's order.
  template <typename F>
  __device__ __forceinline__ float Sum(F f) const {
    float partial[4] = {};
    ForEach([&](int32_t e, bool marked) {
      const float term = f(e, marked);
      const int q = e / (kChunk * kWarp) % 4;
#pragma unroll
      for (int n = 0; n < 4; ++n) partial[n] = n == q ? Add(partial[n], term) : partial[n];
    });
    return Butterfly(partial[0], partial[1], partial[2], partial[3]);
  }

  const RouterGradParams& p_;
  const int lane_;
  const Bits<T>* const logits_;
  const Bits<T>* const grad_;
  Bits<T>* const grad_logits_;
  const uint8_t* const map_;
  float max_ = 0.0f;
  float sum_ = 1.0f;
  RouterGradParams::Normalization normalization_;
  bool normalized_ = false;  // G is behind the normalisation
};

// By a copy of nothing but the row, so that its caller's state stays in registers.
template <typename T>
__device__ __noinline__ void ComputeGradInTurn(const RouterGradParams& p, int64_t row) {
  GradInTurn<T>(p, row).Compute();
}

}  // namespace ort_moe
