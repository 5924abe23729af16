// FinalizeRouting on CUDA: the weighted sum of the rows that belong to a token, in one launch.
//
// Mapping: a thread owns 16 bytes of columns of a token, a block neighbouring columns of one token, and then of those
// gridDim.y further on; where rows are no multiple of 16 bytes, a thread owns one column.
// Bytes: (K + 1) * H * sizeof(type) a token, H more with a residual, each once. Bound by: memory from some 64 tokens
// on; before that by latency, that of the choices' rows and then of the rows themselves. Why so: a lane looks up one
// choice and hands it to its warp by shuffles; then the loads of all K rows are issued before the first is used (up to
// 24 at a time), and the sum has the contract's order. With few tokens a block is one warp, which spreads the columns
// over all multiprocessors.
#include "kernels/finalize_routing.h"

#include <algorithm>
#include <cstdint>

#include "kernels/float_math.h"
#include "kernels/launch.cuh"
#include "kernels/storage.cuh"

namespace ort_moe {
namespace {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxThreads = 128;
constexpr int64_t kFewWarps = 512;       // up to here every warp is a block
constexpr int64_t kMaxGridRows = 65535;  // the device's

struct FinalizeParams {
  FinalizeArgs args;
  bool routing_settled;
};

// One thread's columns of a row; loaded past the first-level cache, for nobody reads them twice.
template <typename T, int kColumns>
struct alignas(sizeof(Bits<T>) * kColumns) Columns {
  Bits<T> bits[kColumns];

  static __device__ Columns Load(const void* rows, int64_t row, int64_t hidden, int64_t column) {
    const Bits<T>* address = static_cast<const Bits<T>*>(rows) + row * hidden + column;
    union {
      Columns columns;
      uint4 vector;
      Bits<T> one;
    } loaded;
    if constexpr (sizeof(Columns) == sizeof(uint4)) {
      loaded.vector = __ldcg(reinterpret_cast<const uint4*>(address));
    } else {
      static_assert(kColumns == 1);
      loaded.one = __ldcg(address);
    }
    return loaded.columns;
  }

  __device__ void Store(void* rows, int64_t row, int64_t hidden, int64_t column) const {
    *reinterpret_cast<Columns*>(static_cast<Bits<T>*>(rows) + row * hidden + column) = *this;
  }

  __device__ float operator[](int i) const { return Storage<T>::Widen(bits[i]); }
};

// kBatch choices of a token, known to all lanes.
template <int kBatch, bool kBias>
struct Choices {
  static_assert(kBatch <= kLanes);
  int32_t row[kBatch];  // negative: none
  int32_t expert[kBias ? kBatch : 1];
  float weight[kBatch];

  // Choices first, first + 1, ... of the token, as far as there are any; by whole warps.
  __device__ __forceinline__ void LookUp(const FinalizeArgs& a, int64_t token, int32_t first) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int32_t j = first + lane;
    int32_t my_row = -1, my_expert = 0;
    float my_weight = 0.0f;
    if (lane < kBatch && j < a.k) {
      my_row = a.unpermuted_to_permuted[j * a.tokens + token];
      my_weight = a.weights[token * a.k + j];
      if (kBias && a.bias != nullptr) my_expert = a.indices[token * a.k + j];
      const bool has_expert = !kBias || a.bias == nullptr || (my_expert >= 0 && my_expert < a.experts);
      if (my_row >= a.tokens * a.k || !has_expert) my_row = -1;
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) row[n] = __shfl_sync(kAllLanes, my_row, n);
    if constexpr (kBias) {
#pragma unroll
      for (int n = 0; n < kBatch; ++n) expert[n] = __shfl_sync(kAllLanes, my_expert, n);
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) weight[n] = __shfl_sync(kAllLanes, my_weight, n);
  }
};

// kBatch rows are loaded ahead; without kBias there is none.
template <typename T, int kColumns, int kBatch, bool kBias>
__global__ void __launch_bounds__(kMaxThreads) FinalizeRoutingKernel(const __grid_constant__ FinalizeParams p) {
  using Vector = Columns<T, kColumns>;
  const FinalizeArgs& a = p.args;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kColumns;
  const bool inside = column < a.hidden;

  Choices<kBatch, kBias> choices;
  int64_t token = blockIdx.y;
  bool looked_up = p.routing_settled;
  if (looked_up) choices.LookUp(a, token, 0);
  WaitForPrevious();
  AllowNext();

  for (; token < a.tokens; token += gridDim.y) {
    float sum[kColumns] = {};
    Vector residual;
    if (a.residual != nullptr && inside) residual = Vector::Load(a.residual, token, a.hidden, column);
    for (int32_t first = 0; first < a.k; first += kBatch) {
      if (!looked_up) choices.LookUp(a, token, first);
      looked_up = false;
      Vector row[kBatch];
      Vector bias[kBias ? kBatch : 1];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        if (choices.row[n] < 0 || !inside) continue;
        row[n] = Vector::Load(a.expert_output, choices.row[n], a.hidden, column);
        if (kBias && a.bias != nullptr) bias[n] = Vector::Load(a.bias, choices.expert[n], a.hidden, column);
      }
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        if (choices.row[n] < 0 || !inside) continue;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          float value = row[n][i];
          if (kBias && a.bias != nullptr) value = Add(value, bias[n][i]);
          sum[i] = Fma(choices.weight[n], value, sum[i]);
        }
      }
    }
    if (!inside) continue;
    Vector y;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (a.residual != nullptr) sum[i] = Add(sum[i], residual[i]);
      y.bits[i] = Storage<T>::Round(sum[i]);
    }
    y.Store(a.y, token, a.hidden, column);
  }
}

// As many threads as leave few of the last block idle.
int Threads(int64_t vectors, int64_t tokens) {
  const auto padded = [&](int64_t threads) { return (vectors + threads - 1) / threads * threads; };
  if (padded(kLanes) / kLanes * tokens <= kFewWarps) return kLanes;
  for (int threads = kMaxThreads; threads > kLanes; threads /= 2) {
    if (padded(threads) * 8 <= vectors * 9) return threads;
  }
  return kLanes;
}

template <typename T, int kColumns, int kBatch, bool kBias>
cudaError_t LaunchBatch(const FinalizeParams& p, cudaStream_t stream) {
  const int64_t vectors = (p.args.hidden + kColumns - 1) / kColumns;
  const int threads = Threads(vectors, p.args.tokens);
  const dim3 grid(static_cast<unsigned>((vectors + threads - 1) / threads),
                  static_cast<unsigned>(std::min(p.args.tokens, kMaxGridRows)));
  return Launch<FinalizeRoutingKernel<T, kColumns, kBatch, kBias>>(grid, threads, 0, stream, p);
}

template <typename T>
cudaError_t LaunchOfType(const FinalizeParams& p, cudaStream_t stream) {
  constexpr int kVector = sizeof(uint4) / sizeof(Bits<T>);
  const FinalizeArgs& a = p.args;
  uintptr_t addresses = 0;
  for (const void* address : {a.expert_output, a.bias, a.residual, static_cast<const void*>(a.y)}) {
    addresses |= reinterpret_cast<uintptr_t>(address);
  }
  if (a.hidden % kVector != 0 || addresses % sizeof(uint4) != 0) return LaunchBatch<T, 1, 8, true>(p, stream);
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
