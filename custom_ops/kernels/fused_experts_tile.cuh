// A warp's part of FusedExperts' products: one or two tiles of 8 weight rows, up to 8 tokens, a slice of the reduction.
//
// Lane 4 * g + q of the warp holds weight row g of each tile and token g; the tensor core takes the tiles as the two
// halves of its 16 rows. A batch of loads is in flight at once: 6 or 8 times 16 bytes a lane.
#pragma once

#include <cstdint>

#include "kernels/fused_experts_format.cuh"

#ifndef ORT_MOE_FC1_BATCH
#define ORT_MOE_FC1_BATCH 4
#define ORT_MOE_FC2_BATCH 6
#define ORT_MOE_FC1_WARPS 8
#define ORT_MOE_FC1_BLOCKS 3
#endif

namespace ort_moe {

__device__ __forceinline__ void MultiplyPairs(__half, float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void MultiplyPairs(__nv_bfloat16, float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same value, but the compiler does not know it: what is computed from it is not kept from one batch to the next.
__device__ __forceinline__ int Forgotten(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The lane's row of each tile; weights already at the lane's 16 bytes of step 0.
template <int kTiles>
struct LaneRows {
  const uint8_t* weights[kTiles];
  const uint8_t* scales[kTiles];
};

template <typename Format, int kTiles>
__device__ __forceinline__ LaneRows<kTiles> RowsOf(const LayerParams& layer, int64_t expert,
                                                   const int (&rows)[kTiles]) {
  const int quad_lane = threadIdx.x % 4;
  LaneRows<kTiles> lane;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int64_t row = expert * layer.rows + rows[tile];
    lane.weights[tile] = layer.weights + row * Format::RowBytes(layer.depth) + quad_lane * sizeof(uint4);
    if constexpr (Format::kScaled) lane.scales[tile] = layer.scales + row * (layer.depth / kNvfp4Block);
  }
  return lane;
}

template <typename Format, int kTiles>
class WarpTile {
 public:
  static constexpr int kBatch = kTiles == 2 ? ORT_MOE_FC1_BATCH : ORT_MOE_FC2_BATCH;  // steps: as many as 64 registers hold beside the rest

  // Starts the loads of steps [first, min(first + kBatch, end)).
  __device__ __forceinline__ void Load(const LaneRows<kTiles>& rows, int depth, int first, int end) {
    const int quad_lane = threadIdx.x % 4;
    const int row_bytes = static_cast<int>(Format::RowBytes(depth)) - quad_lane * static_cast<int>(sizeof(uint4));
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int offset = (first + u) * kStepBytes;
      const bool valid = first + u < end && offset < row_bytes;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        words_[u][tile] = valid ? LoadWeights(rows.weights[tile] + offset) : make_uint4(0, 0, 0, 0);
      }
    }
    if constexpr (Format::kScaled) {
#pragma unroll
      for (int four = 0; four < kFours; ++four) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          scales_[four][tile] = LoadFour(rows.scales[tile], depth, first + 4 * four, end);
        }
      }
    }
  }

  // Adds the products of the steps that Load began. `vectors`: the lane's activations at step 0, in 16 bytes; any
  // token's where its own does not exist. sum: row g of the first tile by tokens 2q and 2q + 1, then of the second.
  __device__ __forceinline__ void Accumulate(const uint4* vectors, int depth, int first, int end, float (&sum)[4]) {
    const int quad_lane = threadIdx.x % 4;
    if constexpr (Format::kScaled) {
      if (depth % Format::kStep == 0) {
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            scales_[four][tile] = TransposeScales(scales_[four][tile], quad_lane);
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (first + u >= end) break;
#pragma unroll
      for (int v = 0; v < Format::kVectors; ++v) {
        const uint4 tokens = vectors[(first + u) * (Format::kStep / kVectorElements) + v * 4];
        uint32_t pairs[2][4] = {};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          uint32_t scales = 0;
          if constexpr (Format::kScaled) {
            const uint2 four = scales_[u / 4][tile];
            scales = ((u % 4 < 2 ? four.x : four.y) >> (u % 2 * 16)) & 0xffffu;
          }
          Format::Pairs(words_[u][tile], v, scales, pairs[tile]);
        }
        using Element = typename Format::Element;
        MultiplyPairs(Element{}, sum, pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1], tokens.x, tokens.y);
        MultiplyPairs(Element{}, sum, pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3], tokens.z, tokens.w);
      }
    }
  }

 private:
  static constexpr int kStepBytes = 64;  // of a row: four lanes' 16
  static constexpr int kFours = (kBatch + 3) / 4;

  // Whole steps: the eight scales of step first + q, to be transposed; else the lane's own two of each step.
  __device__ __forceinline__ static uint2 LoadFour(const uint8_t* row, int depth, int first, int end) {
    const int quad_lane = threadIdx.x % 4;
    constexpr int kStepScales = Format::kStep / kNvfp4Block;
    if (depth % Format::kStep == 0) {
      return first + quad_lane < end ? LoadScales(row + (first + quad_lane) * kStepScales) : make_uint2(0, 0);
    }
    uint32_t own[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int at = (first + u) * kStepScales + quad_lane * 2;
      const bool valid = first + u < end && at < depth / static_cast<int>(kNvfp4Block);
      own[u] = valid ? __ldg(reinterpret_cast<const uint16_t*>(row + at)) : 0u;
    }
    return make_uint2(own[0] | own[1] << 16, own[2] | own[3] << 16);
  }

  uint4 words_[kBatch][kTiles];
  uint2 scales_[kFours][kTiles];
};

// Steps of slice `slice` of a layer's reduction.
template <typename Format>
__device__ __forceinline__ int2 StepsOf(const LayerParams& layer, int slice) {
  const int steps = (layer.depth + Format::kStep - 1) / Format::kStep;
  const int each = (steps + layer.slices - 1) / layer.slices;
  const int first = slice * each;
  return make_int2(first < steps ? first : steps, first + each < steps ? first + each : steps);
}

}  // namespace ort_moe
