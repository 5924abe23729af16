// FC2 of FusedExperts with finalize taken in, for few tokens.
//
// Mapping: one block a multiprocessor; a block owns tiles of 4, 8 or 16 columns of y, that is so many weight rows of
// every chosen expert. A warp takes units, each one slice of the reduction of 4, 2 or 1 items at one tile. All products
// meet in shared memory, where each is rounded as FC2 rounds alone, and a thread per element of y adds its k choices in
// rank order: the bits are FinalizeRouting's. Bytes: the chosen experts' weights once; no intermediate of k rows a
// token, and one launch less. Bound by: as FC1. Ahead of the wait for FC1 a block reads the routing (FC1 let it start
// only after its own wait, so that what wrote the routing, and all other inputs, have finished) and fills its rings.
#pragma once

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/experts/few/items.cuh"
#include "kernels/experts/mma/product_codes.cuh"
#include "kernels/experts/mma/product_nvfp4.cuh"
#include "kernels/experts/mma/staging.cuh"

namespace ort_moe {

constexpr int kFc2Warps = 16;

// The block's shared memory, in order.
template <typename Format>
struct Fc2Shared {
  static_assert(Format::kFc2Tokens <= kFewChunk, "items are laid out for kFewChunk");

  // `columns`: of a block.
  static __host__ __device__ __forceinline__ size_t Bytes(const LayerParams& layer, int slots, int columns) {
    return kFc2Warps * static_cast<size_t>(WeightRing<Format, Format::kFc2Groups>::kBytes) +
           static_cast<size_t>(slots) * StagedStride<Format>(layer.depth) +
           static_cast<size_t>(slots) * (columns * layer.slices + 2) * sizeof(float) + Items::Bytes(slots, kFewChunk) +
           3 * sizeof(uint4);
  }

  __device__ __forceinline__ Fc2Shared(uint4* memory, const ExpertsParams& p) {
    const int slots = p.slots;
    rings = reinterpret_cast<char*>(memory);
    activations = rings + kFc2Warps * WeightRing<Format, Format::kFc2Groups>::kBytes;
    items = activations + slots * StagedStride<Format>(p.fc2.depth);
    mix = reinterpret_cast<float*>(static_cast<char*>(items) + (Items::Bytes(slots, kFewChunk) + 15) / 16 * 16);
    scale = mix + slots;
    partial = scale + slots;
  }

  char* rings;        // of each warp
  char* activations;  // (slots) rows
  void* items;
  float* mix;      // (slots)
  float* scale;    // (slots) of the expert
  float* partial;  // (tiles, slots, slices, columns of a tile)
};

// kColumns: of a tile.
template <typename Format, int kTokens, int kColumns>
__global__ void __launch_bounds__(kFc2Warps* kLanes, 1) Fc2FinalizeKernel(const ExpertsParams p) {
  using T = typename Format::Element;
  using Ring = WeightRing<Format, Format::kFc2Groups>;
  constexpr int kUnitItems = kSetRows / kColumns;
  extern __shared__ uint4 shared[];
  const LayerParams& layer = p.fc2;
  const Fc2Shared<Format> s(shared, p);
  const int warp = threadIdx.x / kLanes;
  const int slots = p.slots, slices = layer.slices;
  const int stride = StagedStride<Format>(layer.depth);
  const uint32_t all_tiles = layer.rows / kColumns;  // times blocks: below 2^32
  const int first_tile = static_cast<int>(all_tiles * blockIdx.x / gridDim.x);
  const int tiles = static_cast<int>(all_tiles * (blockIdx.x + 1) / gridDim.x) - first_tile;

  // What does not take the choices, while they are on their way.
  const int choice = kTokens == 1 ? Items::Choice(p.indices, slots, p.experts) : -1;
  Items items(s.items, slots, kTokens);
  Ring ring(s.rings + warp * Ring::kBytes, layer, 1);
  const int blocks = PaddedDepth<Format>(layer.depth) / Format::kBlock;
  int slot = static_cast<int>(threadIdx.x / static_cast<uint32_t>(blocks)), block = threadIdx.x - slot * blocks;
  const T* row = static_cast<const T*>(p.activated) + static_cast<int64_t>(slot) * p.activated_stride;

  int num_items, item_expert = -1;  // of one token: as in FC1
  if constexpr (kTokens == 1) {
    num_items = items.TakeAlone(choice, &item_expert);
  } else {
    if (warp == 0) items.Find(p.indices, slots, p.k, p.experts);
    __syncthreads();
    num_items = items.NumItems();
  }
  const auto expert_of = [&](int item) {
    item = min(item, num_items - 1);
    return kTokens == 1 ? __shfl_sync(0xffffffffu, item_expert, item) : items.Expert(item);
  };

  // Units in the order of their tiles.
  const int tile_units = (num_items + kUnitItems - 1) / kUnitItems * slices;
  struct Fc2Unit {
    int tile, within;  // the tile's units
  };
  const auto advance = [&](Fc2Unit& at, int by) {
    for (at.within += by; at.within >= tile_units && at.tile < tiles; at.within -= tile_units) ++at.tile;
  };
  const auto item_of = [&](const Fc2Unit& at) { return kUnitItems * (slices == 1 ? at.within : at.within / slices); };
  const auto part_of = [&](const Fc2Unit& at) { return SliceOf<Format>(layer, slices == 1 ? 0 : at.within % slices); };
  Fc2Unit next{num_items == 0 ? tiles : 0, 0};
  advance(next, warp);
  Fc2Unit unit = next;
  int next_groups = 0;
  const auto fill = [&](int at) {
    if (next.tile < tiles) {
      if (next_groups == 0) {
        const Slice part = part_of(next);
        const int item = item_of(next), first_row = (first_tile + next.tile) * kColumns;
        int experts[kUnitItems];
#pragma unroll
        for (int i = 0; i < kUnitItems; ++i) experts[i] = expert_of(item + i);
        const auto expert = [&](int quarter) { return experts[4 * quarter / kColumns]; };
        const auto quarter_row = [&](int quarter) { return first_row + 4 * quarter % kColumns; };
        ring.Start(layer, {quarter_row(0), quarter_row(1), quarter_row(2), quarter_row(3)}, part.first);
        ring.Choose(layer, {expert(0), expert(1), expert(2), expert(3)});
        next_groups = part.end - part.first;
      }
      ring.Fill(at);
      if (--next_groups == 0) advance(next, kFc2Warps);
    }
    CommitCopies();
  };
#pragma unroll 1
  for (int at = 0; at < Ring::kBytes; at += Ring::kGroupBytes) fill(at);
  if (kTokens == 1) __syncthreads();  // the items

  for (int i = threadIdx.x; i < slots; i += blockDim.x) {
    const int expert = items.SlotExpert(i);
    if (p.mix_input || expert < 0) {
      s.mix[i] = 1.0f;
    } else {
      CopyWord(s.mix + i, p.mix + i);
    }
    if (expert >= 0) BeginGlobalScale(layer, expert, s.scale + i);
  }

  WaitForPreviousBehind(block, reinterpret_cast<uintptr_t>(row));
  AllowNext();

  // Some blocks are on their way together where there are many.
  constexpr int kAtOnce = kTokens == 1 ? 1 : 4;
#pragma unroll 1
  while (slot < slots) {
    BlockInRegisters<Format> activations[kAtOnce];
    int at_slot[kAtOnce], at_block[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      at_slot[i] = slot < slots && items.SlotExpert(slot) >= 0 ? slot : -1;
      at_block[i] = block;
      if (at_slot[i] >= 0) activations[i].Load(row, layer.depth, block, true);
      for (block += blockDim.x; block >= blocks; block -= blocks, row += p.activated_stride) ++slot;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (at_slot[i] >= 0) activations[i].Stage(s.activations + at_slot[i] * stride, layer.depth, at_block[i], true);
    }
  }
  __syncthreads();

  const StagedActivations staged{s.activations, stride, blocks * Format::kBlock * static_cast<int>(sizeof(T))};
  int at = 0;
  for (; unit.tile < tiles; advance(unit, kFc2Warps)) {
    const int item = item_of(unit), tile = unit.tile, slice = slices == 1 ? 0 : unit.within % slices;
    const auto count_of = [&](int i) { return i < kUnitItems && item + i < num_items ? items.Count(item + i) : 0; };
    const int4 counts = make_int4(count_of(0), count_of(1), count_of(2), count_of(3));
    const Slice part = part_of(unit);
    const auto multiply = [&](auto tokens) {
      constexpr int kCount = decltype(tokens)::value;
      const auto store = [&](int member, int row, float sum) {
        s.partial[((tile * slots + member) * slices + slice) * kColumns + row] = sum;
      };
      if constexpr (kUnitItems == 1) {
        const auto member = [&](int token) { return items.Member(item, token); };
        OneExpert<Format, kCount> products(staged, counts.x, part.first, member);
        MultiplySlice(products, ring, part, member, fill, &at);
        products.Emit(
            [&](int side, int token, int row, float sum) { store(member(token), side * kTileRows + row, sum); });
      } else {
        const auto member = [&](int side, int token) { return items.Member(item + side, token); };
        MoreExperts<Format, kCount, kColumns> products(staged, counts, part.first, member);
        MultiplySlice(products, ring, part, member, fill, &at);
        products.Emit([&](int side, int token, int row, float sum) { store(member(side, token), row, sum); });
      }
    };
    ForTokens<Format, kTokens>(max(max(counts.x, counts.y), max(counts.z, counts.w)), multiply);
  }
  CommitCopies();  // of mix and scale, if no weights have closed their group
  WaitForCopies<0>();
  __syncthreads();

  // FC2's rounded outputs, in place of the first slice.
  for (int i = threadIdx.x; i < tiles * slots * kColumns; i += blockDim.x) {
    const int tile = i / kColumns / slots, slot = i / kColumns % slots, row = i % kColumns;
    const int expert = items.SlotExpert(slot);
    float* const sums = s.partial + (tile * slots + slot) * slices * kColumns + row;
    if (expert < 0) {
      sums[0] = -0.0f;  // adds nothing
      continue;
    }
    float sum = 0.0f;
    for (int slice = 0; slice < slices; ++slice) sum = Add(sum, sums[slice * kColumns]);
    const int column = (first_tile + tile) * kColumns + row;
    const float bias = BiasOf<T>(layer, static_cast<int64_t>(expert) * layer.rows + column);
    sums[0] = LayerOutput<T>(sum, LayerScale<Format>(s.scale[slot]), 1.0f, bias);
  }
  __syncthreads();

  for (int i = threadIdx.x; i < tiles * p.tokens * kColumns; i += blockDim.x) {
    const int tile = i / kColumns / p.tokens, token = i / kColumns % p.tokens, row = i % kColumns;
    const float* const outputs = s.partial + tile * slots * slices * kColumns + row;
    float y = 0.0f;
#pragma unroll 4
    for (int slot = token * p.k; slot < (token + 1) * p.k; ++slot) {
      y = Fma(s.mix[slot], outputs[slot * slices * kColumns], y);
    }
    const int64_t out = static_cast<int64_t>(token) * layer.rows + (first_tile + tile) * kColumns + row;
    if (p.residual != nullptr) y = Add(y, HalfTraits<T>::ToFloat(static_cast<const T*>(p.residual)[out]));
    static_cast<T*>(p.y)[out] = HalfTraits<T>::FromFloat(y);
  }
}

}  // namespace ort_moe
