// Rows of tokens for the grouped product of packed weights and few tokens.
#pragma once

#include <cstdint>

#include "kernels/common/launch.cuh"

namespace ort_moe {

constexpr int kPermutedColumns = 32;  // whole groups with any code

// Word q of vector i of 32 columns, permuted.
template <int kBits>
__device__ __forceinline__ uint32_t Permuted(const uint32_t (&in)[4][4], int i, int q) {
  return kBits == 4 ? __byte_perm(in[q][i / 2], in[q][2 + i / 2], i % 2 == 0 ? 0x5410 : 0x7632)
                    : in[i / 2 * 2 + q / 2][q % 2 * 2 + i % 2];
}

// Rows of tokens with columns permuted as packed weights of kBits meet them; a thread takes 32.
template <int kBits>
__global__ void __launch_bounds__(256)
    PrepareTokensKernel(const uint4* __restrict__ x, uint4* __restrict__ prepared, int64_t groups) {
  WaitForPrevious();
  AllowNext();
  for (int64_t group = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; group < groups;
       group += int64_t{gridDim.x} * blockDim.x) {
    uint32_t in[4][4];
#pragma unroll
    for (int q = 0; q < 4; ++q) *reinterpret_cast<uint4*>(in[q]) = x[group * 4 + q];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t out[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) out[q] = Permuted<kBits>(in, i, q);
      prepared[group * 4 + i] = *reinterpret_cast<const uint4*>(out);
    }
  }
}

// A group of columns times `inverse`, as float16 and permuted; 0 leaves columns where they are.
template <int kBits>
__device__ __forceinline__ void StoreConverted(const uint4 (&group)[kPermutedColumns / 8], float inverse, uint4* to) {
  constexpr int kVectors = kPermutedColumns / 8;
  uint32_t in[kVectors][4];
#pragma unroll
  for (int q = 0; q < kVectors; ++q) {
    *reinterpret_cast<uint4*>(in[q]) = group[q];
#pragma unroll
    for (uint32_t& pair : in[q]) {
      const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
      const __half2 both = __floats2half2_rn(__fmul_rn(low, inverse), __fmul_rn(high, inverse));
      pair = reinterpret_cast<const uint32_t&>(both);
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    uint32_t out[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) out[q] = kBits == 0 ? in[i][q] : Permuted<kBits>(in, i, q);
    to[i] = *reinterpret_cast<const uint4*>(out);
  }
}

// Rows of bfloat16 as float16, each times a power of two that brings its largest element near the top, whose inverse
// goes to `factors`. Elements that are 2^29 times smaller than that one are rounded, far below what float32 sums keep
// of them. A block takes a row of `columns`, `stride` elements after the last, and a thread holds its first 32 columns,
// mostly all of them, between looking for the largest and converting; kBits permutes as above, 0 leaves columns where
// they are. `rows`: how many there are, or null for all; memory behind them is read, too.
template <int kBits>
__global__ void __launch_bounds__(128) ConvertRowsKernel(const uint4* source, uint4* target, float* factors,
                                                         int columns, int stride, const int64_t* rows) {
  constexpr int kVectors = kPermutedColumns / 8, kWarps = 4;
  constexpr uint32_t kMagnitude = 0x7fff7fffu;
  __shared__ uint32_t peaks[kWarps];
  AllowNext();  // the next kernel waits for this one, and this one for all before it
  WaitForPrevious();
  const uint4* const from = source + int64_t{blockIdx.x} * (stride / 8);
  uint4* const to = target + int64_t{blockIdx.x} * (stride / 8);
  const int first = threadIdx.x, groups = columns / kPermutedColumns;
  uint4 held[kVectors] = {};
  uint32_t peak = 0;
  const auto look = [&](uint4 v) {
    peak = __vmaxu2(__vmaxu2(peak, __vmaxu2(v.x & kMagnitude, v.y & kMagnitude)),
                    __vmaxu2(v.z & kMagnitude, v.w & kMagnitude));
  };
  if (first < groups) {
#pragma unroll
    for (int q = 0; q < kVectors; ++q) held[q] = from[first * kVectors + q];
  }
  const bool within = rows == nullptr || blockIdx.x < *rows;
#pragma unroll
  for (int q = 0; q < kVectors; ++q) look(held[q]);
  for (int vector = (first + blockDim.x) * kVectors; vector < groups * kVectors; vector += blockDim.x * kVectors) {
#pragma unroll
    for (int q = 0; q < kVectors; ++q) look(from[vector + q]);
  }
  if (!within) return;
  peak = __reduce_max_sync(0xffffffffu, max(peak >> 16, peak & 0xffffu));
  if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = peak;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) peak = max(peak, peaks[warp]);
  // The exponent of the factor; the largest element becomes 2^14 at least and less than 2^15.
  constexpr int kTop = 14, kBias = 127;
  const int exponent = max(static_cast<int>(peak >> 7), kTop + 1) - kTop;
  const float inverse = __uint_as_float(static_cast<uint32_t>(2 * kBias - exponent) << 23);
  if (threadIdx.x == 0) factors[blockIdx.x] = __uint_as_float(static_cast<uint32_t>(exponent) << 23);
  if (first < groups) StoreConverted<kBits>(held, inverse, to + first * kVectors);
  for (int group = first + blockDim.x; group < groups; group += blockDim.x) {
#pragma unroll
    for (int q = 0; q < kVectors; ++q) held[q] = from[group * kVectors + q];
    StoreConverted<kBits>(held, inverse, to + group * kVectors);
  }
}

}  // namespace ort_moe
