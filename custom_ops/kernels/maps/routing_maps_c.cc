// The CUDA launcher of routing maps in C, for callers without ONNX Runtime.
#include <cstdint>

#include "kernels/common/c_call.h"
#include "kernels/maps/routing_maps.h"

// The arguments of LaunchRoutingMaps. Mirrored by ort_moe/kernels/permute.py.
struct OrtMoeRoutingMapsCall {
  const int32_t* indices;
  ort_moe::RoutingMaps maps;
  void* scratch;  // ort_moe_routing_maps_scratch_bytes
  int64_t tokens;
  int64_t k;
  int64_t experts;
};

ORT_MOE_C_EXPORT int64_t ort_moe_routing_maps_scratch_bytes(const OrtMoeRoutingMapsCall* call) {
  return static_cast<int64_t>(ort_moe::RoutingMapsScratchBytes(call->tokens, call->k, call->experts));
}

ORT_MOE_C_EXPORT const char* ort_moe_launch_routing_maps(const OrtMoeRoutingMapsCall* call, void* stream) {
  return ort_moe::CallError("routing maps",
                            ort_moe::LaunchRoutingMaps(call->indices, call->tokens, call->k, call->experts, call->maps,
                                                       call->scratch, static_cast<cudaStream_t>(stream)));
}
