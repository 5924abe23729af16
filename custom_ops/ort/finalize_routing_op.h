// FinalizeRouting as an ORT op, on the CPU and on CUDA.
#pragma once

#include "kernels/finalize/finalize_routing.h"
#include "ort/context.h"
#include "ort/node.h"
#include "ort/op_spec.h"
#include "ort/shape_inference.h"

namespace ort_moe {

class FinalizeRoutingOp {
 public:
  static const OpSpec& Spec();
  static void InferShapes(ShapeInference& node);

  FinalizeRoutingOp(const Node& node, Device device);
  void Compute(Context& context) const;

 private:
  Device device_;
};

}  // namespace ort_moe
