// FC1 of FusedExperts with its activation, for few tokens.
//
// Mapping: one block a multiprocessor, and all of them share out the units: 16 weight rows of an item (with gates: 8
// gates and the 8 values they meet). A team of warps takes a unit, each a slice of its reduction, and one of them
// finishes it while the others go on to the next, whose weights are under way. Bytes: the chosen experts' weights once.
// Bound by: memory, once the loop runs (4 TB/s at four tokens); at one token by what each block does before and after.
#pragma once

#include <cstdint>

#include "kernels/common/cluster.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/experts/activation.cuh"
#include "kernels/experts/few/items.cuh"
#include "kernels/experts/mma/product_codes.cuh"
#include "kernels/experts/mma/product_nvfp4.cuh"
#include "kernels/experts/mma/staging.cuh"

namespace ort_moe {

constexpr int kFc1Warps = 16;

// The block's shared memory, in order.
template <typename Format>
struct Fc1Shared {
  // Of the units that a block's warps work at, twice.
  static __host__ __device__ __forceinline__ size_t PartialBytes(int chunk) {
    return 2 * static_cast<size_t>(kFc1Warps * chunk * kSetRows) * sizeof(float);
  }

  static __host__ __device__ __forceinline__ size_t Bytes(int depth, int tokens, int slots, int chunk) {
    return kFc1Warps * static_cast<size_t>(WeightRing<Format, Format::kFc1Groups>::kBytes) +
           static_cast<size_t>(tokens) * StagedStride<Format>(depth) + PartialBytes(chunk) + Items::Bytes(slots, chunk);
  }

  __device__ __forceinline__ Fc1Shared(uint4* memory, const ExpertsParams& p) {
    rings = reinterpret_cast<char*>(memory);
    activations = rings + kFc1Warps * WeightRing<Format, Format::kFc1Groups>::kBytes;
    partial = reinterpret_cast<float*>(activations + p.tokens * StagedStride<Format>(p.fc1.depth));
    items = partial + PartialBytes(p.chunk) / sizeof(float);
  }

  char* rings;        // of each warp
  char* activations;  // (tokens) rows
  float* partial;     // (2, teams, chunk, slices, kSetRows)
  void* items;
};

// A warp's next unit: how many are left from it on, of the block's or of all, and where it lies.
struct Fc1Unit {
  int left, item, tile;
};

// A barrier of the warps that share units, `warps` of them: team `team`. All must have found as many units, from the
// same indices.
__device__ __forceinline__ void SyncTeam(int team, int warps) {
  if (warps == 1) {
    __syncwarp();
  } else {
    BlockSync(team + 1, warps * kLanes);
  }
}

template <typename Format, int kTokens>
__global__ void __launch_bounds__(kFc1Warps* kLanes, 1) Fc1Kernel(const ExpertsParams p) {
  using T = typename Format::Element;
  using Ring = WeightRing<Format, Format::kFc1Groups>;
  static_assert(kTokens * kTileRows <= kLanes, "a warp finishes a unit at once");
  extern __shared__ uint4 shared[];
  const LayerParams& layer = p.fc1;
  const Fc1Shared<Format> s(shared, p);
  const int warp = threadIdx.x / kLanes;
  const int slices = layer.slices, chunk = p.chunk;
  const int team = warp / slices, slice = warp % slices, teams = blockDim.x / kLanes / slices;
  const int stride = StagedStride<Format>(layer.depth), blocks = PaddedDepth<Format>(layer.depth) / Format::kBlock;

  // Ahead of the wait: the block of the tokens' activations that the thread stages first, of threads in reverse, for
  // the first warp is busy with the items; and the warp's units. A block's are neighbours where all take as long, else
  // a grid apart, for those of an expert that several tokens share take longer.
  const int first_block = blockDim.x - 1 - threadIdx.x;
  int token = kTokens == 1 ? 0 : first_block / blocks, block = first_block - token * blocks;
  const T* row = static_cast<const T*>(p.x) + static_cast<int64_t>(token) * layer.depth;
  const int tile_columns = p.gated ? kTileRows : kSetRows;
  const int tiles = p.fc2.depth / tile_columns;
  const int apart = kTokens == 1 ? 1 : gridDim.x;
  const int apart_items = teams * apart / tiles, apart_tiles = teams * apart - apart_items * tiles;
  Fc1Unit unit;
  const auto share_out = [&](int num_items) {
    const uint32_t units = static_cast<uint32_t>(num_items) * tiles;  // times blocks: far below 2^32
    const uint32_t begin = kTokens == 1 ? units * blockIdx.x / gridDim.x : blockIdx.x;
    const uint32_t end = kTokens == 1 ? units * (blockIdx.x + 1) / gridDim.x : units;
    const uint32_t own = begin + team * apart, own_item = own / static_cast<uint32_t>(tiles);
    unit = {static_cast<int>(end - own), static_cast<int>(own_item), static_cast<int>(own - own_item * tiles)};
  };
  share_out(p.slots);
  const auto advance = [&](Fc1Unit& at_unit) {
    at_unit.left -= teams * apart;
    at_unit.item += apart_items;
    at_unit.tile += apart_tiles;
    if (at_unit.tile >= tiles) {
      at_unit.tile -= tiles;
      ++at_unit.item;
    }
  };

  // The ring runs through all units of the warp. Weight rows of a unit: tile `tile` begins `tile * tile_rows` behind
  // the unit's first.
  const Slice part = SliceOf<Format>(layer, slice);
  const int tile_rows = !p.gated ? kTileRows : p.interleaved ? 1 : p.fc2.depth;
  const int unit_rows = p.gated && !p.interleaved ? kTileRows : kSetRows, row_step = p.gated && p.interleaved ? 2 : 1;
  Ring ring(s.rings + warp * Ring::kBytes, layer, row_step);
  const auto start = [&](int tile) {
    const int at = tile * unit_rows;
    ring.Start(layer, {at, at + 4 * row_step, at + tile_rows, at + tile_rows + 4 * row_step}, part.first);
  };
  start(unit.tile);
  Items items(s.items, p.slots, kTokens == 1 ? 1 : chunk);

  WaitForPreviousBehind(ring.Started(), unit.left, unit.item, apart_items, apart_tiles, block,
                        reinterpret_cast<uintptr_t>(row));
  AllowNext();  // after the wait: FC2 may read the routing ahead of its own

  BlockInRegisters<Format> activations;
  const bool stages = token < p.tokens && block < blocks;
  if (stages) activations.Load(row, layer.depth, block, false);
  const auto stage = [&] {
    if (stages) activations.Stage(s.activations + token * stride, layer.depth, block, false);
    for (block += blockDim.x;; block += blockDim.x) {
      for (; block >= blocks; block -= blocks, row += layer.depth) ++token;
      if (token >= p.tokens) break;
      activations.Load(row, layer.depth, block, false);
      activations.Stage(s.activations + token * stride, layer.depth, block, false);
    }
    __syncthreads();
  };
  int item_expert = -1;  // of one token: of the item that has the lane's number
  if constexpr (kTokens == 1) {
    const int num_items = items.TakeAlone(Items::Choice(p.indices, p.slots, p.experts), &item_expert);
    if (num_items != p.slots) {
      share_out(num_items);
      start(unit.tile);
    }
  } else {
    if (warp == 0) items.Find(p.indices, p.slots, p.k, p.experts);
    stage();
    unit.left -= (p.slots - items.NumItems()) * tiles;
  }
  const auto expert_of = [&](int item) {
    return kTokens == 1 ? __shfl_sync(0xffffffffu, item_expert, item) : items.Expert(item);
  };
  const auto choose = [&](int item) {
    const int expert = expert_of(item);
    ring.Choose(layer, {expert, expert, expert, expert});
  };

  Fc1Unit next = unit;
  if (next.left > 0) choose(next.item);
  int next_groups = part.end - part.first;
  const auto fill = [&](int at) {
    if (next.left > 0) {
      if (next_groups == 0) {
        start(next.tile);
        choose(next.item);
        next_groups = part.end - part.first;
      }
      ring.Fill(at);
      if (--next_groups == 0) advance(next);
    }
    CommitCopies();
  };
#pragma unroll 1
  for (int at = 0; at < Ring::kBytes; at += Ring::kGroupBytes) fill(at);
  if (kTokens == 1) stage();

  const StagedActivations staged{s.activations, stride, blocks * Format::kBlock * static_cast<int>(sizeof(T))};
  const int unit_sums = chunk * slices * kSetRows;
  float* partial = s.partial + team * unit_sums;
  float* other_partial = partial + teams * unit_sums;
  int at = 0, turn = slice;  // units until this warp finishes one
  for (; unit.left > 0; advance(unit)) {
    const int count = kTokens == 1 ? 1 : items.Count(unit.item);
    const int expert = expert_of(unit.item);
    const float global_scale = layer.global_scale == nullptr ? 1.0f : layer.global_scale[expert];
    const auto multiply = [&](auto tokens) {
      const auto activation_row = [&](int i) { return kTokens == 1 ? 0 : items.Token(unit.item, i); };
      OneExpert<Format, decltype(tokens)::value> products(staged, count, part.first, activation_row);
      MultiplySlice(products, ring, part, activation_row, fill, &at);
      products.Emit([&](int tile, int i, int r, float sum) {
        partial[(i * slices + slice) * kSetRows + tile * kTileRows + r] = sum;
      });
    };
    ForTokens<Format, kTokens>(count, multiply);

    // The team's warps finish a unit in turn, a lane to a column of a token. They come to the next unit's sums only
    // when this one's have been read.
    SyncTeam(team, slices);
    const bool finishes = turn == 0;
    turn = finishes ? slices - 1 : turn - 1;
    const int own = kTokens == 1 ? 0 : threadIdx.x % kLanes / kTileRows, own_row = threadIdx.x % kTileRows;
    if (finishes && own < count && (kTokens > 1 || threadIdx.x % kLanes < kTileRows)) {
      const int member = items.Member(unit.item, own);
      const float* const sums = partial + own * slices * kSetRows + own_row;
      float results[2] = {};
      for (int other = 0; other < slices; ++other) {
        results[0] = Add(results[0], sums[other * kSetRows]);
        results[1] = Add(results[1], sums[other * kSetRows + kTileRows]);
      }
      const float scale = LayerScale<Format>(global_scale), mix = p.mix_input ? p.mix[member] : 1.0f;
      const int64_t weight_row = static_cast<int64_t>(expert) * layer.rows + unit.tile * unit_rows + own_row * row_step;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        results[side] = LayerOutput<T>(results[side], scale, mix, BiasOf<T>(layer, weight_row + side * tile_rows));
      }
      T* const activated = static_cast<T*>(p.activated) + static_cast<int64_t>(member) * p.activated_stride;
      const int column = unit.tile * tile_columns + own_row;
#pragma unroll 1
      for (int side = 0; side < (p.gated ? 1 : 2); ++side) {
        const float value = Activated(p, side == 0 ? results[0] : results[1], results[1]);
        activated[Format::Position(column + side * kTileRows)] = HalfTraits<T>::FromFloat(value);
      }
    }
    __syncwarp();
    float* const read = partial;
    partial = other_partial;
    other_partial = read;
  }
}

}  // namespace ort_moe
