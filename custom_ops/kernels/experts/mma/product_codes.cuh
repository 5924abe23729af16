// A warp's products of FusedExperts with weights of mxfp4, int4, int8 and fp8 (product.cuh).
//
// As for nvfp4 the weights go to the core without their scale, and each of its columns has the activations of one
// lane's part of a step and zero elsewhere, so that each lane is left with sums of single parts and scales those. A
// part lies in one block of weights, so that there are four parts to a step and the core has columns for two rows of
// activations.
#pragma once

#include <cstdint>

#include "kernels/common/float_math.h"
#include "kernels/experts/mma/product.cuh"

namespace ort_moe {

// A lane's part of a step: decoded weights of both tiles, and what is multiplied with them.
template <typename Format>
struct LaneParts {
  static constexpr int kVectors = Format::kBlock / kVectorElements;
  using Vectors = uint4[kVectors];  // activations
  using Zeros = typename Format::Zero[2];

  uint32_t pairs[2][kVectors][4];

  __device__ __forceinline__ LaneParts(const StepWeights& w, const Zeros& zeros) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const uint32_t words[4] = {w.words[tile].x, w.words[tile].y, w.words[tile].z, w.words[tile].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Format::kBits == 4) {
          Format::Decode(words[i], zeros[tile], pairs[tile][i]);
        } else {
          uint32_t half[2];
          Format::Decode(words[i], zeros[tile], half);
          pairs[tile][i / 2][i % 2 * 2] = half[0];
          pairs[tile][i / 2][i % 2 * 2 + 1] = half[1];
        }
      }
    }
  }

  // The core's sums with the columns that the lanes hold.
  __device__ __forceinline__ void Multiply(const Vectors& x, float (&sums)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const uint32_t (&a)[4] = pairs[0][vector], (&b)[4] = pairs[1][vector];
      MultiplyPairs(__half{}, sums, a[0], b[0], a[1], b[1], x[vector].x, x[vector].y);
      MultiplyPairs(__half{}, sums, a[2], b[2], a[3], b[3], x[vector].z, x[vector].w);
    }
  }

  // A part of a row of activations, or zeros.
  __device__ __forceinline__ static void LoadPart(const char* at, bool reads, Vectors& x) {
    constexpr int kVectorStride = 64;  // four lanes' 16 bytes
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      x[vector] = reads ? Vector(at + vector * kVectorStride) : uint4{};
    }
  }

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

  static constexpr int kStepBytes = Format::kStep * static_cast<int>(sizeof(uint16_t));  // of activations
  static constexpr int kStepFactors = 4 * static_cast<int>(sizeof(float));
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
    rows_[0] = staged.rows + row_of(0) * staged.stride;
    rows_[1] = staged.rows + row_of(min(1, count - 1)) * staged.stride;
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
    const Parts parts(operand.weights, {Format::ZeroOf(operand.zeros[0]), Format::ZeroOf(operand.zeros[1])});
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (pair > 0 && 2 * pair >= count_) break;
      const char* rows[2] = {rows_[0], rows_[1]};
      if (pair > 0) {
        rows[0] = staged_.rows + row_of(2 * pair) * staged_.stride;
        rows[1] = staged_.rows + row_of(min(2 * pair + 1, count_ - 1)) * staged_.stride;
      }
      const bool reads = token_ < kTokens && 2 * pair + token_ < count_;
      typename Parts::Vectors x;
      Parts::LoadPart((token_ == 1 ? rows[1] : rows[0]) + offset_, reads, x);
      float sums[4];
      parts.Multiply(x, sums);
#pragma unroll
      for (int i = 0; i < (kTokens == 1 ? 1 : 2); ++i) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          float& total = totals_[pair][i][tile];
          total = Fma(sums[2 * tile + i], Parts::WholeScale(operand.scales[tile], rows[i] + factors_), total);
        }
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
        float sum = totals_[token / 2][token % 2][tile];
        sum = Add(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = Add(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        if (lane % 4 == 0) store(tile, token, lane / 4, sum);
      }
    }
  }

 private:
  static constexpr int kPairs = (kTokens + 1) / 2;

  StagedActivations staged_;
  int count_;
  const char* rows_[2];  // of the first two tokens
  int token_;            // of two, that this lane reads activations of; kTokens: of none
  int offset_;           // in a row
  int factors_;          // in a row
  float totals_[kPairs][2][2] = {};
};

// Columns 0 to 3 are the four lanes' parts of a token of one expert, and columns 4 to 7 of one of another's, one of the
// first tile and one of the second. That serves two experts; of four, two such products serve 0 and 2, then 1 and 3.
// Lanes 0 and 1 of a quad are left with the first tile's sums, two lanes' parts each, and lanes 2 and 3 with the
// second's; of four experts, those of a tile's first four rows take them from the first product, the others from the
// second.
template <typename Format, int kTokens>
class MoreExperts {
  using Parts = LaneParts<Format>;
  static constexpr int kProducts = kTileRows / Format::kFc2Columns;
  static_assert(kProducts == 1 || kProducts == 2, "a tile has one expert or two");

 public:
  // `row_of(expert, token)`: the row of activations; there is an expert 0.
  template <typename RowOf>
  __device__ __forceinline__ MoreExperts(const StagedActivations& staged, int4 counts, int first_group, RowOf row_of)
      : staged_(staged) {
    if constexpr (kProducts == 1) {
      most_of_[0] = most_ = max(counts.x, counts.y);
    } else {
      most_of_[0] = max(counts.x, counts.z);
      most_of_[1] = max(counts.y, counts.w);
      most_ = max(most_of_[0], most_of_[1]);
    }
    const int lane = threadIdx.x % kLanes, part = lane % 4;
    offset_ = 2 * first_group * Parts::kStepBytes + part * 16;
    factors_ =
        staged.vector_bytes + 2 * first_group * Parts::kStepFactors + part % 2 * 2 * static_cast<int>(sizeof(float));
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      experts_[product] = lane / 16 * kProducts + product;
      const int count = CountOf(counts, experts_[product]);
      counts_[product] = part == lane / 4 % 4 ? count : 0;
      rows_[product] = staged.rows + row_of(count > 0 ? experts_[product] : 0, 0) * staged.stride;
    }
    own_ = part / 2 * kProducts + (kProducts == 1 ? 0 : lane / 16);
    own_count_ = CountOf(counts, own_);
    if (own_count_ == 0) own_ = 0;
    own_row_ = staged.rows + row_of(own_, 0) * staged.stride;
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
    const Parts parts(operand.weights, {Format::ZeroOf(operand.zeros[0]), Format::ZeroOf(operand.zeros[1])});
    const bool second = threadIdx.x % kLanes >= kLanes / 2, last = threadIdx.x % 4 >= 2;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token > 0 && token >= most_) break;
      float sums[kProducts][4] = {};
#pragma unroll
      for (int product = 0; product < kProducts; ++product) {
        if (token > 0 && token >= most_of_[product]) continue;
        const bool reads = token < counts_[product];
        const char* row = rows_[product];
        if (token > 0 && reads) row = staged_.rows + row_of(experts_[product], token) * staged_.stride;
        typename Parts::Vectors x;
        Parts::LoadPart(row + offset_, reads, x);
        parts.Multiply(x, sums[product]);
      }
      const char* row = own_row_;
      if (token > 0 && token < own_count_) row = staged_.rows + row_of(own_, token) * staged_.stride;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = last ? sums[0][2 + i] : sums[0][i];
        if constexpr (kProducts == 2) sum = second ? (last ? sums[1][2 + i] : sums[1][i]) : sum;
        float& total = totals_[token][i];
        const char* const factor = row + factors_ + i * static_cast<int>(sizeof(float));
        total = Fma(sum, Parts::WholeScale(operand.scales[i], factor), total);
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
      if (token >= most_) break;
      float sum = Add(totals_[token][0], totals_[token][1]);
      sum = Add(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
      if (lane % 2 == 0 && token < own_count_) store(own_, token, lane / 4 % Format::kFc2Columns, sum);
    }
  }

 private:
  StagedActivations staged_;
  int experts_[kProducts];         // that this lane reads activations of, for each product
  int counts_[kProducts];          // of their tokens; 0 in lanes that read none
  const char* rows_[kProducts];    // of their first tokens
  int own_, own_count_;            // the expert whose sums this lane is left with, and its tokens
  const char* own_row_;            // of its first token
  int most_of_[kProducts], most_;  // tokens of any of a product's experts, of any
  int offset_;                     // in a row
  int factors_;                    // in a row
  float totals_[kTokens][2] = {};
};

}  // namespace ort_moe
