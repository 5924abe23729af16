// What the training ops' CPU kernels do with one row, in float32: its scores and their gradients, step by step as
// router_probs.h and router_scores.h have them. A row lives in arrays of E floats, and loops over it vectorise.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/common/float_math.h"
#include "kernels/common/half_float.h"
#include "kernels/router/expert_sum.h"
#include "kernels/router/fused_router.h"

namespace ort_moe {

// Elements [begin, begin + count) of an array of that type, widened.
inline void LoadRow(DType dtype, const void* from, int64_t begin, int64_t count, float* to) {
  WithType(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto* elements = static_cast<const typename Type::Storage*>(from) + begin;
    for (int64_t e = 0; e < count; ++e) to[e] = Type::Load(elements[e]);
  });
}

// The same, rounded.
inline void StoreRow(DType dtype, const float* from, void* to, int64_t begin, int64_t count) {
  WithType(dtype, [&](auto type) {
    using Type = decltype(type);
    auto* elements = static_cast<typename Type::Storage*>(to) + begin;
    for (int64_t e = 0; e < count; ++e) elements[e] = Type::Store(from[e]);
  });
}

inline float SumAll(const std::vector<float>& values) {
  ExpertSum sum;
  sum.AddAll(values.data(), static_cast<int64_t>(values.size()));
  return sum.Total();
}

// A row of logits that turns into scores, and gradients of the scores into gradients of the logits. `part` holds 1 for
// the experts that a softmax goes over, else 0.
class TrainingRow {
 public:
  TrainingRow(Score score, float softcap, int64_t experts)
      : score_(score), softcap_(softcap), x_(experts), slope_(softcap > 0.0f ? experts : 0), v_(experts), t_(experts) {}

  int64_t experts() const { return static_cast<int64_t>(x_.size()); }
  std::vector<float>& v() { return v_; }

  // Logits into x, soft-capped, with the slope of the cap.
  void Load(DType dtype, const void* logits, int64_t row) {
    LoadRow(dtype, logits, row * experts(), experts(), x_.data());
    for (size_t e = 0; e < slope_.size(); ++e) {
      const float t = Tanh(Div(x_[e], softcap_));
      x_[e] = Mul(softcap_, t);
      slope_[e] = Add(1.0f, -Mul(t, t));
    }
  }

  // The score of each expert into v; of those without a part +0.
  void ScoreExperts(const std::vector<uint8_t>& part) {
    const int64_t count = experts();
    switch (score_) {
      case Score::kSoftmax:
        return Softmax(part);
      case Score::kSigmoid:
        for (int64_t e = 0; e < count; ++e) v_[e] = Sigmoid(x_[e]);
        break;
      case Score::kSqrtSoftplus:
        for (int64_t e = 0; e < count; ++e) v_[e] = SqrtSoftplus(x_[e]);
        break;
      default:
        v_ = x_;
    }
    for (int64_t e = 0; e < count; ++e) v_[e] = part[e] ? v_[e] : 0.0f;
  }

  // The gradient of v from that of v / divisor, their sum and a constant, in place. v is +0 where it is not in the sum.
  void ThroughNormalization(float divisor, std::vector<float>& g) {
    const float reciprocal = Div(1.0f, divisor);
    const float share = Div(SumOfProducts(g, v_), divisor);
    for (float& value : g) value = Mul(Add(value, -share), reciprocal);
  }

  // The gradient of the logits from that of v, in place. `weighed`: v, and +0 where there is no gradient.
  void ThroughScore(const std::vector<float>& weighed, std::vector<float>& g) {
    const int64_t count = experts();
    if (score_ == Score::kSoftmax) {
      const float share = SumOfProducts(g, weighed);
      for (int64_t e = 0; e < count; ++e) g[e] = Mul(v_[e], Add(g[e], -share));
    } else if (score_ == Score::kSigmoid) {
      for (int64_t e = 0; e < count; ++e) g[e] = Mul(g[e], Mul(v_[e], Add(1.0f, -v_[e])));
    } else if (score_ == Score::kSqrtSoftplus) {
      for (int64_t e = 0; e < count; ++e) {
        g[e] = Mul(g[e], x_[e] < -64.0f ? Mul(v_[e], 0.5f) : Div(Sigmoid(x_[e]), Add(v_[e], v_[e])));
      }
    }
    for (size_t e = 0; e < slope_.size(); ++e) g[e] = Mul(g[e], slope_[e]);
  }

 private:
  void Softmax(const std::vector<uint8_t>& part) {
    const int64_t count = experts();
    float max = -Infinity();
    for (int64_t e = 0; e < count; ++e) max = part[e] && x_[e] > max ? x_[e] : max;
    for (int64_t e = 0; e < count; ++e) v_[e] = part[e] ? Exp(Add(x_[e], -max)) : 0.0f;
    const float total = SumAll(v_);
    for (int64_t e = 0; e < count; ++e) v_[e] = part[e] ? Div(v_[e], total) : 0.0f;
  }

  float SumOfProducts(const std::vector<float>& a, const std::vector<float>& b) {
    for (int64_t e = 0; e < experts(); ++e) t_[e] = Mul(a[e], b[e]);
    return SumAll(t_);
  }

  Score score_;
  float softcap_;
  std::vector<float> x_, slope_, v_, t_;
};

}  // namespace ort_moe
