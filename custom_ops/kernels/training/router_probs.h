// RouterProbs: what the launchers take. The semantics are docs/ops.md's; ort_moe/reference/router_probs.py is the
// executable form, and every kernel returns its bits.
//
// Forward: FusedRouter's choice; its weights at the places of the chosen, each rounded once, and zero elsewhere.
//
// Backward, in float32, per row, R = the experts that the map marks (any number of them, also none):
//   l = logits; x = l, or with a softcap Mul(softcap, t), t = Tanh(Div(l, softcap)).
//   v = FusedRouter's score of the experts in R, recomputed by its steps: softmax over all experts, or over R where
//   score_after_topk is set or IsChosenSoftmax; else elementwise.
//   g = grad; with expert_scale g = Mul(g, expert_scale[e]); then g = Mul(g, scale).
//   normalize, unless IsChosenSoftmax: D = Add(Sum_R v, normalize_eps); r = Div(1, D); q = Div(Sum_R Mul(g, v), D);
//     g = Mul(Add(g, -q), r). Where D < normalize_min: g = Mul(g, Div(1, normalize_min)), no q.
//   d = softmax over R:  Mul(v, Add(g, -q)) on R, q = Sum_R Mul(g, v); zero elsewhere.
//       softmax over E:  the same on R, Mul(v, -q) elsewhere.
//       sigmoid:         Mul(g, Mul(v, Add(1, -v))) on R; zero elsewhere.
//       sqrtsoftplus:    Mul(g, x < -64 ? Mul(v, 0.5) : Div(Sigmoid(x), Add(v, v))) on R; zero elsewhere.
//       none:            g on R; zero elsewhere.
//   with a softcap d = Mul(d, Add(1, -Mul(t, t))). One rounding to dtype.
// Sum_R: FusedRouter's order, the others count as +0. A softmax subtracts its maximum, NaN ignored. The gradient
// outside R is never looked at, and unless the softmax is over all experts neither are the logits outside R: there is
// no rule for NaN, it arrives through the formulas. A zero elsewhere is +0, or -0: they compare equal.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/common/dtype.h"
#include "kernels/router/fused_router.h"
#include "kernels/training/training_map.h"

namespace ort_moe {

// FusedRouter's attributes but weights_from (scores) and mixer_threshold, and the map's format.
struct RouterProbsConfig {
  RouterConfig router;
  MapFormat map_format = MapFormat::kByte;

  // softmax and normalisation in one: the softmax over the chosen.
  bool IsChosenSoftmax() const {
    return router.score == Score::kSoftmax && !router.score_after_topk && router.normalize &&
           router.normalize_eps == 0.0f && router.normalize_min == 0.0f;
  }
  // The softmax over all experts.
  bool IsFullSoftmax() const {
    return router.score == Score::kSoftmax && !router.score_after_topk && !IsChosenSoftmax();
  }
};

// Pointers are aligned to their elements, no more; rows follow each other without a gap. Outputs overlap nothing.
struct RouterProbsArgs {
  const void* logits;           // (rows, experts) of dtype
  const float* selection_bias;  // (experts) or null
  const float* expert_scale;    // (experts) or null
  void* probs;                  // (rows, experts) of dtype
  uint8_t* map;                 // (rows, MapBytes)
  int32_t* indices;             // (rows, k) in rank order, or null: not wanted
  DType dtype;
  int64_t rows;     // rows * experts may pass 2^31
  int64_t experts;  // up to kMaxTrainingExperts
};

struct RouterProbsGradArgs {
  const void* logits;         // (rows, experts) of dtype
  const uint8_t* map;         // (rows, MapBytes)
  const void* grad_probs;     // (rows, experts) of dtype
  const float* expert_scale;  // (experts) or null
  void* grad_logits;          // (rows, experts) of dtype
  DType dtype;
  int64_t rows;
  int64_t experts;
};

// Empty where the configuration is valid for this many experts (-1: not known yet); else one clause that names the
// attribute, what was expected and what came.
std::string CheckRouterProbsConfig(const RouterProbsConfig& config, int64_t experts, bool has_selection_bias);

// Rows [begin, end) on the calling thread. The configuration has been checked.
void RouterProbsCpu(const RouterProbsConfig& config, const RouterProbsArgs& args, int64_t begin, int64_t end);
void RouterProbsGradCpu(const RouterProbsConfig& config, const RouterProbsGradArgs& args, int64_t begin, int64_t end);

#if defined(ORT_MOE_WITH_CUDA)
// On `stream`; rows = 0 is a no-op. The configuration has been checked. No scratch.
cudaError_t LaunchRouterProbs(const RouterProbsConfig& config, const RouterProbsArgs& args, cudaStream_t stream);
cudaError_t LaunchRouterProbsGrad(const RouterProbsConfig& config, const RouterProbsGradArgs& args,
                                  cudaStream_t stream);
#endif

}  // namespace ort_moe
