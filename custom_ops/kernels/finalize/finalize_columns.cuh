// What FinalizeRouting and GatherFinalize share on the device: a thread's columns of a row, and their weighted sum. The
// arithmetic is here alone, so that both return the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/common/float_math.h"
#include "kernels/common/storage.cuh"

namespace ort_moe {

constexpr int kFinalizeMaxThreads = 128;

// One thread's columns of a row: one, or as many as are 16 bytes. Loaded past the first-level cache, for nobody reads
// them twice.
template <typename T, int kColumns>
struct Columns {
  static constexpr int kInWord = sizeof(uint32_t) / sizeof(Bits<T>);
  static_assert(kColumns * sizeof(Bits<T>) == sizeof(uint4));

  uint32_t words[kColumns / kInWord];

  static __device__ const uint4* At(const void* rows, int64_t row, int64_t hidden, int64_t column) {
    return reinterpret_cast<const uint4*>(static_cast<const Bits<T>*>(rows) + row * hidden + column);
  }

  static __device__ Columns Load(const void* rows, int64_t row, int64_t hidden, int64_t column) {
    const uint4 loaded = __ldcg(At(rows, row, hidden, column));
    return {{loaded.x, loaded.y, loaded.z, loaded.w}};
  }

  static __device__ Columns Rounded(const float (&values)[kColumns]) {
    Columns rounded;
#pragma unroll
    for (int w = 0; w < kColumns / kInWord; ++w) {
      rounded.words[w] = Storage<T>::Round(values[w * kInWord]);
      if constexpr (kInWord == 2)
        rounded.words[w] |= static_cast<uint32_t>(Storage<T>::Round(values[w * kInWord + 1])) << 16;
    }
    return rounded;
  }

  __device__ void Store(void* rows, int64_t row, int64_t hidden, int64_t column) const {
    *const_cast<uint4*>(At(rows, row, hidden, column)) = make_uint4(words[0], words[1], words[2], words[3]);
  }

  __device__ float operator[](int i) const { return Storage<T>::WidenOfWord(words[i / kInWord], i % kInWord); }
};

template <typename T>
struct Columns<T, 1> {
  Bits<T> bits;

  static __device__ const Bits<T>* At(const void* rows, int64_t row, int64_t hidden, int64_t column) {
    return static_cast<const Bits<T>*>(rows) + row * hidden + column;
  }

  static __device__ Columns Load(const void* rows, int64_t row, int64_t hidden, int64_t column) {
    return {__ldcg(At(rows, row, hidden, column))};
  }

  static __device__ Columns Rounded(const float (&values)[1]) { return {Storage<T>::Round(values[0])}; }

  __device__ void Store(void* rows, int64_t row, int64_t hidden, int64_t column) const {
    *const_cast<Bits<T>*>(At(rows, row, hidden, column)) = bits;
  }

  __device__ float operator[](int) const { return Storage<T>::Widen(bits); }
};

// The sums of a thread's columns: choices are added in rank order, then the residual.
template <typename T, int kColumns>
class ColumnSums {
 public:
  using Vector = Columns<T, kColumns>;

  __device__ __forceinline__ void AddRow(float weight, const Vector& row) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum_[i] = Fma(weight, row[i], sum_[i]);
  }

  __device__ __forceinline__ void AddRow(float weight, const Vector& row, const Vector& bias) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum_[i] = Fma(weight, Add(row[i], bias[i]), sum_[i]);
  }

  __device__ __forceinline__ void AddResidual(const Vector& residual) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum_[i] = Add(sum_[i], residual[i]);
  }

  __device__ __forceinline__ Vector Rounded() const { return Vector::Rounded(sum_); }

 private:
  float sum_[kColumns] = {};
};

// Blocks and threads for that many vectors of columns a token.
struct FinalizeGrid {
  dim3 grid;
  int threads;

  FinalizeGrid(int64_t vectors, int64_t tokens) {
    threads = Threads(vectors, tokens);
    const int64_t blocks = (vectors + threads - 1) / threads;
    const int64_t per_block = std::clamp<int64_t>(tokens * blocks * threads / kManyThreads, 1, kMaxTokensPerBlock);
    const int64_t grid_rows = std::min((tokens + per_block - 1) / per_block, kMaxGridRows);
    grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(grid_rows));
  }

 private:
  static constexpr int kLanes = 32;
  static constexpr int64_t kFewWarps = 512;         // up to here every warp is a block
  static constexpr int64_t kManyThreads = 1 << 19;  // of a grid: beyond, a block takes several tokens
  static constexpr int64_t kMaxTokensPerBlock = 4;
  static constexpr int64_t kMaxGridRows = 65535;  // the device's

  // As many threads as leave few of the last block idle.
  static int Threads(int64_t vectors, int64_t tokens) {
    const auto padded = [&](int64_t threads) { return (vectors + threads - 1) / threads * threads; };
    if (padded(kLanes) / kLanes * tokens <= kFewWarps) return kLanes;
    for (int threads = kFinalizeMaxThreads; threads > kLanes; threads /= 2) {
      if (padded(threads) * 8 <= vectors * 9) return threads;
    }
    return kLanes;
  }
};

// Whether rows of as many columns from all of these addresses (null: none) may be read and written 16 bytes at a time.
template <typename T>
bool HasVectorRows(std::initializer_list<int64_t> columns, std::initializer_list<const void*> addresses) {
  uintptr_t bits = 0;
  for (const int64_t count : columns) bits |= static_cast<uintptr_t>(count) * sizeof(Bits<T>);
  for (const void* address : addresses) bits |= reinterpret_cast<uintptr_t>(address);
  return bits % sizeof(uint4) == 0;
}

}  // namespace ort_moe
