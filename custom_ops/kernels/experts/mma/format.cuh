// The weight formats of FusedExperts as the tensor core's operand: 16 bytes of one weight row per lane and step.
//
// The tensor core multiplies 16 weight rows by up to 8 tokens over 16 elements of the reduction. Which elements share
// an instruction is free as long as weights and activations agree, so a lane of quad q loads the 16 bytes of a row that
// begin at 64 * step + 16 * q, and activations lie at Position(element): 16 bytes of them serve 8 elements of a lane.
//
// nvfp4: a weight is e2m1 times the e4m3 scale of its 16 elements. e2m1 becomes a float16 by moving its bits to where
// the exponent ends: its value times 2^-14, subnormals included, which kFactor undoes at the end. bfloat16 has its
// exponent's end across two bytes, which costs half as many instructions again; so bfloat16 activations become float16
// as well, each block of 16 times a power of two that brings its largest element near the top. Elements that are 2^29
// times smaller than that one are rounded, far below what float32 sums keep of them.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/float_math.h"
#include "kernels/experts/params.cuh"

namespace ort_moe {

// Bits of `first` where `mask` has ones, else of `second`, in one operation, which the compiler would take apart.
__device__ __forceinline__ uint32_t Select(uint32_t mask, uint32_t first, uint32_t second) {
  uint32_t selected;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(selected) : "r"(first), "r"(second), "r"(mask));
  return selected;
}

// Eight e2m1 weights times 2^-14, as the pairs of a vector. Written for the pipe of the logical operations, which is
// the first to fill up: the shifts to the left are multiplications.
__device__ __forceinline__ void DecodeE2m1(uint32_t w, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSigns = 0x80808080u, kHalves = 0x8e008e00u;
  // Nibbles 0, 2, 4, 6 and 1, 3, 5, 7: signs and magnitudes as in a half's upper byte, other bits between them.
  const uint32_t even = Select(kSigns, w << 4, w << 1), odd = Select(kSigns, w, w >> 3);
  pairs[0] = (even << 8) & kHalves;
  pairs[1] = (odd << 8) & kHalves;
  pairs[2] = even & kHalves;
  pairs[3] = odd & kHalves;
}

constexpr float kE2m1Factor = 16384.0f;  // that DecodeE2m1 leaves out

// A block's bfloat16 as float16; returns what its products are to be multiplied with. Infinities and NaN stay.
template <int kVectors>
__device__ __forceinline__ float ConvertBlock(uint4 (&block)[kVectors]) {
  constexpr uint32_t kExponents = 0x7f807f80u, kUnit = 1u << 7;
  // The largest exponent, in place.
  uint32_t peaks = 0;
#pragma unroll
  for (const uint4& v : block) {
    peaks = __vmaxu2(
        peaks, __vmaxu2(__vmaxu2(v.x & kExponents, v.y & kExponents), __vmaxu2(v.z & kExponents, v.w & kExponents)));
  }
  const uint32_t peak = max(peaks >> 16, peaks & 0xffffu);
  // What the exponents are lowered by, in place: the peak becomes 30, the largest; 31 if it was infinity.
  const uint32_t base = peak == 255 * kUnit ? 224 * kUnit : max(peak, 30 * kUnit) - 30 * kUnit;
  const uint32_t lowered = -base & 0xffffu, both = lowered | lowered << 16;
  const auto convert = [&](uint32_t v) { return __viaddmax_s16x2(v & 0x7fff7fffu, both, 0u) << 3 | (v & 0x80008000u); };
#pragma unroll
  for (uint4& v : block) v = make_uint4(convert(v.x), convert(v.y), convert(v.z), convert(v.w));
  return PowerOfTwo(static_cast<int>(base >> 7) - 112);
}

// Where activations lie for weights of four bits, 128 of which are a step: vector v of lane q begins at 32 * v + 8 * q;
// in it element i and i + 4 are a pair.
__host__ __device__ __forceinline__ int NibblePosition(int element) {
  const int lane = element / 32 % 4, vector = element / 8 % 4, within = element % 8;
  return element / 128 * 128 + vector * 32 + lane * 8 + within % 4 * 2 + within / 4;
}

// A vector of neighbours in that order.
__device__ __forceinline__ uint4 ArrangeNibbles(uint4 v) {
  return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                    __byte_perm(v.y, v.w, 0x7632));
}

template <typename T>
struct DenseFormat {
  using Element = T;
  static constexpr int kStep = 32;          // elements of the reduction in a warp's step
  static constexpr int kFc1Groups = 4;      // of weights in flight in a warp
  static constexpr int kFc2Groups = 2;      // where the activations of all choices lie beside them
  static constexpr int kManyGroups = 4;     // in both layers for many tokens
  static constexpr int kFc2Tokens = 2;      // of an expert at once, where four share the tensor core
  static constexpr bool kHasPairs = false;  // products of two tokens have code of their own
  static constexpr int kFc2Columns = 4;     // of a tile there, or more where there are few slots
  static constexpr float kFactor = 1.0f;
  static constexpr int kBlock = 16;         // of activations, which one thread stages
  static constexpr bool kArranges = false;  // activations lie in another order within their vectors
  static constexpr bool kConverts = false;  // activations are taken as float16, times a factor for each block

  static __host__ __device__ __forceinline__ int Position(int element) { return element; }
  static __host__ __device__ __forceinline__ int64_t RowBytes(int depth) { return int64_t{depth} * sizeof(T); }
};

template <typename T>
struct Nvfp4Format {
  using Element = T;
  static constexpr int kStep = 128;
  static constexpr int kStepScales = kStep / static_cast<int>(kNvfp4Block);  // of a row
  static constexpr int kFc1Groups = 2;  // a third delays the first by more than it brings later
  static constexpr int kFc2Groups = 2;
  static constexpr int kManyGroups = 3;
  static constexpr int kFc2Tokens = 4;
  static constexpr bool kHasPairs = false;
  static constexpr int kFc2Columns = 8;
  static constexpr float kFactor = kE2m1Factor;
  static constexpr int kBlock = static_cast<int>(kNvfp4Block);
  static constexpr bool kArranges = true;
  static constexpr bool kConverts = std::is_same_v<T, __nv_bfloat16>;

  static __host__ __device__ __forceinline__ int Position(int element) { return NibblePosition(element); }
  static __host__ __device__ __forceinline__ int64_t RowBytes(int depth) { return depth / 2; }

  // Two neighbouring scales.
  static __device__ __forceinline__ float2 ScalesOf(uint32_t both) {
    return __half22float2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(both), __NV_E4M3));
  }
};

}  // namespace ort_moe
