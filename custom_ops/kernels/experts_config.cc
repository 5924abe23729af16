// The constraints between FusedExperts' attributes.
#include <cmath>
#include <string>

#include "kernels/float_text.h"
#include "kernels/fused_experts.h"

namespace ort_moe {

std::string CheckExpertsConfig(const ExpertsConfig& c) {
  const auto refusal = [](const char* attribute, const char* expected, float value) {
    return std::string("attribute '") + attribute + "' must be " + expected + ", but is " +
           (std::isnan(value) ? "NaN" : FloatText(value));
  };
  if (!std::isfinite(c.alpha)) return refusal("alpha", "finite", c.alpha);
  if (!std::isfinite(c.beta)) return refusal("beta", "finite", c.beta);
  if (!(c.limit >= 0.0f) || std::isinf(c.limit)) return refusal("limit", "finite and at least 0", c.limit);
  if (c.activation != Activation::kSilu && c.alpha != 1.0f)
    return refusal("alpha", "1 unless activation = silu", c.alpha);
  if (!c.gated && c.beta != 0.0f) return refusal("beta", "0 with gated = 0", c.beta);
  if (!c.gated && c.limit != 0.0f) return refusal("limit", "0 with gated = 0", c.limit);
  return {};
}

}  // namespace ort_moe
