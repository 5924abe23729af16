// Pairs of half-precision results, and silu by the approximate exponential and reciprocal: some ulp of float32, of
// which rounding keeps none.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/common/float_math.h"
#include "kernels/experts/params.cuh"

namespace ort_moe {

template <typename T>
__device__ __forceinline__ float LowOf(uint32_t word) {
  return HalfTraits<T>::ToFloat(reinterpret_cast<const T*>(&word)[0]);
}

template <typename T>
__device__ __forceinline__ float HighOf(uint32_t word) {
  return HalfTraits<T>::ToFloat(reinterpret_cast<const T*>(&word)[1]);
}

template <typename T>
__device__ __forceinline__ uint32_t PairOf(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

class FastSilu {
 public:
  __device__ __forceinline__ explicit FastSilu(const ExpertsParams& p)
      : limit_(p.limit > 0.0f ? p.limit : Infinity()), exponent_(Mul(-kLog2E, p.alpha)), beta_(p.beta) {}

  __device__ __forceinline__ float operator()(float x) const {
    float power, factor;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(Mul(x, exponent_)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(factor) : "f"(Add(1.0f, power)));
    return Mul(x, factor);
  }

  __device__ __forceinline__ float operator()(float gate, float up) const {
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(gate) : "f"(limit_));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(up) : "f"(limit_));
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(up) : "f"(-limit_));
    return Mul((*this)(gate), Add(up, beta_));
  }

 private:
  static constexpr float kLog2E = 1.44269504f;
  float limit_, exponent_, beta_;  // infinity where there is no limit; what a gate is multiplied with
};

}  // namespace ort_moe
