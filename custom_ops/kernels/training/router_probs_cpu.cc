// RouterProbs on the CPU: FusedRouter's weights put at the places of their experts, and the gradient of the logits.
//
// Mapping: one thread owns a row; the caller spreads ranges of rows over its threads. Forward, the router's own kernel
// routes a few rows at a time into scratch. Backward, a row is in the first-level cache for all its steps, each a loop
// over E; bound by the exponentials of the score.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/common/half_float.h"
#include "kernels/common/with_fma.h"
#include "kernels/training/router_probs.h"
#include "kernels/training/training_row_cpu.h"

namespace ort_moe {
namespace {

constexpr int64_t kRowsTogether = 64;

void Mark(uint8_t* map, MapFormat format, int64_t expert) {
  if (format == MapFormat::kByte) {
    map[expert] = 1;
  } else {
    map[expert / 8] = static_cast<uint8_t>(map[expert / 8] | 1u << (expert % 8));
  }
}

bool IsMarked(const uint8_t* map, MapFormat format, int64_t expert) {
  return format == MapFormat::kByte ? map[expert] != 0 : (map[expert / 8] >> (expert % 8) & 1) != 0;
}

// Rows of probs and map from the choices of rows [begin, end), which `weights` and `indices` start with.
template <typename Type>
void Scatter(const RouterProbsConfig& config, const RouterProbsArgs& args, int64_t begin, int64_t end,
             const float* weights, const int32_t* indices) {
  const int64_t k = config.router.k;
  const int64_t map_bytes = MapBytes(config.map_format, args.experts);
  for (int64_t row = begin; row < end; ++row, weights += k, indices += k) {
    auto* probs = static_cast<typename Type::Storage*>(args.probs) + row * args.experts;
    uint8_t* map = args.map + row * map_bytes;
    std::fill(probs, probs + args.experts, typename Type::Storage{0});
    std::fill(map, map + map_bytes, uint8_t{0});
    for (int64_t j = 0; j < k; ++j) {
      probs[indices[j]] = Type::Store(weights[j]);
      Mark(map, config.map_format, indices[j]);
    }
  }
}

class RowGradient {
 public:
  RowGradient(const RouterProbsConfig& config, const RouterProbsGradArgs& args)
      : config_(config),
        args_(args),
        row_(config.router.score, config.router.softcap, args.experts),
        chosen_(args.experts),
        all_(args.experts, 1),
        g_(args.experts),
        weighed_(args.experts) {}

  void Compute(int64_t row) {
    const bool full = config_.IsFullSoftmax();
    LoadMap(row);
    LoadGradient(row);
    row_.Load(args_.dtype, args_.logits, row);
    row_.ScoreExperts(full ? all_ : chosen_);
    weighed_ = row_.v();
    if (full) KeepChosen(weighed_);
    if (config_.router.normalize && !config_.IsChosenSoftmax()) Normalization();
    row_.ThroughScore(weighed_, g_);
    if (!full) KeepChosen(g_);
    StoreRow(args_.dtype, g_.data(), args_.grad_logits, row * args_.experts, args_.experts);
  }

 private:
  void LoadMap(int64_t row) {
    const uint8_t* map = args_.map + row * MapBytes(config_.map_format, args_.experts);
    for (int64_t e = 0; e < args_.experts; ++e) chosen_[e] = IsMarked(map, config_.map_format, e);
  }

  // The gradient of the weights before their factors; +0 of the others.
  void LoadGradient(int64_t row) {
    LoadRow(args_.dtype, args_.grad_probs, row * args_.experts, args_.experts, g_.data());
    if (args_.expert_scale != nullptr) {
      for (int64_t e = 0; e < args_.experts; ++e) g_[e] = Mul(g_[e], args_.expert_scale[e]);
    }
    for (float& value : g_) value = Mul(value, config_.router.scale);
    KeepChosen(g_);
  }

  void Normalization() {
    const float divisor = Add(SumAll(weighed_), config_.router.normalize_eps);
    if (divisor < config_.router.normalize_min) {
      const float reciprocal = Div(1.0f, config_.router.normalize_min);
      for (float& value : g_) value = Mul(value, reciprocal);
    } else {
      std::swap(row_.v(), weighed_);
      row_.ThroughNormalization(divisor, g_);
      std::swap(row_.v(), weighed_);
    }
    KeepChosen(g_);
  }

  void KeepChosen(std::vector<float>& values) const {
    for (int64_t e = 0; e < args_.experts; ++e) values[e] = chosen_[e] ? values[e] : 0.0f;
  }

  const RouterProbsConfig& config_;
  const RouterProbsGradArgs& args_;
  TrainingRow row_;
  std::vector<uint8_t> chosen_, all_;
  std::vector<float> g_, weighed_;
};

}  // namespace

void RouterProbsCpu(const RouterProbsConfig& config, const RouterProbsArgs& args, int64_t begin, int64_t end) {
  const int64_t k = config.router.k;
  std::vector<float> weights(kRowsTogether * k);
  std::vector<int32_t> indices(kRowsTogether * k);
  for (int64_t first = begin; first < end; first += kRowsTogether) {
    const int64_t last = std::min(first + kRowsTogether, end);
    RouterArgs some{};
    some.logits = static_cast<const char*>(args.logits) + first * args.experts * SizeOf(args.dtype);
    some.selection_bias = args.selection_bias;
    some.expert_scale = args.expert_scale;
    some.weights = weights.data();
    some.indices = indices.data();
    some.dtype = args.dtype;
    some.rows = last - first;
    some.experts = args.experts;
    FusedRouterCpu(config.router, some, 0, some.rows);
    WithType(args.dtype,
             [&](auto type) { Scatter<decltype(type)>(config, args, first, last, weights.data(), indices.data()); });
    if (args.indices != nullptr) std::copy_n(indices.data(), some.rows * k, args.indices + first * k);
  }
}

void RouterProbsGradCpu(const RouterProbsConfig& config, const RouterProbsGradArgs& args, int64_t begin, int64_t end) {
  RowGradient gradient(config, args);
  WithFma([&] {
    for (int64_t row = begin; row < end; ++row) gradient.Compute(row);
  });
}

}  // namespace ort_moe
