// One layer of FusedExperts for a group of tokens of one expert: FC1 with its activation, or FC2 alone.
//
// Mapping: a block owns 16 weight rows (FC1 with gates: 8 gates and the 8 values they meet) and a group of up to 8
// tokens; its warps split the reduction. Bytes: the tile's weights once, 16 rows * depth * (0.5625 for nvfp4, 2 for
// dense); activations come from the L2.
// Bound by: memory, if decoding keeps up: nvfp4 takes 2.5 to 3 instructions a weight and lane, some 60 % of the issue
// slots at copy speed. Why so: all loads of a warp are under way before the first product, about 4 KB a warp and 30 warps
// a multiprocessor; blocks are small, so that at one token several of them fill every multiprocessor evenly.
#pragma once

#include <cstdint>

#include "kernels/fused_experts_activation.cuh"
#include "kernels/fused_experts_groups.cuh"
#include "kernels/fused_experts_tile.cuh"
#include "kernels/launch.cuh"

namespace ort_moe {

constexpr int kMaxGroupedWarps = ORT_MOE_FC1_WARPS;

template <typename Format>
struct GroupedShared {
  // Elements between the activations of two tokens: 64 bytes past a multiple of 128, so that no two tokens' vectors
  // meet in a bank.
  static __host__ __device__ __forceinline__ int Stride(int depth) {
    constexpr int kLine = 128 / sizeof(typename Format::Element);
    const int padded = (depth + Format::kStep - 1) / Format::kStep * Format::kStep;
    return (padded + kLine - 1) / kLine * kLine + kLine / 2;
  }
  static __host__ __device__ __forceinline__ size_t Bytes(const LayerParams& layer, int chunk) {
    return static_cast<size_t>(chunk) * Stride(layer.depth) * sizeof(typename Format::Element) +
           static_cast<size_t>(layer.slices * chunk + 1) * 2 * kTileRows * sizeof(float);
  }
};

// The warp's slice of a token's activations into shared memory. `arranged`: the source has them at Position already.
template <typename Format>
__device__ __forceinline__ void StageSlice(const typename Format::Element* source, typename Format::Element* target,
                                           int depth, int2 steps, bool arranged) {
  for (int k = steps.x * Format::kStep + threadIdx.x % kLanes * kVectorElements; k < steps.y * Format::kStep;
       k += kLanes * kVectorElements) {
    const int position = Format::Position(k);
    uint4 v = make_uint4(0, 0, 0, 0);
    if (k < depth) {
      v = *reinterpret_cast<const uint4*>(source + (arranged ? position : k));
      if (!arranged) v = Format::Arrange(v);
    }
    *reinterpret_cast<uint4*>(target + position) = v;
  }
}

// Sums over the slices of `token` and weight row `row` of the tiles, scaled.
__device__ __forceinline__ float2 SumSlices(const float* partial, int slices, int chunk, int token, int row,
                                            float scale) {
  float first = 0.0f, second = 0.0f;
  for (int slice = 0; slice < slices; ++slice) {
    first = Add(first, partial[((slice * 2) * chunk + token) * kTileRows + row]);
    second = Add(second, partial[((slice * 2 + 1) * chunk + token) * kTileRows + row]);
  }
  return make_float2(Mul(first, scale), Mul(second, scale));
}

// kFirst: FC1, x to activations; else FC2 of the activations, rounded, in permuted order. kMaps: groups by the maps.
template <typename Format, bool kFirst, bool kMaps>
__global__ void __launch_bounds__(kMaxGroupedWarps* kLanes, kMaps ? 3 : ORT_MOE_FC1_BLOCKS) GroupedKernel(const ExpertsParams p) {
  using T = typename Format::Element;
  using Tile = WarpTile<Format, 2>;
  extern __shared__ uint4 shared[];
  const LayerParams& layer = kFirst ? p.fc1 : p.fc2;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int stride = GroupedShared<Format>::Stride(layer.depth);
  T* const activations = reinterpret_cast<T*>(shared);
  float* const biases = reinterpret_cast<float*>(activations + p.chunk * stride);
  float* const partial = biases + 2 * kTileRows;  // (slices, 2, chunk, kTileRows)

  WaitForPrevious();
  AllowNext();  // after the wait: FC2 may read the routing ahead of its own

  const int experts = p.experts, chunk = p.chunk;
  int item = blockIdx.y, end = 0;  // with maps: permuted rows of one expert
  int expert = 0;
  if constexpr (kMaps) {
    expert = p.by_expert ? static_cast<int>(blockIdx.y) : p.maps.permuted_to_expert[blockIdx.y];
    if (expert < 0 || expert >= experts) return;
    const int first = max(static_cast<int>(p.maps.expert_first_token_offset[expert]), 0);
    end = min(static_cast<int>(p.maps.expert_first_token_offset[expert + 1]), p.slots);
    if (p.by_expert) {
      item = first;
    } else {
      if ((item - first) % chunk != 0) return;
      end = min(end, item + chunk);
    }
    if (item >= end) return;
  }

  do {
    Group group;
    if constexpr (kMaps) {
      group = GroupOfRows(p, expert, item, min(chunk, end - item));
    } else {
      group = GroupOfSlot(p.indices, p.slots, experts, chunk, item);
      if (group.count == 0) return;
    }
    const bool paired = kFirst && p.gated;
    const int base = blockIdx.x * (paired ? kTileRows : 2 * kTileRows);
    const auto row_of = [&](int tile, int row) {
      if (!paired) return min(base + tile * kTileRows + row, layer.rows - 1);
      return p.interleaved ? 2 * (base + row) + tile : tile * (layer.rows / 2) + base + row;
    };
    const auto lane_rows = [&](int expert) {
      const int rows[2] = {row_of(0, lane / 4), row_of(1, lane / 4)};
      return RowsOf<Format, 2>(layer, expert, rows);
    };
    const int2 steps = StepsOf<Format>(layer, warp);
    Tile tile;
    tile.Load(lane_rows(group.expert), layer.depth, steps.x, steps.y);

    if (threadIdx.x < 2 * kTileRows) {
      const int64_t row = int64_t{group.expert} * layer.rows + row_of(threadIdx.x / kTileRows, threadIdx.x % kTileRows);
      biases[threadIdx.x] =
          layer.bias == nullptr ? 0.0f : HalfTraits<T>::ToFloat(static_cast<const T*>(layer.bias)[row]);
    }
    for (int token = 0; token < group.count; ++token) {
      const int slot = __shfl_sync(0xffffffffu, group.member, token);
      const T* source = kFirst ? static_cast<const T*>(p.x) + int64_t{slot / p.k} * layer.depth
                               : static_cast<const T*>(p.activated) + int64_t{item + token} * p.activated_stride;
      StageSlice<Format>(source, activations + token * stride, layer.depth, steps, !kFirst);
    }
    __syncwarp();

    float sum[4] = {};
    const int token = lane / 4;  // and row of the tiles
    const uint4* vectors =
        reinterpret_cast<const uint4*>(activations + min(token, group.count - 1) * stride) + lane % 4;
    for (int first = steps.x; first < steps.y; first += Tile::kBatch) {
      if (first != steps.x) tile.Load(lane_rows(Forgotten(group.expert)), layer.depth, first, steps.y);
      tile.Accumulate(vectors, layer.depth, first, steps.y, sum);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int of = lane % 4 * 2 + i % 2;
      if (of < group.count) partial[((warp * 2 + i / 2) * chunk + of) * kTileRows + token] = sum[i];
    }
    __syncthreads();

    const int out_row = threadIdx.x % kTileRows;
    float scale = Format::kFactor;
    if (layer.global_scale != nullptr) scale = Mul(scale, layer.global_scale[group.expert]);
    for (int at = 0; at < group.count; at += blockDim.x / kTileRows) {
      const int i = at + threadIdx.x / kTileRows;
      const int slot = __shfl_sync(0xffffffffu, group.member, i);
      if (i >= group.count) break;
      float2 value = SumSlices(partial, layer.slices, chunk, i, out_row, scale);
      if constexpr (kFirst) {
        if (p.mix_input) {
          value.x = Mul(value.x, p.mix[slot]);
          value.y = Mul(value.y, p.mix[slot]);
        }
      }
      value.x = Rounded<T>(Add(value.x, biases[out_row]));
      value.y = Rounded<T>(Add(value.y, biases[kTileRows + out_row]));
      const int64_t out = kMaps ? item + i : slot;
      const int column = base + out_row;
#pragma unroll 1
      for (int tile = 0; tile < (paired ? 1 : 2); ++tile) {
        const int at_column = column + tile * kTileRows;
        float result = tile == 0 ? value.x : value.y;
        if (!paired && at_column >= layer.rows) break;
        if constexpr (kFirst) {
          result = Activated(p, result, value.y);
          static_cast<T*>(p.activated)[out * p.activated_stride + Format::Position(at_column)] =
              HalfTraits<T>::FromFloat(result);
        } else {
          static_cast<T*>(p.output)[out * layer.rows + at_column] = HalfTraits<T>::FromFloat(result);
        }
      }
    }
    if constexpr (kMaps) {
      item += chunk;
      if (item < end) __syncthreads();
    }
  } while (kMaps && item < end);
}

}  // namespace ort_moe
