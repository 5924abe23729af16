// One of an expert's two layers on the CPU: rows of weights decoded to float32, and their products with activations.
//
// Along the reduction, decoded weights and activations are padded with zeros to blocks of 16, and in a block stand in
// the order that decodes fastest. A product has one order of summation: 16 partial sums over the blocks, then a tree.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/float_math.h"
#include "kernels/fused_experts.h"
#include "kernels/half_float.h"

namespace ort_moe {

// The value of a float8e4m3fn.
inline float Float8ToFloat(uint8_t x) {
  const uint32_t magnitude = x & 0x7fu;
  const uint32_t sign = static_cast<uint32_t>(x & 0x80u) << 24;
  if (magnitude == 0x7fu) return NaN();
  if (magnitude >= 0x08u) return BitsToFloat(((magnitude << 20) + (120u << 23)) | sign);
  const float subnormal = static_cast<float>(magnitude) * 0.001953125f;  // 2^-9
  return BitsToFloat(FloatBits(subnormal) | sign);
}

// The value of a float4e2m1 in the low four bits.
inline float Float4ToFloat(uint32_t x) {
  const uint32_t magnitude = x & 0x7u;
  const uint32_t normal = (magnitude << 22) + (126u << 23);
  const uint32_t subnormal = FloatBits(Add(BitsToFloat((magnitude << 22) + (127u << 23)), -1.0f));  // 0 or 0.5
  return BitsToFloat((magnitude >= 2u ? normal : subnormal) | (x & 0x8u) << 28);
}

class ExpertLayerCpu {
 public:
  static constexpr int64_t kBlock = 16;
  static constexpr int64_t kRows = 4;  // decoded together: a load of activations serves all of them

  // `rows` and `depth` are N and D.
  ExpertLayerCpu(const ExpertLayer& layer, WeightFormat format, DType dtype, int64_t rows, int64_t depth)
      : layer_(layer), format_(format), dtype_(dtype), rows_(rows), depth_(depth) {}

  // Floats of a decoded row, and of a row of activations.
  int64_t stride() const { return (depth_ + kBlock - 1) / kBlock * kBlock; }

  // Where element d of a row stands.
  int64_t Position(int64_t d) const {
    if (format_ == WeightFormat::kDense) return d;
    const int64_t within = d % kBlock;
    return d - within + (within % 2) * (kBlock / 2) + within / 2;  // all low halves of the bytes, then all high ones
  }

  // Row n of an expert into stride() floats, of which those past D must be zero already. nvfp4 without the global
  // scale.
  void Decode(int64_t expert, int64_t n, float* out) const {
    if (format_ == WeightFormat::kDense) {
      WithType(dtype_, [&](auto type) {
        using Type = decltype(type);
        const auto* row = static_cast<const typename Type::Storage*>(layer_.weights) + (expert * rows_ + n) * depth_;
        for (int64_t d = 0; d < depth_; ++d) out[d] = Type::Load(row[d]);
      });
      return;
    }
    const int64_t blocks = depth_ / kNvfp4Block;
    const uint8_t* bytes = static_cast<const uint8_t*>(layer_.weights) + (expert * rows_ + n) * depth_ / 2;
    const uint8_t* scales = static_cast<const uint8_t*>(layer_.scales) + (expert * rows_ + n) * blocks;
    for (int64_t b = 0; b < blocks; ++b, bytes += kBlock / 2, out += kBlock) {
      const float scale = Float8ToFloat(scales[b]);
      for (int64_t i = 0; i < kBlock / 2; ++i) out[i] = Mul(Float4ToFloat(bytes[i]), scale);
      for (int64_t i = 0; i < kBlock / 2; ++i) out[kBlock / 2 + i] = Mul(Float4ToFloat(bytes[i] >> 4), scale);
    }
  }

  // The products of kRows decoded rows with one row of activations.
  std::array<float, kRows> Multiply(const float* rows, const float* activations) const {
    float sums[kRows][kBlock] = {};
    const int64_t step = stride();
    for (int64_t d = 0; d < step; d += kBlock) {
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t i = 0; i < kBlock; ++i) sums[r][i] = Fma(rows[r * step + d + i], activations[d + i], sums[r][i]);
      }
    }
    std::array<float, kRows> products;
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t width = kBlock / 2; width > 0; width /= 2) {
        for (int64_t i = 0; i < width; ++i) sums[r][i] = Add(sums[r][i], sums[r][i + width]);
      }
      products[r] = sums[r][0];
    }
    return products;
  }

  // What every product of an expert is multiplied with.
  float GlobalScale(int64_t expert) const {
    return layer_.global_scale == nullptr ? 1.0f : layer_.global_scale[expert];
  }

  float Bias(int64_t expert, int64_t n) const {
    if (layer_.bias == nullptr) return 0.0f;
    float bias = 0.0f;
    WithType(dtype_, [&](auto type) {
      using Type = decltype(type);
      bias = Type::Load(static_cast<const typename Type::Storage*>(layer_.bias)[expert * rows_ + n]);
    });
    return bias;
  }

  int64_t rows() const { return rows_; }

 private:
  ExpertLayer layer_;
  WeightFormat format_;
  DType dtype_;
  int64_t rows_;
  int64_t depth_;
};

}  // namespace ort_moe
