// The constraints between the training ops' attributes and the number of experts.
#include <cmath>
#include <string>

#include "kernels/common/float_text.h"
#include "kernels/training/aux_loss.h"
#include "kernels/training/router_probs.h"
#include "kernels/training/router_scores.h"

namespace ort_moe {
namespace {

std::string CheckExperts(const char* input, int64_t experts) {
  if (experts <= kMaxTrainingExperts) return {};
  return std::string("input '") + input + "' must have at most " + std::to_string(kMaxTrainingExperts) +
         " experts, but has " + std::to_string(experts);
}

std::string CheckK(int64_t k, int64_t experts) {
  if (k < 1) return "attribute 'k' must be at least 1, but is " + std::to_string(k);
  if (experts < 0 || k <= experts) return {};
  return "attribute 'k' must be at most the number of experts, " + std::to_string(experts) + ", but is " +
         std::to_string(k);
}

}  // namespace

std::string CheckRouterProbsConfig(const RouterProbsConfig& config, int64_t experts, bool has_selection_bias) {
  const std::string refusal = CheckRouterConfig(config.router, experts, has_selection_bias);
  if (!refusal.empty()) return refusal;
  if (config.router.score == Score::kSparseMixer) return "attribute 'score' must not be 'sparse_mixer', but is";
  if (config.router.weights_from != WeightsFrom::kScores) return "weights must be taken from the scores";
  return CheckExperts("logits", experts);
}

std::string CheckRouterScoresConfig(const RouterScoresConfig& config, int64_t experts) {
  if (std::string refusal = CheckK(config.k, experts); !refusal.empty()) return refusal;
  if (!(config.softcap >= 0.0f) || std::isinf(config.softcap)) {
    return "attribute 'softcap' must be finite and at least 0, but is " + FloatText(config.softcap);
  }
  if (std::isnan(config.normalize_eps)) return "attribute 'normalize_eps' must be a number, but is NaN";
  return CheckExperts("logits", experts);
}

std::string CheckAuxLossConfig(const AuxLossConfig& config, int64_t experts) {
  if (std::string refusal = CheckK(config.k, experts); !refusal.empty()) return refusal;
  if (!std::isfinite(config.coeff)) return "attribute 'coeff' must be finite, but is " + FloatText(config.coeff);
  if (config.total < 0) return "attribute 'total_tokens' must be at least 0, but is " + std::to_string(config.total);
  return CheckExperts("probs", experts);
}

}  // namespace ort_moe
