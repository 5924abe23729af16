// The weight formats of FusedExperts as the tensor core's operand: 16 bytes of one weight row per lane and step.
//
// The tensor core multiplies 16 weight rows by up to 8 tokens over 16 elements of the reduction. Which elements share
// an instruction is free as long as weights and activations agree, so a lane of quad q loads the 16 bytes of a row that
// begin at 64 * step + 16 * q, and activations lie at Position(element): 16 bytes of them serve 8 elements of a lane.
//
// nvfp4: a weight is e2m1 times the e4m3 scale of its 16 elements: 2 bits times 4 bits of significand, exact in float16
// and bfloat16. e2m1 becomes a half by moving its bits to where the half's exponent ends, which is the value times a
// power of two that kFactor undoes at the end; subnormals come out right by themselves.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/fused_experts_params.cuh"

namespace ort_moe {

template <typename T>
struct DenseFormat {
  using Element = T;
  static constexpr int kStep = 32;    // elements of the reduction in a warp's step
  static constexpr int kVectors = 1;  // of 16 bytes of activations per lane and step
  static constexpr bool kScaled = false;
  static constexpr float kFactor = 1.0f;

  struct Scales {};

  static __host__ __device__ __forceinline__ int Position(int element) { return element; }
  static __host__ __device__ __forceinline__ int VectorElement(int position) { return position; }
  static __host__ __device__ __forceinline__ int64_t RowBytes(int depth) { return int64_t{depth} * sizeof(T); }
  static __device__ __forceinline__ uint4 Arrange(uint4 natural) { return natural; }

  // The pairs of weights that meet the four pairs of activation vector `vector`.
  static __device__ __forceinline__ void Pairs(uint4 words, int, Scales, uint32_t (&pairs)[4]) {
    pairs[0] = words.x, pairs[1] = words.y, pairs[2] = words.z, pairs[3] = words.w;
  }
};

template <typename T>
struct Nvfp4Format {
  using Element = T;
  static constexpr int kStep = 128;
  static constexpr int kVectors = 4;
  static constexpr bool kScaled = true;
  static constexpr bool kHalf = std::is_same_v<T, __half>;
  static constexpr float kFactor = kHalf ? 16384.0f : 256.0f;

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

  // A lane's two scales of a step, each twice.
  using Pair = typename HalfTraits<T>::Pair;
  struct Scales {
    Pair low, high;
  };
  static __device__ __forceinline__ Scales ScalesOf(uint16_t both) {
    const __half2_raw wide = __nv_cvt_fp8x2_to_halfraw2(both, __NV_E4M3);
    if constexpr (kHalf) {
      return {__low2half2(wide), __high2half2(wide)};
    } else {
      // 2^118 instead of the whole 2^126, which would overflow at scale 4; kFactor makes up for it.
      constexpr float kLift = 0x1p118f;
      const float2 scales = __half22float2(wide);
      return {__float2bfloat162_rn(__fmul_rn(scales.x, kLift)), __float2bfloat162_rn(__fmul_rn(scales.y, kLift))};
    }
  }

  static __device__ __forceinline__ void Pairs(uint4 words, int vector, const Scales& scales, uint32_t (&pairs)[4]) {
    const uint32_t w = vector == 0 ? words.x : vector == 1 ? words.y : vector == 2 ? words.z : words.w;
    const Pair scale = vector < 2 ? scales.low : scales.high;
    uint32_t raw[4];
    if constexpr (kHalf) {
      // Bytes of a half's upper part: nibbles 0, 2, 4, 6 and 1, 3, 5, 7.
      const uint32_t even = ((w << 4) & 0x80808080u) | ((w << 1) & 0x0e0e0e0eu);
      const uint32_t odd = (w & 0x80808080u) | ((w >> 3) & 0x0e0e0e0eu);
      raw[0] = __byte_perm(even, 0, 0x2404);
      raw[1] = __byte_perm(odd, 0, 0x2404);
      raw[2] = even & 0xff00ff00u;
      raw[3] = odd & 0xff00ff00u;
    } else {
      raw[0] = ((w << 12) & 0x80008000u) | ((w << 6) & 0x01c001c0u);
      raw[1] = ((w << 8) & 0x80008000u) | ((w << 2) & 0x01c001c0u);
      raw[2] = ((w << 4) & 0x80008000u) | ((w >> 2) & 0x01c001c0u);
      raw[3] = (w & 0x80008000u) | ((w >> 6) & 0x01c001c0u);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = BitCast<uint32_t>(__hmul2(BitCast<Pair>(raw[i]), scale));
  }
};

}  // namespace ort_moe
