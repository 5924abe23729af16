// The CUDA launcher of SharedGateRouter in C, for callers without ONNX Runtime.
#include "kernels/router/shared_gate_router.h"

#include <cstdint>
#include <string>

#include "kernels/common/c_call.h"
#include "kernels/router/fused_router_call.h"

// A router's call, whose weights and indices have k + count columns and whose maps are of all of them, and SharedGates,
// flat. Mirrored by ort_moe/kernels/router.py.
struct OrtMoeSharedGateRouterCall {
  OrtMoeFusedRouterCall router;
  const void* hidden;
  const void* gate_weight;
  int64_t size;
  int32_t count;
  int32_t base;
  float scale;
};

namespace ort_moe {
namespace {

constexpr const char* kSharedGateRouter = "SharedGateRouter";

SharedGates GatesOf(const OrtMoeSharedGateRouterCall& call) {
  return {call.hidden, call.gate_weight, call.size, call.count, call.base, call.scale};
}

RouterArgs RouterOf(const OrtMoeSharedGateRouterCall& call) {
  RouterArgs router = ArgsOf(call.router);
  router.columns = call.router.k + call.count;
  return router;
}

}  // namespace
}  // namespace ort_moe

ORT_MOE_C_EXPORT int64_t ort_moe_shared_gate_router_scratch_bytes(const OrtMoeSharedGateRouterCall* call) {
  using namespace ort_moe;
  return static_cast<int64_t>(SharedGateRouterScratchBytes(ConfigOf(call->router), RouterOf(*call), GatesOf(*call)));
}

ORT_MOE_C_EXPORT const char* ort_moe_launch_shared_gate_router(const OrtMoeSharedGateRouterCall* call, void* stream) {
  using namespace ort_moe;
  const RouterConfig config = ConfigOf(call->router);
  const bool has_bias = call->router.selection_bias != nullptr;
  const std::string refusal = CheckRouterConfig(config, call->router.experts, has_bias);
  if (!refusal.empty()) return CallError(kSharedGateRouter, refusal);
  const cudaError_t status =
      LaunchSharedGateRouter(config, RouterOf(*call), GatesOf(*call), static_cast<cudaStream_t>(stream));
  if (status == cudaErrorInvalidValue) {
    return CallError(kSharedGateRouter, std::to_string(call->router.experts) +
                                            " experts need more shared memory than a block of this device has");
  }
  return CallError(kSharedGateRouter, status);
}
