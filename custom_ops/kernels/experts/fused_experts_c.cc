// The CUDA launcher of FusedExperts in C, for callers without ONNX Runtime.
#include <cstdint>

#include "kernels/common/c_call.h"
#include "kernels/experts/fused_experts.h"

// ExpertsArgs and ExpertsConfig, flat; the enumerations count as in fused_experts.h. Mirrored by
// ort_moe/kernels/experts.py.
struct OrtMoeFusedExpertsCall {
  const void* x;
  const float* weights;
  const int32_t* indices;
  ort_moe::RoutingMaps maps;  // or all null
  ort_moe::ExpertLayer fc1;
  ort_moe::ExpertLayer fc2;
  const void* residual;  // or null
  void* y;
  void* scratch;  // ort_moe_fused_experts_scratch_bytes
  int64_t tokens;
  int64_t hidden;
  int64_t inner;
  int64_t experts;
  int64_t k;
  int64_t block_size;
  int32_t dtype;
  int32_t weight_format;
  int32_t activation;
  int32_t gated;
  int32_t gate_layout;
  int32_t weight_on;
  float alpha;
  float beta;
  float limit;
};

namespace {

ort_moe::ExpertsConfig ConfigOf(const OrtMoeFusedExpertsCall& call) {
  ort_moe::ExpertsConfig config;
  config.weight_format = static_cast<ort_moe::WeightFormat>(call.weight_format);
  config.block_size = call.block_size;
  config.activation = static_cast<ort_moe::Activation>(call.activation);
  config.gated = call.gated != 0;
  config.gate_layout = static_cast<ort_moe::GateLayout>(call.gate_layout);
  config.alpha = call.alpha;
  config.beta = call.beta;
  config.limit = call.limit;
  config.weight_on = static_cast<ort_moe::WeightOn>(call.weight_on);
  return config;
}

ort_moe::ExpertsArgs ArgsOf(const OrtMoeFusedExpertsCall& call) {
  ort_moe::ExpertsArgs args{};
  args.x = call.x;
  args.weights = call.weights;
  args.indices = call.indices;
  args.maps = call.maps;
  args.fc1 = call.fc1;
  args.fc2 = call.fc2;
  args.residual = call.residual;
  args.y = call.y;
  args.dtype = static_cast<ort_moe::DType>(call.dtype);
  args.tokens = call.tokens;
  args.hidden = call.hidden;
  args.inner = call.inner;
  args.experts = call.experts;
  args.k = call.k;
  args.scratch = call.scratch;
  return args;
}

}  // namespace

ORT_MOE_C_EXPORT int64_t ort_moe_fused_experts_scratch_bytes(const OrtMoeFusedExpertsCall* call) {
  return static_cast<int64_t>(ort_moe::ExpertsScratchBytes(ConfigOf(*call), ArgsOf(*call)));
}

ORT_MOE_C_EXPORT const char* ort_moe_launch_fused_experts(const OrtMoeFusedExpertsCall* call, void* stream) {
  const ort_moe::ExpertsConfig config = ConfigOf(*call);
  const std::string refusal = ort_moe::CheckExpertsConfig(config);
  if (!refusal.empty()) return ort_moe::CallError("FusedExperts", refusal);
  return ort_moe::CallError("FusedExperts",
                            ort_moe::LaunchFusedExperts(config, ArgsOf(*call), static_cast<cudaStream_t>(stream)));
}
