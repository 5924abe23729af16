// FC1 of FusedExperts with its activation, for few tokens.
//
// Mapping: one block a multiprocessor, and all of them share out the units: 16 weight rows of an item (with gates: 8
// gates and the 8 values they meet). A warp takes a slice of a unit's reduction and goes on to another unit while that
// one's weights are still under way; a batch's sums meet in shared memory. Bytes: the chosen experts' weights once.
// Bound by: memory, once the loop runs (4 TB/s at four tokens); at one token by what each block does before and after.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/common/launch.cuh"
#include "kernels/experts/activation.cuh"
#include "kernels/experts/few/items.cuh"
#include "kernels/experts/mma/product_codes.cuh"
#include "kernels/experts/mma/product_nvfp4.cuh"
#include "kernels/experts/mma/staging.cuh"

namespace ort_moe {

constexpr int kFc1Warps = 16;
constexpr int kFc1PartialBytes = 16 << 10;  // of a batch's sums

// The block's shared memory, in order.
template <typename Format>
struct Fc1Shared {
  static __host__ __device__ __forceinline__ int UnitSums(int slices, int chunk) { return slices * chunk * kSetRows; }

  // Units of a block that are finished at once.
  static __host__ __device__ __forceinline__ int Batch(int slices, int chunk) {
    return kFc1PartialBytes / (UnitSums(slices, chunk) * static_cast<int>(sizeof(float)));
  }

  static __host__ __device__ __forceinline__ size_t Bytes(int depth, int tokens, int slots, int chunk) {
    return kFc1Warps * static_cast<size_t>(WeightRing<Format, Format::kFc1Groups>::kBytes) +
           static_cast<size_t>(tokens) * StagedStride<Format>(depth) + kFc1PartialBytes + Items::Bytes(slots, chunk) +
           slots * sizeof(float);
  }

  __device__ __forceinline__ Fc1Shared(uint4* memory, const ExpertsParams& p) {
    rings = reinterpret_cast<char*>(memory);
    activations = rings + kFc1Warps * WeightRing<Format, Format::kFc1Groups>::kBytes;
    partial = reinterpret_cast<float*>(activations + p.tokens * StagedStride<Format>(p.fc1.depth));
    items = partial + kFc1PartialBytes / sizeof(float);
    scale = reinterpret_cast<float*>(static_cast<char*>(items) + Items::Bytes(p.slots, p.chunk));
  }

  char* rings;        // of each warp
  char* activations;  // (tokens) rows
  float* partial;     // (batch, chunk, slices, kSetRows)
  void* items;
  float* scale;  // (slots) global scale of an item's expert
};

// A warp's next unit: how many are left in the block from it on, and where it lies.
struct Unit {
  int left, item, tile;
};

template <typename Format, int kTokens>
__global__ void __launch_bounds__(kFc1Warps* kLanes, 1) Fc1Kernel(const ExpertsParams p) {
  using T = typename Format::Element;
  using Ring = WeightRing<Format, Format::kFc1Groups>;
  extern __shared__ uint4 shared[];
  const LayerParams& layer = p.fc1;
  const Fc1Shared<Format> s(shared, p);
  const int warp = threadIdx.x / kLanes;
  const int slices = layer.slices, chunk = p.chunk;
  const int team = warp / slices, slice = warp % slices, teams = blockDim.x / kLanes / slices;
  const int stride = StagedStride<Format>(layer.depth), blocks = PaddedDepth<Format>(layer.depth) / Format::kBlock;

  WaitForPrevious();
  AllowNext();  // after the wait: FC2 may read the routing ahead of its own

  // All tokens' activations, a thread to a block; the first warps are busy with the items.
  const auto each_block = [&](auto body) {
#pragma unroll 1
    for (int i = blockDim.x - 1 - threadIdx.x; i < p.tokens * blocks; i += blockDim.x) {
      const int token = p.tokens == 1 ? 0 : i / blocks, block = p.tokens == 1 ? i : i % blocks;
      body(static_cast<const T*>(p.x) + static_cast<int64_t>(token) * layer.depth, s.activations + token * stride,
           block);
    }
  };
  Items items(s.items, p.slots, chunk);
  const int num_items = items.Find(p.indices, p.slots, p.k, p.experts, [&] {
    each_block(
        [&](const T* row, char* target, int block) { BeginBlock<Format>(row, target, layer.depth, block, false); });
  });
  const int tile_columns = p.gated ? kTileRows : kSetRows;
  const int tiles = p.fc2.depth / tile_columns;
  const uint32_t units = static_cast<uint32_t>(num_items) * tiles;  // times blocks: far below 2^32
  const int begin = static_cast<int>(units * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);
  const Slice part = SliceOf<Format>(layer, slice);

  // Weight rows of a unit: tile `tile` begins `tile * tile_rows` behind the unit's first.
  const int tile_rows = !p.gated ? kTileRows : p.interleaved ? 1 : p.fc2.depth;
  const int unit_rows = p.gated && !p.interleaved ? kTileRows : kSetRows, row_step = p.gated && p.interleaved ? 2 : 1;
  const auto first_row = [&](int item, int tile) {
    return static_cast<int64_t>(items.Expert(item)) * layer.rows + tile * unit_rows;
  };
  const auto advance = [&](Unit& unit) {
    unit.left -= teams;
    for (unit.tile += teams; unit.tile >= tiles; unit.tile -= tiles) ++unit.item;
  };
  const uint32_t own = begin + team, own_item = own / static_cast<uint32_t>(tiles);
  Unit unit{end - static_cast<int>(own), static_cast<int>(own_item), static_cast<int>(own - own_item * tiles)};

  // The ring runs through all units of the warp.
  Ring ring(s.rings + warp * Ring::kBytes, layer, row_step);
  Unit next = unit;
  int next_groups = 0;
  const auto fill = [&](int at) {
    if (next.left > 0) {
      if (next_groups == 0) {
        const int64_t row = first_row(next.item, next.tile);
        ring.Start(layer, {row, row + 4 * row_step, row + tile_rows, row + tile_rows + 4 * row_step}, part.first);
        next_groups = part.end - part.first;
      }
      ring.Fill(at);
      if (--next_groups == 0) advance(next);
    }
    CommitCopies();
  };
  if (static_cast<int>(threadIdx.x) < num_items) {
    BeginGlobalScale(layer, items.Expert(threadIdx.x), s.scale + threadIdx.x);
  }
  CommitCopies();
#pragma unroll 1
  for (int at = 0; at < Ring::kBytes; at += Ring::kGroupBytes) fill(at);

  WaitForCopies<Ring::kGroups>();
  each_block([&](const T*, char* target, int block) { FinishBlock<Format>(target, layer.depth, block, false); });
  __syncthreads();

  const StagedActivations staged{s.activations, stride, blocks * Format::kBlock * static_cast<int>(sizeof(T))};
  const int batch = Fc1Shared<Format>::Batch(slices, chunk), unit_sums = Fc1Shared<Format>::UnitSums(slices, chunk);
  int at = 0;
  for (int first = begin; first < end; first += batch) {
    const int batch_units = min(batch, end - first), left_behind = end - first - batch_units;
    for (; unit.left > left_behind; advance(unit)) {
      float* const partial = s.partial + (end - first - unit.left) * unit_sums + slice * kSetRows;
      const int count = items.Count(unit.item);
      const auto multiply = [&](auto tokens) {
        const auto activation_row = [&](int token) { return items.Token(unit.item, token); };
        OneExpert<Format, decltype(tokens)::value> products(staged, count, part.first, activation_row);
        MultiplySlice(products, ring, part, activation_row, fill, &at);
        products.Emit([&](int tile, int token, int row, float sum) {
          partial[token * slices * kSetRows + tile * kTileRows + row] = sum;
        });
      };
      if (kTokens == 1 || count == 1) {
        multiply(std::integral_constant<int, 1>());
      } else {
        multiply(std::integral_constant<int, kTokens>());
      }
    }
    __syncthreads();

    // A thread to a column of a unit and token.
#pragma unroll 1
    for (int i = threadIdx.x; i < batch_units * chunk * kTileRows; i += blockDim.x) {
      const int row = i % kTileRows, token = i / kTileRows % chunk, local = i / kTileRows / chunk;
      const int item = (first + local) / tiles, tile = (first + local) % tiles;
      if (token >= items.Count(item)) continue;
      const int member = items.Member(item, token);
      const float* const sums = s.partial + local * unit_sums + token * slices * kSetRows + row;
      float results[2] = {};
      for (int other = 0; other < slices; ++other) {
        results[0] = Add(results[0], sums[other * kSetRows]);
        results[1] = Add(results[1], sums[other * kSetRows + kTileRows]);
      }
      const float scale = LayerScale<Format>(s.scale[item]), mix = p.mix_input ? p.mix[member] : 1.0f;
      const int64_t weight_row = first_row(item, tile) + row * row_step;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        results[side] = LayerOutput<T>(results[side], scale, mix, BiasOf<T>(layer, weight_row + side * tile_rows));
      }
      T* const activated = static_cast<T*>(p.activated) + static_cast<int64_t>(member) * p.activated_stride;
      const int column = tile * tile_columns + row;
#pragma unroll 1
      for (int side = 0; side < (p.gated ? 1 : 2); ++side) {
        const float value = Activated(p, side == 0 ? results[0] : results[1], results[1]);
        activated[Format::Position(column + side * kTileRows)] = HalfTraits<T>::FromFloat(value);
      }
    }
    if (left_behind > 0) __syncthreads();
  }
}

}  // namespace ort_moe
