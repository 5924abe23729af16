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

// What the core's 16 rows are in MoreExperts: eight rows' weights twice, of a side each.
template <typename T>
class TwoSides {
 public:
  __device__ __forceinline__ TwoSides(const uint4 (&words)[2], const uint16_t (&scales)[2])
      : halves_{{StepWeights{{words[0], words[1]}}, 0}, {StepWeights{{words[0], words[1]}}, 1}},
        scales_{Nvfp4Format<T>::ScalesOf(scales[0]), Nvfp4Format<T>::ScalesOf(scales[1])} {}

  // The core's sums for each half of the lanes' weights. `x`: the activations of the lane's column, if it `reads`.
  __device__ __forceinline__ void Multiply(const char* x, bool reads, float (&sums)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 vectors[2] = {};
      if (reads) LoadBlock(x + half * (Nvfp4Format<T>::kStep * static_cast<int>(sizeof(T)) / 2), vectors);
      halves_[half].Multiply(vectors, sums[half]);
    }
  }

  // Adds the lane's two blocks of a side.
  __device__ __forceinline__ void Add(const float (&sums)[2][4], int side, float2 factor, float* total) const {
    *total = Fma(sums[0][3 * side], Mul(scales_[side].x, factor.x), *total);
    *total = Fma(sums[1][3 * side], Mul(scales_[side].y, factor.y), *total);
  }

 private:
  DecodedBlocks<T> halves_[2];
  float2 scales_[2];
};

// Eight rows of each of two experts. The core's 16 rows are one expert's weights of a step and of the next, then the
// other expert's; of a step without a next they are both experts'. Column 2 * q + i has a block of lane q, of side i. A
// lane is left with the sums of single blocks again.
template <typename T, int kTokens, int kColumns>
class MoreExperts<Nvfp4Format<T>, kTokens, kColumns> {
 public:
  static constexpr bool kTakesGroups = true;
  static_assert(kColumns == kTileRows, "a tile has one expert");

  // `row_of(expert, token)`: the row of activations; there is an expert 0.
  template <typename RowOf>
  __device__ __forceinline__ MoreExperts(const StagedActivations& staged, int4 counts, int first_group, RowOf row_of)
      : staged_(staged), counts_{counts.x, counts.y} {
    const int column = threadIdx.x % kLanes / 4, quad_lane = threadIdx.x % 4;
    side_ = column % 2;
    reads_ = column / 2 == quad_lane;
    offset_ = 2 * first_group * kBytes + quad_lane * 16;
    factors_ = staged.vector_bytes + (2 * first_group * 4 + quad_lane) * kFactorBytes;
    rows_[0] = staged.rows + row_of(0, 0) * staged.stride;
    rows_[1] = staged.rows + row_of(counts.y > 0 ? 1 : 0, 0) * staged.stride;
  }

  struct Group {
    StepWeights steps[2];
    uint16_t scales[2][2];  // of each step, then expert: those of this lane's two blocks
  };

  template <typename Ring>
  __device__ __forceinline__ static Group LoadGroup(const Ring& ring, int at) {
    const int row = threadIdx.x % kLanes / 4, first = threadIdx.x % 4 * 2;
    Group group{{ring.Weights(at, 0), ring.Weights(at, 1)}, {}};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int expert = 0; expert < 2; ++expert) {
        group.scales[step][expert] =
            *reinterpret_cast<const uint16_t*>(Ring::Scales::Row(ring.ScalesOf(at), step, expert, row) + first);
      }
    }
    return group;
  }

  // `both`: the group has a second step.
  template <typename RowOf>
  __device__ __forceinline__ void MultiplyGroup(const Group& group, bool both, RowOf row_of) {
    if (both) {
#pragma unroll
      for (int expert = 0; expert < 2; ++expert) {
        if (expert > 0 && counts_[1] == 0) break;
        const TwoSides<T> steps({group.steps[0].words[expert], group.steps[1].words[expert]},
                                {group.scales[0][expert], group.scales[1][expert]});
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
          if (token > 0 && token >= counts_[expert]) break;
          const char* const row = Row(expert, token, row_of);
          float sums[2][4];
          steps.Multiply(row + offset_ + side_ * kBytes, reads_, sums);
          steps.Add(sums, 0, FactorsOf(row, 0), &totals_[token][expert]);
          steps.Add(sums, 1, FactorsOf(row, 1), &totals_[token][expert]);
        }
      }
    } else {
      const TwoSides<T> experts(group.steps[0].words, group.scales[0]);
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token > 0 && token >= counts_[0] && token >= counts_[1]) break;
        const char* const rows[2] = {Row(0, token, row_of), Row(1, token, row_of)};
        float sums[2][4];
        experts.Multiply((side_ == 0 ? rows[0] : rows[1]) + offset_, reads_, sums);
        experts.Add(sums, 0, FactorsOf(rows[0], 0), &totals_[token][0]);
        experts.Add(sums, 1, FactorsOf(rows[1], 0), &totals_[token][1]);
      }
    }
    offset_ += 2 * kBytes;
    factors_ += 2 * 4 * kFactorBytes;
  }

  template <typename Store>
  __device__ __forceinline__ void Emit(Store store) const {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int expert = 0; expert < 2; ++expert) {
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token >= counts_[expert]) break;
        float sum = totals_[token][expert];
        sum = ort_moe::Add(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = ort_moe::Add(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        if (lane % 4 == 0) store(expert, token, lane / 4, sum);
      }
    }
  }

 private:
  static constexpr int kBytes = Nvfp4Format<T>::kStep * sizeof(T);
  static constexpr int kFactorBytes = sizeof(float2);  // of a lane's two blocks

  // A token's row; that of the first in place of one that is not there.
  template <typename RowOf>
  __device__ __forceinline__ const char* Row(int expert, int token, RowOf row_of) const {
    if (token == 0 || token >= counts_[expert]) return rows_[expert];
    return staged_.rows + row_of(expert, token) * staged_.stride;
  }

  __device__ __forceinline__ float2 FactorsOf(const char* row, int step) const {
    if constexpr (!Nvfp4Format<T>::kConverts) return make_float2(1.0f, 1.0f);
    return *reinterpret_cast<const float2*>(row + factors_ + step * 4 * kFactorBytes);
  }

  StagedActivations staged_;
  int counts_[2];
  const char* rows_[2];  // of the experts' first tokens
  int side_;             // that the lane reads activations of, if it does
  bool reads_;
  int offset_;   // in a row
  int factors_;  // in a row
  float totals_[kTokens][2] = {};
};

}  // namespace ort_moe
