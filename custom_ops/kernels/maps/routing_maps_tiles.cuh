// Routing maps of any number of choices, in three launches over tiles of neighbouring choices: count each tile's
// choices by expert, sum the counts over the tiles before, and deal out the rows. The scratch holds a row of counts per
// tile and one of totals.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/maps/group_scan.cuh"
#include "kernels/maps/routing_maps.h"

namespace ort_moe {

constexpr int kTileThreads = 256;
constexpr int kMaxTiles = 256;
constexpr int kMinTileChoices = 512;

struct TileParams {
  RoutingMaps maps;
  const int32_t* indices;
  int32_t* counts;  // (tiles + 1, stride); the last row: totals
  int32_t tokens;
  int32_t k;
  int32_t experts;
  int32_t choices;
  int32_t tile;     // choices of a tile
  int32_t tiles;    // that hold choices
  int32_t stride;   // experts + 1, rounded up
  int32_t dealers;  // warps of a block that deal out rows: as many as shared memory holds counts for, at least one

  // Number E where there is none.
  __device__ int32_t ExpertOf(int32_t choice) const {
    const int32_t index = indices[choice];
    return index >= 0 && index < experts ? index : experts;
  }
};

constexpr size_t kMaxDealBytes = 72 << 10;  // of more than one dealer

inline size_t DealBytes(const TileParams& p) { return static_cast<size_t>(p.dealers) * p.stride * sizeof(int32_t); }

inline TileParams MakeTileParams(int64_t tokens, int64_t k, int64_t experts) {
  TileParams p{};
  p.tokens = static_cast<int32_t>(tokens);
  p.k = static_cast<int32_t>(k);
  p.experts = static_cast<int32_t>(experts);
  p.choices = p.tokens * p.k;
  const int64_t even = (tokens * k + kMaxTiles - 1) / kMaxTiles;
  p.tile = static_cast<int32_t>((even + kMinTileChoices - 1) / kMinTileChoices * kMinTileChoices);
  p.tiles = static_cast<int32_t>((tokens * k + p.tile - 1) / p.tile);
  p.stride = (p.experts + 4) / 4 * 4;
  p.dealers = kTileThreads / 32;
  while (p.dealers > 1 && DealBytes(p) > kMaxDealBytes) p.dealers /= 2;
  return p;
}

inline size_t TileScratchBytes(const TileParams& p) {
  return static_cast<size_t>(p.tiles + 1) * p.stride * sizeof(int32_t);
}

__global__ void __launch_bounds__(kTileThreads) CountChoicesKernel(const __grid_constant__ TileParams p) {
  extern __shared__ int32_t counts[];  // (stride)
  for (int32_t e = threadIdx.x; e < p.stride; e += kTileThreads) counts[e] = 0;
  __syncthreads();
  WaitForPrevious();
  AllowNext();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * p.tile;
  const int64_t end = min(begin + p.tile, static_cast<int64_t>(p.choices));
  for (int64_t i = begin + threadIdx.x; i < end; i += kTileThreads) {
    atomicAdd(counts + p.ExpertOf(static_cast<int32_t>(i)), 1);
  }
  __syncthreads();
  int32_t* of_tile = p.counts + static_cast<int64_t>(blockIdx.x) * p.stride;
  for (int32_t e = threadIdx.x; e < p.stride; e += kTileThreads) of_tile[e] = counts[e];
}

// A block takes 32 experts, a warp some neighbouring tiles.
constexpr int kSumWarps = 32;

__global__ void __launch_bounds__(kSumWarps * 32) SumCountsKernel(const __grid_constant__ TileParams p) {
  constexpr int kPerWarp = kMaxTiles / kSumWarps;
  __shared__ int32_t of_warps[kSumWarps][32];
  WaitForPrevious();
  AllowNext();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t expert = static_cast<int32_t>(blockIdx.x) * 32 + lane;
  int32_t count[kPerWarp];
  int32_t sum = 0;
#pragma unroll
  for (int n = 0; n < kPerWarp; ++n) {
    const int32_t tile = warp * kPerWarp + n;
    count[n] = expert < p.stride && tile < p.tiles ? p.counts[static_cast<int64_t>(tile) * p.stride + expert] : 0;
  }
#pragma unroll
  for (int n = 0; n < kPerWarp; ++n) sum += count[n];
  of_warps[warp][lane] = sum;
  __syncthreads();
  int32_t before = 0;
  for (int w = 0; w < warp; ++w) before += of_warps[w][lane];
  if (expert >= p.stride) return;
#pragma unroll
  for (int n = 0; n < kPerWarp; ++n) {
    const int32_t tile = warp * kPerWarp + n;
    if (tile < p.tiles) p.counts[static_cast<int64_t>(tile) * p.stride + expert] = before;
    before += count[n];
  }
  if (warp == kSumWarps - 1) p.counts[static_cast<int64_t>(p.tiles) * p.stride + expert] = before;
}

// Some of the block's warps each take neighbouring choices of its tile, 32 at a time, and have a row of their own in
// shared memory: the next position of each expert.
__global__ void __launch_bounds__(kTileThreads) DealRowsKernel(const __grid_constant__ TileParams p) {
  extern __shared__ int32_t next[];  // (dealers, stride)
  __shared__ int32_t of_warps[kTileThreads / 32];
  constexpr int kBarrier = 1;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  for (int32_t i = thread; i < p.dealers * p.stride; i += kTileThreads) next[i] = 0;
  __syncthreads();
  WaitForPrevious();
  AllowNext();

  int32_t* mine = next + warp * p.stride;
  const int32_t share = p.tile / p.dealers;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * p.tile + static_cast<int64_t>(warp) * share;
  const int64_t end = warp < p.dealers ? min(begin + share, static_cast<int64_t>(p.choices)) : begin;
  for (int64_t i = begin + lane; i < end; i += 32) atomicAdd(mine + p.ExpertOf(static_cast<int32_t>(i)), 1);

  // A thread's experts are neighbours.
  const int32_t* totals = p.counts + static_cast<int64_t>(p.tiles) * p.stride;
  const int32_t* before_tile = p.counts + static_cast<int64_t>(blockIdx.x) * p.stride;
  const int32_t per_thread = (p.stride + kTileThreads - 1) / kTileThreads;
  const int32_t first = thread * per_thread, last = min(first + per_thread, p.stride);
  int32_t count = 0;
  for (int32_t e = first; e < last; ++e) count += totals[e];
  int32_t start = ExclusiveSum<kTileThreads>(count, thread, kBarrier, of_warps);
  for (int32_t e = first; e < last; ++e) {
    if (blockIdx.x == 0 && e <= p.experts) p.maps.expert_first_token_offset[e] = start;
    int32_t position = start + before_tile[e];
    for (int w = 0; w < p.dealers; ++w) {
      const int32_t of_warp = next[w * p.stride + e];
      next[w * p.stride + e] = position;
      position += of_warp;
    }
    start += totals[e];
  }
  __syncthreads();

  for (int64_t base = begin; base < end; base += 32) {
    const int32_t choice = static_cast<int32_t>(base) + lane;
    const bool inside = base + lane < end;
    const unsigned lanes = __ballot_sync(0xffffffffu, inside);
    if (!inside) continue;
    const int32_t expert = p.ExpertOf(choice);
    const unsigned peers = __match_any_sync(lanes, expert);
    const int32_t rank = __popc(peers & ((1u << lane) - 1u));
    const int32_t position = mine[expert] + rank;
    __syncwarp(lanes);
    if (rank == 0) mine[expert] = position + __popc(peers);
    __syncwarp(lanes);
    const int32_t token = choice / p.k;
    const int32_t row = (choice - token * p.k) * p.tokens + token;
    p.maps.permuted_to_unpermuted[position] = row;
    p.maps.unpermuted_to_permuted[row] = expert < p.experts ? position : -1;
    p.maps.permuted_to_expert[position] = expert;
  }
}

}  // namespace ort_moe
