// Sums over experts on the host, in the order that every sum of the routers has.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/float_math.h"

namespace ort_moe {

// 128 partial sums from +0, expert e into number (e / 8) % 128 in ascending order, then a butterfly (of which one lane
// is enough here). Experts that are not added count as +0, which changes no partial sum.
class ExpertSum {
 public:
  void AddExpert(int64_t expert, float value) {
    float& partial = partials_[(expert / kRun) % kPartials];
    partial = Add(partial, value);
  }

  void AddAll(const float* values, int64_t experts) {
    for (int64_t begin = 0; begin < experts; begin += kRun) {
      float partial = partials_[(begin / kRun) % kPartials];
      const int64_t end = std::min(begin + kRun, experts);
      for (int64_t e = begin; e < end; ++e) partial = Add(partial, values[e]);
      partials_[(begin / kRun) % kPartials] = partial;
    }
  }

  float Total() { return Butterfly(partials_); }

  // Adds 128 numbers, which it overwrites.
  static float Butterfly(float* partials) {
    for (int stride = kPartials / 2; stride > 0; stride /= 2) {
      for (int p = 0; p < stride; ++p) partials[p] = Add(partials[p], partials[p + stride]);
    }
    return partials[0];
  }

 private:
  static constexpr int kPartials = 128;
  static constexpr int kRun = 8;
  float partials_[kPartials] = {};
};

}  // namespace ort_moe
