// GatherFinalize on CUDA: the weighted sum of a token's rows, straight from the masked layout, in one launch.
//
// Mapping: as FinalizeRouting has it, a thread owns 16 bytes of columns (one column where rows are no multiple of 16
// bytes), a block neighbouring columns of one token, and then of those gridDim.y further on. A block reads the routing
// data of its tokens once: its threads look up a choice each and leave row and weight in shared memory.
// Bytes: (K + 1) * H * sizeof(type) a token, H more with a residual, each once; no permuted copy, which would be read
// and written besides. Bound by: memory from some 64 tokens on, before that by latency: of the choices, of their
// experts' offsets, of the rows.
// Why so: the loads of all K rows are issued before the first is used (up to 12 at a time); the arithmetic is
// finalize_columns.cuh's, so the bits are those of a gather and a FinalizeRouting.
#include "kernels/finalize/gather_finalize.h"

#include <algorithm>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/finalize/finalize_columns.cuh"

namespace ort_moe {
namespace {

constexpr int kStagedBatches = 4;  // of choices, in shared memory at a time

struct alignas(16) StagedChoice {
  int64_t first;  // element of expert_output; negative: no row
  int32_t expert;
  float weight;
};

__device__ __forceinline__ StagedChoice LookUp(const GatherFinalizeArgs& a, int64_t token, int64_t j) {
  const FinalizeArgs& f = a.finalize;
  StagedChoice choice{-1, 0, 0.0f};
  if (token >= f.tokens || j >= f.k) return choice;
  choice.expert = f.indices[token * f.k + j];
  choice.weight = f.weights[token * f.k + j];
  const int32_t permuted = f.unpermuted_to_permuted[j * f.tokens + token];
  if (a.IsLocal(choice.expert)) {
    const int64_t row = a.Row(permuted, choice.expert, a.expert_first_token_offset[choice.expert]);
    choice.first = row < 0 ? -1 : row * a.padded;
  }
  return choice;
}

// Brings the routing data of a block's first token into the second-level cache. Nothing is read: whoever still writes
// it is not missed.
__device__ __forceinline__ void Prefetch(const GatherFinalizeArgs& a, int64_t token) {
  constexpr int kLineOffsets = 128 / sizeof(int64_t);
  const FinalizeArgs& f = a.finalize;
  const int64_t thread = threadIdx.x;
  if (thread < f.k) {
    PrefetchIntoL2(f.indices + token * f.k + thread);
    PrefetchIntoL2(f.weights + token * f.k + thread);
    PrefetchIntoL2(f.unpermuted_to_permuted + thread * f.tokens + token);
  }
  if (blockIdx.y == 0 && thread * kLineOffsets < a.local_count) {
    PrefetchIntoL2(a.expert_first_token_offset + a.local_begin + thread * kLineOffsets);
  }
}

// Adds kBatch staged choices. Where every one has a row, kWhole, no branch stands between their steps.
template <bool kWhole, int kBatch, bool kBias, typename T, int kColumns>
__device__ __forceinline__ void AddBatch(const FinalizeArgs& f, const StagedChoice* choices, int64_t column,
                                         ColumnSums<T, kColumns>& sums) {
  using Vector = Columns<T, kColumns>;
  StagedChoice choice[kBatch];
  Vector row[kBatch];
  Vector bias[kBias ? kBatch : 1];
#pragma unroll
  for (int n = 0; n < kBatch; ++n) choice[n] = choices[n];
#pragma unroll
  for (int n = 0; n < kBatch; ++n) {
    if (!kWhole && choice[n].first < 0) continue;
    row[n] = Vector::Load(f.expert_output, 0, 0, choice[n].first + column);
    if (kBias && f.bias != nullptr) bias[n] = Vector::Load(f.bias, choice[n].expert, f.hidden, column);
  }
#pragma unroll
  for (int n = 0; n < kBatch; ++n) {
    if (!kWhole && choice[n].first < 0) continue;
    if (kBias && f.bias != nullptr) {
      sums.AddRow(choice[n].weight, row[n], bias[n]);
    } else {
      sums.AddRow(choice[n].weight, row[n]);
    }
  }
}

// kBatch rows are loaded ahead; without kBias there is none.
template <typename T, int kColumns, int kBatch, bool kBias>
__global__ void __launch_bounds__(kFinalizeMaxThreads)
    GatherFinalizeKernel(const __grid_constant__ GatherFinalizeArgs a) {
  using Vector = Columns<T, kColumns>;
  __shared__ StagedChoice staged[kStagedBatches * kBatch];
  const FinalizeArgs& f = a.finalize;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kColumns;
  const bool inside = column < f.hidden;
  const uint32_t batches = f.k > 0 ? static_cast<uint32_t>(f.k + kBatch - 1) / kBatch : 1;  // of a token

  // Batches `first` and on of the block's tokens, one after another; whether every choice has a row.
  const auto stage = [&](uint32_t first) {
    bool whole = true;
    for (uint32_t i = threadIdx.x; i < kStagedBatches * kBatch; i += blockDim.x) {
      const uint32_t batch = first + i / kBatch;
      const uint32_t turn = batches == 1 ? batch : batch / batches;
      const int64_t token = blockIdx.y + static_cast<int64_t>(turn) * gridDim.y;
      const StagedChoice choice = LookUp(a, token, (batch - turn * batches) * kBatch + i % kBatch);
      whole &= choice.first >= 0 || token >= f.tokens;
      staged[i] = choice;
    }
    return __syncthreads_and(whole) != 0;
  };

  if (blockIdx.x == 0) Prefetch(a, blockIdx.y);
  if (f.residual != nullptr && inside) PrefetchIntoL2(Vector::At(f.residual, blockIdx.y, f.hidden, column));
  WaitForPrevious();
  AllowNext();
  bool whole = stage(0);

  uint32_t batch = 0;
  for (int64_t token = blockIdx.y; token < f.tokens; token += gridDim.y) {
    ColumnSums<T, kColumns> sums;
    Vector residual;
    if (f.residual != nullptr && inside) residual = Vector::Load(f.residual, token, f.hidden, column);
    for (uint32_t i = 0; i < batches; ++i, ++batch) {
      if (batch != 0 && batch % kStagedBatches == 0) {
        __syncthreads();  // nobody still reads the batches before
        whole = stage(batch);
      }
      const StagedChoice* choices = staged + batch % kStagedBatches * kBatch;
      if (!inside) continue;
      if (whole) {
        AddBatch<true, kBatch, kBias>(f, choices, column, sums);
      } else {
        AddBatch<false, kBatch, kBias>(f, choices, column, sums);
      }
    }
    if (!inside) continue;
    if (f.residual != nullptr) sums.AddResidual(residual);
    sums.Rounded().Store(f.y, token, f.hidden, column);
  }
}

template <typename T, int kColumns, int kBatch, bool kBias>
cudaError_t LaunchBatch(const GatherFinalizeArgs& a, cudaStream_t stream) {
  const FinalizeGrid blocks((a.finalize.hidden + kColumns - 1) / kColumns, a.finalize.tokens);
  return Launch<GatherFinalizeKernel<T, kColumns, kBatch, kBias>>(blocks.grid, blocks.threads, 0, stream, a);
}

template <typename T>
cudaError_t LaunchOfType(const GatherFinalizeArgs& a, cudaStream_t stream) {
  constexpr int kVector = sizeof(uint4) / sizeof(Bits<T>);
  const FinalizeArgs& f = a.finalize;
  if (!HasVectorRows<T>({f.hidden, a.padded}, {f.expert_output, f.bias, f.residual, f.y})) {
    return LaunchBatch<T, 1, 8, true>(a, stream);
  }
  if (f.bias != nullptr) return LaunchBatch<T, kVector, 8, true>(a, stream);
  if (f.k <= 4) return LaunchBatch<T, kVector, 4, false>(a, stream);
  if (f.k <= 8) return LaunchBatch<T, kVector, 8, false>(a, stream);
  return LaunchBatch<T, kVector, 12, false>(a, stream);
}

}  // namespace

cudaError_t LaunchGatherFinalize(const GatherFinalizeArgs& args, cudaStream_t stream) {
  if (args.finalize.tokens == 0 || args.finalize.hidden == 0) return cudaSuccess;
  switch (args.finalize.dtype) {
    case DType::kFloat32:
      return LaunchOfType<float>(args, stream);
    case DType::kFloat16:
      return LaunchOfType<Float16>(args, stream);
    case DType::kBFloat16:
      return LaunchOfType<BFloat16>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ort_moe
