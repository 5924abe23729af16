// The formats of FusedExperts in which a lane's 16 bytes share one scale at least: mxfp4, int4, int8 and fp8
// (format.cuh has the others and tells the order of the activations).
//
// Weights become float16 without their scale, exactly: e2m1 as for nvfp4, e4m3 by the conversion for it, and an integer
// by 1024 in front of it, whose last digit is 1, less 1024 and the zero point. bfloat16 activations become float16 for
// all of them, each lane's block times a power of two of its own.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/experts/mma/format.cuh"

namespace ort_moe {

// Two weights a byte.
template <typename T>
struct NibbleFormat {
  using Element = T;
  static constexpr int kBits = 4;
  static constexpr int kStep = 128;
  static constexpr int kBlock = 32;  // a lane's part of a step
  static constexpr int kFc1Groups = 2;
  static constexpr int kFc2Groups = 2;
  static constexpr int kFc2Tokens = 4;
  static constexpr bool kHasPairs = true;
  static constexpr int kFc2Columns = 8;
  static constexpr bool kArranges = true;
  static constexpr bool kConverts = std::is_same_v<T, __nv_bfloat16>;

  static __host__ __device__ __forceinline__ int Position(int element) { return NibblePosition(element); }
  static __host__ __device__ __forceinline__ int64_t RowBytes(int depth) { return depth / 2; }
};

// A weight a byte. Vector v of lane q begins at 32 * v + 8 * q of a step, and neighbours are pairs.
template <typename T>
struct ByteFormat {
  using Element = T;
  static constexpr int kBits = 8;
  static constexpr int kStep = 64;
  static constexpr int kBlock = 16;
  static constexpr int kFc1Groups = 2;
  static constexpr int kFc2Groups = 2;
  static constexpr int kFc2Tokens = 4;
  static constexpr bool kHasPairs = true;
  static constexpr int kFc2Columns = 8;
  static constexpr bool kArranges = false;
  static constexpr bool kConverts = std::is_same_v<T, __nv_bfloat16>;

  static __host__ __device__ __forceinline__ int Position(int element) {
    const int lane = element / 16 % 4, vector = element / 8 % 2, within = element % 8;
    return element / kStep * kStep + vector * 32 + lane * 8 + within;
  }
  static __host__ __device__ __forceinline__ int64_t RowBytes(int depth) { return depth; }
};

// Beside these a format has
//   kScaleBytes      of a scale, and Scale(bits), its value
//   kZeroBits        of a zero point, 0 for none, and kZero, the default
//   kSharesRows      blocks of rows share a scale, too
//   Zero, ZeroOf     a zero point as decoding takes it
//   Decode           a word's weights as pairs in the activations' order
struct NoZero {};

template <typename T>
struct Mxfp4Format : NibbleFormat<T> {
  static constexpr float kFactor = kE2m1Factor;
  static constexpr int kScaleBytes = 1, kZeroBits = 0, kZero = 0;
  static constexpr bool kSharesRows = false;
  using Zero = NoZero;

  // As E8m0ToFloat, with little for the pipe of the logical operations: 255 is infinity first, and NaN after that.
  static __device__ __forceinline__ float Scale(uint32_t bits) {
    constexpr uint32_t kSmallest = 0x00400000u;
    const float scale = BitsToFloat(max(bits << 23, kSmallest));
    return Add(scale, Add(scale, -scale));
  }
  static __device__ __forceinline__ Zero ZeroOf(uint32_t) { return {}; }
  static __device__ __forceinline__ void Decode(uint32_t w, Zero, uint32_t (&pairs)[4]) { DecodeE2m1(w, pairs); }
};

constexpr uint32_t k1024 = 0x64006400u;  // pairs of 1024

__device__ __forceinline__ uint32_t BitsOf(__half2 pair) { return reinterpret_cast<const uint32_t&>(pair); }
__device__ __forceinline__ __half2 PairOfBits(uint32_t bits) { return reinterpret_cast<const __half2&>(bits); }

template <typename T>
__device__ __forceinline__ float ScaleOfType(uint32_t bits) {
  const uint16_t half = static_cast<uint16_t>(bits);
  return HalfTraits<T>::ToFloat(reinterpret_cast<const T&>(half));
}

template <typename T>
struct Int4Format : NibbleFormat<T> {
  static constexpr float kFactor = 1.0f;
  static constexpr int kScaleBytes = 2, kZeroBits = 4, kZero = 8;
  static constexpr bool kSharesRows = false;
  struct Zero {
    uint32_t low, high;
  };

  static __device__ __forceinline__ float Scale(uint32_t bits) { return ScaleOfType<T>(bits); }

  // 1024 + zero, and -(64 + zero).
  static __device__ __forceinline__ Zero ZeroOf(uint32_t zero) {
    return {zero * 0x00010001u + k1024, zero * 0x00100010u + 0xd400d400u};
  }

  // A code in a half's last four bits is 1024 + code, in the four above 1024 + 16 * code.
  static __device__ __forceinline__ void Decode(uint32_t w, const Zero& zero, uint32_t (&pairs)[4]) {
    const __half2 sixteenth = PairOfBits(0x2c002c00u), low = PairOfBits(zero.low), high = PairOfBits(zero.high);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t codes = i == 0 ? w : w >> 8;
      pairs[2 * i] = BitsOf(__hsub2(PairOfBits(Masked(codes, 0x000f000fu, k1024)), low));
      pairs[2 * i + 1] = BitsOf(__hfma2(PairOfBits(Masked(codes, 0x00f000f0u, k1024)), sixteenth, high));
    }
  }

 private:
  // The bits of `bits` where `mask` has ones, and `rest`; in one operation, which the compiler would take apart.
  static __device__ __forceinline__ uint32_t Masked(uint32_t bits, uint32_t mask, uint32_t rest) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(bits), "r"(mask), "r"(rest));  // (a & b) | c
    return result;
  }
};

template <typename T>
struct Int8Format : ByteFormat<T> {
  static constexpr float kFactor = 1.0f;
  static constexpr int kScaleBytes = 2, kZeroBits = 8, kZero = 128;
  static constexpr bool kSharesRows = false;
  using Zero = uint32_t;  // pairs of 1024 + zero

  static __device__ __forceinline__ float Scale(uint32_t bits) { return ScaleOfType<T>(bits); }
  static __device__ __forceinline__ Zero ZeroOf(uint32_t zero) { return zero * 0x00010001u + k1024; }
  static __device__ __forceinline__ void Decode(uint32_t w, Zero zero, uint32_t (&pairs)[2]) {
    pairs[0] = BitsOf(__hsub2(PairOfBits(__byte_perm(w, k1024, 0x5150)), PairOfBits(zero)));
    pairs[1] = BitsOf(__hsub2(PairOfBits(__byte_perm(w, k1024, 0x5352)), PairOfBits(zero)));
  }
};

template <typename T>
struct Fp8Format : ByteFormat<T> {
  static constexpr float kFactor = 1.0f;
  static constexpr int kScaleBytes = 4, kZeroBits = 0, kZero = 0;
  static constexpr bool kSharesRows = true;
  using Zero = NoZero;

  static __device__ __forceinline__ float Scale(uint32_t bits) { return BitsToFloat(bits); }
  static __device__ __forceinline__ Zero ZeroOf(uint32_t) { return {}; }
  static __device__ __forceinline__ void Decode(uint32_t w, Zero, uint32_t (&pairs)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto bytes = static_cast<__nv_fp8x2_storage_t>(w >> (16 * i));
      pairs[i] = BitsOf(__half2(__nv_cvt_fp8x2_to_halfraw2(bytes, __NV_E4M3)));
    }
  }
};

}  // namespace ort_moe
