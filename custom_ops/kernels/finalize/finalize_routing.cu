// FinalizeRouting on CUDA: the weighted sum of the rows that belong to a token, in one launch.
//
// Mapping: a thread owns 16 bytes of columns of a token, a block neighbouring columns of one token, and then of those
// gridDim.y further on; where rows are no multiple of 16 bytes, a thread owns one column.
// Bytes: (K + 1) * H * sizeof(type) a token, H more with a residual, each once. Bound by: memory from some 64 tokens
// on; before that by latency, that of the choices' rows and then of the rows themselves. Why so: a lane looks up one
// choice and hands it to its warp by shuffles; then the loads of all K rows are issued before the first is used (up to
// 24 at a time), and the sum has the contract's order. With few tokens a block is one warp, which spreads the columns
// over all multiprocessors.
#include "kernels/finalize/finalize_routing.h"

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/finalize/finalize_columns.cuh"

namespace ort_moe {
namespace {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct FinalizeParams {
  FinalizeArgs args;
  bool routing_settled;
};

// What a lane knows of its warp's token: one choice of it.
struct LaneChoice {
  int32_t row = -1;  // negative: none
  int32_t expert = 0;
  float weight = 0.0f;

  // Choice `j` of the token, if there are both.
  __device__ __forceinline__ void LookUp(const FinalizeArgs& a, int64_t token, int32_t j) {
    row = -1;
    if (j >= a.k || token >= a.tokens) return;
    row = a.unpermuted_to_permuted[j * a.tokens + token];
    weight = a.weights[token * a.k + j];
    if (a.bias != nullptr) expert = a.indices[token * a.k + j];
  }

  __device__ __forceinline__ bool Contributes(const FinalizeArgs& a) const {
    return row >= 0 && row < a.tokens * a.k && (a.bias == nullptr || (expert >= 0 && expert < a.experts));
  }

  // Brings what LookUp will read into the second-level cache. Nothing is read: whoever still writes it is not missed.
  static __device__ __forceinline__ void Prefetch(const FinalizeArgs& a, int64_t token, int32_t j) {
    if (j >= a.k) return;
    PrefetchIntoL2(a.unpermuted_to_permuted + j * a.tokens + token);
    PrefetchIntoL2(a.weights + token * a.k + j);
    if (a.bias != nullptr) PrefetchIntoL2(a.indices + token * a.k + j);
  }
};

// kBatch rows are loaded ahead; without kBias there is none.
template <typename T, int kColumns, int kBatch, bool kBias>
__global__ void __launch_bounds__(kFinalizeMaxThreads) FinalizeRoutingKernel(const __grid_constant__ FinalizeParams p) {
  using Vector = Columns<T, kColumns>;
  const FinalizeArgs& a = p.args;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kColumns;
  const bool inside = column < a.hidden;

  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int32_t choice = lane < kBatch ? lane : a.k;  // of a batch; a.k: none

  LaneChoice next;
  int64_t token = blockIdx.y;
  if (p.routing_settled) {
    next.LookUp(a, token, choice);
  } else if (blockIdx.x == 0 && threadIdx.x < kLanes) {
    LaneChoice::Prefetch(a, token, choice);
  }
  if (a.residual != nullptr && inside) PrefetchIntoL2(Vector::At(a.residual, token, a.hidden, column));
  WaitForPrevious();
  AllowNext();
  if (!p.routing_settled) next.LookUp(a, token, choice);

  for (; token < a.tokens; token += gridDim.y) {
    ColumnSums<T, kColumns> sums;
    Vector residual;
    if (a.residual != nullptr && inside) residual = Vector::Load(a.residual, token, a.hidden, column);
    for (int32_t first = 0; first < a.k; first += kBatch) {
      const LaneChoice mine = next;
      const unsigned chosen = __ballot_sync(kAllLanes, mine.Contributes(a));
      int32_t number[kBatch];
      int32_t expert[kBias ? kBatch : 1];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        number[n] = __shfl_sync(kAllLanes, mine.row, n);
        if constexpr (kBias) expert[n] = __shfl_sync(kAllLanes, mine.expert, n);
      }
      Vector row[kBatch];
      Vector bias[kBias ? kBatch : 1];
      if (chosen != 0u) {  // without this branch the compiler lets every load wait for the shuffle before it
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
          if ((chosen >> n & 1u) == 0u || !inside) continue;
          row[n] = Vector::Load(a.expert_output, number[n], a.hidden, column);
          if (kBias && a.bias != nullptr) bias[n] = Vector::Load(a.bias, expert[n], a.hidden, column);
        }
      }
      const bool last = first + kBatch >= a.k;
      next.LookUp(a, last ? token + gridDim.y : token, last ? choice : first + kBatch + choice);
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        const float weight = __shfl_sync(kAllLanes, mine.weight, n);
        if ((chosen >> n & 1u) == 0u || !inside) continue;
        if (kBias && a.bias != nullptr) {
          sums.AddRow(weight, row[n], bias[n]);
        } else {
          sums.AddRow(weight, row[n]);
        }
      }
    }
    if (!inside) continue;
    if (a.residual != nullptr) sums.AddResidual(residual);
    sums.Rounded().Store(a.y, token, a.hidden, column);
  }
}

template <typename T, int kColumns, int kBatch, bool kBias>
cudaError_t LaunchBatch(const FinalizeParams& p, cudaStream_t stream) {
  const FinalizeGrid blocks((p.args.hidden + kColumns - 1) / kColumns, p.args.tokens);
  return Launch<FinalizeRoutingKernel<T, kColumns, kBatch, kBias>>(blocks.grid, blocks.threads, 0, stream, p);
}

template <typename T>
cudaError_t LaunchOfType(const FinalizeParams& p, cudaStream_t stream) {
  constexpr int kVector = sizeof(uint4) / sizeof(Bits<T>);
  const FinalizeArgs& a = p.args;
  if (!HasVectorRows<T>({a.hidden}, {a.expert_output, a.bias, a.residual, a.y})) {
    return LaunchBatch<T, 1, 8, true>(p, stream);
  }
  if (a.bias != nullptr) {
    if (a.k <= 4) return LaunchBatch<T, kVector, 4, true>(p, stream);
    if (a.k <= 8) return LaunchBatch<T, kVector, 8, true>(p, stream);
    return LaunchBatch<T, kVector, 12, true>(p, stream);
  }
  if (a.k <= 4) return LaunchBatch<T, kVector, 4, false>(p, stream);
  if (a.k <= 8) return LaunchBatch<T, kVector, 8, false>(p, stream);
  if (a.k <= 12) return LaunchBatch<T, kVector, 12, false>(p, stream);
  return LaunchBatch<T, kVector, 24, false>(p, stream);
}

}  // namespace

cudaError_t LaunchFinalizeRouting(const FinalizeArgs& args, bool routing_settled, cudaStream_t stream) {
  if (args.tokens == 0 || args.hidden == 0) return cudaSuccess;
  const FinalizeParams p{args, routing_settled};
  switch (args.dtype) {
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
