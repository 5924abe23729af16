// RouterScores on CUDA: which kernel takes a configuration. Softmax and sigmoid without a soft cap go to a warp a row
// (router_probs_rows.cu), the rest to a block a row (router_probs_block.cu); gradients to router_grad.cu.
#include "kernels/training/router_scores.h"

#include "kernels/common/float_math.h"
#include "kernels/training/router_grad.h"
#include "kernels/training/router_grad_params.cuh"
#include "kernels/training/router_probs_block.h"
#include "kernels/training/router_probs_params.cuh"

namespace ort_moe {

cudaError_t LaunchRouterScores(const RouterScoresConfig& config, const RouterScoresArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  if (args.rows < 0 || args.experts > kMaxTrainingExperts) return cudaErrorInvalidValue;
  const bool softmax = config.score == Score::kSoftmax;
  if (config.softcap == 0.0f && (softmax || config.score == Score::kSigmoid)) {
    ProbsParams p{};
    p.logits = args.logits;
    p.probs = args.scores;
    p.map = args.map;
    p.rows = args.rows;
    p.experts = static_cast<int32_t>(args.experts);
    p.k = static_cast<int32_t>(config.k);
    p.map_format = config.map_format;
    p.normalize = config.normalize;
    p.normalize_eps = config.normalize_eps;
    const ProbsKind kind = softmax ? ProbsKind::kSoftmaxOfExperts : ProbsKind::kSigmoid;
    const cudaError_t error = LaunchProbsRows(kind, true, args.dtype, p, stream);
    if (error != cudaErrorInvalidValue) return error;  // else a row is too long for this device's shared memory
  }
  RouterConfig router;
  router.k = config.k;
  router.score = config.score;
  router.softcap = config.softcap;
  router.normalize_eps = config.normalize_eps;
  RouterArgs router_args{};
  router_args.logits = args.logits;
  router_args.dtype = args.dtype;
  router_args.rows = args.rows;
  router_args.experts = args.experts;
  ProbsBlockOutputs outputs{};
  outputs.probs = args.scores;
  outputs.map = args.map;
  outputs.map_format = config.map_format;
  outputs.all_scores = true;
  outputs.normalize_scores = config.normalize;
  return LaunchProbsBlocks(router, router_args, outputs, stream);
}

cudaError_t LaunchRouterScoresGrad(const RouterScoresConfig& config, const RouterScoresGradArgs& args,
                                   cudaStream_t stream) {
  if (args.rows < 0 || args.experts > kMaxTrainingExperts) return cudaErrorInvalidValue;
  RouterGradParams p{};
  p.logits = args.logits;
  p.grad = args.grad_scores;
  p.grad_logits = args.grad_logits;
  p.rows = args.rows;
  p.experts = static_cast<int32_t>(args.experts);
  p.score = config.score;
  p.over_experts = true;
  p.normalize = config.normalize;
  p.normalize_eps = config.normalize_eps;
  p.normalize_min = -Infinity();
  p.scale = 1.0f;
  p.softcap = config.softcap;
  return LaunchRouterGrad(args.dtype, p, stream);
}

}  // namespace ort_moe
