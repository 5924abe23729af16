// GatherFinalize as an ORT op, on the CPU and on CUDA.
#pragma once

#include <cstdint>

#include "kernels/finalize/gather_finalize.h"
#include "ort/context.h"
#include "ort/node.h"
#include "ort/op_spec.h"
#include "ort/shape_inference.h"

namespace ort_moe {

class GatherFinalizeOp {
 public:
  static const OpSpec& Spec();
  static void InferShapes(ShapeInference& node);

  GatherFinalizeOp(const Node& node, Device device);
  void Compute(Context& context) const;

 private:
  int64_t hidden_;
  int64_t local_begin_;
  int64_t local_count_;
  Device device_;
};

}  // namespace ort_moe
