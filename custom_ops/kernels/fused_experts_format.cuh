// The weight formats of FusedExperts as the tensor core's operand: 16 bytes of one weight row per lane and step.
//
// The tensor core multiplies 16 weight rows by up to 8 tokens over 16 elements of the reduction. Which elements share
// an instruction is free as long as weights and activations agree, so a lane of quad q loads the 16 bytes of a row that
// begin at 64 * step + 16 * q, and activations lie at Position(element): 16 bytes of them serve 8 elements of a lane.
//
// nvfp4: a weight is e2m1 times the e4m3 scale of its 16 elements. e2m1 becomes a float16 by moving its bits to where
// the exponent ends: its value times 2^-14, subnormals included, which kFactor undoes at the end. bfloat16 has its
// exponent's end across two bytes, which costs half as many instructions again; so bfloat16 activations become float16
// as well, each row times a power of two that brings its largest element near the top. Elements that are 2^29 times
// smaller than that one are rounded, far below what float32 sums keep of them.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/float_math.h"
#include "kernels/fused_experts_params.cuh"

namespace ort_moe {

template <typename T>
struct DenseFormat {
  using Element = T;
  static constexpr int kStep = 32;    // elements of the reduction in a warp's step
  static constexpr int kVectors = 1;  // of 16 bytes of activations per lane and step
  static constexpr bool kScaled = false;
  static constexpr float kFactor = 1.0f;

  static __host__ __device__ __forceinline__ int Position(int element) { return element; }
  static __host__ __device__ __forceinline__ int VectorElement(int position) { return position; }
  static __host__ __device__ __forceinline__ int64_t RowBytes(int depth) { return int64_t{depth} * sizeof(T); }
  static __device__ __forceinline__ uint4 Arrange(uint4 natural) { return natural; }

  // Activations are taken as they are.
  static constexpr bool kConverts = false;
  static __device__ __forceinline__ uint32_t Peak(uint4) { return 0; }
  static __device__ __forceinline__ uint4 Convert(uint4 v, uint32_t) { return v; }
  static __device__ __forceinline__ float ConversionFactor(uint32_t) { return 1.0f; }
};

template <typename T>
struct Nvfp4Format {
  using Element = T;
  static constexpr int kStep = 128;
  static constexpr int kVectors = 4;
  static constexpr bool kScaled = true;
  static constexpr float kFactor = 16384.0f;

  // Vector v of lane q begins at 32 * v + 8 * q of a step; in it element i and i + 4 are a pair.
  static __host__ __device__ __forceinline__ int Position(int element) {
    const int lane = element / 32 % 4, vector = element / 8 % 4, within = element % 8;
    return element / kStep * kStep + vector * 32 + lane * 8 + within % 4 * 2 + within / 4;
  }
  // The first element of the vector at a position.
  static __host__ __device__ __forceinline__ int VectorElement(int position) {
    return position / kStep * kStep + position / 8 % 4 * 32 + position / 32 % 4 * 8;
  }
  static __host__ __device__ __forceinline__ int64_t RowBytes(int depth) { return depth / 2; }
  static __device__ __forceinline__ uint4 Arrange(uint4 v) {
    return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                      __byte_perm(v.y, v.w, 0x7632));
  }

  static constexpr bool kConverts = std::is_same_v<T, __nv_bfloat16>;

  // The largest exponent among a vector's elements, in place.
  static __device__ __forceinline__ uint32_t Peak(uint4 v) {
    constexpr uint32_t kExponents = 0x7f807f80u;
    const uint32_t both =
        __vmaxu2(__vmaxu2(v.x & kExponents, v.y & kExponents), __vmaxu2(v.z & kExponents, v.w & kExponents));
    return max(both >> 16, both & 0xffffu);
  }

  // bfloat16 as float16 for a row with this peak; infinities and NaN stay.
  static __device__ __forceinline__ uint4 Convert(uint4 v, uint32_t peak) {
    if constexpr (kConverts) {
      const uint32_t lowered = -Base(peak) & 0xffffu, both = lowered | lowered << 16;
      v = make_uint4(ConvertPair(v.x, both), ConvertPair(v.y, both), ConvertPair(v.z, both), ConvertPair(v.w, both));
    }
    return v;
  }

  // What the products of a converted row are multiplied with.
  static __device__ __forceinline__ float ConversionFactor(uint32_t peak) {
    return kConverts ? PowerOfTwo(static_cast<int>(Base(peak) >> 7) - 112) : 1.0f;
  }

  // A lane's two scales of a step.
  static __device__ __forceinline__ float2 ScalesOf(uint32_t both) {
    return __half22float2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(both), __NV_E4M3));
  }

  // Eight weights without their scale, as the pairs of a vector.
  static __device__ __forceinline__ void Decode(uint32_t w, uint32_t (&pairs)[4]) {
    // Bytes of a half's upper part: nibbles 0, 2, 4, 6 and 1, 3, 5, 7.
    const uint32_t even = ((w << 4) & 0x80808080u) | ((w << 1) & 0x0e0e0e0eu);
    const uint32_t odd = (w & 0x80808080u) | ((w >> 3) & 0x0e0e0e0eu);
    pairs[0] = __byte_perm(even, 0, 0x2404);
    pairs[1] = __byte_perm(odd, 0, 0x2404);
    pairs[2] = even & 0xff00ff00u;
    pairs[3] = odd & 0xff00ff00u;
  }

 private:
  // What the exponents are lowered by, in place: the peak becomes 30, the largest; 31 if it was infinity.
  static __device__ __forceinline__ uint32_t Base(uint32_t peak) {
    constexpr uint32_t kUnit = 1u << 7;
    return peak == 255 * kUnit ? 224 * kUnit : max(peak, 30 * kUnit) - 30 * kUnit;
  }
  static __device__ __forceinline__ uint32_t ConvertPair(uint32_t v, uint32_t lowered) {
    return __viaddmax_s16x2(v & 0x7fff7fffu, lowered, 0u) << 3 | (v & 0x80008000u);
  }
};

}  // namespace ort_moe
