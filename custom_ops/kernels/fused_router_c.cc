// The CUDA launcher of FusedRouter in C, for callers without ONNX Runtime: ort_moe/kernels.py reaches it by ctypes, and
// with it tests, benchmarks and PyTorch. All addresses are device memory; the call launches on `stream` and returns at
// once, also while the stream is being captured.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "kernels/fused_router.h"

extern "C" {

// RouterArgs and RouterConfig, flat; the enumerations count as in fused_router.h. Mirrored by ort_moe/kernels.py.
struct OrtMoeFusedRouterCall {
  const void* logits;
  const float* selection_bias;  // or null
  const float* expert_scale;    // or null
  float* weights;
  int32_t* indices;
  int64_t rows;
  int64_t experts;
  int64_t k;
  int64_t num_groups;
  int64_t topk_groups;
  int64_t group_score_top;
  int32_t dtype;
  int32_t score;
  int32_t score_after_topk;
  int32_t bias_on;
  int32_t weights_from;
  int32_t normalize;
  float mixer_threshold;
  float group_fill;
  float normalize_eps;
  float normalize_min;
  float scale;
  float softcap;
};

// Null, or a sentence that says what was wrong; it is valid until the thread's next call.
__attribute__((visibility("default"))) const char* ort_moe_launch_fused_router(const OrtMoeFusedRouterCall* call,
                                                                               void* stream) {
  static thread_local std::string error;
  ort_moe::RouterConfig config;
  config.k = call->k;
  config.score = static_cast<ort_moe::Score>(call->score);
  config.mixer_threshold = call->mixer_threshold;
  config.score_after_topk = call->score_after_topk != 0;
  config.bias_on = static_cast<ort_moe::BiasOn>(call->bias_on);
  config.num_groups = call->num_groups;
  config.topk_groups = call->topk_groups;
  config.group_score_top = call->group_score_top;
  config.group_fill = call->group_fill;
  config.weights_from = static_cast<ort_moe::WeightsFrom>(call->weights_from);
  config.normalize = call->normalize != 0;
  config.normalize_eps = call->normalize_eps;
  config.normalize_min = call->normalize_min;
  config.scale = call->scale;
  config.softcap = call->softcap;
  error = ort_moe::CheckRouterConfig(config, call->experts, call->selection_bias != nullptr);
  if (!error.empty()) {
    error.insert(0, "FusedRouter: ");
    return error.c_str();
  }
  ort_moe::RouterArgs args{};
  args.logits = call->logits;
  args.selection_bias = call->selection_bias;
  args.expert_scale = call->expert_scale;
  args.weights = call->weights;
  args.indices = call->indices;
  args.dtype = static_cast<ort_moe::DType>(call->dtype);
  args.rows = call->rows;
  args.experts = call->experts;
  const cudaError_t status = ort_moe::LaunchFusedRouter(config, args, static_cast<cudaStream_t>(stream));
  if (status == cudaSuccess) return nullptr;
  if (status == cudaErrorInvalidValue) {
    error = "FusedRouter: " + std::to_string(call->experts) +
            " experts need more shared memory than a block of this device has";
    return error.c_str();
  }
  error = std::string("FusedRouter: the CUDA launch failed: ") + cudaGetErrorString(status);
  return error.c_str();
}

}  // extern "C"
