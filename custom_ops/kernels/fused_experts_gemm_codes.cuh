// Packed weights of the grouped product, as pairs of half-precision numbers.
//
// A lane decodes a word of neighbouring weights of a row at once, which share a scale: of 8 four-bit weights, pairs are
// i and i + 4, which lie 16 bits apart; of 4 bytes, neighbours. What a stage needs beside the weights lies in a row's
// slot: pieces of its scales and zero points, in whole words of four bytes, since rows begin anywhere.
//
// e2m1's bits, moved to where the exponent ends, are its value times 2^-126 in bfloat16 and times 2^-14 in float16;
// products with e4m3 have 6 digits at most and are exact, kFactor undoes the rest. Integers get an exponent with which
// their last digit is 1, so that subtracting the zero point is exact. Then one product with the scale is rounded.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/fused_experts_format.cuh"
#include "kernels/fused_experts_gemm_finish.cuh"

namespace ort_moe {

template <typename T>
using PairType = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <typename T>
__device__ __forceinline__ PairType<T> AsPair(uint32_t bits) {
  return reinterpret_cast<const PairType<T>&>(bits);
}

template <typename T>
__device__ __forceinline__ uint32_t MulPairs(uint32_t a, uint32_t b) {
  const PairType<T> product = __hmul2(AsPair<T>(a), AsPair<T>(b));
  return reinterpret_cast<const uint32_t&>(product);
}

template <typename T>
__device__ __forceinline__ uint32_t SubtractPairs(uint32_t a, uint32_t b) {
  const PairType<T> difference = __hsub2(AsPair<T>(a), AsPair<T>(b));
  return reinterpret_cast<const uint32_t&>(difference);
}

// The bits of both halves where `mask` has ones, and `rest`; in one operation, which the compiler would take apart.
__device__ __forceinline__ uint32_t Masked(uint32_t bits, uint32_t mask, uint32_t rest) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(bits), "r"(mask), "r"(rest));  // (a & b) | c
  return result;
}

// Eight e2m1 weights as four pairs, times 2^-126 or 2^-14.
template <typename T>
__device__ __forceinline__ void UnscaledE2m1(uint32_t w, uint32_t (&pairs)[4]) {
  if constexpr (std::is_same_v<T, __half>) {
    DecodeE2m1(w, pairs);
  } else {
    constexpr uint32_t kSigns = 0x80008000u, kMagnitudes = 0x01c001c0u;
    pairs[0] = Masked(w * (1u << 12), kSigns, (w * (1u << 6)) & kMagnitudes);
    pairs[1] = Masked(w * (1u << 8), kSigns, (w * (1u << 2)) & kMagnitudes);
    pairs[2] = Masked(w * (1u << 4), kSigns, (w >> 2) & kMagnitudes);
    pairs[3] = Masked(w, kSigns, (w >> 6) & kMagnitudes);
  }
}

// A code: the bytes of a row's slot and where they are in memory; then what a lane of quad position q makes of the
// slot, and the decoding of words. Word j of a stage's 16 is 4 * w + q.
//   ScaleAt   byte of a row's scales at which the block of an element begins; of the depth, rounded up: a row's bytes
//   ZeroAt    the same of zero points, in nibbles
template <typename T>
struct Nvfp4Code {
  static constexpr int kSlotBytes = 8;
  static constexpr float kFactor = 256.0f;
  static constexpr bool kHasZeroPoints = false;
  static constexpr int kBits = 4;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int) { return element / 16; }

  uint32_t scales[4];  // of each step, twice

  __device__ __forceinline__ Nvfp4Code(uint32_t slot, int, int, const LayerParams&, int q) {
    uint32_t low, high;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(slot) : "memory");
    const uint32_t mine = __byte_perm(low, high, q < 2 ? 0x6420 : 0x7531);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const __half2_raw raw =
          __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(half == 0 ? mine : mine >> 16), __NV_E4M3);
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 both = __hmul2(__half2(raw), __float2half2_rn(64.0f));  // 2^-14 * 2^6 * kFactor = 1
        const uint32_t bits = reinterpret_cast<const uint32_t&>(both);
        scales[2 * half] = __byte_perm(bits, bits, 0x1010);
        scales[2 * half + 1] = __byte_perm(bits, bits, 0x3232);
      } else {
        constexpr float kPower = 3.32306998946229e35f;  // 2^118; 2^-126 * 2^118 * kFactor = 1
        const float2 both = __half22float2(__half2(raw));
        scales[2 * half] = PairOf<T>(Mul(both.x, kPower), Mul(both.x, kPower));
        scales[2 * half + 1] = PairOf<T>(Mul(both.y, kPower), Mul(both.y, kPower));
      }
    }
  }

  __device__ __forceinline__ void Decode(int w, uint32_t word, uint32_t (&pairs)[4]) const {
    UnscaledE2m1<T>(word, pairs);
#pragma unroll
    for (uint32_t& pair : pairs) pair = MulPairs<T>(pair, scales[w]);
  }
};

// Bytes [shift, shift + 4) of two words.
__device__ __forceinline__ uint32_t Piece(uint32_t low, uint32_t high, int shift) {
  return __funnelshift_r(low, high, 8 * shift);
}

// With bfloat16 alone: e8m0 goes far beyond float16.
template <typename T>
struct Mxfp4Code {
  static constexpr int kSlotBytes = 8;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kHasZeroPoints = false;
  static constexpr int kBits = 4;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int) { return element / 32; }

  uint32_t scales[4];

  __device__ __forceinline__ Mxfp4Code(uint32_t slot, int shift, int, const LayerParams&, int) {
    uint32_t low, high;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(slot) : "memory");
    const uint32_t bytes = Piece(low, high, shift);
    constexpr uint32_t kNaN = 0x7fff7fffu, kNaNByte = 0x00ff00ffu, kSmallest = 0x00400040u;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t byte = __byte_perm(bytes, 0, 0x4040 + w * 0x0101);
      scales[w] = byte == kNaNByte ? kNaN : byte == 0 ? kSmallest : byte << 7;
    }
  }

  __device__ __forceinline__ void Decode(int w, uint32_t word, uint32_t (&pairs)[4]) const {
    constexpr uint32_t kUnit = 0x7e807e80u;  // 2^126
    UnscaledE2m1<T>(word, pairs);
#pragma unroll
    for (uint32_t& pair : pairs) pair = MulPairs<T>(MulPairs<T>(pair, kUnit), scales[w]);
  }
};

template <typename T>
struct Int4Code {
  static constexpr int kSlotBytes = 16;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kHasZeroPoints = true;
  static constexpr int kBits = 4;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int block) {
    return element / block * static_cast<int>(sizeof(T));
  }
  static __host__ __device__ __forceinline__ int ZeroAt(int element, int block) { return element / block; }

  static constexpr uint32_t kUnit = std::is_same_v<T, __half> ? 0x64006400u : 0x43004300u;  // 2^10 or 2^7, and a code

  uint32_t scales[4], zeros[4];

  // zero_shift counts nibbles. Four scales begin at a whole word: blocks have 32 weights at least, rows a multiple
  // of 64.
  __device__ __forceinline__ Int4Code(uint32_t slot, int shift, int zero_shift, const LayerParams& layer, int) {
    uint32_t words[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(slot)
                 : "memory");
    const uint32_t first = Piece(words[0], words[1], shift), second = words[1];
    const uint32_t codes = layer.zero_points == nullptr ? 0x8888u : __funnelshift_r(words[2], words[3], 4 * zero_shift);
    const int block_bits = __ffs(layer.block_size) - 1;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int block = w * 32 >> block_bits;
      scales[w] = __byte_perm(block < 2 ? first : second, 0, block % 2 == 0 ? 0x1010 : 0x3232);
      const uint32_t zero = (codes >> (4 * block)) & 15u;
      zeros[w] = zero * 0x00010001u | kUnit;
    }
  }

  __device__ __forceinline__ void Decode(int w, uint32_t word, uint32_t (&pairs)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = MulPairs<T>(SubtractPairs<T>(Masked(word >> (4 * i), 0x000f000fu, kUnit), zeros[w]), scales[w]);
    }
  }
};

template <typename T>
struct Int8Code {
  static constexpr int kBits = 8;
  static constexpr int kSlotBytes = 16;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kHasZeroPoints = true;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int block) {
    return element / block * static_cast<int>(sizeof(T));
  }
  static __host__ __device__ __forceinline__ int ZeroAt(int element, int block) { return element / block * 2; }

  float scales[2], zeros[2];  // of the stage's halves

  __device__ __forceinline__ Int8Code(uint32_t slot, int shift, int zero_shift, const LayerParams& layer, int) {
    constexpr float kUnit = 8388608.0f;  // 2^23
    uint32_t words[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(slot)
                 : "memory");
    const uint32_t both = Piece(words[0], words[1], shift);
    const uint32_t codes = layer.zero_points == nullptr ? 0x8080u : Piece(words[2], words[3], zero_shift / 2);
    const bool two = layer.block_size == 32;
    scales[0] = LowOf<T>(both);
    scales[1] = two ? HighOf<T>(both) : scales[0];
    zeros[0] = Add(kUnit, static_cast<float>(codes & 0xffu));
    zeros[1] = two ? Add(kUnit, static_cast<float>(codes >> 8 & 0xffu)) : zeros[0];
  }

  __device__ __forceinline__ void Decode(int w, uint32_t word, uint32_t (&pairs)[2]) const {
    constexpr uint32_t kUnitBits = 0x4b000000u;  // of 2^23: with a byte in its end, 2^23 and the byte
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = __uint_as_float(__byte_perm(word, kUnitBits, 0x7540 + 2 * i));
      const float high = __uint_as_float(__byte_perm(word, kUnitBits, 0x7541 + 2 * i));
      pairs[i] = PairOf<T>(Mul(Add(low, -zeros[w / 2]), scales[w / 2]), Mul(Add(high, -zeros[w / 2]), scales[w / 2]));
    }
  }
};

// Blocks of rows share a scale too.
template <typename T>
struct Fp8Code {
  static constexpr int kBits = 8;
  static constexpr int kSlotBytes = 8;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kHasZeroPoints = false;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int block) {
    return element / block * static_cast<int>(sizeof(float));
  }

  float scales[2];  // of the stage's halves

  __device__ __forceinline__ Fp8Code(uint32_t slot, int, int, const LayerParams& layer, int) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=f"(scales[0]), "=f"(scales[1]) : "r"(slot) : "memory");
    if (layer.block_size > 32) scales[1] = scales[0];
  }

  __device__ __forceinline__ void Decode(int w, uint32_t word, uint32_t (&pairs)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto bytes = static_cast<__nv_fp8x2_storage_t>(word >> (16 * i));
      const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(bytes, __NV_E4M3)));
      pairs[i] = PairOf<T>(Mul(values.x, scales[w / 2]), Mul(values.y, scales[w / 2]));
    }
  }
};

template <typename Code>
inline constexpr bool kSharesRows = false;
template <typename T>
inline constexpr bool kSharesRows<Fp8Code<T>> = true;

}  // namespace ort_moe
