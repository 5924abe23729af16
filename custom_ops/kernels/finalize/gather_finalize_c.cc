// The CUDA launcher of GatherFinalize in C, for callers without ONNX Runtime.
#include "kernels/finalize/gather_finalize.h"

#include <cstdint>

#include "kernels/common/c_call.h"

// GatherFinalizeArgs, flat. Mirrored by ort_moe/kernels/finalize.py.
struct OrtMoeGatherFinalizeCall {
  const void* expert_output;
  const float* weights;
  const int32_t* indices;
  const int32_t* unpermuted_to_permuted;
  const int64_t* expert_first_token_offset;
  const void* bias;      // or null
  const void* residual;  // or null
  void* y;
  int64_t tokens;
  int64_t hidden;
  int64_t padded;
  int64_t capacity;
  int64_t local_begin;
  int64_t local_count;
  int32_t k;
  int32_t experts;
  int32_t dtype;
};

ORT_MOE_C_EXPORT const char* ort_moe_launch_gather_finalize(const OrtMoeGatherFinalizeCall* call, void* stream) {
  ort_moe::GatherFinalizeArgs args{};
  args.finalize.expert_output = call->expert_output;
  args.finalize.weights = call->weights;
  args.finalize.indices = call->indices;
  args.finalize.unpermuted_to_permuted = call->unpermuted_to_permuted;
  args.finalize.bias = call->bias;
  args.finalize.residual = call->residual;
  args.finalize.y = call->y;
  args.finalize.dtype = static_cast<ort_moe::DType>(call->dtype);
  args.finalize.tokens = call->tokens;
  args.finalize.hidden = call->hidden;
  args.finalize.k = call->k;
  args.finalize.experts = call->experts;
  args.expert_first_token_offset = call->expert_first_token_offset;
  args.padded = call->padded;
  args.capacity = call->capacity;
  args.local_begin = call->local_begin;
  args.local_count = call->local_count;
  return ort_moe::CallError("GatherFinalize", ort_moe::LaunchGatherFinalize(args, static_cast<cudaStream_t>(stream)));
}
