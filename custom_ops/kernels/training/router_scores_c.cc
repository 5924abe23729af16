// The launchers of RouterScores and its gradient in C, for callers without ONNX Runtime.
#include "kernels/training/router_scores.h"

#include <cstdint>
#include <string>

#include "kernels/common/c_call.h"
#include "kernels/training/row_threads.h"

// The arguments and configuration of both directions, flat; the enumerations count as in the headers. Mirrored by
// ort_moe/kernels/training.py.
struct OrtMoeRouterScoresCall {
  const void* logits;
  void* scores;             // forward
  uint8_t* map;             // forward
  const void* grad_scores;  // backward
  void* grad_logits;        // backward
  int64_t rows;
  int64_t experts;
  int64_t k;
  int32_t dtype;
  int32_t map_format;
  int32_t score;
  int32_t normalize;
  float normalize_eps;
  float softcap;
};

namespace ort_moe {
namespace {

constexpr const char* kOp = "RouterScores";

RouterScoresConfig ConfigOf(const OrtMoeRouterScoresCall& call) {
  RouterScoresConfig config;
  config.k = call.k;
  config.score = static_cast<Score>(call.score);
  config.normalize = call.normalize != 0;
  config.normalize_eps = call.normalize_eps;
  config.softcap = call.softcap;
  config.map_format = static_cast<MapFormat>(call.map_format);
  return config;
}

RouterScoresArgs ArgsOf(const OrtMoeRouterScoresCall& call) {
  RouterScoresArgs args{};
  args.logits = call.logits;
  args.scores = call.scores;
  args.map = call.map;
  args.dtype = static_cast<DType>(call.dtype);
  args.rows = call.rows;
  args.experts = call.experts;
  return args;
}

RouterScoresGradArgs GradArgsOf(const OrtMoeRouterScoresCall& call) {
  RouterScoresGradArgs args{};
  args.logits = call.logits;
  args.grad_scores = call.grad_scores;
  args.grad_logits = call.grad_logits;
  args.dtype = static_cast<DType>(call.dtype);
  args.rows = call.rows;
  args.experts = call.experts;
  return args;
}

std::string Check(const OrtMoeRouterScoresCall& call) { return CheckRouterScoresConfig(ConfigOf(call), call.experts); }

}  // namespace
}  // namespace ort_moe

ORT_MOE_C_EXPORT const char* ort_moe_run_router_scores(const OrtMoeRouterScoresCall* call, int64_t threads) {
  using namespace ort_moe;
  if (const std::string refusal = Check(*call); !refusal.empty()) return CallError(kOp, refusal);
  return CallOnHost(kOp, [&] {
    OnThreads(call->rows, kElementsPerThread / call->experts, threads,
              [&](int64_t begin, int64_t end) { RouterScoresCpu(ConfigOf(*call), ArgsOf(*call), begin, end); });
  });
}

ORT_MOE_C_EXPORT const char* ort_moe_run_router_scores_grad(const OrtMoeRouterScoresCall* call, int64_t threads) {
  using namespace ort_moe;
  if (const std::string refusal = Check(*call); !refusal.empty()) return CallError(kOp, refusal);
  return CallOnHost(kOp, [&] {
    OnThreads(call->rows, kElementsPerThread / call->experts, threads,
              [&](int64_t begin, int64_t end) { RouterScoresGradCpu(ConfigOf(*call), GradArgsOf(*call), begin, end); });
  });
}

#if defined(ORT_MOE_WITH_CUDA)
ORT_MOE_C_EXPORT const char* ort_moe_launch_router_scores(const OrtMoeRouterScoresCall* call, void* stream) {
  using namespace ort_moe;
  if (const std::string refusal = Check(*call); !refusal.empty()) return CallError(kOp, refusal);
  return CallError(kOp, LaunchRouterScores(ConfigOf(*call), ArgsOf(*call), static_cast<cudaStream_t>(stream)));
}

ORT_MOE_C_EXPORT const char* ort_moe_launch_router_scores_grad(const OrtMoeRouterScoresCall* call, void* stream) {
  using namespace ort_moe;
  if (const std::string refusal = Check(*call); !refusal.empty()) return CallError(kOp, refusal);
  return CallError(kOp, LaunchRouterScoresGrad(ConfigOf(*call), GradArgsOf(*call), static_cast<cudaStream_t>(stream)));
}
#endif
