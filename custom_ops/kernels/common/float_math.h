// Float32 arithmetic with one answer everywhere.
//
// Every function here is a fixed sequence of IEEE-754 add, multiply, fused multiply-add, divide and square root, so the
// CPU kernels, the CUDA kernels and the NumPy emulation (ort_moe/reference/float_math.py) return the same bits.
// Compile hosts with -ffp-contract=off and devices without --use_fast_math.
// Polynomials: Cephes single precision (expf, logf, tanhf).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ORT_MOE_HD __host__ __device__ __forceinline__
#else
#define ORT_MOE_HD inline
#endif

namespace ort_moe {

ORT_MOE_HD float Add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

ORT_MOE_HD float Mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

ORT_MOE_HD float Fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fmaf(a, b, c);
#endif
}

ORT_MOE_HD float Div(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// 1 / a for a in [1, 2^100] or NaN: Div without the branch of its rare cases on a device.
ORT_MOE_HD float Reciprocal(float a) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return __fmaf_rn(r, __fmaf_rn(-a, r, 1.0f), r);
#else
  return 1.0f / a;
#endif
}

ORT_MOE_HD float Sqrt(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return std::sqrt(a);
#endif
}

ORT_MOE_HD uint32_t FloatBits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

ORT_MOE_HD float BitsToFloat(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

ORT_MOE_HD float Infinity() { return BitsToFloat(0x7f800000u); }
ORT_MOE_HD float NaN() { return BitsToFloat(0x7fc00000u); }
ORT_MOE_HD bool IsNaN(float x) { return x != x; }

// 2^n for n in [-126, 127].
ORT_MOE_HD float PowerOfTwo(int n) { return BitsToFloat(static_cast<uint32_t>(n + 127) << 23); }

// e^x, within 1 ulp; subnormal results are rounded once, overflow gives +inf, NaN stays NaN.
ORT_MOE_HD float Exp(float x) {
  // Past these bounds the steps below give infinity and 0 by themselves; NaN stays NaN. Without branches calls
  // interleave on a device, and loops vectorise on a host.
#if defined(__CUDA_ARCH__)
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(89.0f));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-104.0f));
#else
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
#endif
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693359375f;  // few bits, so n * kLn2High is exact
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to an integer
  const float shifted = Add(Mul(x, kLog2E), kRoundMagic);
  const float n = Add(shifted, -kRoundMagic);
  const float r = Fma(n, -kLn2Low, Fma(n, -kLn2High, x));
  float p = 1.9875691500e-4f;
  p = Fma(p, r, 1.3981999507e-3f);
  p = Fma(p, r, 8.3334519073e-3f);
  p = Fma(p, r, 4.1665795894e-2f);
  p = Fma(p, r, 1.6666665459e-1f);
  p = Fma(p, r, 5.0000001201e-1f);
  p = Add(Fma(p, Mul(r, r), r), 1.0f);
  const int exponent = static_cast<int>(n);
  const int half = exponent / 2;  // two steps reach 2^128 and the subnormals without leaving the format
  return Mul(Mul(p, PowerOfTwo(half)), PowerOfTwo(exponent - half));
}

// Natural logarithm of a normal, positive, finite x, within 2 ulp.
ORT_MOE_HD float Log(float x) {
  constexpr float kSqrtHalf = 0.707106781f;
  const uint32_t bits = FloatBits(x);
  int exponent = static_cast<int>(bits >> 23) - 126;
  float m = BitsToFloat((bits & 0x007fffffu) | 0x3f000000u);  // in [0.5, 1)
  if (m < kSqrtHalf) {
    exponent -= 1;
    m = Add(m, m);
  }
  const float r = Add(m, -1.0f);
  const float z = Mul(r, r);
  float p = 7.0376836292e-2f;
  p = Fma(p, r, -1.1514610310e-1f);
  p = Fma(p, r, 1.1676998740e-1f);
  p = Fma(p, r, -1.2420140846e-1f);
  p = Fma(p, r, 1.4249322787e-1f);
  p = Fma(p, r, -1.6668057665e-1f);
  p = Fma(p, r, 2.0000714765e-1f);
  p = Fma(p, r, -2.4999993993e-1f);
  p = Fma(p, r, 3.3333331174e-1f);
  p = Mul(Mul(p, r), z);
  const float n = static_cast<float>(exponent);
  p = Fma(n, -2.12194440e-4f, p);
  p = Fma(z, -0.5f, p);
  return Fma(n, 0.693359375f, Add(r, p));
}

// log(1 + y) for y >= 0, within 3 ulp: Kahan's correction of the rounding of 1 + y.
ORT_MOE_HD float Log1p(float y) {
  const float u = Add(1.0f, y);
  if (u == 1.0f) return y;
  if (!(u < Infinity())) return u;
  return Mul(Log(u), Div(y, Add(u, -1.0f)));  // the quotient first: it is near 1, so nothing overflows
}

// tanh(x), within 3 ulp.
ORT_MOE_HD float Tanh(float x) {
  const float a = std::fabs(x);
  if (a < 0.625f) {
    const float z = Mul(x, x);
    float p = -5.70498872745e-3f;
    p = Fma(p, z, 2.06390887954e-2f);
    p = Fma(p, z, -5.37397155531e-2f);
    p = Fma(p, z, 1.33314422036e-1f);
    p = Fma(p, z, -3.33332819422e-1f);
    return Fma(Mul(p, z), x, x);
  }
  const float e = Exp(Mul(-2.0f, a));  // NaN falls through to here and stays
  const float t = Div(Add(1.0f, -e), Add(1.0f, e));
  return x < 0.0f ? -t : t;
}

// 1 / (1 + e^-x), within 3 ulp; far below zero it is e^x, which does not vanish before the format ends.
ORT_MOE_HD float Sigmoid(float x) {
  const bool small = x < -64.0f;
  const float e = Exp(small ? x : -x);
  return small ? e : Reciprocal(Add(1.0f, e));
}

// sqrt(softplus(x)), within 3 ulp, softplus linear above 20 as the frameworks have it. Far below zero it is e^(x/2),
// which keeps the digits that e^x would lose among the subnormals.
ORT_MOE_HD float SqrtSoftplus(float x) {
  if (x < -64.0f) return Exp(Mul(x, 0.5f));
  return Sqrt(x > 20.0f ? x : Log1p(Exp(x)));
}

// Total order of ranking keys as unsigned integers: +inf > finite > -inf > NaN, -0 = +0.
ORT_MOE_HD uint32_t OrderedKey(float x) {
  if (IsNaN(x)) return 0u;
  const uint32_t bits = FloatBits(Add(x, 0.0f));  // -0 + 0 = +0
  return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}

}  // namespace ort_moe
