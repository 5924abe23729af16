#include "kernels/expert_layer_cpu.h"

namespace ort_moe {

int64_t ExpertLayerCpu::Position(int64_t d) const {
  if (!config_.nibbles()) return d;
  const int64_t within = d % kRowBlock;
  return d - within + (within % 2) * (kRowBlock / 2) + within / 2;
}

void ExpertLayerCpu::Decode(int64_t expert, int64_t n, float* out) const {
  const int64_t row = expert * rows_ + n;
  const int64_t block = config_.scale_block();
  const int64_t blocks = (depth_ + block - 1) / block;
  const auto* bytes = static_cast<const uint8_t*>(layer_.weights) + row * depth_ / (config_.nibbles() ? 2 : 1);
  const auto* scales = static_cast<const uint8_t*>(layer_.scales) + row * blocks;  // where they are bytes
  switch (config_.weight_format) {
    case WeightFormat::kDense:
      return DecodeDense(row, out);
    case WeightFormat::kNvfp4:
      return DecodeNvfp4Row(bytes, scales, blocks, out);
    case WeightFormat::kMxfp4:
      return DecodeMxfp4Row(bytes, scales, blocks, out);
    case WeightFormat::kInt4:
      return DecodeInt4Row(Integers(bytes, row, blocks, (blocks + 1) / 2), out);
    case WeightFormat::kInt8:
      return DecodeInt8Row(Integers(bytes, row, blocks, blocks), out);
    case WeightFormat::kFp8: {
      const int64_t row_of_blocks = expert * ((rows_ + block - 1) / block) + n / block;
      return DecodeFp8Row(bytes, static_cast<const float*>(layer_.scales) + row_of_blocks * blocks, depth_, block, out);
    }
  }
}

void ExpertLayerCpu::DecodeDense(int64_t row, float* out) const {
  WithType(dtype_, [&](auto type) {
    using Type = decltype(type);
    const auto* weights = static_cast<const typename Type::Storage*>(layer_.weights) + row * depth_;
    for (int64_t d = 0; d < depth_; ++d) out[d] = Type::Load(weights[d]);
  });
}

IntegerRow ExpertLayerCpu::Integers(const uint8_t* codes, int64_t row, int64_t blocks, int64_t zero_bytes) const {
  const auto* scales = static_cast<const char*>(layer_.scales) + row * blocks * SizeOf(dtype_);
  const auto* zeros = static_cast<const uint8_t*>(layer_.zero_points);
  return {codes, scales, zeros == nullptr ? nullptr : zeros + row * zero_bytes, dtype_, blocks, config_.block_size};
}

}  // namespace ort_moe
