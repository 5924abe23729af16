// FusedRouter as an ORT op, on the CPU and on CUDA.
#pragma once

#include <optional>

#include "kernels/router/fused_router.h"
#include "ort/context.h"
#include "ort/node.h"
#include "ort/op_spec.h"
#include "ort/scratch.h"
#include "ort/shape_inference.h"

namespace ort_moe {

class FusedRouterOp {
 public:
  static const OpSpec& Spec();
  static void InferShapes(ShapeInference& node);

  FusedRouterOp(const Node& node, Device device);
  void Compute(Context& context) const;

 private:
  void CheckExperts(int64_t experts) const;

  RouterConfig config_;
  Device device_;
  bool has_selection_bias_;
  bool has_maps_;
  std::optional<ScratchAllocator> scratch_;  // on CUDA with maps
};

}  // namespace ort_moe
