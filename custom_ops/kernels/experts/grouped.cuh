// One layer of FusedExperts by the routing maps, for any number of tokens: FC1 with its activation, or FC2 alone.
//
// Mapping: a block owns two sets of 16 weight rows (FC1 with gates: 8 gates and the 8 values they meet) and a group of
// up to 8 permuted rows of one expert; the warps of a set share out the reduction. Bytes: the rows' weights once a
// group, from the L2 where an expert has several.
#pragma once

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/experts/activation.cuh"
#include "kernels/experts/mma/product_nvfp4.cuh"
#include "kernels/experts/mma/staging.cuh"

namespace ort_moe {

constexpr int kSets = 2;  // of 16 weight rows in a block

// The block's shared memory, in order.
template <typename Format>
struct GroupedShared {
  static __host__ __device__ __forceinline__ size_t Bytes(const LayerParams& layer, int chunk) {
    return static_cast<size_t>(kSets * layer.slices) * (WeightRing<Format, Format::kManyGroups>::kBytes +
                                                        static_cast<size_t>(kSetRows * chunk) * sizeof(float)) +
           static_cast<size_t>(chunk) * StagedStride<Format>(layer.depth);
  }

  __device__ __forceinline__ GroupedShared(uint4* memory, const LayerParams& layer, int chunk) {
    const int warps = kSets * layer.slices;
    rings = reinterpret_cast<char*>(memory);
    activations = rings + warps * WeightRing<Format, Format::kManyGroups>::kBytes;
    partial = reinterpret_cast<float*>(activations + chunk * StagedStride<Format>(layer.depth));
  }

  char* rings;        // of each warp
  char* activations;  // (chunk) rows
  float* partial;     // (warps, chunk, kSetRows)
};

// kFirst: FC1, x to activations; else FC2 of the activations, rounded, in permuted order.
template <typename Format, bool kFirst>
__global__ void __launch_bounds__(kSets * kMaxSlices * kLanes) GroupedKernel(const ExpertsParams p) {
  using T = typename Format::Element;
  using Ring = WeightRing<Format, Format::kManyGroups>;
  extern __shared__ uint4 shared[];
  const LayerParams& layer = kFirst ? p.fc1 : p.fc2;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, warps = blockDim.x / kLanes;
  const int slices = layer.slices, chunk = p.chunk;
  const int set = warp / slices, slice = warp % slices;
  const int stride = StagedStride<Format>(layer.depth), blocks = PaddedDepth<Format>(layer.depth) / Format::kBlock;
  const GroupedShared<Format> s(shared, layer, chunk);

  WaitForPrevious();
  AllowNext();

  // Permuted rows of one expert.
  const int expert = p.by_expert ? static_cast<int>(blockIdx.y) : p.maps.permuted_to_expert[blockIdx.y];
  if (expert < 0 || expert >= p.experts) return;
  const int begin = max(static_cast<int>(p.maps.expert_first_token_offset[expert]), 0);
  int end = min(static_cast<int>(p.maps.expert_first_token_offset[expert + 1]), p.slots);
  int item = begin;
  if (!p.by_expert) {
    item = blockIdx.y;
    if ((item - begin) % chunk != 0) return;
    end = min(end, item + chunk);
  }

  // Weight rows of the set: row `r` of each of its two tiles.
  const bool paired = kFirst && p.gated;
  const int base = (blockIdx.x * kSets + set) * (paired ? kTileRows : kSetRows);
  const int row_step = paired && p.interleaved ? 2 : 1;
  const int tile_rows = !paired ? kTileRows : p.interleaved ? 1 : layer.rows / 2;
  const int64_t first_row = static_cast<int64_t>(expert) * layer.rows + base * row_step;
  const Slice part = SliceOf<Format>(layer, slice);
  Ring ring(s.rings + warp * Ring::kBytes, layer, row_step);
  const int row = lane % kTileRows;
  const float scale = LayerScale<Format>(layer.global_scale == nullptr ? 1.0f : layer.global_scale[expert]);
  const float biases[2] = {BiasOf<T>(layer, first_row + row * row_step),
                           BiasOf<T>(layer, first_row + row * row_step + tile_rows)};

  for (; item < end; item += chunk) {
    const int count = min(chunk, end - item);
    // Lane i < count: the slot of the group's token i. Maps of other indices do no harm.
    int member = 0;
    if (lane < count) {
      const int expanded = min(max(p.maps.permuted_to_unpermuted[item + lane], 0), p.slots - 1);
      member = expanded % p.tokens * p.k + expanded / p.tokens;
    }
    int filled = part.first;
    const int at_row = base * row_step, second_row = at_row + tile_rows;
    ring.Start(layer, {at_row, at_row + 4 * row_step, second_row, second_row + 4 * row_step}, part.first);
    ring.Choose(layer, {expert, expert, expert, expert});
    const auto fill = [&](int at) {
      if (filled++ < part.end) ring.Fill(at);
      CommitCopies();
    };
#pragma unroll 1
    for (int at = 0; at < Ring::kBytes; at += Ring::kGroupBytes) fill(at);

    if (kFirst && p.ones != nullptr && blockIdx.x == 0 && threadIdx.x < count) p.ones[member] = 1.0f;
    for (int token = warp; token < count; token += warps) {
      const int slot = __shfl_sync(0xffffffffu, member, token);
      const T* const source =
          kFirst ? static_cast<const T*>(p.x) + static_cast<int64_t>(slot / p.k) * layer.depth
                 : static_cast<const T*>(p.activated) + static_cast<int64_t>(item + token) * p.activated_stride;
      char* const target = s.activations + token * stride;
#pragma unroll 1
      for (int block = lane; block < blocks; block += kLanes) {
        BeginBlock<Format>(source, target, layer.depth, block, !kFirst);
      }
      CommitCopies();
      WaitForCopies<0>();
#pragma unroll 1
      for (int block = lane; block < blocks; block += kLanes) FinishBlock<Format>(target, layer.depth, block, !kFirst);
    }
    __syncthreads();

    const StagedActivations staged{s.activations, stride, blocks * Format::kBlock * static_cast<int>(sizeof(T))};
    const auto activation_row = [](int token) { return token; };
    OneExpert<Format, kMaxChunk> products(staged, count, part.first, activation_row);
    int at = 0;
    MultiplySlice(products, ring, part, activation_row, fill, &at);
    products.Emit([&](int tile, int token, int r, float sum) {
      s.partial[(warp * chunk + token) * kSetRows + tile * kTileRows + r] = sum;
    });
    __syncthreads();

    // A thread of the set takes one row of its tiles.
    for (int tokens = 0; tokens < count; tokens += slices * kLanes / kTileRows) {
      const int token = tokens + slice * (kLanes / kTileRows) + lane / kTileRows;
      const int slot = __shfl_sync(0xffffffffu, member, token % kLanes);
      if (token >= count) continue;
      float first = 0.0f, second = 0.0f;
      for (int other = 0; other < slices; ++other) {
        const float* const sums = s.partial + ((set * slices + other) * chunk + token) * kSetRows + row;
        first = Add(first, sums[0]);
        second = Add(second, sums[kTileRows]);
      }
      const float mix = kFirst && p.mix_input ? p.mix[slot] : 1.0f;
      first = LayerOutput<T>(first, scale, mix, biases[0]);
      second = LayerOutput<T>(second, scale, mix, biases[1]);
#pragma unroll 1
      for (int tile = 0; tile < (paired ? 1 : 2); ++tile) {
        const int column = base + tile * kTileRows + row;
        float result = tile == 0 ? first : second;
        if constexpr (kFirst) {
          result = Activated(p, result, second);
          static_cast<T*>(p.activated)[int64_t{item + token} * p.activated_stride + Format::Position(column)] =
              HalfTraits<T>::FromFloat(result);
        } else {
          static_cast<T*>(p.output)[int64_t{item + token} * layer.rows + column] = HalfTraits<T>::FromFloat(result);
        }
      }
    }
    __syncthreads();  // before the next group's activations and sums
  }
}

}  // namespace ort_moe
