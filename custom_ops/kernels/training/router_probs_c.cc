// The launchers of RouterProbs and its gradient in C, for callers without ONNX Runtime.
#include "kernels/training/router_probs.h"

#include <cstdint>
#include <string>

#include "kernels/common/c_call.h"
#include "kernels/router/fused_router_call.h"
#include "kernels/training/row_threads.h"

// The arguments and configuration of both directions, flat; the enumerations count as in the headers. Mirrored by
// ort_moe/kernels/training.py.
struct OrtMoeRouterProbsCall {
  const void* logits;
  const float* selection_bias;  // forward; or null
  const float* expert_scale;    // or null
  void* probs;                  // forward
  uint8_t* map;
  int32_t* indices;        // forward; or null
  const void* grad_probs;  // backward
  void* grad_logits;       // backward
  int64_t rows;
  int64_t experts;
  int64_t k;
  int64_t num_groups;
  int64_t topk_groups;
  int64_t group_score_top;
  int32_t dtype;
  int32_t map_format;
  int32_t score;
  int32_t score_after_topk;
  int32_t bias_on;
  int32_t normalize;
  float group_fill;
  float normalize_eps;
  float normalize_min;
  float scale;
  float softcap;
};

namespace ort_moe {
namespace {

constexpr const char* kOp = "RouterProbs";

RouterProbsConfig ConfigOf(const OrtMoeRouterProbsCall& call) {
  RouterProbsConfig config;
  config.router = CommonConfigOf(call);
  config.map_format = static_cast<MapFormat>(call.map_format);
  return config;
}

RouterProbsArgs ArgsOf(const OrtMoeRouterProbsCall& call) {
  RouterProbsArgs args{};
  args.logits = call.logits;
  args.selection_bias = call.selection_bias;
  args.expert_scale = call.expert_scale;
  args.probs = call.probs;
  args.map = call.map;
  args.indices = call.indices;
  args.dtype = static_cast<DType>(call.dtype);
  args.rows = call.rows;
  args.experts = call.experts;
  return args;
}

RouterProbsGradArgs GradArgsOf(const OrtMoeRouterProbsCall& call) {
  RouterProbsGradArgs args{};
  args.logits = call.logits;
  args.map = call.map;
  args.grad_probs = call.grad_probs;
  args.expert_scale = call.expert_scale;
  args.grad_logits = call.grad_logits;
  args.dtype = static_cast<DType>(call.dtype);
  args.rows = call.rows;
  args.experts = call.experts;
  return args;
}

std::string Check(const OrtMoeRouterProbsCall& call) {
  return CheckRouterProbsConfig(ConfigOf(call), call.experts, call.selection_bias != nullptr);
}

}  // namespace
}  // namespace ort_moe

ORT_MOE_C_EXPORT const char* ort_moe_run_router_probs(const OrtMoeRouterProbsCall* call, int64_t threads) {
  using namespace ort_moe;
  if (const std::string refusal = Check(*call); !refusal.empty()) return CallError(kOp, refusal);
  return CallOnHost(kOp, [&] {
    OnThreads(call->rows, kElementsPerThread / call->experts, threads,
              [&](int64_t begin, int64_t end) { RouterProbsCpu(ConfigOf(*call), ArgsOf(*call), begin, end); });
  });
}

ORT_MOE_C_EXPORT const char* ort_moe_run_router_probs_grad(const OrtMoeRouterProbsCall* call, int64_t threads) {
  using namespace ort_moe;
  if (const std::string refusal = Check(*call); !refusal.empty()) return CallError(kOp, refusal);
  return CallOnHost(kOp, [&] {
    OnThreads(call->rows, kElementsPerThread / call->experts, threads,
              [&](int64_t begin, int64_t end) { RouterProbsGradCpu(ConfigOf(*call), GradArgsOf(*call), begin, end); });
  });
}

#if defined(ORT_MOE_WITH_CUDA)
ORT_MOE_C_EXPORT const char* ort_moe_launch_router_probs(const OrtMoeRouterProbsCall* call, void* stream) {
  using namespace ort_moe;
  if (const std::string refusal = Check(*call); !refusal.empty()) return CallError(kOp, refusal);
  return CallError(kOp, LaunchRouterProbs(ConfigOf(*call), ArgsOf(*call), static_cast<cudaStream_t>(stream)));
}

ORT_MOE_C_EXPORT const char* ort_moe_launch_router_probs_grad(const OrtMoeRouterProbsCall* call, void* stream) {
  using namespace ort_moe;
  if (const std::string refusal = Check(*call); !refusal.empty()) return CallError(kOp, refusal);
  return CallError(kOp, LaunchRouterProbsGrad(ConfigOf(*call), GradArgsOf(*call), static_cast<cudaStream_t>(stream)));
}
#endif
