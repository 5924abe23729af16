// Launches of the training ops' row kernels: how many warps walk over the rows.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/router/fused_router_row.cuh"

namespace ort_moe {

constexpr int kMaxRowThreads = 8 * kWarp;  // of a block

struct RowGrid {
  int64_t warps = 0;   // of a block
  int64_t blocks = 0;  // of a multiprocessor

  int64_t all() const { return warps * blocks; }
};

// The most warps up to `most` that a multiprocessor has place for, in the largest blocks that allow it. `block_bytes`
// is what a block may have, nearly all that a multiprocessor has.
inline RowGrid FillMultiprocessor(int64_t block_bytes, int64_t warp_bytes, int64_t most) {
  constexpr int64_t kReservedBytes = 1 << 10;  // of a block, by the system
  RowGrid best;
  for (int64_t warps = kMaxRowThreads / kWarp; warps > 0; --warps) {
    if (warps * warp_bytes > block_bytes) continue;
    const int64_t fitting = (block_bytes + kReservedBytes) / (warps * warp_bytes + kReservedBytes);
    const int64_t blocks = std::max<int64_t>(1, std::min(fitting, most / warps));
    if (warps * blocks > best.all()) best = {warps, blocks};
  }
  return best;
}

// One launch of kKernel on rows that `grid` has been chosen for.
template <auto kKernel, typename Params>
cudaError_t LaunchOverRows(RowGrid grid, int64_t rows, int64_t warp_bytes, const Params& params, cudaStream_t stream) {
  int device = 0, multiprocessors = 1;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  if (grid.all() == 0) return cudaErrorInvalidValue;                      // not one row fits
  const int64_t spread = (rows + multiprocessors - 1) / multiprocessors;  // few rows: over all multiprocessors
  const int64_t warps = std::min(grid.warps, spread);
  const int64_t blocks = std::min((rows + warps - 1) / warps, multiprocessors * grid.blocks);
  return Launch<kKernel>(static_cast<unsigned>(blocks), static_cast<unsigned>(warps * kWarp),
                         static_cast<size_t>(warps * warp_bytes), stream, params);
}

// A warp of a row kernel: Rows(params, shared) sets its shared memory up, ahead of what the kernel before has written.
template <typename Rows, typename Params, void (Rows::*kOneRow)()>
__device__ __forceinline__ void WalkOverRows(const Params& p, unsigned char* shared) {
  const int warp = threadIdx.x / kWarp;
  const int64_t warps = blockDim.x / kWarp;
  Rows rows(p, shared + warp * p.warp_bytes);
  WaitForPrevious();
  AllowNext();
  rows.Begin(blockIdx.x * warps + warp, gridDim.x * warps);
  while (rows.row() < p.rows) (rows.*kOneRow)();
  rows.Finish();
}

}  // namespace ort_moe
