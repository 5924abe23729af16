// FusedRouter on the CPU: weights and indices of the best k experts of each row.
//
// Mapping: one thread owns a row; the caller spreads ranges of rows over its threads. A row lives in scratch of E
// floats per stage (logits, scores, keys), so it is read once and everything after that hits the first-level cache.
// Bound by: the exponentials (E a row) where a full softmax, a sigmoid or a softplus is asked for; else by the
// selection, O(E log k) comparisons of which all but a few fail at once. The stages are plain loops over E that
// compilers vectorise, with FMA instructions where the processor has them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/common/float_math.h"
#include "kernels/common/half_float.h"
#include "kernels/common/with_fma.h"
#include "kernels/router/expert_sum.h"
#include "kernels/router/fused_router.h"

namespace ort_moe {
namespace {

// An OrderedKey and its expert as one number: the larger is ranked first, and no two are equal.
inline uint64_t Candidate(uint32_t key, int64_t expert) {
  return static_cast<uint64_t>(key) << 32 | (0xffffffffu - static_cast<uint32_t>(expert));
}

inline int32_t ExpertOf(uint64_t candidate) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(candidate));
}

template <typename T>
void BestFirst(std::vector<T>& items, int64_t count) {
  std::partial_sort(items.begin(), items.begin() + count, items.end(), std::greater<>());
}

class RowRouter {
 public:
  RowRouter(const RouterConfig& config, const RouterArgs& args)
      : config_(config),
        args_(args),
        bias_(args.selection_bias),
        x_(args.experts),
        score_(args.experts),
        key_(args.experts),
        ordered_(args.experts),
        value_(config.k),
        chosen_(config.k),
        by_expert_(config.k) {}

  void Route(int64_t row) {
    const bool has_nan = LoadLogits(row);
    ScoreExperts();
    const float* key = MakeKeys();
    Choose(key);
    TakeWeights(key);
    Store(row, has_nan);
  }

 private:
  // softmax and normalisation in one: the softmax over the chosen.
  bool IsChosenSoftmax() const {
    return config_.score == Score::kSoftmax && !config_.score_after_topk && config_.normalize &&
           config_.normalize_eps == 0.0f && config_.normalize_min == 0.0f &&
           config_.weights_from == WeightsFrom::kScores;
  }

  // The logits themselves rank: softmax keeps their order, and its underflow would make ties.
  bool RanksLogits() const {
    return config_.score_after_topk || config_.score == Score::kNone || config_.score == Score::kSparseMixer ||
           (config_.score == Score::kSoftmax && bias_ == nullptr && !config_.has_groups());
  }

  // Step 1 into x_; whether a logit is NaN.
  bool LoadLogits(int64_t row) {
    const int64_t experts = args_.experts;
    const int64_t offset = row * experts;
    if (args_.dtype == DType::kFloat32) {
      const float* logits = static_cast<const float*>(args_.logits) + offset;
      std::copy(logits, logits + experts, x_.begin());
    } else {
      const uint16_t* logits = static_cast<const uint16_t*>(args_.logits) + offset;
      if (args_.dtype == DType::kFloat16) {
        for (int64_t e = 0; e < experts; ++e) x_[e] = HalfToFloat(logits[e]);
      } else {
        for (int64_t e = 0; e < experts; ++e) x_[e] = BFloat16ToFloat(logits[e]);
      }
    }
    int nans = 0;
    for (int64_t e = 0; e < experts; ++e) nans |= IsNaN(x_[e]);
    if (config_.softcap > 0.0f) {
      for (int64_t e = 0; e < experts; ++e) x_[e] = Mul(config_.softcap, Tanh(Div(x_[e], config_.softcap)));
    }
    return nans != 0;
  }

  // Scores of all experts into score_, where the keys or the weights need them.
  void ScoreExperts() {
    if (config_.score_after_topk) return;
    const int64_t experts = args_.experts;
    if (config_.score == Score::kSigmoid) {
      for (int64_t e = 0; e < experts; ++e) score_[e] = Sigmoid(x_[e]);
    } else if (config_.score == Score::kSqrtSoftplus) {
      for (int64_t e = 0; e < experts; ++e) score_[e] = SqrtSoftplus(x_[e]);
    } else if (config_.score == Score::kSoftmax) {
      const bool ranks_scores = !RanksLogits();
      const bool weighs_scores = config_.weights_from == WeightsFrom::kScores && !IsChosenSoftmax();
      if (!ranks_scores && !weighs_scores) return;
      const float max = *std::max_element(x_.begin(), x_.end());
      for (int64_t e = 0; e < experts; ++e) score_[e] = Exp(Add(x_[e], -max));
      ExpertSum sum;
      sum.AddAll(score_.data(), experts);
      const float total = sum.Total();
      for (int64_t e = 0; e < experts; ++e) score_[e] = Div(score_[e], total);
    }
  }

  // Step 2: the keys, in x_ or score_ where those are the keys already.
  const float* MakeKeys() {
    const float* key = RanksLogits() ? x_.data() : score_.data();
    if (bias_ == nullptr && !config_.has_groups()) return key;
    if (bias_ != nullptr) {
      for (int64_t e = 0; e < args_.experts; ++e) key_[e] = Add(key[e], bias_[e]);
    } else {
      std::copy(key, key + args_.experts, key_.begin());
    }
    if (config_.has_groups()) MaskGroups();
    return key_.data();
  }

  // key_ of the experts outside the best groups becomes group_fill.
  void MaskGroups() {
    const int64_t size = args_.experts / config_.num_groups;
    groups_.clear();
    for (int64_t group = 0; group < config_.num_groups; ++group) {
      members_.clear();
      for (int64_t e = group * size; e < (group + 1) * size; ++e) members_.push_back(Candidate(OrderedKey(key_[e]), e));
      BestFirst(members_, config_.group_score_top);
      std::sort(members_.begin(), members_.begin() + config_.group_score_top,
                [](uint64_t a, uint64_t b) { return ExpertOf(a) < ExpertOf(b); });
      ExpertSum sum;
      for (int64_t j = 0; j < config_.group_score_top; ++j) {
        const int32_t expert = ExpertOf(members_[j]);
        sum.AddExpert(expert, key_[expert]);
      }
      groups_.push_back(Candidate(OrderedKey(sum.Total()), group));
    }
    BestFirst(groups_, config_.topk_groups);
    for (int64_t j = config_.topk_groups; j < config_.num_groups; ++j) {
      const auto first = key_.begin() + ExpertOf(groups_[j]) * size;
      std::fill(first, first + size, config_.group_fill);
    }
  }

  // Step 3: the k best into chosen_, and their order by expert into by_expert_.
  void Choose(const float* key) {
    const int64_t experts = args_.experts;
    uint32_t* ordered = ordered_.data();
    for (int64_t e = 0; e < experts; ++e) ordered[e] = OrderedKey(key[e]);
    const uint32_t least = LeastOfBest();
    candidates_.resize(experts);
    int64_t count = 0;
    for (int64_t e = 0; e < experts; ++e) {
      candidates_[count] = Candidate(ordered[e], e);
      count += ordered[e] >= least;
    }
    candidates_.resize(count);
    BestFirst(candidates_, config_.k);
    for (int64_t j = 0; j < config_.k; ++j) {
      chosen_[j] = ExpertOf(candidates_[j]);
      by_expert_[j] = j;
    }
    std::sort(by_expert_.begin(), by_expert_.end(), [this](int64_t a, int64_t b) { return chosen_[a] < chosen_[b]; });
  }

  // A key that k experts reach, mostly few others: the k-th largest among the maxima of at least k sets of experts. Set
  // s is s, s + sets, s + 2 * sets, ..., so that the maxima of neighbours come out of one vector operation.
  uint32_t LeastOfBest() {
    const int64_t experts = args_.experts;
    const int64_t sets = std::max(config_.k, experts / kSetSize);
    if (2 * sets > experts) return 0;  // the maxima would be most of the keys
    maxima_.assign(ordered_.begin(), ordered_.begin() + sets);
    for (int64_t begin = sets; begin < experts; begin += sets) {
      const int64_t size = std::min(sets, experts - begin);
      const uint32_t* ordered = ordered_.data() + begin;
      uint32_t* maxima = maxima_.data();
      for (int64_t s = 0; s < size; ++s) maxima[s] = std::max(maxima[s], ordered[s]);
    }
    BestFirst(maxima_, config_.k);
    return maxima_[config_.k - 1];
  }

  // Steps 4 and 5 into value_, but for NaN rows.
  void TakeWeights(const float* key) {
    const bool selection = config_.weights_from == WeightsFrom::kSelection;
    if (config_.score_after_topk) {
      TakeChosen(selection ? key : x_.data());
      ScoreChosen();
    } else if (selection) {
      TakeChosen(key);
    } else if (IsChosenSoftmax()) {
      TakeChosen(x_.data());
      SoftmaxChosen();
    } else if (config_.score == Score::kSparseMixer) {
      value_[0] = MixerWeight(chosen_[0], -1);
      value_[1] = MixerWeight(chosen_[1], chosen_[0]);
    } else {
      TakeChosen(config_.score == Score::kNone ? x_.data() : score_.data());
    }
    if (config_.normalize && !IsChosenSoftmax()) {
      float divisor = Add(SumChosen(), config_.normalize_eps);
      if (divisor < config_.normalize_min) divisor = config_.normalize_min;
      for (float& v : value_) v = Div(v, divisor);
    }
    for (float& v : value_) v = Mul(v, config_.scale);
    if (args_.expert_scale != nullptr) {
      for (int64_t j = 0; j < config_.k; ++j) value_[j] = Mul(value_[j], args_.expert_scale[chosen_[j]]);
    }
  }

  void TakeChosen(const float* of_experts) {
    for (int64_t j = 0; j < config_.k; ++j) value_[j] = of_experts[chosen_[j]];
  }

  void ScoreChosen() {
    if (config_.score == Score::kSoftmax) SoftmaxChosen();
    if (config_.score == Score::kSigmoid) {
      for (float& v : value_) v = Sigmoid(v);
    }
    if (config_.score == Score::kSqrtSoftplus) {
      for (float& v : value_) v = SqrtSoftplus(v);
    }
  }

  void SoftmaxChosen() {
    const float max = *std::max_element(value_.begin(), value_.end());
    for (float& v : value_) v = Exp(Add(v, -max));
    const float total = SumChosen();
    for (float& v : value_) v = Div(v, total);
  }

  float SumChosen() const {
    ExpertSum sum;
    for (const int64_t j : by_expert_) sum.AddExpert(chosen_[j], value_[j]);
    return sum.Total();
  }

  // Softmax weight of `best` among the experts near it, without `excluded`.
  float MixerWeight(int32_t best, int32_t excluded) {
    const float max = x_[best];
    for (int64_t e = 0; e < args_.experts; ++e) {
      const float magnitude = std::fabs(x_[e]);
      const float distance = Div(Add(max, -x_[e]), magnitude < max ? max : magnitude);
      const bool shares = !(distance > config_.mixer_threshold) && e != excluded;
      score_[e] = shares ? Exp(Add(x_[e], -max)) : 0.0f;
    }
    ExpertSum sum;
    sum.AddAll(score_.data(), args_.experts);
    return Div(score_[best], sum.Total());
  }

  void Store(int64_t row, bool has_nan) const {
    const int64_t first = row * (args_.columns == 0 ? config_.k : args_.columns);
    for (int64_t j = 0; j < config_.k; ++j) {
      args_.weights[first + j] = has_nan ? NaN() : value_[j];
      args_.indices[first + j] = chosen_[j];
    }
  }

  static constexpr int64_t kSetSize = 8;

  const RouterConfig& config_;
  const RouterArgs& args_;
  const float* bias_;
  std::vector<float> x_, score_, key_;
  std::vector<uint32_t> ordered_, maxima_;
  std::vector<uint64_t> candidates_, members_, groups_;
  std::vector<float> value_;     // by rank
  std::vector<int32_t> chosen_;  // by rank
  std::vector<int64_t> by_expert_;
};

inline void RouteRows(const RouterConfig& config, const RouterArgs& args, int64_t begin, int64_t end) {
  RowRouter router(config, args);
  for (int64_t row = begin; row < end; ++row) router.Route(row);
}

}  // namespace

void FusedRouterCpu(const RouterConfig& config, const RouterArgs& args, int64_t begin, int64_t end) {
  WithFma([&] { RouteRows(config, args, begin, end); });
}

}  // namespace ort_moe
