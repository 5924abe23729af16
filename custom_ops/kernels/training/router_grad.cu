// Gradients of RouterProbs and RouterScores.
//
//   marked    RouterProbs but the softmax over all experts: only the map's experts have a gradient
//   rows      every expert has one: the softmax over all experts, RouterScores of softmax and sigmoid
//   in turn   the rest: soft caps and rare scores where every expert has a gradient, maps too long for shared memory
// Mapping: marked: a warp to a row, as many warps as shared memory has place for, each walking over rows; rows: a warp
// to a row of up to 512 experts, beyond a block of four, whose threads keep in registers what they read.
// Bytes: rows * E * sizeof(logit) written, and read the map and 64 bytes for every mark (marked), or twice as much as
// is written (rows). Bound by: memory, 85 % of a copy's bandwidth at E = 2304 (rows).
// Tried: rows in shared memory, a warp to each, 21 us for 16 at E = 512 and 92 for 62 at 2304, where only six warps had
// place and waited for their exponentials.
#include "kernels/training/router_grad.h"

#include "kernels/training/router_grad_in_turn.cuh"
#include "kernels/training/router_grad_marked.cuh"
#include "kernels/training/router_grad_params.cuh"
#include "kernels/training/router_grad_rows.cuh"
#include "kernels/training/training_grid.cuh"

namespace ort_moe {
namespace {

template <typename T>
__global__ void __launch_bounds__(kMaxRowThreads) MarkedGradKernel(const __grid_constant__ RouterGradParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  WalkOverRows<MarkedGrad<T>, RouterGradParams, &MarkedGrad<T>::Compute>(p, shared);
}

template <typename Rows>
__global__ void __launch_bounds__(Rows::kThreads* Rows::kRows, Rows::kBlocks)
    RowGradKernel(const __grid_constant__ RouterGradParams p) {
  __shared__ typename Rows::Shared shared;
  WaitForPrevious();
  AllowNext();
  const int64_t row = int64_t{blockIdx.x} * Rows::kRows + threadIdx.x / Rows::kThreads;
  if (row < p.rows) Rows(p, shared, row).Compute();
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

template <typename T>
cudaError_t LaunchMarked(RouterGradParams p, cudaStream_t stream) {
  constexpr auto* kKernel = &MarkedGradKernel<T>;
  constexpr int64_t kMostWarps = 24;
  KernelTraits traits;
  if (cudaError_t error = QueryKernel<kKernel>(&traits); error != cudaSuccess) return error;
  p.warp_bytes = static_cast<int32_t>(MarkedGrad<T>::Bytes(p));
  p.bulk = p.vectors && traits.hopper && (reinterpret_cast<uint64_t>(p.map) | p.map_bytes) % 16 == 0;
  const RowGrid grid = FillMultiprocessor(traits.max_shared_bytes, p.warp_bytes, kMostWarps);
  if (grid.all() == 0) return LaunchInTurn<T>(p, stream);
  return LaunchOverRows<kKernel>(grid, p.rows, p.warp_bytes, p, stream);
}

template <typename Rows>
cudaError_t LaunchRows(const RouterGradParams& p, cudaStream_t stream) {
  const int64_t blocks = (p.rows + Rows::kRows - 1) / Rows::kRows;
  return Launch<RowGradKernel<Rows>>(static_cast<unsigned>(blocks), Rows::kThreads * Rows::kRows, 0, stream, p);
}

template <typename T, bool kSoftmax>
cudaError_t LaunchRowsOf(const RouterGradParams& p, cudaStream_t stream) {
  if (p.experts <= RowGrad<T, kSoftmax, 1, 2>::kMaxExperts) return LaunchRows<RowGrad<T, kSoftmax, 1, 2>>(p, stream);
  if (p.experts <= RowGrad<T, kSoftmax, 4, 3>::kMaxExperts) return LaunchRows<RowGrad<T, kSoftmax, 4, 3>>(p, stream);
  return LaunchRows<RowGrad<T, kSoftmax, 4, 8>>(p, stream);
}

template <typename T>
cudaError_t LaunchOfType(RouterGradParams p, cudaStream_t stream) {
  p.row_bytes = static_cast<int32_t>(p.experts * sizeof(Bits<T>));
  p.shared_row_bytes = static_cast<int32_t>((p.experts + kChunk - 1) / kChunk * kChunk * sizeof(Bits<T>));
  p.map_bytes = p.map == nullptr ? 0 : static_cast<int32_t>(MapBytes(p.map_format, p.experts));
  const uint64_t addresses = reinterpret_cast<uint64_t>(p.logits) | reinterpret_cast<uint64_t>(p.grad) |
                             reinterpret_cast<uint64_t>(p.grad_logits);
  p.vectors = addresses % 16 == 0 && p.experts % kChunk == 0;
  if (!p.over_experts) return LaunchMarked<T>(p, stream);
  const bool plain = p.softcap == 0.0f && !(p.map != nullptr && p.normalize);
  if (plain && p.score == Score::kSoftmax) return LaunchRowsOf<T, true>(p, stream);
  if (plain && p.score == Score::kSigmoid) return LaunchRowsOf<T, false>(p, stream);
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
