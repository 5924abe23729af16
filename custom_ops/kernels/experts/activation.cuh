// Activations of FusedExperts in float32, chosen at run time: for few tokens a block computes a few hundred of them at
// most, and for many the grouped product has a silu of its own.
#pragma once

#include "kernels/common/float_math.h"
#include "kernels/experts/params.cuh"

namespace ort_moe {

__device__ __forceinline__ float Activated(const ExpertsParams& p, float x) {
  switch (p.activation) {
    case Activation::kSilu:
      return Mul(x, Sigmoid(Mul(p.alpha, x)));
    case Activation::kGelu: {
      constexpr float kSqrtHalf = 0.707106781f;
      return Mul(Mul(0.5f, x), erfcf(Mul(-kSqrtHalf, x)));  // erfc keeps the digits of the far left
    }
    case Activation::kGeluTanh: {
      constexpr float kSqrt8OverPi = 1.59576912f;
      return Mul(x, Sigmoid(Mul(kSqrt8OverPi, Fma(Mul(0.044715f, Mul(x, x)), x, x))));  // (1 + tanh y) / 2
    }
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;  // NaN stays
    case Activation::kRelu2:
      return x < 0.0f ? 0.0f : Mul(x, x);
    case Activation::kIdentity:
      break;
  }
  return x;
}

// A gate and its value, or a value alone in place of the gate; rounded already.
__device__ __forceinline__ float Activated(const ExpertsParams& p, float gate, float up) {
  if (p.limit > 0.0f && p.gated) {  // comparisons that let NaN pass
    if (gate > p.limit) gate = p.limit;
    if (up > p.limit) up = p.limit;
    if (up < -p.limit) up = -p.limit;
  }
  const float activated = Activated(p, gate);
  return p.gated ? Mul(activated, Add(up, p.beta)) : activated;
}

}  // namespace ort_moe
