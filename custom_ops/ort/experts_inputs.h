// The inputs of FusedExperts: their numbers, and what their types and shapes must be to each other.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/experts/fused_experts.h"
#include "ort/op_spec.h"
#include "ort/routing_maps_spec.h"

namespace ort_moe {

namespace experts_input {
enum Input : size_t { kX, kWeights, kIndices, kMaps, kFc1 = kMaps + kRoutingMaps };
enum OfLayer : size_t { kMatrix, kScales, kGlobalScale, kZeroPoints, kBias, kLayerInputs };
inline constexpr size_t kFc2 = kFc1 + kLayerInputs;
inline constexpr size_t kResidual = kFc2 + kLayerInputs;
inline constexpr size_t kCount = kResidual + 1;
}  // namespace experts_input

// Type and shape of an input. -1: not known yet; empty: nothing known, or a scalar.
struct ExpertsInput {
  ONNXTensorElementDataType type;
  std::vector<int64_t> shape;
};

using ExpertsInputs = std::array<std::optional<ExpertsInput>, experts_input::kCount>;

// -1: not known yet.
struct ExpertsSizes {
  int64_t hidden = -1;
  int64_t inner = -1;
  int64_t experts = -1;
  int64_t k = -1;
};

std::vector<TensorSpec> ExpertsInputSpecs();

// Throws where the inputs do not fit the attributes or each other. `all_known`: shapes are those of tensors that came.
ExpertsSizes CheckExpertsInputs(const ExpertsConfig& config, const ExpertsInputs& inputs, bool all_known);

}  // namespace ort_moe
