// The list of work of the grouped product: which expert's rows each block multiplies with which of its weights.
//
// An expert with rows is cut into token tiles of about the same height, at most `max_tokens`, and row tiles of its
// weights; a tile is one of each. Tiles of one row tile are neighbours, and so are computed at the same time: its
// weights come from memory once. Blocks take tiles in turn. Experts without rows have none.
#pragma once

#include <cstdint>

#include "kernels/experts/params.cuh"

namespace ort_moe {

constexpr int kMaxGemmWarps = 32;  // of a block
constexpr int kTokenGranule = 8;   // rows of a token tile are cut at multiples

struct GemmTile {
  int expert;
  int first;   // permuted row
  int tokens;  // rows
  int row_tile;
};

// In shared memory, for all experts: E + 1 row offsets and E + 1 numbers of the tiles before an expert.
struct GemmTileList {
  int* offsets;
  int* before;
  int experts, row_tiles, max_tokens;

  static __host__ __device__ __forceinline__ int Bytes(int experts) {
    return (2 * (experts + 1) + kMaxGemmWarps) * static_cast<int>(sizeof(int));
  }

  __device__ __forceinline__ GemmTileList(char* memory, int experts, int row_tiles, int max_tokens)
      : offsets(reinterpret_cast<int*>(memory)),
        before(offsets + experts + 1),
        experts(experts),
        row_tiles(row_tiles),
        max_tokens(max_tokens) {}

  // By all threads; ends with a barrier. Offsets of other indices do no harm.
  __device__ __forceinline__ void Build(const int64_t* first_rows, int slots) {
    int* const of_warps = before + experts + 1;
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
      offsets[e] = static_cast<int>(min(max(first_rows[e], int64_t{0}), static_cast<int64_t>(slots)));
    }
    __syncthreads();
    const int share = (experts + blockDim.x - 1) / blockDim.x,
              begin = min(share * static_cast<int>(threadIdx.x), experts);
    const int end = min(begin + share, experts);
    int mine = 0;
    for (int e = begin; e < end; ++e) mine += TokenTiles(e) * row_tiles;
    int sum = mine;
#pragma unroll
    for (int stride = 1; stride < kLanes; stride *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, stride);
      if (lane >= stride) sum += other;
    }
    if (lane == kLanes - 1) of_warps[warp] = sum;
    __syncthreads();
    int total = sum - mine;
    for (int w = 0; w < warp; ++w) total += of_warps[w];
    for (int e = begin; e < end; ++e) {
      before[e] = total;
      total += TokenTiles(e) * row_tiles;
    }
    if (end == experts && (begin < end || threadIdx.x == 0)) before[experts] = total;
    __syncthreads();
  }

  __device__ __forceinline__ int TokenTiles(int expert) const {
    return (max(offsets[expert + 1] - offsets[expert], 0) + max_tokens - 1) / max_tokens;
  }
};

// A warp's walk over the block's tiles.
class GemmTileWalk {
 public:
  __device__ __forceinline__ explicit GemmTileWalk(const GemmTileList& list)
      : next_(blockIdx.x), end_(list.before[list.experts]), expert_(0) {}

  // By whole warps. False behind the last.
  __device__ __forceinline__ bool Next(const GemmTileList& list, GemmTile* tile) {
    if (next_ >= end_) return false;
    const int lane = threadIdx.x % kLanes;
    while (true) {
      const int expert = expert_ + lane;
      const unsigned behind =
          __ballot_sync(0xffffffffu, expert < list.experts && list.before[min(expert + 1, list.experts)] > next_);
      if (behind != 0) {
        expert_ += __ffs(behind) - 1;
        break;
      }
      expert_ += kLanes;
    }
    const int local = next_ - list.before[expert_], first = list.offsets[expert_];
    const int tokens = list.offsets[expert_ + 1] - first;
    if (tokens <= list.max_tokens) {
      *tile = {expert_, first, tokens, local};
      next_ += gridDim.x;
      return true;
    }
    const int parts = (tokens + list.max_tokens - 1) / list.max_tokens;
    const int height = ((tokens + parts - 1) / parts + kTokenGranule - 1) / kTokenGranule * kTokenGranule;
    const int part = local % parts;
    tile->expert = expert_;
    tile->row_tile = local / parts;
    tile->first = first + part * height;
    tile->tokens = min(height, tokens - part * height);
    next_ += gridDim.x;
    return true;
  }

 private:
  int next_, end_, expert_;
};

}  // namespace ort_moe
