// One layer of FusedExperts for a group of tokens of one expert: FC1 with its activation, or FC2 alone.
//
// Mapping: a block owns two sets of 16 weight rows (FC1 with gates: 8 gates and the 8 values they meet) and a group of
// up to 8 tokens; the warps of a set share out the reduction. Bytes: the rows' weights once, 32 rows * depth * (0.5625
// for nvfp4, 2 for dense); activations come from the L2. Bound by: memory, if decoding keeps up: nvfp4 takes 2.5 to 3
// instructions a weight and lane, some 60 % of the issue slots at copy speed. Why so: a block is small, so that at one
// token three of them keep each multiprocessor busy evenly, and a warp's slice is long, so that what it does once
// weighs little.
#pragma once

#include <cstdint>

#include "kernels/fused_experts_activation.cuh"
#include "kernels/fused_experts_groups.cuh"
#include "kernels/fused_experts_ring.cuh"
#include "kernels/launch.cuh"

namespace ort_moe {

constexpr int kSets = 2;  // of 16 weight rows in a block
constexpr int kSetRows = 2 * kTileRows;
constexpr int kMaxSlices = 4;
constexpr int kGroupedRing = 4;  // groups of steps ahead

// Elements between the activations of two tokens: 64 bytes past a multiple of 128, so that no two tokens' vectors meet
// in a bank.
template <typename Format>
__host__ __device__ __forceinline__ int ActivationStride(int depth) {
  constexpr int kLine = 128 / sizeof(typename Format::Element);
  const int padded = (depth + Format::kStep - 1) / Format::kStep * Format::kStep;
  return (padded + kLine - 1) / kLine * kLine + kLine / 2;
}

template <typename Format>
__host__ __device__ __forceinline__ size_t GroupedSharedBytes(const LayerParams& layer, int chunk) {
  return static_cast<size_t>(kSets * layer.slices) *
             (WeightRing<Format, kGroupedRing>::kBytes + static_cast<size_t>(kSetRows * chunk) * sizeof(float)) +
         kSets * kSetRows * sizeof(float) +
         static_cast<size_t>(chunk) * ActivationStride<Format>(layer.depth) * sizeof(typename Format::Element);
}

// A token's activations into shared memory, by the whole block. `arranged`: the source has them at Position already.
template <typename Format>
__device__ __forceinline__ void StageActivations(const typename Format::Element* source,
                                                 typename Format::Element* target, int depth, bool arranged) {
  const int padded = (depth + Format::kStep - 1) / Format::kStep * Format::kStep;
#pragma unroll 4
  for (int k = threadIdx.x * kVectorElements; k < padded; k += blockDim.x * kVectorElements) {
    const int position = Format::Position(k);
    uint4 v = make_uint4(0, 0, 0, 0);
    if (k < depth) {
      v = *reinterpret_cast<const uint4*>(source + (arranged ? position : k));
      if (!arranged) v = Format::Arrange(v);
    }
    *reinterpret_cast<uint4*>(target + position) = v;
  }
}

// kFirst: FC1, x to activations; else FC2 of the activations, rounded, in permuted order. kMaps: groups by the maps.
template <typename Format, bool kFirst, bool kMaps>
__global__ void __launch_bounds__(kSets * kMaxSlices * kLanes) GroupedKernel(const ExpertsParams p) {
  using T = typename Format::Element;
  using Ring = WeightRing<Format, kGroupedRing>;
  extern __shared__ uint4 shared[];
  const LayerParams& layer = kFirst ? p.fc1 : p.fc2;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int slices = layer.slices, chunk = p.chunk;
  const int set = warp / slices, slice = warp % slices;
  char* const rings = reinterpret_cast<char*>(shared);
  T* const activations = reinterpret_cast<T*>(rings + kSets * slices * Ring::kBytes);
  const int stride = ActivationStride<Format>(layer.depth);
  float* const biases = reinterpret_cast<float*>(activations + chunk * stride) + set * kSetRows;
  float* const partial =  // (kSets, slices, chunk, kSetRows), of which the set's
      reinterpret_cast<float*>(activations + chunk * stride) + kSets * kSetRows + set * slices * chunk * kSetRows;

  WaitForPrevious();
  AllowNext();  // after the wait: FC2 may read the routing ahead of its own

  int item = blockIdx.y, end = 0;  // with maps: permuted rows of one expert
  int expert = 0;
  if constexpr (kMaps) {
    expert = p.by_expert ? static_cast<int>(blockIdx.y) : p.maps.permuted_to_expert[blockIdx.y];
    if (expert < 0 || expert >= p.experts) return;
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

  // Weight rows of the set: row `r` of each of its two tiles.
  const bool paired = kFirst && p.gated;
  const int base = (blockIdx.x * kSets + set) * (paired ? kTileRows : kSetRows);
  const auto row_of = [&](int tile, int r) {
    if (!paired) return base + tile * kTileRows + r;
    return p.interleaved ? 2 * (base + r) + tile : tile * (layer.rows / 2) + base + r;
  };
  const int2 steps = StepsOf<Format>(layer, slice);

  do {
    Group group;
    if constexpr (kMaps) {
      group = GroupOfRows(p, expert, item, min(chunk, end - item));
    } else {
      group = GroupOfSlot(p.indices, p.slots, p.experts, chunk, item);
      if (group.count == 0) return;
    }
    Ring ring(rings + warp * Ring::kBytes);
    const int64_t first_row = int64_t{group.expert} * layer.rows;
    const LaneRows rows = Ring::RowsOf(layer, [&](int tile, int r) { return first_row + row_of(tile, r); });
    int filled = steps.x;
#pragma unroll 1
    for (int i = 0; i < Ring::kGroups; ++i, filled += Ring::kGroupSteps) {
      ring.Fill(i, rows, layer.depth, filled, steps.y);
    }

    if (kFirst && kMaps && p.ones != nullptr && blockIdx.x == 0 && threadIdx.x < group.count) {
      p.ones[group.member] = 1.0f;
    }
    if (slice == 0 && lane < kSetRows) {
      const int64_t row = first_row + row_of(lane / kTileRows, lane % kTileRows);
      biases[lane] = layer.bias == nullptr ? 0.0f : HalfTraits<T>::ToFloat(static_cast<const T*>(layer.bias)[row]);
    }
    float scale = Format::kFactor;
    if (layer.global_scale != nullptr) scale = Mul(scale, layer.global_scale[group.expert]);
    for (int token = 0; token < group.count; ++token) {
      const int slot = __shfl_sync(0xffffffffu, group.member, token);
      const T* source = kFirst ? static_cast<const T*>(p.x) + int64_t{slot / p.k} * layer.depth
                               : static_cast<const T*>(p.activated) + int64_t{item + token} * p.activated_stride;
      StageActivations<Format>(source, activations + token * stride, layer.depth, !kFirst);
    }
    __syncthreads();

    float sum[4] = {};
    const int g = lane / 4;  // the lane's token, and row of the tiles
    const uint4* const vectors =
        reinterpret_cast<const uint4*>(activations + min(g, group.count - 1) * stride) + lane % 4;
    int at = 0;
#pragma unroll 1
    for (int first = steps.x; first < steps.y; first += Ring::kGroupSteps, filled += Ring::kGroupSteps) {
      WaitForCopies<Ring::kGroups - 1>();
      __syncwarp();
      ring.Accumulate(at, vectors + first * (Format::kStep / kVectorElements), steps.y - first, sum);
      __syncwarp();
      ring.Fill(at, rows, layer.depth, filled, steps.y);
      at = at + 1 == Ring::kGroups ? 0 : at + 1;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = lane % 4 * 2 + i % 2;
      if (token < group.count) partial[(slice * chunk + token) * kSetRows + i / 2 * kTileRows + g] = sum[i];
    }
    __syncthreads();

    // A thread of the set takes one row of its tiles.
    const int row = lane % kTileRows;
    for (int tokens = 0; tokens < group.count; tokens += slices * kLanes / kTileRows) {
      const int token = tokens + slice * (kLanes / kTileRows) + lane / kTileRows;
      const int slot = __shfl_sync(0xffffffffu, group.member, token % kLanes);
      if (token >= group.count) break;
      float first = 0.0f, second = 0.0f;
      for (int s = 0; s < slices; ++s) {
        first = Add(first, partial[(s * chunk + token) * kSetRows + row]);
        second = Add(second, partial[(s * chunk + token) * kSetRows + kTileRows + row]);
      }
      first = Mul(first, scale);
      second = Mul(second, scale);
      if (kFirst && p.mix_input) {
        first = Mul(first, p.mix[slot]);
        second = Mul(second, p.mix[slot]);
      }
      first = Rounded<T>(Add(first, biases[row]));
      second = Rounded<T>(Add(second, biases[kTileRows + row]));
      const int64_t out = kMaps ? item + token : slot;
#pragma unroll 1
      for (int tile = 0; tile < (paired ? 1 : 2); ++tile) {
        const int column = base + tile * kTileRows + row;
        float result = tile == 0 ? first : second;
        if constexpr (kFirst) {
          result = Activated(p, result, second);
          static_cast<T*>(p.activated)[out * p.activated_stride + Format::Position(column)] =
              HalfTraits<T>::FromFloat(result);
        } else {
          static_cast<T*>(p.output)[out * layer.rows + column] = HalfTraits<T>::FromFloat(result);
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
