// One of an expert's two layers on the CPU: rows of weights decoded to float32, and their products with activations.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/expert_decoders_cpu.h"
#include "kernels/expert_rows_cpu.h"
#include "kernels/fused_experts.h"
#include "kernels/half_float.h"

namespace ort_moe {

class ExpertLayerCpu {
 public:
  // `rows` and `depth` are N and D.
  ExpertLayerCpu(const ExpertLayer& layer, const ExpertsConfig& config, DType dtype, int64_t rows, int64_t depth)
      : layer_(layer), config_(config), dtype_(dtype), rows_(rows), depth_(depth) {}

  int64_t rows() const { return rows_; }

  // Floats of a decoded row, and of a row of activations.
  int64_t stride() const { return blocks() * kRowBlock; }

  // Where element d of a row stands.
  int64_t Position(int64_t d) const;

  // Row n of an expert into stride() floats, of which those past D must be zero already; without the global scale.
  void Decode(int64_t expert, int64_t n, float* out) const;

  // The products of kRowsTogether decoded rows with one row of activations.
  std::array<float, kRowsTogether> Multiply(const float* rows, const float* activations) const {
    std::array<float, kRowsTogether> products;
    MultiplyRows(rows, activations, blocks(), products.data());
    return products;
  }

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
  void DecodeDense(int64_t row, float* out) const;
  IntegerRow Integers(const uint8_t* codes, int64_t row, int64_t blocks, int64_t zero_bytes) const;

  int64_t blocks() const { return (depth_ + kRowBlock - 1) / kRowBlock; }

  ExpertLayer layer_;
  const ExpertsConfig& config_;
  DType dtype_;
  int64_t rows_;
  int64_t depth_;
};

}  // namespace ort_moe
