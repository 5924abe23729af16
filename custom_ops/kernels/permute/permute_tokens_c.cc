// The CUDA launcher of PermuteTokens in C, for callers without ONNX Runtime.
#include <cstdint>

#include "kernels/common/c_call.h"
#include "kernels/permute/permute_tokens.h"

// PermuteArgs and what the launcher takes beside them. Mirrored by ort_moe/kernels/permute.py.
struct OrtMoePermuteTokensCall {
  const void* x;
  const int32_t* indices;
  void* permuted_x;
  ort_moe::RoutingMaps maps;
  void* scratch;  // ort_moe_permute_tokens_scratch_bytes
  int64_t tokens;
  int64_t hidden;
  int64_t k;
  int64_t experts;
  int32_t dtype;
};

namespace {

ort_moe::PermuteArgs ArgsOf(const OrtMoePermuteTokensCall& call) {
  ort_moe::PermuteArgs args{};
  args.x = call.x;
  args.indices = call.indices;
  args.permuted_x = call.permuted_x;
  args.maps = call.maps;
  args.dtype = static_cast<ort_moe::DType>(call.dtype);
  args.tokens = call.tokens;
  args.hidden = call.hidden;
  args.k = call.k;
  args.experts = call.experts;
  return args;
}

}  // namespace

ORT_MOE_C_EXPORT int64_t ort_moe_permute_tokens_scratch_bytes(const OrtMoePermuteTokensCall* call) {
  return static_cast<int64_t>(ort_moe::PermuteTokensScratchBytes(ArgsOf(*call)));
}

ORT_MOE_C_EXPORT const char* ort_moe_launch_permute_tokens(const OrtMoePermuteTokensCall* call, void* stream) {
  return ort_moe::CallError(
      "PermuteTokens", ort_moe::LaunchPermuteTokens(ArgsOf(*call), call->scratch, static_cast<cudaStream_t>(stream)));
}
