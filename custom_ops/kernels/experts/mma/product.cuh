// A warp's products of FusedExperts on the tensor core: two tiles of 8 weight rows by tokens, a step at a time.
//
// Lane 4 * g + q holds weight row g of each tile; the tensor core takes the tiles as the two halves of its 16 rows.
// Either both tiles are one expert's, with up to 8 tokens (OneExpert), or every four or eight rows are another's
// (MoreExperts). All have
//   Load: the lane's weights and scales of a step out of the ring
//   Step: adds the products of the next step of the reduction
//     or, with kTakesGroups, LoadGroup and MultiplyGroup of a group of steps
//   Emit: calls store(tile or expert, token, its row, sum) for every sum, each in one lane
// and give a sum the same bits, whichever computes it.
//
// dense, here: the core's 8 columns are tokens. nvfp4: product_nvfp4.cuh; what is not specialised is in
// product_codes.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/common/float_math.h"
#include "kernels/experts/mma/ring.cuh"

namespace ort_moe {

__device__ __forceinline__ void MultiplyPairs(__half, float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void MultiplyPairs(__nv_bfloat16, float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Activations in shared memory: rows of `stride` bytes, the blocks' factors behind the first `vector_bytes`.
struct StagedActivations {
  const char* rows;
  int stride;
  int vector_bytes;
};

__device__ __forceinline__ uint4 Vector(const char* address) { return *reinterpret_cast<const uint4*>(address); }

__device__ __forceinline__ int CountOf(int4 counts, int expert) {
  return expert == 0 ? counts.x : expert == 1 ? counts.y : expert == 2 ? counts.z : counts.w;
}

// kTokens: of an expert at most.
template <typename Format, int kTokens>
class OneExpert;

// kColumns: weight rows of each expert, 4 or 8; there are as many experts as the core's rows hold.
template <typename Format, int kTokens, int kColumns>
class MoreExperts;

template <typename T, int kTokens>
class OneExpert<DenseFormat<T>, kTokens> {
 public:
  // `row_of(token)`: the row of activations.
  template <typename RowOf>
  __device__ __forceinline__ OneExpert(const StagedActivations& staged, int count, int first_group, RowOf row_of)
      : count_(count) {
    const int lane = threadIdx.x % kLanes;
    at_ = staged.rows + row_of(min(lane / 4, count - 1)) * staged.stride + 2 * first_group * kBytes + lane % 4 * 16;
  }

  template <typename Ring>
  __device__ __forceinline__ static StepWeights Load(const Ring& ring, int at, int step) {
    return ring.Weights(at, step);
  }

  template <typename RowOf>
  __device__ __forceinline__ void Step(const StepWeights& w, RowOf) {
    const uint4 tokens = Vector(at_);
    at_ += kBytes;
    MultiplyPairs(T{}, sums_, w.words[0].x, w.words[1].x, w.words[0].y, w.words[1].y, tokens.x, tokens.y);
    MultiplyPairs(T{}, sums_, w.words[0].z, w.words[1].z, w.words[0].w, w.words[1].w, tokens.z, tokens.w);
  }

  template <typename Store>
  __device__ __forceinline__ void Emit(Store store) const {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = lane % 4 * 2 + i % 2;
      if (token < count_) store(i / 2, token, lane / 4, sums_[i]);
    }
  }

 private:
  static constexpr int kBytes = DenseFormat<T>::kStep * sizeof(T);
  const char* at_;
  int count_;
  float sums_[4] = {};
};

// An expert has kShare of the core's columns, a token each.
template <typename T, int kTokens, int kColumns>
class MoreExperts<DenseFormat<T>, kTokens, kColumns> {
  static constexpr int kShare = kTileRows * kColumns / kSetRows;
  static_assert(kTokens <= kShare, "an expert's tokens have a column each");

 public:
  // `row_of(expert, token)`: the row of activations; there is an expert 0.
  template <typename RowOf>
  __device__ __forceinline__ MoreExperts(const StagedActivations& staged, int4 counts, int first_group, RowOf row_of) {
    // Missing tokens and experts repeat one.
    const int lane = threadIdx.x % kLanes, column = lane / 4;
    const int expert = CountOf(counts, column / kShare) > 0 ? column / kShare : 0;
    const int token = min(column % kShare, CountOf(counts, expert) - 1);
    at_ = staged.rows + row_of(expert, token) * staged.stride + 2 * first_group * kBytes + lane % 4 * 16;
    // The lane has two columns of one expert, among whose rows the lane's two are or not.
    expert_ = 2 * (lane % 4) / kShare;
    first_token_ = 2 * (lane % 4) % kShare;
    count_ = kColumns == kTileRows || expert_ % 2 == lane / 16 ? CountOf(counts, expert_) : 0;
  }

  template <typename Ring>
  __device__ __forceinline__ static StepWeights Load(const Ring& ring, int at, int step) {
    return ring.Weights(at, step);
  }

  template <typename RowOf>
  __device__ __forceinline__ void Step(const StepWeights& w, RowOf) {
    const uint4 tokens = Vector(at_);
    at_ += kBytes;
    MultiplyPairs(T{}, sums_, w.words[0].x, w.words[1].x, w.words[0].y, w.words[1].y, tokens.x, tokens.y);
    MultiplyPairs(T{}, sums_, w.words[0].z, w.words[1].z, w.words[0].w, w.words[1].w, tokens.z, tokens.w);
  }

  template <typename Store>
  __device__ __forceinline__ void Emit(Store store) const {
    const int lane = threadIdx.x % kLanes;
    const bool second = expert_ * kColumns >= kTileRows;  // tile
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = first_token_ + i;
      if (token < count_) store(expert_, token, lane / 4 % kColumns, second ? sums_[2 + i] : sums_[i]);
    }
  }

 private:
  static constexpr int kBytes = DenseFormat<T>::kStep * sizeof(T);
  const char* at_;
  int expert_, first_token_;  // of the lane's columns
  int count_;                 // of that expert's tokens; 0 in lanes that are not left with its sums
  float sums_[4] = {};
};

// Whether products are taken a group of steps at a time.
template <typename Products, typename = void>
struct TakesGroups : std::false_type {};
template <typename Products>
struct TakesGroups<Products, std::enable_if_t<Products::kTakesGroups>> : std::true_type {};

// Calls `multiply` with a number of tokens as a type: the least of 1, 2 (where Format::kHasPairs) and kTokens that
// holds `count`.
template <typename Format, int kTokens, typename Multiply>
__device__ __forceinline__ void ForTokens(int count, Multiply multiply) {
  if (kTokens == 1 || count == 1) {
    multiply(std::integral_constant<int, 1>());
  } else if (Format::kHasPairs && count == 2) {
    multiply(std::integral_constant<int, Format::kHasPairs ? 2 : kTokens>());
  } else {
    multiply(std::integral_constant<int, kTokens>());
  }
}

// All products of a slice, through the ring from place `at` on; `fill(at)` starts another group's copies there.
template <typename Products, typename Ring, typename RowOf, typename Fill>
__device__ __forceinline__ void MultiplySlice(Products& products, const Ring& ring, const Slice& slice, RowOf row_of,
                                              Fill fill, int* at) {
#pragma unroll 1
  for (int group = slice.first; group < slice.end; ++group) {
    WaitForCopies<Ring::kGroups - 1>();
    __syncwarp();
    const bool both = group + 1 < slice.end || !slice.is_odd;
    if constexpr (TakesGroups<Products>::value) {
      const auto loaded = products.LoadGroup(ring, *at);
      __syncwarp();
      fill(*at);
      products.MultiplyGroup(loaded, both, row_of);
    } else {
      const auto first = products.Load(ring, *at, 0), second = products.Load(ring, *at, 1);
      __syncwarp();
      fill(*at);
      products.Step(first, row_of);
      if (both) products.Step(second, row_of);
    }
    *at = Ring::Next(*at);
  }
}

}  // namespace ort_moe
