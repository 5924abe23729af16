// PermuteTokens of up to 32768 choices in one launch: every block finds the places of its own tokens' rows as
// routing_maps_counted.cuh tells. A block has neighbouring tokens, or with few tokens some columns of one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/maps/routing_maps_counted.cuh"
#include "kernels/permute/permute_tokens_params.cuh"

namespace ort_moe {

constexpr int64_t kFewCounted = 1 << 10;  // choices up to which a block is small
constexpr int64_t kBlocks = 128;          // about as many as there are multiprocessors
constexpr int64_t kMinBlockVectors = 64;  // of a row, before its columns are shared by blocks
constexpr int64_t kMaxBlockVectors = 1 << 20;

// A block has neighbouring tokens and neighbouring columns of them.
template <typename Vector, int kThreads>
__global__ void __launch_bounds__(kThreads) PermuteAtOnceKernel(const __grid_constant__ PermuteParams p) {
  extern __shared__ int32_t shared[];
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t first_token = static_cast<int32_t>(blockIdx.y) * p.block_tokens;
  const int32_t tokens = min(p.block_tokens, p.tokens - first_token);
  const int32_t begin = first_token * p.k, end = begin + tokens * p.k;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * p.block_vectors;
  const int32_t columns = static_cast<int32_t>(min(static_cast<int64_t>(p.block_vectors), p.vectors - first_column));
  const int64_t start = first_token * p.vectors + first_column;

  Places<kThreads> places(p, p.block_choices(), shared, thread);
  places.Clear();
  // A thread's vectors are kThreads apart in the block's tokens, one after another.
  const int32_t token_step = kThreads / columns, column_step = kThreads % columns;
  const int32_t my_token = thread / columns, my_column = thread % columns;
  const auto for_mine = [&](const auto& visit) {
    int32_t column = my_column;
#pragma unroll 1
    for (int32_t token = my_token; token < tokens; token += token_step) {
      visit(token, column);
      column += column_step;
      if (column >= columns) {
        column -= columns;
        ++token;
      }
    }
  };
  constexpr int kLineBytes = 128;
  for_mine([&](int32_t token, int32_t column) {
    const Vector* address = static_cast<const Vector*>(p.x) + start + token * p.vectors + column;
    if (reinterpret_cast<uintptr_t>(address) % kLineBytes < sizeof(Vector)) PrefetchIntoL2(address);
  });
  __syncthreads();
  WaitForPrevious();
  AllowNext();

  places.Count(begin, end);
  __syncthreads();
  places.Sum(blockIdx.x == 0 && blockIdx.y == 0);
  __syncthreads();
  places.Find(begin, end, blockIdx.x == 0);
  __syncthreads();

  for_mine([&](int32_t token, int32_t column) {
    const Vector value = LoadOnce<Vector>(p.x, start + token * p.vectors + column);
    const int32_t* place_of = places.place_of + token * p.k;
#pragma unroll 2
    for (int32_t j = 0; j < p.k; ++j) {
      const int32_t place = place_of[j];
      const int64_t row = place < 0 ? ~place : place;
      StoreOnce(p.permuted_x, row * p.vectors + first_column + column, place < 0 ? Vector{} : value);
    }
  });
}

// Among blocks.
inline void Divide(PermuteParams* p) {
  p->block_tokens = static_cast<int32_t>((p->tokens + kBlocks - 1) / kBlocks);
  const int64_t rows = (p->tokens + p->block_tokens - 1) / p->block_tokens;
  const int64_t most = std::max<int64_t>(1, p->vectors / kMinBlockVectors);
  const int64_t parts = std::clamp<int64_t>(kBlocks / rows, 1, most);
  p->block_vectors = static_cast<int32_t>(std::min((p->vectors + parts - 1) / parts, kMaxBlockVectors));
}

// `p` is divided.
inline bool FitsAtOnce(const PermuteParams& p) { return FitsCounting(p, p.block_choices()); }

template <typename Vector, int kThreads>
cudaError_t LaunchAtOnce(const PermuteParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.vectors + p.block_vectors - 1) / p.block_vectors),
                  static_cast<unsigned>((p.tokens + p.block_tokens - 1) / p.block_tokens));
  return Launch<PermuteAtOnceKernel<Vector, kThreads>>(grid, kThreads, CountingBytes(p, p.block_choices()), stream, p);
}

}  // namespace ort_moe
