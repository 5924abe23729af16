// A warp's products of FusedExperts on the tensor core: two tiles of 8 weight rows by up to 8 tokens, a step at a time.
//
// Lane 4 * g + q holds weight row g of each tile; the tensor core takes the tiles as the two halves of its 16 rows.
//
// dense: its 8 columns are tokens.
// nvfp4: its 8 columns are the 8 blocks of a step that share a scale, of one token: in column 2 * q + h the activations
// are those of block h of lane q and zero elsewhere. So the weights need no scale before the product, which saves an
// eighth of the instructions that decode them: each lane is left with the sums of its own blocks, and scales those. A
// token costs 8 products and 4 multiplications a step; what decodes the weights is shared by all.
//
// kTwoExperts: the tiles belong to two experts with up to 4 tokens each, instead of both to one with up to 8.
#pragma once

#include <cstdint>

#include "kernels/float_math.h"
#include "kernels/fused_experts_format.cuh"

namespace ort_moe {

__device__ __forceinline__ void MultiplyPairs(__half, float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void MultiplyPairs(__nv_bfloat16, float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Where the activations of tokens lie in shared memory, in 16 bytes; one zero vector besides.
struct StagedActivations {
  const uint4* rows;
  int stride;
  const uint4* zero;
};

// `row_of(tile, token)` is the row of activations of a tile's token. With one expert both tiles have counts[0] tokens.
template <typename Format, bool kTwoExperts>
class Products;

template <typename T, bool kTwoExperts>
class Products<DenseFormat<T>, kTwoExperts> {
 public:
  template <typename RowOf>
  __device__ __forceinline__ Products(const StagedActivations& staged, const int (&counts)[2], RowOf row_of) {
    // Columns 0 to 3 are the first expert's tokens, the others the second's; missing ones repeat one.
    const int lane = threadIdx.x % kLanes, column = lane / 4;
    const int tile = kTwoExperts && column >= 4 && counts[1] > 0 ? 1 : 0;
    const int token = min(kTwoExperts ? column % 4 : column, counts[tile] - 1);
    vectors_ = staged.rows + row_of(tile, token) * staged.stride + lane % 4;
  }

  template <typename RowOf>
  __device__ __forceinline__ void Step(const StagedActivations&, const int (&)[2], RowOf, const uint4 (&words)[2],
                                       const uint32_t (&)[2], int step) {
    const uint4 tokens = vectors_[step * (DenseFormat<T>::kStep / kVectorElements)];
    MultiplyPairs(T{}, sums_, words[0].x, words[1].x, words[0].y, words[1].y, tokens.x, tokens.y);
    MultiplyPairs(T{}, sums_, words[0].z, words[1].z, words[0].w, words[1].w, tokens.z, tokens.w);
  }

  // Calls store(tile, token, row of the tile, sum) for every sum, each in one lane.
  template <typename Store>
  __device__ __forceinline__ void Emit(const int (&counts)[2], Store store) const {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int tile = i / 2, column = lane % 4 * 2 + i % 2;
      if constexpr (kTwoExperts) {
        if (column / 4 == tile && column % 4 < counts[tile]) store(tile, column % 4, lane / 4, sums_[i]);
      } else {
        if (column < counts[0]) store(tile, column, lane / 4, sums_[i]);
      }
    }
  }

 private:
  const uint4* vectors_;
  float sums_[4] = {};
};

template <typename T, bool kTwoExperts>
class Products<Nvfp4Format<T>, kTwoExperts> {
 public:
  static constexpr int kTokens = kTwoExperts ? 4 : 8;

  template <typename RowOf>
  __device__ __forceinline__ Products(const StagedActivations&, const int (&)[2], RowOf) {}

  template <typename RowOf>
  __device__ __forceinline__ void Step(const StagedActivations& staged, const int (&counts)[2], RowOf row_of,
                                       const uint4 (&words)[2], const uint32_t (&scales)[2], int step) {
    const int lane = threadIdx.x % kLanes, column = lane / 4, quad_lane = lane % 4;
    const float2 scale[2] = {Nvfp4Format<T>::ScalesOf(scales[0]), Nvfp4Format<T>::ScalesOf(scales[1])};
    const int at = step * (Nvfp4Format<T>::kStep / kVectorElements) + quad_lane;
    // The lanes' first blocks, then their second.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pairs[2][2][4];  // tile, vector, pair
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        Nvfp4Format<T>::Decode(half == 0 ? words[tile].x : words[tile].z, pairs[tile][0]);
        Nvfp4Format<T>::Decode(half == 0 ? words[tile].y : words[tile].w, pairs[tile][1]);
      }
      const bool reads = column == 2 * quad_lane + half;
#pragma unroll
      for (int tile = 0; tile < (kTwoExperts ? 2 : 1); ++tile) {
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
          if (token >= counts[tile]) break;
          const uint4* const row = staged.rows + row_of(tile, token) * staged.stride + at + half * 8;
          float sums[4] = {};
#pragma unroll
          for (int vector = 0; vector < 2; ++vector) {
            const uint4 x = *(reads ? row + vector * 4 : staged.zero);
            const uint32_t (&a)[4] = pairs[0][vector], (&b)[4] = pairs[1][vector];
            MultiplyPairs(__half{}, sums, a[0], b[0], a[1], b[1], x.x, x.y);
            MultiplyPairs(__half{}, sums, a[2], b[2], a[3], b[3], x.z, x.w);
          }
          // The sum in the column of the lane's own block.
          if (!kTwoExperts || tile == 0) {
            sums_[token][0] = Fma(sums[half], half == 0 ? scale[0].x : scale[0].y, sums_[token][0]);
          }
          if (!kTwoExperts || tile == 1) {
            sums_[token][1] = Fma(sums[2 + half], half == 0 ? scale[1].x : scale[1].y, sums_[token][1]);
          }
        }
      }
    }
  }

  template <typename Store>
  __device__ __forceinline__ void Emit(const int (&counts)[2], Store store) const {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token >= max(counts[0], counts[1])) break;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float sum = sums_[token][tile];
        sum = Add(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = Add(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        if (lane % 4 == 0 && token < counts[kTwoExperts ? tile : 0]) store(tile, token, lane / 4, sum);
      }
    }
  }

 private:
  float sums_[kTokens][2] = {};
};

}  // namespace ort_moe
