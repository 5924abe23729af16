// Builds with AVX-512, with AVX2 and FMA, and a plain one; the bits are the same. Compilers do not vectorise the loops
// well: sums in arrays do not stay in registers.
//
// A kernel holds the sums of some rows with some tokens in registers: each load of weights serves all its tokens, each
// load of activations all its rows.
#include "kernels/experts/cpu/rows.h"

#include <algorithm>
#include <iterator>

#include "kernels/common/float_math.h"
#include "kernels/common/with_fma.h"

#if defined(ORT_MOE_AVX2)
#include <immintrin.h>
#endif

namespace ort_moe {
namespace {

constexpr int64_t kHalf = kRowBlock / 2;

#if defined(ORT_MOE_AVX2)

template <int kRows, int kTokens>
ORT_MOE_AVX512 void MultiplyAvx512(const float* const* rows, const float* const* activations, int64_t offset,
                                   int64_t blocks, bool first, float* sums) {
  for (int64_t row = 0; row < kPanelRows; row += kRows) {
    __m512 sum[kTokens][kRows];
    const float* weights[kRows];
    const float* a[kTokens];
    for (int r = 0; r < kRows; ++r) weights[r] = rows[row + r];
    for (int t = 0; t < kTokens; ++t) {
      a[t] = activations[t] + offset;
      for (int r = 0; r < kRows; ++r) {
        const float* at = sums + (t * kPanelRows + row + r) * kRowBlock;
        sum[t][r] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(at);
      }
    }
    for (int64_t d = 0; d < blocks * kRowBlock; d += kRowBlock) {
      __m512 x[kTokens];
      for (int t = 0; t < kTokens; ++t) x[t] = _mm512_loadu_ps(a[t] + d);
      for (int r = 0; r < kRows; ++r) {
        __m512 w = _mm512_loadu_ps(weights[r] + d);
        asm("" : "+v"(w));  // one load, not one for each token
        for (int t = 0; t < kTokens; ++t) sum[t][r] = _mm512_fmadd_ps(w, x[t], sum[t][r]);
      }
    }
    for (int t = 0; t < kTokens; ++t) {
      for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(sums + (t * kPanelRows + row + r) * kRowBlock, sum[t][r]);
    }
  }
}

// Each half of the blocks by itself, so that the sums of four rows with three tokens fit into the registers.
template <int kRows, int kTokens>
ORT_MOE_AVX2 void MultiplyAvx2(const float* const* rows, const float* const* activations, int64_t offset,
                               int64_t blocks, bool first, float* sums) {
  for (int64_t part = 0; part < 2 * kPanelRows / kRows; ++part) {
    const int64_t row = part / 2 * kRows, half = part % 2 * kHalf;
    __m256 sum[kTokens][kRows];
    for (int t = 0; t < kTokens; ++t) {
      for (int r = 0; r < kRows; ++r) {
        const float* at = sums + (t * kPanelRows + row + r) * kRowBlock + half;
        sum[t][r] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(at);
      }
    }
    for (int64_t d = half; d < blocks * kRowBlock; d += kRowBlock) {
      __m256 a[kTokens];
      for (int t = 0; t < kTokens; ++t) a[t] = _mm256_loadu_ps(activations[t] + offset + d);
      for (int r = 0; r < kRows; ++r) {
        const __m256 weights = _mm256_loadu_ps(rows[row + r] + d);
        for (int t = 0; t < kTokens; ++t) sum[t][r] = _mm256_fmadd_ps(weights, a[t], sum[t][r]);
      }
    }
    for (int t = 0; t < kTokens; ++t) {
      for (int r = 0; r < kRows; ++r) {
        _mm256_storeu_ps(sums + (t * kPanelRows + row + r) * kRowBlock + half, sum[t][r]);
      }
    }
  }
}

ORT_MOE_AVX2 void AddPartialSumsAvx2(const float* sums, int64_t count, float* products) {
  constexpr int kTogether = 4;
  for (int64_t n = 0; n < count; n += kTogether) {
    __m128 quarter[kTogether];
    for (int i = 0; i < kTogether; ++i) {
      const float* at = sums + (n + i) * kRowBlock;
      const __m256 half = _mm256_add_ps(_mm256_loadu_ps(at), _mm256_loadu_ps(at + kHalf));
      quarter[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    const auto pairs = [](__m128 a, __m128 b)
                           ORT_MOE_AVX2 { return _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)); };
    const __m128 low = pairs(quarter[0], quarter[1]), high = pairs(quarter[2], quarter[3]);
    const __m128 even = _mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0));
    const __m128 odd = _mm_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1));
    _mm_storeu_ps(products + n, _mm_add_ps(even, odd));
  }
}

#endif

void MultiplyPlain(const float* const* rows, const float* const* activations, int64_t offset, int64_t blocks,
                   bool first, float* sums) {
  for (int64_t r = 0; r < kPanelRows; ++r) {
    float* sum = sums + r * kRowBlock;
    if (first) std::fill(sum, sum + kRowBlock, 0.0f);
    for (int64_t d = 0; d < blocks * kRowBlock; d += kRowBlock) {
      for (int64_t i = 0; i < kRowBlock; ++i) sum[i] = Fma(rows[r][d + i], activations[0][offset + d + i], sum[i]);
    }
  }
}

void AddPartialSumsPlain(const float* sums, int64_t count, float* products) {
  for (int64_t n = 0; n < count; ++n) {
    float sum[kRowBlock];
    std::copy(sums + n * kRowBlock, sums + (n + 1) * kRowBlock, sum);
    for (int64_t width = kHalf; width > 0; width /= 2) {
      for (int64_t i = 0; i < width; ++i) sum[i] = Add(sum[i], sum[i + width]);
    }
    products[n] = sum[0];
  }
}

}  // namespace

void MultiplyPanel(const float* const rows[kPanelRows], const float* const* activations, int64_t offset, int64_t tokens,
                   int64_t blocks, bool first, float* sums) {
  using Kernel = void (*)(const float* const*, const float* const*, int64_t, int64_t, bool, float*);
  constexpr Kernel kPlain[] = {MultiplyPlain};
  const Kernel* kernels = kPlain;  // for 1, 2, ... tokens
  int64_t most = 1;
#if defined(ORT_MOE_AVX2)
  constexpr Kernel kAvx2[] = {MultiplyAvx2<8, 1>, MultiplyAvx2<4, 2>, MultiplyAvx2<4, 3>};
  constexpr Kernel kAvx512[] = {MultiplyAvx512<8, 1>, MultiplyAvx512<8, 2>, MultiplyAvx512<8, 3>,
                                MultiplyAvx512<4, 4>, MultiplyAvx512<4, 5>, MultiplyAvx512<4, 6>};
  if (HasAvx512()) {
    kernels = kAvx512;
    most = std::size(kAvx512);
  } else if (HasFma()) {
    kernels = kAvx2;
    most = std::size(kAvx2);
  }
#endif
  for (int64_t t = 0; t < tokens;) {
    const int64_t count = std::min(most, tokens - t);
    kernels[count - 1](rows, activations + t, offset, blocks, first, sums + t * kPanelRows * kRowBlock);
    t += count;
  }
}

void AddPartialSums(const float* sums, int64_t count, float* products) {
#if defined(ORT_MOE_AVX2)
  if (HasFma()) return AddPartialSumsAvx2(sums, count, products);
#endif
  AddPartialSumsPlain(sums, count, products);
}

}  // namespace ort_moe
