#include "kernels/experts/cpu/layer.h"

#include <algorithm>

#include "kernels/common/cache_lines.h"
#include "kernels/common/with_fma.h"
#include "kernels/experts/cpu/bytes.h"

namespace ort_moe {

int64_t ExpertLayerCpu::Position(int64_t d) const {
  if (!config_.nibbles()) return d;
  const int64_t within = d % kRowBlock;
  return d - within + (within % 2) * (kRowBlock / 2) + within / 2;
}

const float* ExpertLayerCpu::Weights(int64_t expert, int64_t n, int64_t first, int64_t width, float* buffer) const {
  const int64_t row = expert * rows_ + n;
  const int64_t at = row * depth_ + first;
  const int64_t count = std::min(width, depth_ - first);
  const int64_t block = config_.scale_block();
  const auto* bytes = static_cast<const uint8_t*>(layer_.weights) + at;
  switch (config_.weight_format) {
    case WeightFormat::kDense:
      if (dtype_ == DType::kFloat32 && count == width) return static_cast<const float*>(layer_.weights) + at;
      DecodeDense(at, count, buffer);
      break;
    case WeightFormat::kNvfp4:
    case WeightFormat::kMxfp4:
    case WeightFormat::kInt4:
      DecodeNibbles(Nibbles(), NibblesOf(row, first), count / block, buffer);
      break;
    case WeightFormat::kInt8: {
      const int64_t at_block = row * scales_ + first / block;
      const auto* scales = static_cast<const char*>(layer_.scales) + at_block * SizeOf(dtype_);
      const auto* zeros = static_cast<const uint8_t*>(layer_.zero_points);
      DecodeInt8({bytes, scales, zeros == nullptr ? nullptr : zeros + at_block, dtype_, count / block, block}, buffer);
      break;
    }
    case WeightFormat::kFp8: {
      const int64_t row_of_blocks = expert * ((rows_ + block - 1) / block) + n / block;
      const auto* scales = static_cast<const float*>(layer_.scales) + row_of_blocks * scales_ + first / block;
      DecodeFp8(bytes, scales, count, block, buffer);
      break;
    }
  }
  std::fill(buffer + count, buffer + width, 0.0f);
  return buffer;
}

bool ExpertLayerCpu::MultiplyFew(int64_t expert, const int64_t* rows, const int64_t* next,
                                 const float* const* activations, int64_t tokens, float* sums) const {
  if (!config_.nibbles()) return false;
  NibbleRow here[kPanelRows], ahead[kPanelRows];
  for (int64_t r = 0; r < kPanelRows; ++r) {
    here[r] = NibblesOf(expert * rows_ + rows[r], 0);
    ahead[r] = NibblesOf(expert * rows_ + next[r], 0);
  }
  return MultiplyNibbles(Nibbles(), here, ahead, scales_, activations, tokens, sums);
}

void ExpertLayerCpu::Prefetch(int64_t expert, int64_t n, int64_t first, int64_t width) const {
  const int64_t at = (expert * rows_ + n) * depth_ + first, count = std::min(width, depth_ - first);
  const bool dense = config_.weight_format == WeightFormat::kDense;
  const int64_t in_byte = config_.nibbles() ? 2 : 1, size = dense ? SizeOf(dtype_) : 1;
  const char* address = static_cast<const char*>(layer_.weights) + at * size / in_byte;
  const int64_t bytes = count * size / in_byte;
  for (int64_t i = 0; i < bytes; i += kCacheLineBytes) __builtin_prefetch(address + i);
  if (config_.nibbles()) __builtin_prefetch(NibblesOf(expert * rows_ + n, first).scales);
}

void ExpertLayerCpu::DecodeDense(int64_t at, int64_t count, float* out) const {
  WithType(dtype_, [&](auto type) {
    using Type = decltype(type);
    const auto* weights = static_cast<const typename Type::Storage*>(layer_.weights) + at;
    WithFma([&] {
      for (int64_t d = 0; d < count; ++d) out[d] = Type::Load(weights[d]);
    });
  });
}

void PanelMultiplier::Multiply(int64_t expert, const int64_t* rows, const int64_t* next,
                               const std::vector<const float*>& activations, float* products, int64_t stride) {
  constexpr int64_t kChunk = ExpertLayerCpu::kChunk;
  const int64_t tokens = static_cast<int64_t>(activations.size());
  sums_.resize(tokens * kPanelRows * kRowBlock);
  if (!layer_.MultiplyFew(expert, rows, next, activations.data(), tokens, sums_.data())) {
    decoded_.resize(kPanelRows * kChunk);
    for (int64_t d = 0; d < layer_.stride(); d += kChunk) {
      const int64_t width = std::min(kChunk, layer_.stride() - d);
      const float* weights[kPanelRows];
      for (int64_t r = 0; r < kPanelRows; ++r) {
        layer_.Prefetch(expert, next[r], d, width);
        weights[r] = layer_.Weights(expert, rows[r], d, width, decoded_.data() + r * kChunk);
      }
      MultiplyPanel(weights, activations.data(), d, tokens, width / kRowBlock, d == 0, sums_.data());
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    AddPartialSums(sums_.data() + t * kPanelRows * kRowBlock, kPanelRows, products + t * stride);
  }
}

NibbleFormat ExpertLayerCpu::Nibbles() const { return {config_.weight_format, dtype_, config_.scale_block()}; }

NibbleRow ExpertLayerCpu::NibblesOf(int64_t row, int64_t first) const {
  const int64_t group = first == 0 ? 0 : first / config_.scale_block();
  const int64_t scale_bytes = config_.weight_format == WeightFormat::kInt4 ? SizeOf(dtype_) : 1;
  const auto* codes = static_cast<const uint8_t*>(layer_.weights) + (row * depth_ + first) / 2;
  const auto* scales = static_cast<const char*>(layer_.scales) + (row * scales_ + group) * scale_bytes;
  const auto* zeros = static_cast<const uint8_t*>(layer_.zero_points);
  if (zeros != nullptr) zeros += row * ((scales_ + 1) / 2) + group / 2;
  return {codes, scales, zeros};
}

}  // namespace ort_moe
