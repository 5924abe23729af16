// The CUDA launcher of FinalizeRouting in C, for callers without ONNX Runtime.
#include "kernels/finalize/finalize_routing.h"

#include <cstdint>

#include "kernels/common/c_call.h"

// FinalizeArgs and what the launcher takes beside them. Mirrored by ort_moe/kernels/finalize.py.
struct OrtMoeFinalizeRoutingCall {
  const void* expert_output;
  const float* weights;
  const int32_t* indices;
  const int32_t* unpermuted_to_permuted;
  const void* bias;      // or null
  const void* residual;  // or null
  void* y;
  int64_t tokens;
  int64_t hidden;
  int32_t k;
  int32_t experts;
  int32_t dtype;
  int32_t routing_settled;
};

ORT_MOE_C_EXPORT const char* ort_moe_launch_finalize_routing(const OrtMoeFinalizeRoutingCall* call, void* stream) {
  ort_moe::FinalizeArgs args{};
  args.expert_output = call->expert_output;
  args.weights = call->weights;
  args.indices = call->indices;
  args.unpermuted_to_permuted = call->unpermuted_to_permuted;
  args.bias = call->bias;
  args.residual = call->residual;
  args.y = call->y;
  args.dtype = static_cast<ort_moe::DType>(call->dtype);
  args.tokens = call->tokens;
  args.hidden = call->hidden;
  args.k = call->k;
  args.experts = call->experts;
  return ort_moe::CallError("FinalizeRouting", ort_moe::LaunchFinalizeRouting(args, call->routing_settled != 0,
                                                                              static_cast<cudaStream_t>(stream)));
}
