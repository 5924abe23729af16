// A warp's products of FusedExperts with weights of mxfp4, int4, int8 and fp8 (product.cuh).
//
// As for nvfp4 the weights go to the core without their scale, and each of its columns has the activations of one
// lane's part of a step and zero elsewhere, so that each lane is left with sums of single parts and scales those. A
// part lies in one block of weights, so that there are four parts to a step and the core has columns for two rows of
// activations. Step does not branch on how many tokens there are: kTokens are multiplied, with zeros for those that are
// not.
#pragma once

#include <cstdint>

#include "kernels/common/float_math.h"
#include "kernels/experts/mma/product.cuh"

namespace ort_moe {

// A lane's part of a step: its weights decoded, and what their sums are multiplied with.
template <typename Format>
struct LaneParts {
  static constexpr int kVectors = Format::kBlock / kVectorElements;
  static constexpr int kVectorStride = 64;  // of activations: four lanes' 16 bytes
  static constexpr int kStepBytes = Format::kStep * static_cast<int>(sizeof(uint16_t));
  static constexpr int kStepFactors = 4 * static_cast<int>(sizeof(float));

  // Eight weights of each tile's row, vector `vector` of the part, decoded.
  struct Decoded {
    uint32_t pairs[2][4];

    __device__ __forceinline__ Decoded(const StepWeights& w, const typename Format::Zero (&zeros)[2], int vector) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint32_t words[4] = {w.words[tile].x, w.words[tile].y, w.words[tile].z, w.words[tile].w};
        if constexpr (Format::kBits == 4) {
          Format::Decode(words[vector], zeros[tile], pairs[tile]);
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            uint32_t half[2];
            Format::Decode(words[2 * vector + i], zeros[tile], half);
            pairs[tile][2 * i] = half[0];
            pairs[tile][2 * i + 1] = half[1];
          }
        }
      }
    }

    // Adds the products with a vector of activations to the core's sums, of the columns that the lanes hold.
    __device__ __forceinline__ void Multiply(uint4 x, float (&sums)[4]) const {
      const uint32_t (&a)[4] = pairs[0], (&b)[4] = pairs[1];
      MultiplyPairs(__half{}, sums, a[0], b[0], a[1], b[1], x.x, x.y);
      MultiplyPairs(__half{}, sums, a[2], b[2], a[3], b[3], x.z, x.w);
    }
  };

  // `scale` times what a row's sums are multiplied with beside it, which is at `at`.
  __device__ __forceinline__ static float WholeScale(float scale, const char* at) {
    if constexpr (!Format::kConverts) return scale;
    return Mul(scale, *reinterpret_cast<const float*>(at));
  }

  template <typename Ring>
  __device__ __forceinline__ static void LoadZeros(const Ring& ring, int at, int step, uint32_t (&zeros)[2]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      zeros[tile] = Format::kZeroBits == 0
                        ? 0u
                        : ring.scales().Zero(ring.ScalesOf(at), step, tile, static_cast<int>(threadIdx.x % 4));
    }
  }
};

// Columns 2 * q and 2 * q + 1 are lane q's part, of two tokens.
template <typename Format, int kTokens>
class OneExpert {
  using Parts = LaneParts<Format>;

 public:
  template <typename RowOf>
  __device__ __forceinline__ OneExpert(const StagedActivations& staged, int count, int first_group, RowOf row_of)
      : staged_(staged), count_(count) {
    const int column = threadIdx.x % kLanes / 4, part = threadIdx.x % 4;
    token_ = column / 2 == part ? column % 2 : kTokens;
    offset_ = 2 * first_group * Parts::kStepBytes + part * 16;
    factors_ = staged.vector_bytes + 2 * first_group * Parts::kStepFactors + part * static_cast<int>(sizeof(float));
#pragma unroll
    for (int token = 0; token < kKeptRows; ++token) rows_[token] = Row(token, row_of);
  }

  struct Operand {
    StepWeights weights;
    float scales[2];  // of each tile's row
    uint32_t zeros[2];
  };

  template <typename Ring>
  __device__ __forceinline__ static Operand Load(const Ring& ring, int at, int step) {
    Operand operand{ring.Weights(at, step), {}, {}};
    Parts::LoadZeros(ring, at, step, operand.zeros);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      operand.scales[tile] = ring.scales().Scale(ring.ScalesOf(at), step, tile, static_cast<int>(threadIdx.x % 4));
    }
    return operand;
  }

  template <typename RowOf>
  __device__ __forceinline__ void Step(const Operand& operand, RowOf row_of) {
    const typename Format::Zero zeros[2] = {Format::ZeroOf(operand.zeros[0]), Format::ZeroOf(operand.zeros[1])};
    const char* vectors[kPairs];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const char* const first = token_ == 1 ? rows_[kKeptRows - 1] : rows_[0];
      vectors[pair] = offset_ + (pair > 0 ? Row(2 * pair + token_, row_of) : first);
    }
    float sums[kPairs][4] = {};
#pragma unroll
    for (int vector = 0; vector < Parts::kVectors; ++vector) {
      const typename Parts::Decoded weights(operand.weights, zeros, vector);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const bool reads = 2 * pair + token_ < count_;
        weights.Multiply(reads ? Vector(vectors[pair] + vector * Parts::kVectorStride) : uint4{}, sums[pair]);
      }
    }
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      const char* const row = token < kKeptRows ? rows_[token] : Row(token, row_of);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float& total = totals_[token][tile];
        const float scale = Parts::WholeScale(operand.scales[tile], row + factors_);
        total = Fma(sums[token / 2][2 * tile + token % 2], scale, total);
      }
    }
    offset_ += Parts::kStepBytes;
    factors_ += Parts::kStepFactors;
  }

  template <typename Store>
  __device__ __forceinline__ void Emit(Store store) const {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token >= count_) break;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float sum = totals_[token][tile];
        sum = Add(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = Add(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        if (lane % 4 == 0) store(tile, token, lane / 4, sum);
      }
    }
  }

 private:
  static constexpr int kPairs = (kTokens + 1) / 2;
  static constexpr int kKeptRows = kTokens == 1 ? 1 : 2;

  // A token's row; that of the last in place of one that is not there.
  template <typename RowOf>
  __device__ __forceinline__ const char* Row(int token, RowOf row_of) const {
    return staged_.rows + row_of(min(token, count_ - 1)) * staged_.stride;
  }

  StagedActivations staged_;
  int count_;
  const char* rows_[kKeptRows];  // of the first tokens
  int token_;                    // of two, that this lane reads activations of; kTokens and more: of none
  int offset_;                   // in a row
  int factors_;                  // in a row
  float totals_[kTokens][2] = {};
};

// Columns 0 to 3 are the four lanes' parts of a token of one expert, and columns 4 to 7 of one of another's, which is
// in the second tile. Lanes 0 and 1 of a quad are left with the first tile's sums, two lanes' parts each, and lanes 2
// and 3 with the second's.
template <typename Format, int kTokens, int kColumns>
class MoreExperts {
  using Parts = LaneParts<Format>;
  static_assert(kColumns == kTileRows, "a tile has one expert");

 public:
  // `row_of(expert, token)`: the row of activations; there is an expert 0.
  template <typename RowOf>
  __device__ __forceinline__ MoreExperts(const StagedActivations& staged, int4 counts, int first_group, RowOf row_of)
      : staged_(staged) {
    const int lane = threadIdx.x % kLanes, part = lane % 4;
    offset_ = 2 * first_group * Parts::kStepBytes + part * 16;
    factors_ =
        staged.vector_bytes + 2 * first_group * Parts::kStepFactors + part % 2 * 2 * static_cast<int>(sizeof(float));
    read_expert_ = lane / 16;
    read_count_ = part == lane / 4 % 4 ? CountOf(counts, read_expert_) : 0;
    own_expert_ = part / 2;
    own_count_ = CountOf(counts, own_expert_);
    if (counts.y == 0) read_expert_ = own_expert_ = 0;
    read_row_ = Row(read_expert_, 0, row_of);
    own_row_ = Row(own_expert_, 0, row_of);
  }

  struct Operand {
    StepWeights weights;
    float scales[2];  // of the two parts whose sums this lane is left with
    uint32_t zeros[2];
  };

  template <typename Ring>
  __device__ __forceinline__ static Operand Load(const Ring& ring, int at, int step) {
    Operand operand{ring.Weights(at, step), {}, {}};
    Parts::LoadZeros(ring, at, step, operand.zeros);
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      operand.scales[i] = ring.scales().Scale(ring.ScalesOf(at), step, lane / 2, lane % 2 * 2 + i);
    }
    return operand;
  }

  template <typename RowOf>
  __device__ __forceinline__ void Step(const Operand& operand, RowOf row_of) {
    const typename Format::Zero zeros[2] = {Format::ZeroOf(operand.zeros[0]), Format::ZeroOf(operand.zeros[1])};
    const char* vectors[kTokens];
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      vectors[token] = offset_ + (token > 0 && token < read_count_ ? Row(read_expert_, token, row_of) : read_row_);
    }
    float sums[kTokens][4] = {};
#pragma unroll
    for (int vector = 0; vector < Parts::kVectors; ++vector) {
      const typename Parts::Decoded weights(operand.weights, zeros, vector);
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        const bool reads = token < read_count_;
        weights.Multiply(reads ? Vector(vectors[token] + vector * Parts::kVectorStride) : uint4{}, sums[token]);
      }
    }
    const bool last = threadIdx.x % 4 >= 2;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      const char* const row = token > 0 && token < own_count_ ? Row(own_expert_, token, row_of) : own_row_;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const char* const factor = row + factors_ + i * static_cast<int>(sizeof(float));
        float& total = totals_[token][i];
        total = Fma(last ? sums[token][2 + i] : sums[token][i], Parts::WholeScale(operand.scales[i], factor), total);
      }
    }
    offset_ += Parts::kStepBytes;
    factors_ += Parts::kStepFactors;
  }

  template <typename Store>
  __device__ __forceinline__ void Emit(Store store) const {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      float sum = Add(totals_[token][0], totals_[token][1]);
      sum = Add(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
      if (lane % 2 == 0 && token < own_count_) store(own_expert_, token, lane / 4, sum);
    }
  }

 private:
  template <typename RowOf>
  __device__ __forceinline__ const char* Row(int expert, int token, RowOf row_of) const {
    return staged_.rows + row_of(expert, token) * staged_.stride;
  }

  StagedActivations staged_;
  int read_expert_, read_count_;  // that this lane reads activations of, and its tokens; 0 in lanes that read none
  const char* read_row_;          // of its first token
  int own_expert_, own_count_;    // whose sums this lane is left with, and its tokens
  const char* own_row_;           // of its first token
  int offset_;                    // in a row
  int factors_;                   // in a row
  float totals_[kTokens][2] = {};
};

}  // namespace ort_moe
