// The CUDA launcher of FusedRouter in C, for callers without ONNX Runtime.
#include <cstdint>
#include <string>

#include "kernels/common/c_call.h"
#include "kernels/router/fused_router_call.h"

ORT_MOE_C_EXPORT int64_t ort_moe_router_scratch_bytes(const OrtMoeFusedRouterCall* call) {
  return static_cast<int64_t>(ort_moe::RouterScratchBytes(ort_moe::ConfigOf(*call), ort_moe::ArgsOf(*call)));
}

ORT_MOE_C_EXPORT const char* ort_moe_launch_fused_router(const OrtMoeFusedRouterCall* call, void* stream) {
  using namespace ort_moe;
  constexpr const char* kOp = "FusedRouter";
  const RouterConfig config = ConfigOf(*call);
  const std::string refusal = CheckRouterConfig(config, call->experts, call->selection_bias != nullptr);
  if (!refusal.empty()) return CallError(kOp, refusal);
  const cudaError_t status = LaunchFusedRouter(config, ArgsOf(*call), static_cast<cudaStream_t>(stream));
  if (status == cudaErrorInvalidValue) {
    return CallError(
        kOp, std::to_string(call->experts) + " experts need more shared memory than a block of this device has");
  }
  return CallError(kOp, status);
}
