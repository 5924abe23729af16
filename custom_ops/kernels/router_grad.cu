// Gradients of RouterProbs and RouterScores.
//
//   marked    RouterProbs but the softmax over all experts: only the map's experts have a gradient
//   rows      every expert has one: the softmax over all experts, RouterScores of softmax and sigmoid
//   in turn   the rest: soft caps and rare scores where every expert has a gradient, rows too long for shared memory
// Mapping: a warp to a row, as many warps as shared memory has place for, each walking over rows.
// Bytes: rows * E * sizeof(logit) written, and read the map and 64 bytes for every mark (marked), or twice as much as
// is written (rows). Bound by: memory.
#include "kernels/router_grad.h"

#include "kernels/router_grad_in_turn.cuh"
#include "kernels/router_grad_marked.cuh"
#include "kernels/router_grad_params.cuh"
#include "kernels/router_grad_rows.cuh"
#include "kernels/training_grid.cuh"

namespace ort_moe {
namespace {

template <typename Rows>
__global__ void __launch_bounds__(kMaxRowThreads) RouterGradKernel(const __grid_constant__ RouterGradParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  WalkOverRows<Rows, RouterGradParams, &Rows::Compute>(p, shared);
}

template <typename T>
__global__ void __launch_bounds__(kMaxRowThreads) GradInTurnKernel(const __grid_constant__ RouterGradParams p) {
  WaitForPrevious();
  AllowNext();
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp);
  for (int64_t row = blockIdx.x * int64_t{blockDim.x / kWarp} + threadIdx.x / kWarp; row < p.rows; row += step) {
    GradInTurn<T>(p, row).Compute();
  }
}

template <typename T>
cudaError_t LaunchInTurn(const RouterGradParams& p, cudaStream_t stream) {
  return LaunchOverRows<GradInTurnKernel<T>>({4, 8}, p.rows, 0, p, stream);
}

template <typename T, typename Rows>
cudaError_t LaunchRows(RouterGradParams p, int64_t most, cudaStream_t stream) {
  KernelTraits traits;
  if (cudaError_t error = QueryKernel<RouterGradKernel<Rows>>(&traits); error != cudaSuccess) return error;
  p.warp_bytes = static_cast<int32_t>(Rows::Bytes(p));
  p.bulk = p.bulk && traits.hopper;
  const RowGrid grid = FillMultiprocessor(traits.max_shared_bytes, p.warp_bytes, most);
  if (grid.all() == 0) return LaunchInTurn<T>(p, stream);
  return LaunchOverRows<RouterGradKernel<Rows>>(grid, p.rows, p.warp_bytes, p, stream);
}

template <typename T>
cudaError_t LaunchOfType(RouterGradParams p, cudaStream_t stream) {
  p.row_bytes = static_cast<int32_t>(p.experts * sizeof(Bits<T>));
  p.shared_row_bytes = static_cast<int32_t>((p.experts + kChunk - 1) / kChunk * kChunk * sizeof(Bits<T>));
  p.map_bytes = p.map == nullptr ? 0 : static_cast<int32_t>(MapBytes(p.map_format, p.experts));
  const uint64_t addresses = reinterpret_cast<uint64_t>(p.logits) | reinterpret_cast<uint64_t>(p.grad) |
                             reinterpret_cast<uint64_t>(p.map) | reinterpret_cast<uint64_t>(p.grad_logits);
  p.bulk = (addresses | static_cast<uint64_t>(p.row_bytes | p.map_bytes)) % 16 == 0 && p.experts % kChunk == 0;
  if (!p.over_experts) {
    constexpr int64_t kMostMarked = 24;
    return LaunchRows<T, MarkedGrad<T>>(p, kMostMarked, stream);
  }
  constexpr int64_t kMostRows = 24;
  const bool plain = p.softcap == 0.0f && !(p.map != nullptr && p.normalize);
  if (plain && p.score == Score::kSoftmax) return LaunchRows<T, RowGrad<T, true>>(p, kMostRows, stream);
  if (plain && p.score == Score::kSigmoid) return LaunchRows<T, RowGrad<T, false>>(p, kMostRows, stream);
  return LaunchInTurn<T>(p, stream);
}

}  // namespace

cudaError_t LaunchRouterGrad(DType dtype, RouterGradParams p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  switch (dtype) {
    case DType::kFloat32:
      return LaunchOfType<float>(p, stream);
    case DType::kFloat16:
      return LaunchOfType<Float16>(p, stream);
    case DType::kBFloat16:
      return LaunchOfType<BFloat16>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ort_moe
