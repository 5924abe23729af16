// float16 and bfloat16 on the host, by their bits: to float32 exactly, from it rounded to nearest even. Branch-free, so
// that loops over them vectorise, and without subnormal operands, which a host that flushes subnormals would lose.
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/float_math.h"

namespace ort_moe {

inline float HalfToFloat(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t subnormal = FloatBits(Add(BitsToFloat((magnitude << 13) + (113u << 23)), -BitsToFloat(113u << 23)));
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  const uint32_t bits = magnitude >= 0x7c00u ? special : (magnitude >= 0x0400u ? normal : subnormal);
  return BitsToFloat(bits | sign);
}

inline float BFloat16ToFloat(uint16_t value) { return BitsToFloat(static_cast<uint32_t>(value) << 16); }

// NaN becomes a quiet NaN.
inline uint16_t FloatToHalf(float x) {
  const uint32_t bits = FloatBits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t even = (magnitude >> 13) & 1u;
  const uint32_t normal = (magnitude - (112u << 23) + 0x0fffu + even) >> 13;
  // Beside 0.5 the last place of a float32 is that of a subnormal float16: the addition rounds.
  const uint32_t subnormal = FloatBits(Add(BitsToFloat(magnitude), 0.5f)) - FloatBits(0.5f);
  const uint32_t finite = magnitude >= (113u << 23) ? normal : subnormal;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  constexpr uint32_t kOverflow = 0x477ff000u;  // 65520, halfway past the largest float16
  return static_cast<uint16_t>((magnitude >= kOverflow ? special : finite) | sign);
}

// NaN becomes a quiet NaN.
inline uint16_t FloatToBFloat16(float x) {
  const uint32_t bits = FloatBits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x0040u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

// An element type: how it is stored, and its conversions.
struct Float32Type {
  using Storage = float;
  static float Load(float x) { return x; }
  static float Store(float x) { return x; }
};

struct Float16Type {
  using Storage = uint16_t;
  static float Load(uint16_t x) { return HalfToFloat(x); }
  static uint16_t Store(float x) { return FloatToHalf(x); }
};

struct BFloat16Type {
  using Storage = uint16_t;
  static float Load(uint16_t x) { return BFloat16ToFloat(x); }
  static uint16_t Store(float x) { return FloatToBFloat16(x); }
};

// Calls f with a value of the element type.
template <typename F>
void WithType(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(Float32Type{});
    case DType::kFloat16:
      return f(Float16Type{});
    case DType::kBFloat16:
      return f(BFloat16Type{});
  }
}

}  // namespace ort_moe
