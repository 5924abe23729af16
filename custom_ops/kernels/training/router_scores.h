// RouterScores: what the launchers take. The semantics are docs/ops.md's; ort_moe/reference/router_scores.py is the
// executable form, and every kernel returns its bits.
//
// Forward, in float32, per row over all experts: x = the logits, soft-capped as FusedRouter does; v = FusedRouter's
// score (softmax, sigmoid, sqrtsoftplus); with normalize Div(v, Add(Sum v, normalize_eps)); one rounding to dtype. The
// map marks the k best as RouterProbs does for the same score without bias and groups: softmax ranks by x, the others
// by v before the division.
//
// Backward: g = grad; with normalize D = Add(Sum v, normalize_eps), r = Div(1, D), q = Div(Sum Mul(g, v), D),
// g = Mul(Add(g, -q), r). Then softmax Mul(v, Add(g, -q)), q = Sum Mul(g, v); the others and the soft cap as in
// router_probs.h. Sums have FusedRouter's order. There is no rule for NaN in either: it arrives through the formulas.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/common/dtype.h"
#include "kernels/router/fused_router.h"
#include "kernels/training/training_map.h"

namespace ort_moe {

// The op's attributes, one field each.
struct RouterScoresConfig {
  int64_t k = 1;
  Score score = Score::kSoftmax;  // kSoftmax, kSigmoid or kSqrtSoftplus
  bool normalize = false;         // also of a softmax, whose sum is 1 but for rounding
  float normalize_eps = 0.0f;
  float softcap = 0.0f;  // 0: off
  MapFormat map_format = MapFormat::kByte;
};

// Pointers are aligned to their elements, no more; rows follow each other without a gap. Outputs overlap nothing.
struct RouterScoresArgs {
  const void* logits;  // (rows, experts) of dtype
  void* scores;        // (rows, experts) of dtype
  uint8_t* map;        // (rows, MapBytes)
  DType dtype;
  int64_t rows;     // rows * experts may pass 2^31
  int64_t experts;  // up to kMaxTrainingExperts
};

struct RouterScoresGradArgs {
  const void* logits;       // (rows, experts) of dtype
  const void* grad_scores;  // (rows, experts) of dtype
  void* grad_logits;        // (rows, experts) of dtype
  DType dtype;
  int64_t rows;
  int64_t experts;
};

// Empty where the configuration is valid for this many experts (-1: not known yet); else one clause that names the
// attribute, what was expected and what came.
std::string CheckRouterScoresConfig(const RouterScoresConfig& config, int64_t experts);

// Rows [begin, end) on the calling thread. The configuration has been checked.
void RouterScoresCpu(const RouterScoresConfig& config, const RouterScoresArgs& args, int64_t begin, int64_t end);
void RouterScoresGradCpu(const RouterScoresConfig& config, const RouterScoresGradArgs& args, int64_t begin,
                         int64_t end);

#if defined(ORT_MOE_WITH_CUDA)
// On `stream`; rows = 0 is a no-op. The configuration has been checked. No scratch.
cudaError_t LaunchRouterScores(const RouterScoresConfig& config, const RouterScoresArgs& args, cudaStream_t stream);
cudaError_t LaunchRouterScoresGrad(const RouterScoresConfig& config, const RouterScoresGradArgs& args,
                                   cudaStream_t stream);
#endif

}  // namespace ort_moe
