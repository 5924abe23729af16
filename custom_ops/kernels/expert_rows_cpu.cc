// A build with AVX2 and FMA beside a plain one; the bits are the same. Compilers do not vectorise the loop well: sums
// in arrays do not stay in registers.
#include "kernels/expert_rows_cpu.h"

#include "kernels/float_math.h"
#include "kernels/with_fma.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define ORT_MOE_AVX2 __attribute__((target("avx2,fma")))
#include <immintrin.h>
#endif

namespace ort_moe {
namespace {

constexpr int64_t kHalf = kRowBlock / 2;

float Total(float (&sums)[kRowBlock]) {
  for (int64_t width = kHalf; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) sums[i] = Add(sums[i], sums[i + width]);
  }
  return sums[0];
}

#if defined(ORT_MOE_AVX2)

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

void MultiplyRows(const float* rows, const float* activations, int64_t blocks, float products[kRowsTogether]) {
#if defined(ORT_MOE_AVX2)
  if (HasFma()) return MultiplyAvx2(rows, activations, blocks, products);
#endif
  MultiplyPlain(rows, activations, blocks, products);
}

}  // namespace ort_moe
