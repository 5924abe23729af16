// A warp's products of FusedExperts with nvfp4 weights (product.cuh).
//
// The core's 8 columns are blocks that share a scale, of one or two tokens: a column has the activations of its block
// and zero elsewhere. So the weights need no scale before the product, which saves a third of the instructions that
// decode them: each lane is left with sums of single blocks, and scales those. What decodes the weights is shared by
// all tokens.
#pragma once

#include <cstdint>

#include "kernels/common/float_math.h"
#include "kernels/experts/mma/product.cuh"

namespace ort_moe {

// Blocks `half` of the four lanes' weights, decoded: of each tile two vectors of pairs.
template <typename T>
struct DecodedBlocks {
  uint32_t pairs[2][2][4];

  __device__ __forceinline__ DecodedBlocks(const StepWeights& w, int half) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      DecodeE2m1(half == 0 ? w.words[tile].x : w.words[tile].z, pairs[tile][0]);
      DecodeE2m1(half == 0 ? w.words[tile].y : w.words[tile].w, pairs[tile][1]);
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

  template <typename Ring>
  __device__ __forceinline__ static Operand Load(const Ring& ring, int at, int step) {
    const int row = threadIdx.x % kLanes / 4, first = threadIdx.x % 4 * 2;
    Operand operand{ring.Weights(at, step), {}};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      operand.scales[tile] =
          *reinterpret_cast<const uint16_t*>(Ring::Scales::Row(ring.ScalesOf(at), step, tile, row) + first);
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

// Columns 0 to 3 are the same block of each lane, of a token of one expert; columns 4 to 7 of one of another's. Two
// such products serve four experts: 0 and 2, then 1 and 3. Lanes 0 and 1 of a quad are left with the first tile's sums,
// two lanes' blocks each, and lanes 2 and 3 with the second's; those of a tile's first four rows take them from the
// first product, the others from the second.
template <typename T, int kTokens>
class MoreExperts<Nvfp4Format<T>, kTokens> {
 public:
  // `row_of(expert, token)`: the row of activations; there is an expert 0.
  template <typename RowOf>
  __device__ __forceinline__ MoreExperts(const StagedActivations& staged, int4 counts, int first_group, RowOf row_of)
      : staged_(staged), most_(max(max(counts.x, counts.y), max(counts.z, counts.w))) {
    const int lane = threadIdx.x % kLanes;
    offset_ = 2 * first_group * kBytes + lane % 4 * 16;
    factors_ = staged.vector_bytes + (4 * first_group + lane % 2) * kFactorBytes;
#pragma unroll
    for (int product = 0; product < 2; ++product) {
      experts_[product] = lane / 16 * 2 + product;
      const int count = CountOf(counts, experts_[product]);
      counts_[product] = lane % 4 == lane / 4 % 4 ? count : 0;
      rows_[product] = staged.rows + row_of(count > 0 ? experts_[product] : 0, 0) * staged.stride;
    }
    own_ = lane % 4 / 2 * 2 + lane / 16;
    own_count_ = CountOf(counts, own_);
    if (own_count_ == 0) own_ = 0;
    own_row_ = staged.rows + row_of(own_, 0) * staged.stride;
  }

  struct Operand {
    StepWeights weights;
    uint32_t scales;  // both halves of one lane's weights that this lane is left with, then of the other's
  };

  template <typename Ring>
  __device__ __forceinline__ static Operand Load(const Ring& ring, int at, int step) {
    const int lane = threadIdx.x % kLanes;
    return {ring.Weights(at, step),
            *reinterpret_cast<const uint32_t*>(Ring::Scales::Row(ring.ScalesOf(at), step, lane % 4 / 2, lane / 4) +
                                               lane % 2 * 4)};
  }

  template <typename RowOf>
  __device__ __forceinline__ void Step(const Operand& operand, RowOf row_of) {
    const float2 scale[2] = {Nvfp4Format<T>::ScalesOf(operand.scales & 0xffffu),
                             Nvfp4Format<T>::ScalesOf(operand.scales >> 16)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const DecodedBlocks<T> blocks(operand.weights, half);
#pragma unroll
      for (int product = 0; product < 2; ++product) {
        if (counts_[product] > 0) LoadBlock(rows_[product] + offset_ + half * kHalfBytes, x_[product]);
      }
      Add(blocks, x_, half, scale, FactorsOf(own_row_), sums_[0]);
      if (kTokens > 1 && most_ > 1) {
#pragma unroll
        for (int token = 1; token < kTokens; ++token) {
          if (token >= most_) break;
          uint4 x[2][2] = {};
#pragma unroll
          for (int product = 0; product < 2; ++product) {
            if (token < counts_[product]) {
              const char* const row = staged_.rows + row_of(experts_[product], token) * staged_.stride;
              LoadBlock(row + offset_ + half * kHalfBytes, x[product]);
            }
          }
          const char* const own_row = staged_.rows + row_of(own_, max(min(token, own_count_ - 1), 0)) * staged_.stride;
          Add(blocks, x, half, scale, FactorsOf(own_row), sums_[token]);
        }
      }
    }
    offset_ += kBytes;
    factors_ += 2 * kFactorBytes;
  }

  template <typename Store>
  __device__ __forceinline__ void Emit(Store store) const {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token >= most_) break;
      float sum = ort_moe::Add(sums_[token][0], sums_[token][1]);
      sum = ort_moe::Add(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
      if (lane % 2 == 0 && token < own_count_) store(own_, token, lane / 4 % 4, sum);
    }
  }

 private:
  static constexpr int kBytes = Nvfp4Format<T>::kStep * sizeof(T), kHalfBytes = kBytes / 2;
  static constexpr int kFactorBytes = sizeof(float4);  // of two lanes' blocks

  __device__ __forceinline__ float4 FactorsOf(const char* row) const {
    if constexpr (!Nvfp4Format<T>::kConverts) return make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    return *reinterpret_cast<const float4*>(row + factors_);
  }

  __device__ __forceinline__ static void Add(const DecodedBlocks<T>& blocks, const uint4 (&x)[2][2], int half,
                                             const float2 (&scale)[2], float4 factor, float (&total)[2]) {
    float first[4], second[4];
    blocks.Multiply(x[0], first);
    blocks.Multiply(x[1], second);
    const bool upper = threadIdx.x % kLanes >= kLanes / 2, last = threadIdx.x % 4 >= 2;
    const float whole[2] = {half == 0 ? Mul(scale[0].x, factor.x) : Mul(scale[0].y, factor.y),
                            half == 0 ? Mul(scale[1].x, factor.z) : Mul(scale[1].y, factor.w)};
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const float of_first = last ? first[2 + block] : first[block],
                  of_second = last ? second[2 + block] : second[block];
      total[block] = Fma(upper ? of_second : of_first, whole[block], total[block]);
    }
  }

  StagedActivations staged_;
  int experts_[2];       // that this lane reads activations of, for each product
  int counts_[2];        // of their tokens; 0 in lanes that read none
  const char* rows_[2];  // of their first tokens
  uint4 x_[2][2] = {};   // of the first tokens; zeros in lanes that read none
  int own_, own_count_;  // the expert whose sums this lane is left with, and its tokens
  const char* own_row_;  // of its first token
  int most_;             // tokens of any
  int offset_;           // in a row
  int factors_;          // in a row
  float sums_[kTokens][2] = {};
};

}  // namespace ort_moe
