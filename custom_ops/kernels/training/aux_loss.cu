// AuxLoss on CUDA.
//
// Forward, mapping: a block to each of the 128 parts of the sum, which reads whole rows, every 128th; a thread owns
// columns of 16 bytes in one of the part's four sums, and copies its next rows to shared memory in the background. A
// second launch of one warp adds the parts.
// Bytes: rows * E * sizeof(prob) read. Bound by: memory; at few rows by two launches.
// Backward, mapping: a thread owns columns of 16 bytes, alike in all rows, and stores them in every so many.
// Bytes: rows * E * sizeof(prob) written. Bound by: memory.
// Why so: the sums' order is the contract's and no atomic is involved; a launch of its own for 128 numbers costs less
// than a counter that somebody has to reset.
// Tried: rows loaded into registers ahead, 28 us for 22 at E = 2304: compilers put the loads behind the sums.
#include "kernels/training/aux_loss.h"

#include <algorithm>
#include <type_traits>

#include "kernels/common/background_copies.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/router/fused_router_row.cuh"
#include "kernels/training/training_map.h"
#include "kernels/training/training_rows.cuh"

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
  double k;
  double share;        // of C: experts * coeff
  float fixed_factor;  // C where `total` is null: doubles take long on a device
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

// Tokens of the experts from `first` on; those behind the last have its.
template <int kCount>
__device__ __forceinline__ void ReadTokens(const AuxLossParams& p, int32_t first, float (&tokens)[kCount]) {
  const auto read = [&](const auto* counts) {
    std::remove_const_t<std::remove_pointer_t<decltype(counts)>> count[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) count[i] = counts[min(first + i, p.experts - 1)];
#pragma unroll
    for (int i = 0; i < kCount; ++i) tokens[i] = static_cast<float>(count[i]);  // rounded once
  };
  if (p.count_type == CountType::kInt32) {
    read(static_cast<const int32_t*>(p.tokens_per_expert));
  } else if (p.count_type == CountType::kInt64) {
    read(static_cast<const int64_t*>(p.tokens_per_expert));
  } else {
    read(static_cast<const float*>(p.tokens_per_expert));
  }
}

// C of aux_loss.h.
__device__ __forceinline__ float Factor(const AuxLossParams& p) {
  if (p.total == nullptr) return p.fixed_factor;
  const double total = CountAt(p.total_type, p.total, 0);
  if (total == 0.0) return 0.0f;
  return __double2float_rn(__ddiv_rn(p.share, __dmul_rn(__dmul_rn(p.k, total), total)));
}

constexpr int kLanesOfPart = kAuxLossRowLanes / kAuxLossParts;  // sums of a column
constexpr int kLossThreads = 512;
constexpr int kInFlight = 8;  // rows that are on their way to a thread: 64 KB to a block keep the memory busy

// What a thread adds up: columns of 16 bytes, an item, of one of the part's sums, row by row, then the next item.
template <typename T, typename Vector>
class PartRows {
 public:
  static constexpr int kWidth = sizeof(Vector) / sizeof(Bits<T>);  // columns

  __device__ __forceinline__ PartRows(const AuxLossParams& p, int32_t tile, int32_t columns)
      : p_(p), tile_(tile), vectors_(columns / kWidth), item_(static_cast<int32_t>(threadIdx.x)) {
    PointToItem();
  }

  __device__ __forceinline__ bool inside() const { return item_ < kLanesOfPart * vectors_; }
  __device__ __forceinline__ bool has_row() const { return left_ > 0; }
  // Where the item's sums lie.
  __device__ __forceinline__ int32_t place() const { return lane_ * p_.tile_columns + column_; }

  // Starts on the row, if there is one, and goes on to the next.
  __device__ __forceinline__ void Copy(Vector* target) {
    if (left_ > 0) {
      if constexpr (sizeof(Vector) == 16) {
        CopyAsync(target, source_, true);
      } else if constexpr (sizeof(Vector) == 4) {
        CopyWord(target, source_);
      } else {
        *target = *source_;
      }
    }
    if (inside()) Advance();
    CommitCopies();
  }

  // False where that was the item's last row.
  __device__ __forceinline__ bool Advance() {
    source_ += int64_t{kAuxLossRowLanes} * p_.experts;
    if (--left_ > 0) return true;
    item_ += kLossThreads;
    PointToItem();
    return false;
  }

 private:
  __device__ __forceinline__ void PointToItem() {
    left_ = 0;
    if (!inside()) return;
    lane_ = item_ / vectors_;
    column_ = (item_ - lane_ * vectors_) * kWidth;
    const int64_t first = blockIdx.x + lane_ * kAuxLossParts;
    source_ = static_cast<const Bits<T>*>(p_.probs) + first * p_.experts + tile_ + column_;
    left_ = static_cast<int32_t>((p_.rows - first + kAuxLossRowLanes - 1) / kAuxLossRowLanes);
  }

  const AuxLossParams& p_;
  int32_t tile_;
  int32_t vectors_;
  int32_t item_;
  int32_t lane_ = 0;
  int32_t column_ = 0;
  int32_t left_ = 0;  // rows from `source_` on; none or fewer where the part has no row
  const Bits<T>* source_ = nullptr;
};

// In shared memory the sums of one part, (kLanesOfPart, tile), the tokens of the tile's experts, and what is on its way
// to each thread. Columns come in tiles of whole 1024, so that a tile has as many chunks for each of the contract's
// partial sums.
template <typename T, typename Vector>
__global__ void __launch_bounds__(kLossThreads) AuxLossPartsKernel(const __grid_constant__ AuxLossParams p) {
  using Rows = PartRows<T, Vector>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float partials[kPartials];
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  Vector* const on_way = reinterpret_cast<Vector*>(shared) + thread;  // kLossThreads apart
  float* const sums = reinterpret_cast<float*>(shared + kInFlight * kLossThreads * sizeof(Vector));
  float* const tokens = sums + kLanesOfPart * p.tile_columns;
  WaitForPrevious();
  AllowNext();
  float partial = 0.0f;
  for (int32_t tile = 0; tile < p.experts; tile += p.tile_columns) {
    const int32_t columns = min(p.tile_columns, p.experts - tile);
    Rows rows(p, tile, columns), coming = rows;
#pragma unroll 1
    for (int n = 0; n < kInFlight; ++n) coming.Copy(on_way + n * kLossThreads);
    for (int32_t chunk = thread; chunk * kChunk < columns; chunk += kLossThreads) {
      float count[kChunk];
      ReadTokens(p, tile + chunk * kChunk, count);
      WriteChunk<float>(tokens, chunk, count);
    }
    float sum[Rows::kWidth] = {};
    for (unsigned n = 0; rows.inside(); n = (n + 1) % kInFlight) {
      WaitForCopies<kInFlight - 1>();
      union {
        Vector vector;
        Bits<T> bits[Rows::kWidth];
      } row;
      row.vector = on_way[n * kLossThreads];
      const bool is_row = rows.has_row();
#pragma unroll
      for (int i = 0; i < Rows::kWidth; ++i) sum[i] = is_row ? Add(sum[i], Storage<T>::Widen(row.bits[i])) : 0.0f;
      coming.Copy(on_way + n * kLossThreads);
      const int32_t place = rows.place();
      if (rows.Advance()) continue;
#pragma unroll
      for (int i = 0; i < Rows::kWidth; ++i) {
        sums[place + i] = sum[i];
        sum[i] = 0.0f;
      }
    }
    __syncthreads();
    if (thread < kPartials) {
      for (int32_t column = thread * kChunk; column < columns; column += kPartials * kChunk) {
        float lane[kLanesOfPart][kChunk], count[kChunk];
#pragma unroll
        for (int l = 0; l < kLanesOfPart; ++l) ReadChunk<float>(sums + l * p.tile_columns + column, 0, lane[l]);
        ReadChunk<float>(tokens + column, 0, count);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          if (column + i >= columns) continue;
          const float of_expert = Add(Add(lane[0][i], lane[2][i]), Add(lane[1][i], lane[3][i]));
          partial = Add(partial, Mul(of_expert, count[i]));
        }
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
  const float grad_loss = *p.grad_loss, factor = Factor(p);
  float tokens[kWidth];
  ReadTokens(p, column, tokens);
  Vector value;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) value.bits[i] = Storage<T>::Round(Mul(Mul(factor, tokens[i]), grad_loss));
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
  p.k = static_cast<double>(config.k);
  p.share = static_cast<double>(args.experts) * static_cast<double>(config.coeff);
  const double total = static_cast<double>(config.total > 0 ? config.total : args.rows);
  p.fixed_factor = total == 0.0 ? 0.0f : static_cast<float>(p.share / (p.k * total * total));
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
  using Vector = std::conditional_t<kVectors, uint4, Bits<T>>;
  constexpr auto* kKernel = &AuxLossPartsKernel<T, Vector>;
  constexpr int64_t kCopyBytes = kInFlight * kLossThreads * static_cast<int64_t>(sizeof(Vector));
  constexpr int64_t kUnit = kPartials * kChunk;
  constexpr int64_t kUnitBytes = kUnit * (kLanesOfPart + 1) * static_cast<int64_t>(sizeof(float));
  KernelTraits traits;
  if (cudaError_t error = QueryKernel<kKernel>(&traits); error != cudaSuccess) return error;
  const int64_t most = (traits.max_shared_bytes - kCopyBytes) / kUnitBytes;
  const int64_t units = std::min<int64_t>((p.experts + kUnit - 1) / kUnit, most);
  p.tile_columns = static_cast<int32_t>(units * kUnit);
  return Launch<kKernel>(kAuxLossParts, kLossThreads, kCopyBytes + units * kUnitBytes, stream, p);
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
