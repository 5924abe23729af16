// The weight formats of FusedExperts as the tensor core's operand: 16 bytes of one weight row per lane and step.
//
// The tensor core multiplies 16 weight rows by up to 8 tokens over 16 elements of the reduction. Which elements share an
// instruction is free as long as weights and activations agree, so a lane of quad q loads the 16 bytes of a row that
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

// Streamed: weights are read once a launch.
__device__ __forceinline__ uint4 LoadWeights(const uint8_t* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ __forceinline__ uint2 LoadScales(const uint8_t* address) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
  return v;
}

// Scales of four steps; lane q of a quad arrives with the eight of step q and leaves with its two of every step.
__device__ __forceinline__ uint2 TransposeScales(uint2 v, int quad_lane) {
  const bool high = quad_lane & 2, odd = quad_lane & 1;
  const uint32_t sent = high ? v.x : v.y;
  const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, 2);
  // First the words: of steps (q & 1) and (q & 1) + 2, the one of this lane's half.
  const uint32_t early = high ? got : v.x, late = high ? v.y : got;
  // Then the halves of the words: this lane keeps its own and sends its neighbour's.
  const uint32_t neighbours = __byte_perm(early, late, odd ? 0x5410 : 0x7632);
  const uint32_t mine = __byte_perm(early, late, odd ? 0x7632 : 0x5410);
  const uint32_t theirs = __shfl_xor_sync(0xffffffffu, neighbours, 1);
  // mine: steps (q & 1), (q & 1) + 2; theirs: the other two.
  return make_uint2(__byte_perm(mine, theirs, odd ? 0x1054 : 0x5410), __byte_perm(mine, theirs, odd ? 0x3276 : 0x7632));
}

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

  // The pairs of weights that meet the four pairs of activation vector `vector`.
  static __device__ __forceinline__ void Pairs(uint4 words, int, uint32_t, uint32_t (&pairs)[4]) {
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

  // `scales`: the lane's two e4m3 of this step, the first 16 elements' low.
  static __device__ __forceinline__ void Pairs(uint4 words, int vector, uint32_t scales, uint32_t (&pairs)[4]) {
    const uint32_t w = vector == 0 ? words.x : vector == 1 ? words.y : vector == 2 ? words.z : words.w;
    const __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(scales), __NV_E4M3);
    if constexpr (kHalf) {
      const __half2 scale = vector < 2 ? __low2half2(both) : __high2half2(both);
      // Bytes of a half's upper part: nibbles 0, 2, 4, 6 and 1, 3, 5, 7.
      const uint32_t even = ((w << 4) & 0x80808080u) | ((w << 1) & 0x0e0e0e0eu);
      const uint32_t odd = (w & 0x80808080u) | ((w >> 3) & 0x0e0e0e0eu);
      const uint32_t raw[4] = {__byte_perm(even, 0, 0x2404), __byte_perm(odd, 0, 0x2404), even & 0xff00ff00u,
                               odd & 0xff00ff00u};
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = BitCast<uint32_t>(__hmul2(BitCast<__half2>(raw[i]), scale));
    } else {
      // 2^118 instead of the whole 2^126, which would overflow at scale 4; kFactor makes up for it.
      constexpr float kLift = 0x1p118f;
      const float2 wide = __half22float2(both);
      const __nv_bfloat162 scale = __float2bfloat162_rn(__fmul_rn(vector < 2 ? wide.x : wide.y, kLift));
      const uint32_t raw[4] = {((w << 12) & 0x80008000u) | ((w << 6) & 0x01c001c0u),
                               ((w << 8) & 0x80008000u) | ((w << 2) & 0x01c001c0u),
                               ((w << 4) & 0x80008000u) | ((w >> 2) & 0x01c001c0u),
                               (w & 0x80008000u) | ((w >> 6) & 0x01c001c0u)};
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = BitCast<uint32_t>(__hmul2(BitCast<__nv_bfloat162>(raw[i]), scale));
    }
  }
};

}  // namespace ort_moe
