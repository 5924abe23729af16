#include "ort/routing_maps_spec.h"

namespace ort_moe {

const std::vector<TensorSpec>& RoutingMapSpecs() {
  static const std::vector<TensorSpec> specs = {
      {"permuted_to_unpermuted", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}, true},
      {"unpermuted_to_permuted", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}, true},
      {"permuted_to_expert", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}, true},
      {"expert_first_token_offset", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64}, true},
  };
  return specs;
}

}  // namespace ort_moe
