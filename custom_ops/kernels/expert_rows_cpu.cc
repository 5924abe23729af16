// A build with AVX2 and FMA beside a plain one; the bits are the same. Compilers vectorise neither loop well: sums in
// arrays do not stay in registers, and they find no table lookup for the codes.
#include "kernels/expert_rows_cpu.h"

#include <array>

#include "kernels/float_math.h"
#include "kernels/with_fma.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define ORT_MOE_AVX2 __attribute__((target("avx2,fma")))
#include <immintrin.h>
#endif

namespace ort_moe {
namespace {

constexpr int64_t kHalf = kRowBlock / 2;

// Twice the value of each e2m1 code.
constexpr int8_t kDoubledCodes[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Half the value of each float8e4m3fn.
const std::array<float, 256>& HalvedScales() {
  static const std::array<float, 256> scales = [] {
    std::array<float, 256> values;
    for (int32_t x = 0; x < 256; ++x) {
      const int32_t magnitude = x & 0x7f;
      const float fraction = static_cast<float>(magnitude < 8 ? magnitude : 8 + magnitude % 8);
      const float value = Mul(fraction, PowerOfTwo((magnitude < 8 ? 0 : magnitude / 8 - 1) - 10));
      values[x] = magnitude == 0x7f ? NaN() : (x < 128 ? value : -value);
    }
    return values;
  }();
  return scales;
}

float Total(float (&sums)[kRowBlock]) {
  for (int64_t width = kHalf; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) sums[i] = Add(sums[i], sums[i + width]);
  }
  return sums[0];
}

#if defined(ORT_MOE_AVX2)

ORT_MOE_AVX2 void DecodeAvx2(const uint8_t* bytes, const uint8_t* scales, int64_t blocks, float* out) {
  const std::array<float, 256>& halved = HalvedScales();
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kDoubledCodes));
  const __m128i low_bits = _mm_set1_epi8(0x0f);
  for (int64_t b = 0; b < blocks; ++b) {
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + b * kHalf));
    const __m128i nibbles = _mm_unpacklo_epi64(packed, _mm_srli_epi16(packed, 4));
    const __m128i values = _mm_shuffle_epi8(codes, _mm_and_si128(nibbles, low_bits));
    const __m256 scale = _mm256_set1_ps(halved[scales[b]]);
    const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values));
    const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(values, kHalf)));
    _mm256_storeu_ps(out + b * kRowBlock, _mm256_mul_ps(low, scale));
    _mm256_storeu_ps(out + b * kRowBlock + kHalf, _mm256_mul_ps(high, scale));
  }
}

ORT_MOE_AVX2 void MultiplyAvx2(const float* rows, const float* activations, int64_t blocks, float* products) {
  const int64_t stride = blocks * kRowBlock;
  __m256 low[kRowsTogether];
  __m256 high[kRowsTogether];
  for (int64_t r = 0; r < kRowsTogether; ++r) low[r] = high[r] = _mm256_setzero_ps();
  for (int64_t d = 0; d < stride; d += kRowBlock) {
    const __m256 a = _mm256_loadu_ps(activations + d);
    const __m256 b = _mm256_loadu_ps(activations + d + kHalf);
    for (int64_t r = 0; r < kRowsTogether; ++r) {
      low[r] = _mm256_fmadd_ps(_mm256_loadu_ps(rows + r * stride + d), a, low[r]);
      high[r] = _mm256_fmadd_ps(_mm256_loadu_ps(rows + r * stride + d + kHalf), b, high[r]);
    }
  }
  for (int64_t r = 0; r < kRowsTogether; ++r) {
    float sums[kRowBlock];
    _mm256_storeu_ps(sums, low[r]);
    _mm256_storeu_ps(sums + kHalf, high[r]);
    products[r] = Total(sums);
  }
}

#endif

void DecodePlain(const uint8_t* bytes, const uint8_t* scales, int64_t blocks, float* out) {
  const std::array<float, 256>& halved = HalvedScales();
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t i = 0; i < kHalf; ++i) {
      const uint8_t byte = bytes[b * kHalf + i];
      out[b * kRowBlock + i] = Mul(kDoubledCodes[byte & 0x0f], halved[scales[b]]);
      out[b * kRowBlock + kHalf + i] = Mul(kDoubledCodes[byte >> 4], halved[scales[b]]);
    }
  }
}

void MultiplyPlain(const float* rows, const float* activations, int64_t blocks, float* products) {
  for (int64_t r = 0; r < kRowsTogether; ++r) {
    const float* row = rows + r * blocks * kRowBlock;
    float sums[kRowBlock] = {};
    for (int64_t d = 0; d < blocks * kRowBlock; d += kRowBlock) {
      for (int64_t i = 0; i < kRowBlock; ++i) sums[i] = Fma(row[d + i], activations[d + i], sums[i]);
    }
    products[r] = Total(sums);
  }
}

}  // namespace

void DecodeNvfp4Row(const uint8_t* bytes, const uint8_t* scales, int64_t blocks, float* out) {
#if defined(ORT_MOE_AVX2)
  if (HasFma()) return DecodeAvx2(bytes, scales, blocks, out);
#endif
  DecodePlain(bytes, scales, blocks, out);
}

void MultiplyRows(const float* rows, const float* activations, int64_t blocks, float products[kRowsTogether]) {
#if defined(ORT_MOE_AVX2)
  if (HasFma()) return MultiplyAvx2(rows, activations, blocks, products);
#endif
  MultiplyPlain(rows, activations, blocks, products);
}

}  // namespace ort_moe
