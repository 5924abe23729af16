// float8 e4m3fn on the host, by its bits: to float32 exactly, branch-free so that loops over it vectorise.
#pragma once

#include <cstdint>

#include "kernels/common/float_math.h"

namespace ort_moe {

inline float E4m3ToFloat(uint8_t x) {
  const uint32_t magnitude = x & 0x7fu;
  const uint32_t sign = static_cast<uint32_t>(x & 0x80u) << 24;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t subnormal = FloatBits(Add(BitsToFloat((magnitude << 20) + (121u << 23)), -BitsToFloat(121u << 23)));
  const uint32_t finite = magnitude >= 8u ? normal : subnormal;
  return BitsToFloat((magnitude == 0x7fu ? 0x7fc00000u : finite) | sign);
}

}  // namespace ort_moe
