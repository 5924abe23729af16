// Builds with AVX-512 and AVX2 beside a plain one, because compilers find no table lookup for the codes; the bits are
// the same.
#include "kernels/experts/cpu/nibbles.h"

#include <iterator>
#include <limits>

#include "kernels/common/cache_lines.h"
#include "kernels/common/float_math.h"
#include "kernels/common/half_float.h"
#include "kernels/common/with_fma.h"
#include "kernels/experts/cpu/rows.h"

#if defined(ORT_MOE_AVX2)
#include <immintrin.h>
#endif

// GCC 12 warns of its own header: of values that the instructions overwrite.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace ort_moe {
namespace {

constexpr int64_t kHalf = kRowBlock / 2;

// Each format: the groups of a row, and what the 16 codes stand for in them. Loops over one block are slow, so a size
// that is known is constant.

constexpr float Power(int32_t exponent) {
  float power = 1.0f;
  for (; exponent > 0; --exponent) power *= 2.0f;
  for (; exponent < 0; ++exponent) power *= 0.5f;
  return power;
}

// A scale of one byte: for each, the values of e2m1's codes times it. Worked out by the compiler, for a thread that
// flushes subnormal numbers to zero would fill it with other values for all threads.
template <typename Scale>
struct E2m1Values {
  alignas(kCacheLineBytes) float of_scale[256][16];

  constexpr E2m1Values() : of_scale() {
    constexpr float kDoubled[8] = {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 6.0f, 8.0f, 12.0f};
    constexpr float kLargest = std::numeric_limits<float>::max(), kInfinity = std::numeric_limits<float>::infinity();
    for (int32_t x = 0; x < 256; ++x) {
      const float halved = Scale::Halved(x);
      for (int32_t code = 0; code < 8; ++code) {
        const bool is_beyond = code > 0 && halved > kLargest / kDoubled[code];
        of_scale[x][code] = is_beyond ? kInfinity : kDoubled[code] * halved;
        of_scale[x][code + 8] = -of_scale[x][code];
      }
    }
  }
};

struct E4m3Scale {
  static constexpr int64_t kBlocks = 1;
  static constexpr float Halved(int32_t x) {
    const int32_t exponent = x >> 3 & 15, digits = x & 7;
    if ((x & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
    const float halved =
        exponent == 0 ? static_cast<float>(digits) * Power(-10) : static_cast<float>(8 + digits) * Power(exponent - 11);
    return x >= 128 ? -halved : halved;
  }
};

struct E8m0Scale {
  static constexpr int64_t kBlocks = 2;
  static constexpr float Halved(int32_t x) {
    return x == 0xff ? std::numeric_limits<float>::quiet_NaN() : Power(x - 128);
  }
};

template <typename Scale>
class E2m1Groups {
 public:
  static constexpr bool kIsE2m1 = true;
  static constexpr int64_t kScaleBytes = 1;
  static constexpr int64_t Blocks(const NibbleFormat&) { return Scale::kBlocks; }

  explicit E2m1Groups(const NibbleRow& row) : scales_(static_cast<const uint8_t*>(row.scales)) {}
  const float* Values(int64_t g, float*) const { return kValues.of_scale[scales_[g]]; }
#if defined(ORT_MOE_AVX2)
  ORT_MOE_AVX512 __m512 Values(int64_t g) const { return _mm512_load_ps(Values(g, nullptr)); }
#endif

 private:
  static constexpr E2m1Values<Scale> kValues{};

  const uint8_t* scales_;
};

template <typename Type>
class Int4Groups {
 public:
  static constexpr bool kIsE2m1 = false;
  static constexpr int64_t kScaleBytes = sizeof(typename Type::Storage);
  static int64_t Blocks(const NibbleFormat& format) { return format.group / kRowBlock; }

  explicit Int4Groups(const NibbleRow& row)
      : scales_(static_cast<const typename Type::Storage*>(row.scales)), zeros_(row.zero_points) {}
  float scale(int64_t g) const { return Type::Load(scales_[g]); }
  int zero(int64_t g) const { return zeros_ == nullptr ? 8 : zeros_[g / 2] >> (g % 2 * 4) & 0x0f; }
  const float* Values(int64_t g, float* buffer) const {
    for (int code = 0; code < 16; ++code) buffer[code] = Mul(static_cast<float>(code - zero(g)), scale(g));
    return buffer;
  }
#if defined(ORT_MOE_AVX2)
  ORT_MOE_AVX512 __m512 Values(int64_t g) const {
    const __m512 codes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 shifted = _mm512_sub_ps(codes, _mm512_set1_ps(static_cast<float>(zero(g))));
    return _mm512_mul_ps(shifted, _mm512_set1_ps(scale(g)));
  }
#endif

 private:
  const typename Type::Storage* scales_;
  const uint8_t* zeros_;
};

// Calls f with the groups of the row, of the format's type.
template <typename F>
void WithGroups(const NibbleFormat& format, const NibbleRow& row, const F& f) {
  switch (format.weight_format) {
    case WeightFormat::kNvfp4:
      return f(E2m1Groups<E4m3Scale>(row));
    case WeightFormat::kMxfp4:
      return f(E2m1Groups<E8m0Scale>(row));
    default:
      return WithType(format.dtype, [&](auto type) { f(Int4Groups<decltype(type)>(row)); });
  }
}

#if defined(ORT_MOE_AVX2)

// A block of which `values` holds what each code stands for: a shift and a lookup.
ORT_MOE_AVX512 inline __m512 DecodeBlock(const uint8_t* bytes, __m512 values) {
  const __m512i shifts = _mm512_set_epi32(4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m128i twice = _mm_castpd_si128(_mm_loaddup_pd(reinterpret_cast<const double*>(bytes)));
  const __m512i nibbles = _mm512_srlv_epi32(_mm512_cvtepu8_epi32(twice), shifts);  // higher bits have no effect
  return _mm512_permutexvar_ps(nibbles, values);
}

template <typename Groups>
ORT_MOE_AVX512 void DecodeAvx512(const NibbleFormat& format, const uint8_t* bytes, Groups group_of, int64_t groups,
                                 float* out) {
  const int64_t group_blocks = Groups::Blocks(format);
  for (int64_t g = 0; g < groups; ++g) {
    const __m512 values = group_of.Values(g);
    for (int64_t b = 0; b < group_blocks; ++b, bytes += kHalf, out += kRowBlock) {
      _mm512_storeu_ps(out, DecodeBlock(bytes, values));
    }
  }
}

template <typename Groups, int kTokens>
ORT_MOE_AVX512 void MultiplyAvx512(const NibbleFormat& format, const NibbleRow* rows, const NibbleRow* next,
                                   int64_t groups, const float* const* activations, float* sums) {
  const int64_t group_blocks = Groups::Blocks(format);
  constexpr int kRows = 4;
  constexpr int64_t kLine = kCacheLineBytes;
  for (int64_t row = 0; row < kPanelRows; row += kRows, rows += kRows, next += kRows) {
    const Groups group_of[kRows] = {Groups(rows[0]), Groups(rows[1]), Groups(rows[2]), Groups(rows[3])};
    const uint8_t* bytes[kRows] = {rows[0].codes, rows[1].codes, rows[2].codes, rows[3].codes};
    __m512 sum[kTokens][kRows];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[t][r] = _mm512_setzero_ps();
    }
    int64_t at = 0;  // in bytes
    for (int64_t g = 0; g < groups; ++g) {
      __m512 values[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) values[r] = group_of[r].Values(g);
      for (int64_t b = 0; b < group_blocks; ++b, at += kHalf) {
        if (at % kLine == 0) {
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            __builtin_prefetch(next[r].codes + at);
            __builtin_prefetch(static_cast<const char*>(next[r].scales) + g * Groups::kScaleBytes);
          }
        }
        __m512 x[kTokens];
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) x[t] = _mm512_loadu_ps(activations[t] + 2 * at);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const __m512 w = DecodeBlock(bytes[r] + at, values[r]);
#pragma GCC unroll 8
          for (int t = 0; t < kTokens; ++t) sum[t][r] = _mm512_fmadd_ps(w, x[t], sum[t][r]);
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(sums + (t * kPanelRows + row + r) * kRowBlock, sum[t][r]);
    }
  }
}

// Eight weights of the low bits of each number: a lookup by the magnitude, and the sign.
ORT_MOE_AVX2 inline __m256 LookUpE2m1(__m256 magnitudes, __m256i codes) {
  const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)), _mm256_set1_ps(-0.0f));
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, codes), sign);
}

template <typename Groups>
ORT_MOE_AVX2 void DecodeAvx2(const NibbleFormat& format, const uint8_t* bytes, Groups group_of, int64_t groups,
                             float* out) {
  const int64_t group_blocks = Groups::Blocks(format);
  for (int64_t g = 0; g < groups; ++g) {
    if constexpr (Groups::kIsE2m1) {
      const __m256 magnitudes = _mm256_load_ps(group_of.Values(g, nullptr));
      for (int64_t b = 0; b < group_blocks; ++b, bytes += kHalf, out += kRowBlock) {
        const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
        _mm256_storeu_ps(out, LookUpE2m1(magnitudes, codes));
        _mm256_storeu_ps(out + kHalf, LookUpE2m1(magnitudes, _mm256_srli_epi32(codes, 4)));
      }
    } else {
      const __m256 scale = _mm256_set1_ps(group_of.scale(g));
      const __m256i zero = _mm256_set1_epi32(group_of.zero(g)), low_bits = _mm256_set1_epi32(0x0f);
      for (int64_t b = 0; b < group_blocks; ++b, bytes += kHalf, out += kRowBlock) {
        const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
        const __m256i low = _mm256_sub_epi32(_mm256_and_si256(codes, low_bits), zero);
        const __m256i high = _mm256_sub_epi32(_mm256_srli_epi32(codes, 4), zero);
        _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(low), scale));
        _mm256_storeu_ps(out + kHalf, _mm256_mul_ps(_mm256_cvtepi32_ps(high), scale));
      }
    }
  }
}

#endif

template <typename Groups>
void DecodePlain(const NibbleFormat& format, const uint8_t* bytes, Groups group_of, int64_t groups, float* out) {
  const int64_t group_blocks = Groups::Blocks(format);
  for (int64_t g = 0; g < groups; ++g) {
    float buffer[16];
    const float* values = group_of.Values(g, buffer);
    for (int64_t b = 0; b < group_blocks; ++b, bytes += kHalf, out += kRowBlock) {
      for (int64_t i = 0; i < kHalf; ++i) {
        out[i] = values[bytes[i] & 0x0f];
        out[kHalf + i] = values[bytes[i] >> 4];
      }
    }
  }
}

}  // namespace

void DecodeNibbles(const NibbleFormat& format, const NibbleRow& row, int64_t groups, float* out) {
  WithGroups(format, row, [&](auto group_of) {
#if defined(ORT_MOE_AVX2)
    if (HasAvx512()) return DecodeAvx512(format, row.codes, group_of, groups, out);
    if (HasFma()) return DecodeAvx2(format, row.codes, group_of, groups, out);
#endif
    DecodePlain(format, row.codes, group_of, groups, out);
  });
}

bool MultiplyNibbles([[maybe_unused]] const NibbleFormat& format, [[maybe_unused]] const NibbleRow* rows,
                     [[maybe_unused]] const NibbleRow* next, [[maybe_unused]] int64_t groups,
                     [[maybe_unused]] const float* const* activations, [[maybe_unused]] int64_t tokens,
                     [[maybe_unused]] float* sums) {
#if defined(ORT_MOE_AVX2)
  constexpr int64_t kMostTokens = 5;
  if (!HasAvx512() || tokens > kMostTokens) return false;
  WithGroups(format, rows[0], [&](auto group_of) {
    using Groups = decltype(group_of);
    using Kernel =
        void (*)(const NibbleFormat&, const NibbleRow*, const NibbleRow*, int64_t, const float* const*, float*);
    constexpr Kernel kKernels[kMostTokens] = {MultiplyAvx512<Groups, 1>, MultiplyAvx512<Groups, 2>,
                                              MultiplyAvx512<Groups, 3>, MultiplyAvx512<Groups, 4>,
                                              MultiplyAvx512<Groups, 5>};
    kKernels[tokens - 1](format, rows, next, groups, activations, sums);
  });
  return true;
#else
  return false;
#endif
}

}  // namespace ort_moe
