// A warp's products of FusedExperts with nvfp4 weights (fused_experts_product.cuh).
//
// The core's 8 columns are blocks that share a scale, of one or two tokens: a column has the activations of its block
// and zero elsewhere. So the weights need no scale before the product, which saves a third of the instructions that
// decode them: each lane is left with sums of single blocks, and scales those. What decodes the weights is shared by
// all tokens.
#pragma once

#include <cstdint>

#include "kernels/float_math.h"
#include "kernels/fused_experts_product.cuh"

namespace ort_moe {

// Blocks `half` of the four lanes' weights, decoded: of each tile two vectors of pairs.
template <typename T>
struct DecodedBlocks {
  uint32_t pairs[2][2][4];

  __device__ __forceinline__ DecodedBlocks(const StepWeights& w, int half) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      Nvfp4Format<T>::Decode(half == 0 ? w.words[tile].x : w.words[tile].z, pairs[tile][0]);
      Nvfp4Format<T>::Decode(half == 0 ? w.words[tile].y : w.words[tile].w, pairs[tile][1]);
    }
  }

  // The core's sums with two vectors of activations.
  __device__ __forceinline__ void Multiply(const uint4 (&x)[2], float (&sums)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int vector = 0; vector < 2; ++vector) {
      const uint32_t (&a)[4] = pairs[0][vector], (&b)[4] = pairs[1][vector];
      MultiplyPairs(__half{}, sums, a[0], b[0], a[1], b[1], x[vector].x, x[vector].y);
      MultiplyPairs(__half{}, sums, a[2], b[2], a[3], b[3], x[vector].z, x[vector].w);
    }
  }
};

// A block's two vectors of activations.
__device__ __forceinline__ void LoadBlock(const char* at, uint4 (&x)[2]) {
  constexpr int kVectorStride = 64;  // four lanes' 16 bytes
  x[0] = Vector(at);
  x[1] = Vector(at + kVectorStride);
}

// Column 2 * q + h is block h of lane q, of one token after another, so that each lane scales the sums of its own
// blocks. A lane reads the activations of one column or of none. Columns of the other half meet weights that they do
// not belong to; nobody reads those sums.
template <typename T, int kTokens>
class OneExpert<Nvfp4Format<T>, kTokens> {
 public:
  template <typename RowOf>
  __device__ __forceinline__ OneExpert(const StagedActivations& staged, int count, int first_group, RowOf row_of)
      : staged_(staged), count_(count) {
    const int column = threadIdx.x % kLanes / 4, quad_lane = threadIdx.x % 4;
    reads_ = column / 2 == quad_lane;
    offset_ = 2 * first_group * kBytes + quad_lane * 16 + column % 2 * kHalfBytes;
    factors_ = staged.vector_bytes + (2 * first_group * 4 + quad_lane) * kFactorBytes;
    row_ = staged.rows + row_of(0) * staged.stride;
  }

  struct Operand {
    StepWeights weights;
    uint16_t scales[2];  // of each tile's row: those of this lane's two blocks
  };

  __device__ __forceinline__ static Operand Load(const WeightRing<Nvfp4Format<T>>& ring, int at, int step) {
    const int row = threadIdx.x % kLanes / 4, first = threadIdx.x % 4 * 2;
    Operand operand{ring.Weights(at, step), {}};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      operand.scales[tile] = *reinterpret_cast<const uint16_t*>(ring.Scales(at, step, tile, row) + first);
    }
    return operand;
  }

  template <typename RowOf>
  __device__ __forceinline__ void Step(const Operand& operand, RowOf row_of) {
    const float2 scale[2] = {Nvfp4Format<T>::ScalesOf(operand.scales[0]), Nvfp4Format<T>::ScalesOf(operand.scales[1])};
    if (reads_) LoadBlock(row_ + offset_, x_);
    const float2 factor = FactorsOf(row_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const DecodedBlocks<T> blocks(operand.weights, half);
      Add(blocks, x_, half, scale, factor, sums_[0]);
      if (kTokens > 1 && count_ > 1) {
#pragma unroll
        for (int token = 1; token < kTokens; ++token) {
          if (token >= count_) break;
          const char* const row = staged_.rows + row_of(token) * staged_.stride;
          uint4 x[2] = {};
          if (reads_) LoadBlock(row + offset_, x);
          Add(blocks, x, half, scale, FactorsOf(row), sums_[token]);
        }
      }
    }
    offset_ += kBytes;
    factors_ += 4 * kFactorBytes;
  }

  template <typename Store>
  __device__ __forceinline__ void Emit(Store store) const {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token >= count_) break;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float sum = sums_[token][tile];
        sum = ort_moe::Add(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = ort_moe::Add(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        if (lane % 4 == 0) store(tile, token, lane / 4, sum);
      }
    }
  }

 private:
  static constexpr int kBytes = Nvfp4Format<T>::kStep * sizeof(T), kHalfBytes = kBytes / 2;

  static constexpr int kFactorBytes = sizeof(float2);  // of a lane's two blocks

  __device__ __forceinline__ float2 FactorsOf(const char* row) const {
    if constexpr (!Nvfp4Format<T>::kConverts) return make_float2(1.0f, 1.0f);
    return *reinterpret_cast<const float2*>(row + factors_);
  }

  __device__ __forceinline__ static void Add(const DecodedBlocks<T>& blocks, const uint4 (&x)[2], int half,
                                             const float2 (&scale)[2], float2 factor, float (&total)[2]) {
    float sums[4];
    blocks.Multiply(x, sums);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float whole = half == 0 ? Mul(scale[tile].x, factor.x) : Mul(scale[tile].y, factor.y);
      total[tile] = Fma(sums[2 * tile + half], whole, total[tile]);
    }
  }

  StagedActivations staged_;
  const char* row_;  // of the first token
  uint4 x_[2] = {};  // of the first token; zeros in lanes that read none
  bool reads_;
  int offset_;   // in a row
  int factors_;  // in a row
  int count_;
  float sums_[kTokens][2] = {};
};

// Columns 0 to 3 are the same block of each lane, of a token of the first expert; columns 4 to 7 of one of the
// second's. So lanes 0 and 1 of a quad are left with the first tile's sums, two lanes' blocks each, and lanes 2 and 3
// with the second's.
template <typename T, int kTokens>
class TwoExperts<Nvfp4Format<T>, kTokens> {
 public:
  template <typename RowOf>
  __device__ __forceinline__ TwoExperts(const StagedActivations& staged, int2 counts, int first_group, RowOf row_of)
      : staged_(staged), counts_(counts) {
    const int lane = threadIdx.x % kLanes;
    tile_ = lane / 16;
    count_ = lane % 4 != lane / 4 % 4 ? 0 : tile_ == 0 ? counts.x : counts.y;
    offset_ = 2 * first_group * kBytes + lane % 4 * 16;
    row_ = staged.rows + row_of(count_ > 0 ? tile_ : 0, 0) * staged.stride;
    factor_tile_ = counts.y > 0 ? lane % 4 / 2 : 0;
    factor_row_ = staged.rows + row_of(factor_tile_, 0) * staged.stride;
    factors_ = staged.vector_bytes + (2 * first_group * 2 + lane % 2) * kFactorBytes;
  }

  struct Operand {
    StepWeights weights;
    uint32_t scales;  // both halves of one lane's weights that this lane is left with, then of the other's
  };

  __device__ __forceinline__ static Operand Load(const WeightRing<Nvfp4Format<T>>& ring, int at, int step) {
    const int lane = threadIdx.x % kLanes;
    return {ring.Weights(at, step),
            *reinterpret_cast<const uint32_t*>(ring.Scales(at, step, lane % 4 / 2, lane / 4) + lane % 2 * 4)};
  }

  template <typename RowOf>
  __device__ __forceinline__ void Step(const Operand& operand, RowOf row_of) {
    const float2 scale[2] = {Nvfp4Format<T>::ScalesOf(operand.scales & 0xffffu),
                             Nvfp4Format<T>::ScalesOf(operand.scales >> 16)};
    const int most = max(counts_.x, counts_.y);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const DecodedBlocks<T> blocks(operand.weights, half);
      if (count_ > 0) LoadBlock(row_ + offset_ + half * kHalfBytes, x_);
      Add(blocks, x_, half, scale, FactorsOf(factor_row_), sums_[0]);
      if (kTokens > 1 && most > 1) {
#pragma unroll
        for (int token = 1; token < kTokens; ++token) {
          if (token >= most) break;
          uint4 x[2] = {};
          if (token < count_) {
            LoadBlock(staged_.rows + row_of(tile_, token) * staged_.stride + offset_ + half * kHalfBytes, x);
          }
          const int last = (factor_tile_ == 0 ? counts_.x : counts_.y) - 1;
          const char* const factor_row = staged_.rows + row_of(factor_tile_, min(token, last)) * staged_.stride;
          Add(blocks, x, half, scale, FactorsOf(factor_row), sums_[token]);
        }
      }
    }
    offset_ += kBytes;
    factors_ += 2 * kFactorBytes;
  }

  template <typename Store>
  __device__ __forceinline__ void Emit(Store store) const {
    const int lane = threadIdx.x % kLanes, tile = lane % 4 / 2;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token >= max(counts_.x, counts_.y)) break;
      float sum = ort_moe::Add(sums_[token][0], sums_[token][1]);
      sum = ort_moe::Add(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
      if (lane % 2 == 0 && token < (tile == 0 ? counts_.x : counts_.y)) store(tile, token, lane / 4, sum);
    }
  }

 private:
  static constexpr int kBytes = Nvfp4Format<T>::kStep * sizeof(T), kHalfBytes = kBytes / 2;

  static constexpr int kFactorBytes = sizeof(float4);  // of two lanes' blocks

  __device__ __forceinline__ float4 FactorsOf(const char* row) const {
    if constexpr (!Nvfp4Format<T>::kConverts) return make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    return *reinterpret_cast<const float4*>(row + factors_);
  }

  __device__ __forceinline__ static void Add(const DecodedBlocks<T>& blocks, const uint4 (&x)[2], int half,
                                             const float2 (&scale)[2], float4 factor, float (&total)[2]) {
    float sums[4];
    blocks.Multiply(x, sums);
    const bool second = threadIdx.x % 4 >= 2;
    const float whole[2] = {half == 0 ? Mul(scale[0].x, factor.x) : Mul(scale[0].y, factor.y),
                            half == 0 ? Mul(scale[1].x, factor.z) : Mul(scale[1].y, factor.w)};
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      total[block] = Fma(second ? sums[2 + block] : sums[block], whole[block], total[block]);
    }
  }

  StagedActivations staged_;
  const char* row_;         // of the first token
  const char* factor_row_;  // of the first token whose sums this lane is left with
  uint4 x_[2] = {};         // of the first token; zeros in lanes that read none
  int2 counts_;
  int tile_;   // that this lane reads activations for
  int count_;  // of its tokens; 0 in lanes that read none
  int factor_tile_;
  int offset_;   // in a row
  int factors_;  // in a row
  float sums_[kTokens][2] = {};
};

}  // namespace ort_moe
