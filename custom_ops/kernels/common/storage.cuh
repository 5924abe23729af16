// Element types on the device: how they are stored, exactly widened to float32, and rounded from it to nearest even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/float_math.h"

namespace ort_moe {

struct Float16 {};
struct BFloat16 {};

template <typename T>
struct Storage;

template <>
struct Storage<float> {
  using Bits = uint32_t;
  static __device__ float Widen(uint32_t bits) { return BitsToFloat(bits); }
  static __device__ float WidenOfWord(uint32_t word, int) { return BitsToFloat(word); }
  static __device__ uint32_t Round(float value) { return FloatBits(value); }
};

template <>
struct Storage<Float16> {
  using Bits = uint16_t;
  static __device__ float Widen(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
  // Of two in a word, the low or the high one.
  static __device__ float WidenOfWord(uint32_t word, int high) {
    return Widen(static_cast<uint16_t>(high ? word >> 16 : word));
  }
  static __device__ uint16_t Round(float value) { return __half_as_ushort(__float2half_rn(value)); }
};

template <>
struct Storage<BFloat16> {
  using Bits = uint16_t;
  static __device__ float Widen(uint16_t bits) { return BitsToFloat(static_cast<uint32_t>(bits) << 16); }
  static __device__ float WidenOfWord(uint32_t word, int high) {
    return BitsToFloat(high ? word & 0xffff0000u : word << 16);
  }
  static __device__ uint16_t Round(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
};

template <typename T>
using Bits = typename Storage<T>::Bits;

}  // namespace ort_moe
