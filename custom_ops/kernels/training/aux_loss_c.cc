// The launchers of AuxLoss and its gradient in C, for callers without ONNX Runtime.
#include "kernels/training/aux_loss.h"

#include <cstdint>
#include <string>

#include "kernels/common/c_call.h"
#include "kernels/training/row_threads.h"

// The arguments and configuration of both directions, flat; the enumerations count as in the headers. Mirrored by
// ort_moe/kernels/training.py.
struct OrtMoeAuxLossCall {
  const void* probs;  // forward
  const void* tokens_per_expert;
  const void* total;       // or null
  float* loss;             // forward
  void* scratch;           // forward on a device: ort_moe_aux_loss_scratch_bytes
  const float* grad_loss;  // backward
  void* grad_probs;        // backward
  int64_t rows;
  int64_t experts;
  int64_t k;
  int64_t total_tokens;
  int32_t dtype;
  int32_t count_type;
  int32_t total_type;
  float coeff;
};

namespace ort_moe {
namespace {

constexpr const char* kOp = "AuxLoss";

AuxLossConfig ConfigOf(const OrtMoeAuxLossCall& call) {
  AuxLossConfig config;
  config.k = call.k;
  config.coeff = call.coeff;
  config.total = call.total_tokens;
  return config;
}

AuxLossArgs ArgsOf(const OrtMoeAuxLossCall& call) {
  AuxLossArgs args{};
  args.probs = call.probs;
  args.tokens_per_expert = call.tokens_per_expert;
  args.total = call.total;
  args.loss = call.loss;
  args.scratch = call.scratch;
  args.dtype = static_cast<DType>(call.dtype);
  args.count_type = static_cast<CountType>(call.count_type);
  args.total_type = static_cast<CountType>(call.total_type);
  args.rows = call.rows;
  args.experts = call.experts;
  return args;
}

AuxLossGradArgs GradArgsOf(const OrtMoeAuxLossCall& call) {
  AuxLossGradArgs args{};
  args.tokens_per_expert = call.tokens_per_expert;
  args.total = call.total;
  args.grad_loss = call.grad_loss;
  args.grad_probs = call.grad_probs;
  args.dtype = static_cast<DType>(call.dtype);
  args.count_type = static_cast<CountType>(call.count_type);
  args.total_type = static_cast<CountType>(call.total_type);
  args.rows = call.rows;
  args.experts = call.experts;
  return args;
}

std::string Check(const OrtMoeAuxLossCall& call) { return CheckAuxLossConfig(ConfigOf(call), call.experts); }

}  // namespace
}  // namespace ort_moe

ORT_MOE_C_EXPORT const char* ort_moe_run_aux_loss(const OrtMoeAuxLossCall* call, int64_t threads) {
  using namespace ort_moe;
  if (const std::string refusal = Check(*call); !refusal.empty()) return CallError(kOp, refusal);
  return CallOnHost(kOp, [&] {
    float parts[kAuxLossParts];
    AuxLossArgs args = ArgsOf(*call);
    args.scratch = parts;
    const int64_t elements_of_part = args.rows * args.experts / kAuxLossParts + 1;
    OnThreads(kAuxLossParts, kElementsPerThread / elements_of_part, threads,
              [&](int64_t begin, int64_t end) { AuxLossCpu(ConfigOf(*call), args, begin, end); });
    FinishAuxLossCpu(ConfigOf(*call), args);
  });
}

ORT_MOE_C_EXPORT const char* ort_moe_run_aux_loss_grad(const OrtMoeAuxLossCall* call, int64_t threads) {
  using namespace ort_moe;
  if (const std::string refusal = Check(*call); !refusal.empty()) return CallError(kOp, refusal);
  return CallOnHost(kOp, [&] {
    OnThreads(call->rows, kElementsPerThread / call->experts, threads,
              [&](int64_t begin, int64_t end) { AuxLossGradCpu(ConfigOf(*call), GradArgsOf(*call), begin, end); });
  });
}

#if defined(ORT_MOE_WITH_CUDA)
ORT_MOE_C_EXPORT int64_t ort_moe_aux_loss_scratch_bytes(const OrtMoeAuxLossCall* call) {
  return static_cast<int64_t>(ort_moe::AuxLossScratchBytes(ort_moe::ArgsOf(*call)));
}

ORT_MOE_C_EXPORT const char* ort_moe_launch_aux_loss(const OrtMoeAuxLossCall* call, void* stream) {
  using namespace ort_moe;
  if (const std::string refusal = Check(*call); !refusal.empty()) return CallError(kOp, refusal);
  return CallError(kOp, LaunchAuxLoss(ConfigOf(*call), ArgsOf(*call), static_cast<cudaStream_t>(stream)));
}

ORT_MOE_C_EXPORT const char* ort_moe_launch_aux_loss_grad(const OrtMoeAuxLossCall* call, void* stream) {
  using namespace ort_moe;
  if (const std::string refusal = Check(*call); !refusal.empty()) return CallError(kOp, refusal);
  return CallError(kOp, LaunchAuxLossGrad(ConfigOf(*call), GradArgsOf(*call), static_cast<cudaStream_t>(stream)));
}
#endif
