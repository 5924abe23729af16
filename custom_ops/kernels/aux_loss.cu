// AuxLoss on CUDA.
//
// Forward, mapping: a block to each of the 128 parts of the sum, which reads whole rows, every 128th; a thread owns
// columns of 16 bytes in one of the part's four sums. A second launch of one warp adds the parts.
// Bytes: rows * E * sizeof(prob) read. Bound by: memory; at few rows by two launches.
// Backward, mapping: a thread owns columns of 16 bytes, alike in all rows, and stores them in every so many.
// Bytes: rows * E * sizeof(prob) written. Bound by: memory.
// Why so: the sums' order is the contract's and no atomic is involved; a launch of its own for 128 numbers costs less
// than a counter that somebody has to reset.
#include "kernels/aux_loss.h"

#include <algorithm>

#include "kernels/fused_router_row.cuh"
#include "kernels/launch.cuh"
#include "kernels/training_map.h"

namespace ort_moe {
namespace {

struct AuxLossParams {
  const void* probs;
  const void* tokens_per_expert;
  const void* total;  // or null
  const float* grad_loss;
  float* parts;
  float* loss;
  void* grad_probs;
  int64_t rows;
  double fixed_total;
  double k;
  double coeff;
  int32_t experts;
  int32_t row_bytes;
  int32_t tile_columns;  // of a part in shared memory
  CountType count_type;
  CountType total_type;
};

__device__ __forceinline__ double CountAt(CountType type, const void* counts, int32_t i) {
  if (type == CountType::kInt32) return static_cast<const int32_t*>(counts)[i];
  if (type == CountType::kInt64) return static_cast<double>(static_cast<const int64_t*>(counts)[i]);
  return static_cast<const float*>(counts)[i];
}

__device__ __forceinline__ float TokensOf(const AuxLossParams& p, int32_t expert) {
  if (p.count_type == CountType::kInt64) {  // rounded once
    return __ll2float_rn(static_cast<const int64_t*>(p.tokens_per_expert)[expert]);
  }
  return static_cast<float>(CountAt(p.count_type, p.tokens_per_expert, expert));
}

// C of aux_loss.h.
__device__ __forceinline__ float Factor(const AuxLossParams& p) {
  const double total = p.total != nullptr ? CountAt(p.total_type, p.total, 0) : p.fixed_total;
  if (total == 0.0) return 0.0f;
  const double share = __dmul_rn(static_cast<double>(p.experts), p.coeff);
  return __double2float_rn(__ddiv_rn(share, __dmul_rn(__dmul_rn(p.k, total), total)));
}

constexpr int kLanesOfPart = kAuxLossRowLanes / kAuxLossParts;  // sums of a column
constexpr int kLossThreads = 512;
constexpr int kInFlight = 16;  // rows that a thread loads before it adds the first

// Sums of one part in shared memory, (kLanesOfPart, tile): columns in tiles of whole 1024, so that a tile has as many
// chunks for each of the contract's partial sums.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kLossThreads) AuxLossPartsKernel(const __grid_constant__ AuxLossParams p) {
  constexpr int kWidth = kVectors ? sizeof(uint4) / sizeof(Bits<T>) : 1;  // columns of a thread
  struct alignas(kWidth * sizeof(Bits<T>)) Vector {
    Bits<T> bits[kWidth];
  };
  extern __shared__ __align__(16) float sums[];
  __shared__ float partials[kPartials];
  const int32_t thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  const Bits<T>* probs = static_cast<const Bits<T>*>(p.probs);
  WaitForPrevious();
  AllowNext();
  float partial = 0.0f;
  for (int32_t tile = 0; tile < p.experts; tile += p.tile_columns) {
    const int32_t columns = min(p.tile_columns, p.experts - tile);
    const int32_t vectors = columns / kWidth;
    for (int32_t item = thread; item < kLanesOfPart * vectors; item += threads) {
      const int32_t lane = item / vectors, column = (item - lane * vectors) * kWidth;
      const int64_t first = blockIdx.x + lane * kAuxLossParts;
      const int64_t step = int64_t{kAuxLossRowLanes} * p.experts;
      const Bits<T>* source = probs + first * p.experts + tile + column;
      int64_t left = p.rows <= first ? 0 : (p.rows - first + kAuxLossRowLanes - 1) / kAuxLossRowLanes;
      float sum[kWidth] = {};
      for (; left > 0; left -= kInFlight, source += kInFlight * step) {
        Vector row[kInFlight];
#pragma unroll
        for (int n = 0; n < kInFlight; ++n) {
          row[n] = Vector{};  // +0 changes no sum
          if (n < left) row[n] = *reinterpret_cast<const Vector*>(source + n * step);
        }
#pragma unroll
        for (int n = 0; n < kInFlight; ++n) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) sum[i] = Add(sum[i], Storage<T>::Widen(row[n].bits[i]));
        }
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[lane * p.tile_columns + column + i] = sum[i];
    }
    __syncthreads();
    for (int32_t column = thread; column < p.tile_columns; column += threads) {
      float term = 0.0f;
      if (column < columns) {
        const float* sum = sums + column;
        const float even = Add(sum[0], sum[2 * p.tile_columns]);
        const float odd = Add(sum[p.tile_columns], sum[3 * p.tile_columns]);
        term = Mul(Add(even, odd), TokensOf(p, tile + column));
      }
      sums[column] = term;
    }
    __syncthreads();
    if (thread < kPartials) {
      for (int32_t column = thread * kChunk; column < columns; column += kPartials * kChunk) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) partial = Add(partial, sums[column + i]);
      }
    }
    __syncthreads();
  }
  if (thread < kPartials) partials[thread] = partial;
  __syncthreads();
  if (thread < kWarp) {
    const float sum = Butterfly(partials[thread], partials[thread + 32], partials[thread + 64], partials[thread + 96]);
    if (thread == 0) p.parts[blockIdx.x] = sum;
  }
}

__global__ void __launch_bounds__(kWarp) AuxLossSumKernel(const __grid_constant__ AuxLossParams p) {
  const int lane = static_cast<int>(threadIdx.x);
  WaitForPrevious();
  AllowNext();
  if (p.rows == 0) {
    if (lane == 0) *p.loss = 0.0f;
    return;
  }
  const float sum = Butterfly(p.parts[lane], p.parts[lane + 32], p.parts[lane + 64], p.parts[lane + 96]);
  if (lane == 0) *p.loss = Mul(Factor(p), sum);
}

constexpr int kGradThreads = 256;

// A thread owns columns of 16 bytes, whose gradient it computes once, and stores them in many rows.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kGradThreads) AuxLossGradKernel(const __grid_constant__ AuxLossParams p) {
  constexpr int kWidth = kVectors ? sizeof(uint4) / sizeof(Bits<T>) : 1;
  struct alignas(kWidth * sizeof(Bits<T>)) Vector {
    Bits<T> bits[kWidth];
  };
  const int32_t column = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
  WaitForPrevious();
  AllowNext();
  if (column >= p.experts) return;
  const float factor = Factor(p), grad_loss = *p.grad_loss;
  Vector value;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    value.bits[i] = Storage<T>::Round(Mul(Mul(factor, TokensOf(p, column + i)), grad_loss));
  }
  const int64_t first = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  Bits<T>* target = static_cast<Bits<T>*>(p.grad_probs) + column;
#pragma unroll 4
  for (int64_t row = first; row < p.rows; row += step) *reinterpret_cast<Vector*>(target + row * p.experts) = value;
}

template <typename Args>
AuxLossParams MakeParams(const AuxLossConfig& config, const Args& args) {
  AuxLossParams p{};
  p.tokens_per_expert = args.tokens_per_expert;
  p.total = args.total;
  p.rows = args.rows;
  p.fixed_total = static_cast<double>(config.total > 0 ? config.total : args.rows);
  p.k = static_cast<double>(config.k);
  p.coeff = static_cast<double>(config.coeff);
  p.experts = static_cast<int32_t>(args.experts);
  p.row_bytes = static_cast<int32_t>(args.experts * SizeOf(args.dtype));
  p.count_type = args.count_type;
  p.total_type = args.total_type;
  return p;
}

bool HasVectors(const void* rows, int32_t row_bytes) {
  return (reinterpret_cast<uint64_t>(rows) | static_cast<uint64_t>(row_bytes)) % sizeof(uint4) == 0;
}

template <typename T, bool kVectors>
cudaError_t LaunchParts(AuxLossParams p, cudaStream_t stream) {
  constexpr auto* kKernel = &AuxLossPartsKernel<T, kVectors>;
  constexpr int64_t kUnit = kPartials * kChunk;
  KernelTraits traits;
  if (cudaError_t error = QueryKernel<kKernel>(&traits); error != cudaSuccess) return error;
  const int64_t most = traits.max_shared_bytes / (kUnit * kLanesOfPart * static_cast<int64_t>(sizeof(float)));
  const int64_t units = std::min<int64_t>((p.experts + kUnit - 1) / kUnit, most);
  p.tile_columns = static_cast<int32_t>(units * kUnit);
  return Launch<kKernel>(kAuxLossParts, kLossThreads, p.tile_columns * kLanesOfPart * sizeof(float), stream, p);
}

template <typename T, bool kVectors>
cudaError_t LaunchGrad(const AuxLossParams& p, cudaStream_t stream) {
  constexpr int64_t kWidth = kVectors ? sizeof(uint4) / sizeof(Bits<T>) : 1;
  constexpr int64_t kBlocks = 1056;  // eight to each of an H200's multiprocessors
  const int64_t vectors = (p.experts + kWidth - 1) / kWidth;
  const int64_t column_blocks = (vectors + kGradThreads - 1) / kGradThreads;
  const int64_t columns = (vectors + column_blocks - 1) / column_blocks;
  const int64_t rows = std::max<int64_t>(1, kGradThreads / columns);
  const int64_t row_blocks = std::clamp<int64_t>(kBlocks / column_blocks, 1, (p.rows + rows - 1) / rows);
  return Launch<AuxLossGradKernel<T, kVectors>>(
      dim3(static_cast<unsigned>(column_blocks), static_cast<unsigned>(row_blocks)),
      dim3(static_cast<unsigned>(columns), static_cast<unsigned>(rows)), 0, stream, p);
}

}  // namespace

size_t AuxLossScratchBytes(const AuxLossArgs&) { return kAuxLossParts * sizeof(float); }

cudaError_t LaunchAuxLoss(const AuxLossConfig& config, const AuxLossArgs& args, cudaStream_t stream) {
  if (args.rows < 0 || args.experts > kMaxTrainingExperts) return cudaErrorInvalidValue;
  AuxLossParams p = MakeParams(config, args);
  p.probs = args.probs;
  p.parts = static_cast<float*>(args.scratch);
  p.loss = args.loss;
  cudaError_t error = cudaSuccess;
  const bool vectors = HasVectors(args.probs, p.row_bytes);
  if (args.rows > 0) {
    switch (args.dtype) {
      case DType::kFloat32:
        error = vectors ? LaunchParts<float, true>(p, stream) : LaunchParts<float, false>(p, stream);
        break;
      case DType::kFloat16:
        error = vectors ? LaunchParts<Float16, true>(p, stream) : LaunchParts<Float16, false>(p, stream);
        break;
      case DType::kBFloat16:
        error = vectors ? LaunchParts<BFloat16, true>(p, stream) : LaunchParts<BFloat16, false>(p, stream);
        break;
    }
  }
  return error == cudaSuccess ? Launch<AuxLossSumKernel>(1, kWarp, 0, stream, p) : error;
}

cudaError_t LaunchAuxLossGrad(const AuxLossConfig& config, const AuxLossGradArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  if (args.rows < 0 || args.experts > kMaxTrainingExperts) return cudaErrorInvalidValue;
  AuxLossParams p = MakeParams(config, args);
  p.grad_loss = args.grad_loss;
  p.grad_probs = args.grad_probs;
  const bool vectors = HasVectors(args.grad_probs, p.row_bytes);
  switch (args.dtype) {
    case DType::kFloat32:
      return vectors ? LaunchGrad<float, true>(p, stream) : LaunchGrad<float, false>(p, stream);
    case DType::kFloat16:
      return vectors ? LaunchGrad<Float16, true>(p, stream) : LaunchGrad<Float16, false>(p, stream);
    case DType::kBFloat16:
      return vectors ? LaunchGrad<BFloat16, true>(p, stream) : LaunchGrad<BFloat16, false>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ort_moe
