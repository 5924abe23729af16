// RouterProbs as an ORT op, on the CPU and on CUDA.
#pragma once

#include "kernels/training/router_probs.h"
#include "ort/context.h"
#include "ort/node.h"
#include "ort/op_spec.h"
#include "ort/router_node.h"
#include "ort/shape_inference.h"

namespace ort_moe {

class RouterProbsOp {
 public:
  static const OpSpec& Spec();
  static void InferShapes(ShapeInference& node);

  RouterProbsOp(const Node& node, Device device);
  void Compute(Context& context) const;

 private:
  void CheckExperts(int64_t experts) const;

  RouterProbsConfig config_;  // the format of the map is set for each
  TrainingMaps maps_;
  Device device_;
  bool has_selection_bias_;
  bool has_indices_;
};

}  // namespace ort_moe
