#include "ort/routing_maps_spec.h"

#include <limits>

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

int64_t MapRows(int64_t tokens, int64_t k) {
  const int64_t rows = tokens * k;
  if (rows > std::numeric_limits<int32_t>::max()) {
    throw Error("input 'logits' must have rows that, times k, fit into int32 with the routing maps, but has " +
                std::to_string(tokens));
  }
  return rows;
}

RoutingMaps OutputRoutingMaps(Context& context, size_t first, int64_t rows, int64_t experts) {
  RoutingMaps maps{};
  maps.permuted_to_unpermuted = static_cast<int32_t*>(context.Output(first, {rows}));
  maps.unpermuted_to_permuted = static_cast<int32_t*>(context.Output(first + 1, {rows}));
  maps.permuted_to_expert = static_cast<int32_t*>(context.Output(first + 2, {rows}));
  maps.expert_first_token_offset = static_cast<int64_t*>(context.Output(first + 3, {experts + 1}));
  return maps;
}

}  // namespace ort_moe
