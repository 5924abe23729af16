// Packed weights of the grouped product for few tokens: exact codes as pairs, with their scales on the sums of blocks.
//
// A row has two slots in a stage, of its scales and of its zero points: whole words of them where rows begin anywhere.
// A lane asks for one half of a stage: units of 32 columns, none of which has two scales but for nvfp4's, whose weights
// take them, exactly.
#pragma once

#include "kernels/experts/gemm/codes.cuh"

namespace ort_moe {

constexpr int kScaleSlotBytes = 16, kZeroSlotBytes = 8;  // of a row in a stage

// Where a row's scales and zero points begin in their slots' words: in bytes and in nibbles.
struct SlotShifts {
  int scale, zero;
};

__device__ __forceinline__ uint32_t SharedWord(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

__device__ __forceinline__ void SharedWords(uint32_t address, uint32_t* low, uint32_t* high) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(*low), "=r"(*high) : "r"(address) : "memory");
}

// a * b + c of both halves.
__device__ __forceinline__ uint32_t FusedPairs(uint32_t a, uint32_t b, uint32_t c) {
  const __half2 sum = __hfma2(AsPair<__half>(a), AsPair<__half>(b), AsPair<__half>(c));
  return reinterpret_cast<const uint32_t&>(sum);
}

template <typename T>
__device__ __forceinline__ float SharedScale(uint32_t address) {
  uint16_t bits;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
  return LowOf<T>(bits);
}

struct Nvfp4Exact {
  static constexpr int kBits = 4, kScaleSize = 1;
  static constexpr float kFactor = 256.0f;
  static constexpr bool kHasZeroPoints = false, kShifts = false, kOnSums = false;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int) { return element / 16; }

  template <bool kZeros>
  struct Slot {
    // Of units 0 and 1, then of 2 and 3; times 64, so that products are times 2^-14 * 64 = 1 / kFactor.
    __half2 scales[2];

    __device__ __forceinline__ Slot(uint32_t slot, uint32_t, int half, int, int, const LayerParams&, int q) {
      uint32_t low, high;
      SharedWords(slot + 8 * half, &low, &high);
      const uint32_t mine = __byte_perm(low, high, q < 2 ? 0x6420 : 0x7531);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto both = static_cast<__nv_fp8x2_storage_t>(i == 0 ? mine : mine >> 16);
        scales[i] = __hmul2(__half2(__nv_cvt_fp8x2_to_halfraw2(both, __NV_E4M3)), __float2half2_rn(64.0f));
      }
    }

    __device__ __forceinline__ void Decode(int unit, uint32_t word, uint32_t (&pairs)[4]) const {
      DecodeE2m1(word, pairs);
      const __half2 scale = unit % 2 == 0 ? __low2half2(scales[unit / 2]) : __high2half2(scales[unit / 2]);
#pragma unroll
      for (uint32_t& pair : pairs) {
        const __half2 product = __hmul2(AsPair<__half>(pair), scale);
        pair = reinterpret_cast<const uint32_t&>(product);
      }
    }
  };
};

struct Mxfp4Exact {
  static constexpr int kBits = 4, kScaleSize = 1;
  static constexpr float kFactor = 16384.0f;
  static constexpr bool kHasZeroPoints = false, kShifts = true, kOnSums = true;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int) { return element / 32; }

  template <bool kZeros>
  struct Slot {
    uint32_t scales, nan;

    __device__ __forceinline__ Slot(uint32_t slot, uint32_t, int half, int shift, int, const LayerParams&, int) {
      const uint32_t low = SharedWord(slot + 4 * half), high = SharedWord(slot + 4 * half + 4);
      scales = Piece(low, high, shift);
      constexpr uint32_t kLow = 0x7f7f7f7fu, kOnes = 0x01010101u, kTop = 0x80808080u;
      nan = (((scales & kLow) + kOnes) & scales & kTop) != 0 ? 0x7fffffffu : 0u;
    }

    // 0 stands for a subnormal number, 255 for NaN, which is the whole sum's anyway.
    __device__ __forceinline__ float Scale(int unit) const {
      const uint32_t moved = unit == 3 ? scales >> 1 : scales << (23 - 8 * unit);
      return __uint_as_float(max((moved & 0x7f800000u) | nan, 0x00400000u));
    }

    __device__ __forceinline__ void Decode(int, uint32_t word, uint32_t (&pairs)[4]) const { DecodeE2m1(word, pairs); }
  };
};

// T: of the scales.
template <typename T>
struct Int4Exact {
  static constexpr int kBits = 4, kScaleSize = 2;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kHasZeroPoints = true, kShifts = true, kOnSums = true;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int block) {
    return element / block * static_cast<int>(sizeof(T));
  }
  static __host__ __device__ __forceinline__ int ZeroAt(int element, int block) { return element / block; }

  template <bool kZeros>
  struct Slot {
    float scales[4];
    uint32_t zeros[4];  // 1024 and a code, twice

    __device__ __forceinline__ Slot(uint32_t slot, uint32_t zero_slot, int half, int shift, int zero_shift,
                                    const LayerParams& layer, int) {
      const int bits = layer.block_size == 32 ? 5 : layer.block_size == 64 ? 6 : 7;
      if (layer.block_size == 32) {
        uint32_t low, high;
        SharedWords(slot + 8 * half, &low, &high);  // rows begin at whole words
        scales[0] = LowOf<T>(low);
        scales[1] = HighOf<T>(low);
        scales[2] = LowOf<T>(high);
        scales[3] = HighOf<T>(high);
      } else {
        const uint32_t first = slot + shift + (half * 128 >> bits) * 2;
        scales[0] = scales[1] = SharedScale<T>(first);
        scales[2] = scales[3] = SharedScale<T>(first + (64 >> bits) * 2);
      }
#pragma unroll
      for (uint32_t& zero : zeros) zero = 0x64086408u;
      if constexpr (kZeros) {
        uint32_t low, high;
        SharedWords(zero_slot, &low, &high);
        const uint32_t codes = __funnelshift_r(low, high, 4 * zero_shift);
#pragma unroll
        for (int unit = 0; unit < 4; ++unit) {
          zeros[unit] = ((codes >> (4 * ((half * 128 + unit * 32) >> bits))) & 15u) * 0x00010001u | 0x64006400u;
        }
      }
    }

    __device__ __forceinline__ float Scale(int unit) const { return scales[unit]; }

    // A code in the last bits of 1024, or 16 bits of it above: 1024 and 16 codes.
    __device__ __forceinline__ void Decode(int unit, uint32_t word, uint32_t (&pairs)[4]) const {
      constexpr uint32_t kUnit = 0x64006400u, kSixteenth = 0x2c002c00u, kRest = 0x63806380u;  // 1024, 1 / 16, 960
      const uint32_t upper = word >> 8;
      const uint32_t less = SubtractPairs<__half>(kRest, zeros[unit]);  // -(64 + z)
      pairs[0] = SubtractPairs<__half>(Masked(word, 0x000f000fu, kUnit), zeros[unit]);
      pairs[1] = FusedPairs(Masked(word, 0x00f000f0u, kUnit), kSixteenth, less);
      pairs[2] = SubtractPairs<__half>(Masked(upper, 0x000f000fu, kUnit), zeros[unit]);
      pairs[3] = FusedPairs(Masked(upper, 0x00f000f0u, kUnit), kSixteenth, less);
    }
  };
};

// T: of the scales.
template <typename T>
struct Int8Exact {
  static constexpr int kBits = 8, kScaleSize = 2;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kHasZeroPoints = true, kShifts = true, kOnSums = true;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int block) {
    return element / block * static_cast<int>(sizeof(T));
  }
  static __host__ __device__ __forceinline__ int ZeroAt(int element, int block) { return element / block * 2; }

  template <bool kZeros>
  struct Slot {
    float scales[2];
    uint32_t zeros[2];  // 1024 and a code, twice

    __device__ __forceinline__ Slot(uint32_t slot, uint32_t zero_slot, int half, int shift, int zero_shift,
                                    const LayerParams& layer, int) {
      const int bits = layer.block_size == 32 ? 5 : layer.block_size == 64 ? 6 : 7;
      const uint32_t first = slot + shift + (half * 64 >> bits) * 2;
      scales[0] = scales[1] = SharedScale<T>(first);
      if (layer.block_size == 32) scales[1] = SharedScale<T>(first + 2);
      zeros[0] = zeros[1] = 0x64806480u;
      if constexpr (kZeros) {
        uint32_t low, high;
        SharedWords(zero_slot, &low, &high);
        const uint32_t codes = __funnelshift_r(low, high, 4 * zero_shift);
#pragma unroll
        for (int unit = 0; unit < 2; ++unit) {
          zeros[unit] = ((codes >> (8 * ((half * 64 + unit * 32) >> bits))) & 255u) * 0x00010001u | 0x64006400u;
        }
      }
    }

    __device__ __forceinline__ float Scale(int unit) const { return scales[unit]; }

    __device__ __forceinline__ void Decode(int unit, uint32_t first, uint32_t second, uint32_t (&pairs)[4]) const {
      constexpr uint32_t kUnit = 0x64646464u;  // upper bytes of 1024
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t codes = __byte_perm(i < 2 ? first : second, kUnit, i % 2 == 0 ? 0x4140 : 0x4342);
        pairs[i] = SubtractPairs<__half>(codes, zeros[unit]);
      }
    }
  };
};

struct Fp8Exact {
  static constexpr int kBits = 8, kScaleSize = 4;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kHasZeroPoints = false, kShifts = false, kOnSums = true;
  static __host__ __device__ __forceinline__ int ScaleAt(int element, int block) {
    return element / block * static_cast<int>(sizeof(float));
  }

  template <bool kZeros>
  struct Slot {
    float scales[2];

    __device__ __forceinline__ Slot(uint32_t slot, uint32_t, int half, int, int, const LayerParams& layer, int) {
      const int bits = layer.block_size == 32 ? 5 : layer.block_size == 64 ? 6 : 7;
      const uint32_t first = slot + (half * 64 >> bits) * 4;
      scales[0] = scales[1] = __uint_as_float(SharedWord(first));
      if (layer.block_size == 32) scales[1] = __uint_as_float(SharedWord(first + 4));
    }

    __device__ __forceinline__ float Scale(int unit) const { return scales[unit]; }

    __device__ __forceinline__ void Decode(int, uint32_t first, uint32_t second, uint32_t (&pairs)[4]) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto bytes = static_cast<__nv_fp8x2_storage_t>((i < 2 ? first : second) >> (16 * (i % 2)));
        const __half2 values(__nv_cvt_fp8x2_to_halfraw2(bytes, __NV_E4M3));
        pairs[i] = reinterpret_cast<const uint32_t&>(values);
      }
    }
  };
};

template <>
inline constexpr bool kSharesRows<Fp8Exact> = true;

}  // namespace ort_moe
