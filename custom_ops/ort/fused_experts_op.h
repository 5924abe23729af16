// FusedExperts as an ORT op, on the CPU and on CUDA.
#pragma once

#include <optional>

#include "kernels/experts/fused_experts.h"
#include "ort/context.h"
#include "ort/node.h"
#include "ort/op_spec.h"
#include "ort/scratch.h"
#include "ort/shape_inference.h"

namespace ort_moe {

class FusedExpertsOp {
 public:
  static const OpSpec& Spec();
  static void InferShapes(ShapeInference& node);

  FusedExpertsOp(const Node& node, Device device);
  void Compute(Context& context) const;

 private:
  ExpertsConfig config_;
  Device device_;
  bool has_maps_;
  std::optional<ScratchAllocator> scratch_;  // on CUDA
};

}  // namespace ort_moe
