// The rows of PermuteTokens behind the kernels of the maps: each token's row is read once and written to its K places.
//
// Those kernels wait for their predecessor before they let the next one start, so x is there from the first instruction
// and is loaded ahead of the wait. On Hopper a row goes through shared memory, and bulk copies write it: 131 us for
// 8192 tokens of 5 KB and 10 choices where vector stores take 136. By permuted position instead, which writes in order
// and reads each row K times from the second-level cache, it takes 183.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/hopper_copies.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/permute/permute_tokens_params.cuh"

namespace ort_moe {

// Zeros for the rows without an expert, by all threads of all blocks that have this one's columns.
template <typename Vector>
__device__ void WriteZeroRows(const PermuteParams& p, int64_t block, int64_t blocks, int64_t column, int64_t step) {
  const int64_t rows = p.count();
  for (int64_t row = p.maps.expert_first_token_offset[p.experts] + block; row < rows; row += blocks) {
    for (int64_t c = column; c < p.vectors; c += step) StoreOnce(p.permuted_x, row * p.vectors + c, Vector{});
  }
}

// --- By vector stores ---

constexpr int64_t kStoreThreads = 256;
constexpr int64_t kMaxGridRows = 65535;  // the device's

template <typename Vector>
__global__ void __launch_bounds__(kStoreThreads) StoreRowsKernel(const __grid_constant__ PermuteParams p) {
  constexpr int kLanes = 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool inside = column < p.vectors;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  int64_t token = blockIdx.y;
  Vector value{};
  if (inside) value = LoadOnce<Vector>(p.x, token * p.vectors + column);
  WaitForPrevious();
  AllowNext();
  while (true) {
    for (int32_t first = 0; first < p.k; first += kLanes) {
      const int32_t count = min(kLanes, p.k - first);
      const int32_t mine =
          lane < count ? p.maps.unpermuted_to_permuted[(first + lane) * int64_t{p.tokens} + token] : -1;
#pragma unroll 2
      for (int32_t n = 0; n < count; ++n) {
        const int64_t place = __shfl_sync(0xffffffffu, mine, n);
        if (place >= 0 && inside) StoreOnce(p.permuted_x, place * p.vectors + column, value);
      }
    }
    token += gridDim.y;
    if (token >= p.tokens) break;
    if (inside) value = LoadOnce<Vector>(p.x, token * p.vectors + column);
  }
  WriteZeroRows<Vector>(p, blockIdx.y, gridDim.y, column, static_cast<int64_t>(gridDim.x) * blockDim.x);
}

// --- By bulk copies ---

constexpr int kBulkThreads = 64;
constexpr int64_t kMaxBulkBytes = 64 << 10;  // of a row

// A block is a token.
__global__ void __launch_bounds__(kBulkThreads) CopyRowsKernel(const __grid_constant__ PermuteParams p) {
  extern __shared__ __align__(128) uint4 row[];
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t token = blockIdx.x;
#pragma unroll 5
  for (int64_t c = thread; c < p.vectors; c += kBulkThreads) row[c] = LoadOnce<uint4>(p.x, token * p.vectors + c);
  FenceForAsyncProxy();  // another thread copies what this one wrote
  WaitForPrevious();
  AllowNext();
  __syncthreads();
  for (int32_t j = thread; j < p.k; j += kBulkThreads) {
    const int64_t place = p.maps.unpermuted_to_permuted[j * int64_t{p.tokens} + token];
    if (place < 0) continue;
    StoreBulkOnce(static_cast<uint4*>(p.permuted_x) + place * p.vectors, SharedAddress(row),
                  static_cast<int>(p.vectors * sizeof(uint4)));
  }
  WriteZeroRows<uint4>(p, blockIdx.x, gridDim.x, thread, kBulkThreads);
  CommitBulkStores();
  WaitForBulkReads();
}

template <typename Vector>
cudaError_t LaunchRows(const PermuteParams& p, cudaStream_t stream) {
  if constexpr (sizeof(Vector) == sizeof(uint4)) {
    KernelTraits traits;
    if (cudaError_t error = QueryKernel<CopyRowsKernel>(&traits); error != cudaSuccess) return error;
    const int64_t row_bytes = p.vectors * static_cast<int64_t>(sizeof(Vector));
    if (traits.hopper && row_bytes <= kMaxBulkBytes) {
      return Launch<CopyRowsKernel>(static_cast<unsigned>(p.tokens), kBulkThreads, row_bytes, stream, p);
    }
  }
  const int64_t blocks = (p.vectors + kStoreThreads - 1) / kStoreThreads;
  const int64_t threads = ((p.vectors + blocks - 1) / blocks + 31) / 32 * 32;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(std::min<int64_t>(p.tokens, kMaxGridRows)));
  return Launch<StoreRowsKernel<Vector>>(grid, static_cast<unsigned>(threads), 0, stream, p);
}

}  // namespace ort_moe
