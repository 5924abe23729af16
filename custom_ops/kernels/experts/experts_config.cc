// The constraints between FusedExperts' attributes.
#include <cmath>
#include <string>

#include "kernels/common/float_text.h"
#include "kernels/experts/fused_experts.h"

namespace ort_moe {

const char* FormatName(WeightFormat format) {
  static constexpr const char* kNames[] = {"dense", "nvfp4", "mxfp4", "int4", "int8", "fp8"};
  return kNames[static_cast<int>(format)];
}

namespace {

std::string CheckBlockSize(const ExpertsConfig& c) {
  const auto refusal = [&](const char* expected) {
    return std::string("attribute 'block_size' must be ") + expected +
           " with weight_format = " + FormatName(c.weight_format) + ", but is " + std::to_string(c.block_size);
  };
  switch (c.weight_format) {
    case WeightFormat::kDense:
    case WeightFormat::kNvfp4:
    case WeightFormat::kMxfp4:
      return c.block_size == 0 ? "" : refusal("0");
    case WeightFormat::kInt4:
    case WeightFormat::kInt8:
    case WeightFormat::kFp8:
      return c.block_size == 16 || c.block_size == 32 || c.block_size == 64 || c.block_size == 128
                 ? ""
                 : refusal("16, 32, 64 or 128");
  }
  return {};
}

}  // namespace

std::string CheckExpertsConfig(const ExpertsConfig& c) {
  const auto refusal = [](const char* attribute, const char* expected, float value) {
    return std::string("attribute '") + attribute + "' must be " + expected + ", but is " +
           (std::isnan(value) ? "NaN" : FloatText(value));
  };
  if (std::string block = CheckBlockSize(c); !block.empty()) return block;
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
