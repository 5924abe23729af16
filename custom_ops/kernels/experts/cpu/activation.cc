// Loops that compilers vectorise, but that of erfc.
#include "kernels/experts/cpu/activation.h"

#include <cmath>

#include "kernels/common/float_math.h"
#include "kernels/common/with_fma.h"

namespace ort_moe {
namespace {

float GeluTanh(float x) {
  constexpr float kSqrt8OverPi = 1.59576912f;
  return Mul(x, Sigmoid(Mul(kSqrt8OverPi, Fma(Mul(0.044715f, Mul(x, x)), x, x))));  // (1 + tanh y) / 2
}

float Gelu(float x) {
  constexpr float kSqrtHalf = 0.707106781f;
  return Mul(Mul(0.5f, x), std::erfc(Mul(-kSqrtHalf, x)));  // erfc keeps the digits of the far left
}

void ActivateAlone(const ExpertsConfig& config, int64_t count, float* x) {
  const auto each = [&](const auto& activation) {
    for (int64_t i = 0; i < count; ++i) x[i] = activation(x[i]);
  };
  switch (config.activation) {
    case Activation::kSilu: {
      const float alpha = config.alpha;
      return each([alpha](float v) { return Mul(v, Sigmoid(Mul(alpha, v))); });
    }
    case Activation::kGelu:
      return each(Gelu);
    case Activation::kGeluTanh:
      return each(GeluTanh);
    case Activation::kRelu:
      return each([](float v) { return v < 0.0f ? 0.0f : v; });
    case Activation::kRelu2:
      return each([](float v) { return v < 0.0f ? 0.0f : Mul(v, v); });
    case Activation::kIdentity:
      return;
  }
}

}  // namespace

void ActivateCpu(const ExpertsConfig& config, int64_t count, float* x, float* values) {
  WithFma([&] {
    const float limit = config.limit, beta = config.beta;
    if (values != nullptr && limit > 0.0f) {
      for (int64_t i = 0; i < count; ++i) {
        x[i] = x[i] > limit ? limit : x[i];
        values[i] = values[i] > limit ? limit : (values[i] < -limit ? -limit : values[i]);
      }
    }
    ActivateAlone(config, count, x);
    if (values != nullptr) {
      for (int64_t i = 0; i < count; ++i) x[i] = Mul(x[i], Add(values[i], beta));
    }
  });
}

}  // namespace ort_moe
