// Packed weights of the grouped product, as pairs of half-precision numbers.
//
// Of 8 four-bit weights, pairs i and i + 4 lie 16 bits apart; of 4 bytes, neighbours are pairs.
//
// e2m1's bits, moved to where the exponent ends, are its value times 2^-126 in bfloat16 and times 2^-14 in float16;
// products with e4m3 have 6 digits at most and are exact, kFactor undoes the rest. Integers get an exponent with which
// their last digit is 1, so that subtracting the zero point is exact. Then one product with the scale is rounded.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/experts/gemm/finish.cuh"
#include "kernels/experts/mma/format.cuh"

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

// Bytes [shift, shift + 4) of two words.
__device__ __forceinline__ uint32_t Piece(uint32_t low, uint32_t high, int shift) {
  return __funnelshift_r(low, high, 8 * shift);
}

// A code decodes 16 bytes of neighbouring weights of a row into pairs of neighbours, eight weights to a vector.
//   Scale      of the weights' block, from the row's; ZeroPoint likewise
//   ScaleAt    byte of a row's scales at which the block of an element begins; of the depth, rounded up: a row's bytes
//   ZeroAt     the same of zero points, in nibbles

// Loads whose registers may be copied while they are on their way: 32 bits wide, so nothing need be merged.
__device__ __forceinline__ uint32_t LoadByte(uint64_t address) {
  uint32_t value;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}
__device__ __forceinline__ uint32_t LoadShort(uint64_t address) {
  uint32_t value;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}
__device__ __forceinline__ uint32_t LoadWord(uint64_t address) {
  uint32_t value;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}

// Pairs i and i + 4 of eight weights, in order.
__device__ __forceinline__ void InOrder(const uint32_t (&pairs)[4], uint32_t (&ordered)[4]) {
  ordered[0] = __byte_perm(pairs[0], pairs[1], 0x5410);
  ordered[1] = __byte_perm(pairs[2], pairs[3], 0x5410);
  ordered[2] = __byte_perm(pairs[0], pairs[1], 0x7632);
  ordered[3] = __byte_perm(pairs[2], pairs[3], 0x7632);
}

__device__ __forceinline__ uint32_t Twice(uint32_t low) { return __byte_perm(low, 0, 0x1010); }

template <typename T>
struct Nvfp4Code {
  static constexpr float kFactor = 256.0f;
  static constexpr bool kHasZeroPoints = false;
  static constexpr int kBits = 4;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int) { return element / 16; }
  static __device__ __forceinline__ uint32_t Scale(uint64_t row, int, int column) {
    return LoadShort(row + column / 16);
  }

  uint32_t scales[2];

  __device__ __forceinline__ Nvfp4Code(uint32_t loaded, uint32_t, int) {
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(loaded), __NV_E4M3);
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 both = __hmul2(__half2(raw), __float2half2_rn(64.0f));  // 2^-14 * 2^6 * kFactor = 1
      const uint32_t bits = reinterpret_cast<const uint32_t&>(both);
      scales[0] = __byte_perm(bits, bits, 0x1010);
      scales[1] = __byte_perm(bits, bits, 0x3232);
    } else {
      constexpr float kPower = 3.32306998946229e35f;  // 2^118; 2^-126 * 2^118 * kFactor = 1
      const float2 both = __half22float2(__half2(raw));
      scales[0] = PairOf<T>(Mul(both.x, kPower), Mul(both.x, kPower));
      scales[1] = PairOf<T>(Mul(both.y, kPower), Mul(both.y, kPower));
    }
  }

  __device__ __forceinline__ void Decode(const uint32_t (&words)[4], uint32_t (&vectors)[4][4]) const {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t pairs[4];
      UnscaledE2m1<T>(words[w], pairs);
#pragma unroll
      for (uint32_t& pair : pairs) pair = MulPairs<T>(pair, scales[w / 2]);
      InOrder(pairs, vectors[w]);
    }
  }
};

// With bfloat16 alone: e8m0 goes far beyond float16.
template <typename T>
struct Mxfp4Code {
  static constexpr float kFactor = 1.0f;
  static constexpr bool kHasZeroPoints = false;
  static constexpr int kBits = 4;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int) { return element / 32; }
  static __device__ __forceinline__ uint32_t Scale(uint64_t row, int, int column) {
    return LoadByte(row + column / 32);
  }

  uint32_t scale;

  __device__ __forceinline__ Mxfp4Code(uint32_t byte, uint32_t, int) {
    constexpr uint32_t kNaN = 0x7fff7fffu, kNaNByte = 0xffu, kSmallest = 0x00400040u;
    scale = byte == kNaNByte ? kNaN : byte == 0 ? kSmallest : Twice(byte << 7);
  }

  __device__ __forceinline__ void Decode(const uint32_t (&words)[4], uint32_t (&vectors)[4][4]) const {
    constexpr uint32_t kUnit = 0x7e807e80u;  // 2^126
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t pairs[4];
      UnscaledE2m1<T>(words[w], pairs);
#pragma unroll
      for (uint32_t& pair : pairs) pair = MulPairs<T>(MulPairs<T>(pair, kUnit), scale);
      InOrder(pairs, vectors[w]);
    }
  }
};

template <typename T>
struct Int4Code {
  static constexpr float kFactor = 1.0f;
  static constexpr bool kHasZeroPoints = true;
  static constexpr int kBits = 4;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int block) {
    return element / block * static_cast<int>(sizeof(T));
  }
  static __host__ __device__ __forceinline__ int ZeroAt(int element, int block) { return element / block; }
  static __device__ __forceinline__ uint32_t Scale(uint64_t row, int block, int) { return LoadShort(row + block * 2); }
  static __device__ __forceinline__ uint32_t ZeroPoint(uint64_t row, int block) { return LoadByte(row + block / 2); }

  static constexpr uint32_t kUnit = std::is_same_v<T, __half> ? 0x64006400u : 0x43004300u;  // 2^10 or 2^7, and a code

  uint32_t scale, zero;

  __device__ __forceinline__ Int4Code(uint32_t loaded, uint32_t codes, int block)
      : scale(Twice(loaded)), zero(Twice(codes >> (block % 2 * 4) & 15u) | kUnit) {}

  __device__ __forceinline__ void Decode(const uint32_t (&words)[4], uint32_t (&vectors)[4][4]) const {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] = MulPairs<T>(SubtractPairs<T>(Masked(words[w] >> (4 * i), 0x000f000fu, kUnit), zero), scale);
      }
      InOrder(pairs, vectors[w]);
    }
  }
};

template <typename T>
struct Int8Code {
  static constexpr int kBits = 8;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kHasZeroPoints = true;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int block) {
    return element / block * static_cast<int>(sizeof(T));
  }
  static __host__ __device__ __forceinline__ int ZeroAt(int element, int block) { return element / block * 2; }
  static __device__ __forceinline__ uint32_t Scale(uint64_t row, int block, int) { return LoadShort(row + block * 2); }
  static __device__ __forceinline__ uint32_t ZeroPoint(uint64_t row, int block) { return LoadByte(row + block); }

  uint32_t scale, zero;  // the latter 1024 more, or for bfloat16 128 less

  __device__ __forceinline__ Int8Code(uint32_t loaded, uint32_t code, int) : scale(Twice(loaded)) {
    if constexpr (std::is_same_v<T, __half>) {
      zero = Twice(code) | 0x64006400u;
    } else {
      const float less = Add(static_cast<float>(code), -128.0f);
      zero = PairOf<T>(less, less);
    }
  }

  // All differences are exact. 128 and seven bits are a number of bfloat16; the eighth bit says what is less in it.
  __device__ __forceinline__ void Decode(const uint32_t (&words)[4], uint32_t (&vectors)[2][4]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t pair;
      if constexpr (std::is_same_v<T, __half>) {
        pair = SubtractPairs<T>(__byte_perm(words[i / 2], 0x64646464u, i % 2 == 0 ? 0x4140 : 0x4342), zero);
      } else {
        constexpr uint32_t kUnit = 0x43004300u, kSeven = 0x007f007fu, kEighth = 0x00800080u;
        const uint32_t codes = __byte_perm(words[i / 2], 0, i % 2 == 0 ? 0x4140 : 0x4342);
        const uint32_t less = Masked(~codes, kEighth, kUnit);
        pair = SubtractPairs<T>(SubtractPairs<T>(Masked(codes, kSeven, kUnit), less), zero);
      }
      vectors[i / 4][i % 4] = MulPairs<T>(pair, scale);
    }
  }
};

// Blocks of rows share a scale too.
template <typename T>
struct Fp8Code {
  static constexpr int kBits = 8;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kHasZeroPoints = false;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int block) {
    return element / block * static_cast<int>(sizeof(float));
  }
  static __device__ __forceinline__ uint32_t Scale(uint64_t row, int block, int) { return LoadWord(row + block * 4); }

  uint32_t loaded;

  __device__ __forceinline__ Fp8Code(uint32_t loaded, uint32_t, int) : loaded(loaded) {}

  __device__ __forceinline__ void Decode(const uint32_t (&words)[4], uint32_t (&vectors)[2][4]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float scale = __uint_as_float(loaded);
      const auto bytes = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (16 * (i % 2)));
      const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(bytes, __NV_E4M3)));
      vectors[i / 4][i % 4] = PairOf<T>(Mul(values.x, scale), Mul(values.y, scale));
    }
  }
};

template <typename Code>
inline constexpr bool kSharesRows = false;
template <typename T>
inline constexpr bool kSharesRows<Fp8Code<T>> = true;

}  // namespace ort_moe
