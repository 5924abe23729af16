// AuxLoss as an ORT op, on the CPU and on CUDA.
#pragma once

#include <optional>

#include "kernels/training/aux_loss.h"
#include "ort/context.h"
#include "ort/node.h"
#include "ort/op_spec.h"
#include "ort/scratch.h"
#include "ort/shape_inference.h"

namespace ort_moe {

class AuxLossOp {
 public:
  static const OpSpec& Spec();
  static void InferShapes(ShapeInference& node);

  AuxLossOp(const Node& node, Device device);
  void Compute(Context& context) const;

 private:
  void CheckExperts(int64_t experts) const;

  AuxLossConfig config_;
  Device device_;
  std::optional<ScratchAllocator> scratch_;  // on CUDA
};

}  // namespace ort_moe
