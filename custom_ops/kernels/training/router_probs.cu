// RouterProbs on CUDA: which kernel takes a configuration. What most routers are goes to a warp a row
// (router_probs_rows.cu), the rest to a block a row (router_probs_block.cu); gradients to router_grad.cu.
#include "kernels/training/router_probs.h"

#include <optional>

#include "kernels/training/router_grad.h"
#include "kernels/training/router_grad_params.cuh"
#include "kernels/training/router_probs_block.h"
#include "kernels/training/router_probs_params.cuh"

namespace ort_moe {
namespace {

// What a warp a row computes, if it does.
std::optional<ProbsKind> KindOf(const RouterProbsConfig& config, bool has_selection_bias) {
  const RouterConfig& router = config.router;
  if (router.softcap != 0.0f || router.has_groups()) return {};
  if (router.score == Score::kSigmoid && !router.score_after_topk) return ProbsKind::kSigmoid;
  if (router.score != Score::kSoftmax || has_selection_bias) return {};
  return config.IsFullSoftmax() ? ProbsKind::kSoftmaxOfExperts : ProbsKind::kSoftmaxOfChosen;
}

}  // namespace

cudaError_t LaunchRouterProbs(const RouterProbsConfig& config, const RouterProbsArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  if (args.rows < 0 || args.experts > kMaxTrainingExperts) return cudaErrorInvalidValue;
  if (const auto kind = KindOf(config, args.selection_bias != nullptr)) {
    ProbsParams p{};
    p.logits = args.logits;
    p.selection_bias = args.selection_bias;
    p.expert_scale = args.expert_scale;
    p.probs = args.probs;
    p.map = args.map;
    p.indices = args.indices;
    p.rows = args.rows;
    p.experts = static_cast<int32_t>(args.experts);
    p.k = static_cast<int32_t>(config.router.k);
    p.map_format = config.map_format;
    p.normalize = config.router.normalize && !config.IsChosenSoftmax();
    p.normalize_eps = config.router.normalize_eps;
    p.normalize_min = config.router.normalize_min;
    p.scale = config.router.scale;
    const cudaError_t error = LaunchProbsRows(*kind, false, args.dtype, p, stream);
    if (error != cudaErrorInvalidValue) return error;  // else a row is too long for this device's shared memory
  }
  RouterArgs router{};
  router.logits = args.logits;
  router.selection_bias = args.selection_bias;
  router.expert_scale = args.expert_scale;
  router.dtype = args.dtype;
  router.rows = args.rows;
  router.experts = args.experts;
  ProbsBlockOutputs outputs{};
  outputs.probs = args.probs;
  outputs.map = args.map;
  outputs.indices = args.indices;
  outputs.map_format = config.map_format;
  return LaunchProbsBlocks(config.router, router, outputs, stream);
}

cudaError_t LaunchRouterProbsGrad(const RouterProbsConfig& config, const RouterProbsGradArgs& args,
                                  cudaStream_t stream) {
  if (args.rows < 0 || args.experts > kMaxTrainingExperts) return cudaErrorInvalidValue;
  RouterGradParams p{};
  p.logits = args.logits;
  p.grad = args.grad_probs;
  p.map = args.map;
  p.expert_scale = args.expert_scale;
  p.grad_logits = args.grad_logits;
  p.rows = args.rows;
  p.experts = static_cast<int32_t>(args.experts);
  p.map_format = config.map_format;
  p.score = config.router.score;
  p.over_experts = config.IsFullSoftmax();
  p.normalize = config.router.normalize && !config.IsChosenSoftmax();
  p.normalize_eps = config.router.normalize_eps;
  p.normalize_min = config.router.normalize_min;
  p.scale = config.router.scale;
  p.softcap = config.router.softcap;
  return LaunchRouterGrad(args.dtype, p, stream);
}

}  // namespace ort_moe
