// One of an expert's two layers on the CPU: rows of weights decoded to float32, and their products with activations.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/common/cache_lines.h"
#include "kernels/common/half_float.h"
#include "kernels/experts/cpu/nibbles.h"
#include "kernels/experts/cpu/rows.h"
#include "kernels/experts/fused_experts.h"

namespace ort_moe {

class ExpertLayerCpu {
 public:
  // Weights of a row that are decoded at a time: with those of a panel's other rows, half of a first-level cache.
  static constexpr int64_t kChunk = 512;

  // `rows` and `depth` are N and D.
  ExpertLayerCpu(const ExpertLayer& layer, const ExpertsConfig& config, DType dtype, int64_t rows, int64_t depth)
      : layer_(layer),
        config_(config),
        dtype_(dtype),
        rows_(rows),
        depth_(depth),
        scales_((depth + config.scale_block() - 1) / config.scale_block()) {}

  int64_t rows() const { return rows_; }

  // Floats of a decoded row, and of a row of activations.
  int64_t stride() const { return blocks() * kRowBlock; }

  // Where element d of a row stands.
  int64_t Position(int64_t d) const;

  // `width` weights of row n of an expert from `first` on, up to the row's end and then zeros; without the global
  // scale. Decoded into `buffer`, or where they lie. `first` is a multiple of kChunk.
  const float* Weights(int64_t expert, int64_t n, int64_t first, int64_t width, float* buffer) const;

  // The partial sums of kPanelRows whole rows with few tokens' activations, as MultiplyPanel leaves them, where it can
  // be done without decoding rows by themselves; `next` are the rows that follow. False where it cannot.
  bool MultiplyFew(int64_t expert, const int64_t* rows, const int64_t* next, const float* const* activations,
                   int64_t tokens, float* sums) const;

  // Brings what Weights will read into the caches. A panel's rows are apart, which no prefetcher of a processor
  // follows.
  void Prefetch(int64_t expert, int64_t n, int64_t first, int64_t width) const;

  // What every product of an expert is multiplied with.
  float GlobalScale(int64_t expert) const {
    return layer_.global_scale == nullptr ? 1.0f : layer_.global_scale[expert];
  }

  float Bias(int64_t expert, int64_t n) const {
    float bias = 0.0f;
    if (layer_.bias == nullptr) return bias;
    WithType(dtype_, [&](auto type) {
      using Type = decltype(type);
      bias = Type::Load(static_cast<const typename Type::Storage*>(layer_.bias)[expert * rows_ + n]);
    });
    return bias;
  }

 private:
  void DecodeDense(int64_t at, int64_t count, float* out) const;
  NibbleFormat Nibbles() const;
  NibbleRow NibblesOf(int64_t row, int64_t first) const;

  int64_t blocks() const { return (depth_ + kRowBlock - 1) / kRowBlock; }

  ExpertLayer layer_;
  const ExpertsConfig& config_;
  DType dtype_;
  int64_t rows_;
  int64_t depth_;
  int64_t scales_;  // of a row; kept, because a division takes as long as the decoding of a hundred weights
};

// Products of panels of an expert's rows with its tokens; for one thread.
class PanelMultiplier {
 public:
  explicit PanelMultiplier(const ExpertLayerCpu& layer) : layer_(layer) {}

  // products[t * stride + r] of kPanelRows rows and all activations; `next` are the rows that follow.
  void Multiply(int64_t expert, const int64_t* rows, const int64_t* next, const std::vector<const float*>& activations,
                float* products, int64_t stride);

 private:
  const ExpertLayerCpu& layer_;
  CacheLineVector<float> decoded_;  // a chunk of each row
  CacheLineVector<float> sums_;     // of all tokens
};

}  // namespace ort_moe
