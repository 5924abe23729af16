// The constraints between FusedRouter's attributes, the number of experts and the bias.
#include <cmath>
#include <limits>
#include <string>

#include "kernels/common/float_text.h"
#include "kernels/router/fused_router.h"

namespace ort_moe {
namespace {

// "attribute 'k' must be ..., but is ..."
std::string Refusal(const std::string& attribute, const std::string& expected, const std::string& value) {
  return "attribute '" + attribute + "' must be " + expected + ", but is " + value;
}

std::string Refusal(const std::string& attribute, const std::string& expected, int64_t value) {
  return Refusal(attribute, expected, std::to_string(value));
}

std::string Refusal(const std::string& attribute, const std::string& expected, float value) {
  return Refusal(attribute, expected, FloatText(value));
}

std::string CheckNumbers(const RouterConfig& c) {
  const struct {
    const char* name;
    float value;
  } floats[] = {{"normalize_eps", c.normalize_eps}, {"normalize_min", c.normalize_min}, {"scale", c.scale}};
  for (const auto& attribute : floats) {
    if (std::isnan(attribute.value)) return Refusal(attribute.name, "a number", "NaN");
  }
  if (!(c.softcap >= 0.0f) || std::isinf(c.softcap)) return Refusal("softcap", "finite and at least 0", c.softcap);
  return {};
}

std::string CheckGroups(const RouterConfig& c) {
  if (c.num_groups < 1) return Refusal("num_groups", "at least 1", c.num_groups);
  if (c.topk_groups < 1 || c.topk_groups > c.num_groups) {
    return Refusal("topk_groups", "between 1 and num_groups = " + std::to_string(c.num_groups), c.topk_groups);
  }
  if (c.group_score_top < 1) return Refusal("group_score_top", "at least 1", c.group_score_top);
  if (c.group_fill != 0.0f && c.group_fill != -INFINITY) return Refusal("group_fill", "-inf or 0", c.group_fill);
  return {};
}

std::string CheckSparseMixer(const RouterConfig& c, bool has_selection_bias) {
  if (c.k != 2) return Refusal("k", "2 with score = sparse_mixer", c.k);
  if (!(c.mixer_threshold >= 0.0f) || std::isinf(c.mixer_threshold)) {
    return Refusal("mixer_threshold", "finite and at least 0", c.mixer_threshold);
  }
  if (c.score_after_topk) return Refusal("score_after_topk", "0 with score = sparse_mixer", "1");
  if (c.has_groups()) return Refusal("topk_groups", "equal to num_groups with score = sparse_mixer", c.topk_groups);
  if (c.weights_from != WeightsFrom::kScores) {
    return Refusal("weights_from", "'scores' with score = sparse_mixer", "'selection'");
  }
  if (has_selection_bias) return "input 'selection_bias' must be absent with score = sparse_mixer, but is given";
  return {};
}

std::string CheckExperts(const RouterConfig& c, int64_t experts) {
  const std::string count = std::to_string(experts);
  if (experts > std::numeric_limits<int32_t>::max()) {
    return "input 'logits' must have a last dimension that fits into int32, but has " + count;
  }
  if (c.k > experts) return Refusal("k", "at most the number of experts, " + count, c.k);
  if (experts % c.num_groups != 0) {
    return Refusal("num_groups", "a divisor of the number of experts, " + count, c.num_groups);
  }
  const int64_t group_size = experts / c.num_groups;
  if (c.group_score_top > group_size) {
    return Refusal("group_score_top", "at most the experts per group, " + std::to_string(group_size),
                   c.group_score_top);
  }
  if (c.has_groups() && c.topk_groups * group_size < c.k) {
    return Refusal("k", "at most the experts of the kept groups, " + std::to_string(c.topk_groups * group_size), c.k);
  }
  return {};
}

}  // namespace

std::string CheckRouterConfig(const RouterConfig& c, int64_t experts, bool has_selection_bias) {
  if (c.k < 1) return Refusal("k", "at least 1", c.k);
  if (std::string refusal = CheckNumbers(c); !refusal.empty()) return refusal;
  if (std::string refusal = CheckGroups(c); !refusal.empty()) return refusal;
  if (c.score == Score::kSparseMixer) {
    if (std::string refusal = CheckSparseMixer(c, has_selection_bias); !refusal.empty()) return refusal;
  }
  if (c.bias_on == BiasOn::kLogits && !c.score_after_topk) {
    return Refusal("bias_on", "'score' unless score_after_topk = 1", "'logits'");
  }
  if (c.weights_from == WeightsFrom::kSelection && has_selection_bias) {
    return Refusal("weights_from", "'scores' with a selection_bias", "'selection'");
  }
  if (experts < 0) return {};
  return CheckExperts(c, experts);
}

}  // namespace ort_moe
