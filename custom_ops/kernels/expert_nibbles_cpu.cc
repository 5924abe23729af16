// Builds with AVX-512 and AVX2 beside a plain one, because compilers find no table lookup for the codes; the bits are
// the same.
#include "kernels/expert_nibbles_cpu.h"

#include <iterator>

#include "kernels/cache_lines.h"
#include "kernels/expert_rows_cpu.h"
#include "kernels/float8.h"
#include "kernels/float_math.h"
#include "kernels/half_float.h"
#include "kernels/with_fma.h"

#if defined(ORT_MOE_AVX2)
#include <immintrin.h>
#endif

// GCC 12 warns of its own header: of values that the instructions overwrite.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace ort_moe {
namespace {

constexpr int64_t kHalf = kRowBlock / 2;

using Codes = int8_t[16];

// What the weights of a group have in common: (value of the code - zero) * scale.
struct Group {
  float scale;
  int8_t zero;
};

// Each format: the values of the codes, and the groups of a row. Loops over one block are slow, so a size that is known
// is constant.

// A scale of one byte: all its values, halved because the codes are doubled, and times each code.
struct ByteScales {
  float halved[256];
  alignas(kCacheLineBytes) float values[256][16];

  ByteScales(const Codes& codes, float (*halved_of)(uint8_t)) {
    for (int32_t x = 0; x < 256; ++x) {
      halved[x] = halved_of(static_cast<uint8_t>(x));
      for (int32_t code = 0; code < 16; ++code) values[x][code] = Mul(static_cast<float>(codes[code]), halved[x]);
    }
  }
};

struct E4m3Scale {
  static constexpr int64_t kBlocks = 1;
  static float Halved(uint8_t x) { return Mul(0.5f, E4m3ToFloat(x)); }
};

struct E8m0Scale {
  static constexpr int64_t kBlocks = 2;
  // 2^(x - 127), by its bits: the least two are subnormal.
  static float Halved(uint8_t x) {
    if (x == 0xff) return NaN();
    return BitsToFloat(x >= 2 ? static_cast<uint32_t>(x - 1) << 23 : 0x00200000u << x);
  }
};

template <typename Scale>
class E2m1Groups {
 public:
  static constexpr Codes kCodes = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled
  static constexpr int64_t kScaleBytes = 1;
  static constexpr int64_t Blocks(const NibbleFormat&) { return Scale::kBlocks; }

  explicit E2m1Groups(const NibbleRow& row) : scales_(static_cast<const uint8_t*>(row.scales)) {}
  Group operator()(int64_t g) const { return {all_->halved[scales_[g]], 0}; }
#if defined(ORT_MOE_AVX2)
  ORT_MOE_AVX512 __m512 Values(int64_t g) const { return _mm512_load_ps(all_->values[scales_[g]]); }
#endif

 private:
  static const ByteScales* All() {
    static const ByteScales scales(kCodes, Scale::Halved);
    return &scales;
  }

  const uint8_t* scales_;
  const ByteScales* all_ = All();
};

template <typename Type>
class Int4Groups {
 public:
  static constexpr Codes kCodes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  static constexpr int64_t kScaleBytes = sizeof(typename Type::Storage);
  static int64_t Blocks(const NibbleFormat& format) { return format.group / kRowBlock; }

  explicit Int4Groups(const NibbleRow& row)
      : scales_(static_cast<const typename Type::Storage*>(row.scales)), zeros_(row.zero_points) {}
  Group operator()(int64_t g) const {
    const int zero = zeros_ == nullptr ? 8 : zeros_[g / 2] >> (g % 2 * 4) & 0x0f;
    return {Type::Load(scales_[g]), static_cast<int8_t>(zero)};
  }
#if defined(ORT_MOE_AVX2)
  ORT_MOE_AVX512 __m512 Values(int64_t g) const {
    const Group group = (*this)(g);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kCodes));
    const __m512 codes = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    const __m512 shifted = _mm512_sub_ps(codes, _mm512_set1_ps(static_cast<float>(group.zero)));
    return _mm512_mul_ps(shifted, _mm512_set1_ps(group.scale));
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

template <typename Groups>
ORT_MOE_AVX2 void DecodeAvx2(const NibbleFormat& format, const uint8_t* bytes, Groups group_of, int64_t groups,
                             float* out) {
  const int64_t group_blocks = Groups::Blocks(format);
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Groups::kCodes));
  const __m128i low_bits = _mm_set1_epi8(0x0f);
  for (int64_t g = 0; g < groups; ++g) {
    const Group group = group_of(g);
    const __m256 scale = _mm256_set1_ps(group.scale);
    const __m128i values = _mm_sub_epi8(codes, _mm_set1_epi8(group.zero));
    for (int64_t b = 0; b < group_blocks; ++b, bytes += kHalf, out += kRowBlock) {
      const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
      const __m128i nibbles = _mm_and_si128(_mm_unpacklo_epi64(packed, _mm_srli_epi16(packed, 4)), low_bits);
      const __m128i decoded = _mm_shuffle_epi8(values, nibbles);
      const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(decoded));
      const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(decoded, kHalf)));
      _mm256_storeu_ps(out, _mm256_mul_ps(low, scale));
      _mm256_storeu_ps(out + kHalf, _mm256_mul_ps(high, scale));
    }
  }
}

#endif

template <typename Groups>
void DecodePlain(const NibbleFormat& format, const uint8_t* bytes, Groups group_of, int64_t groups, float* out) {
  const int64_t group_blocks = Groups::Blocks(format);
  for (int64_t g = 0; g < groups; ++g) {
    const Group group = group_of(g);
    for (int64_t b = 0; b < group_blocks; ++b, bytes += kHalf, out += kRowBlock) {
      for (int64_t i = 0; i < kHalf; ++i) {
        out[i] = Mul(static_cast<float>(Groups::kCodes[bytes[i] & 0x0f] - group.zero), group.scale);
        out[kHalf + i] = Mul(static_cast<float>(Groups::kCodes[bytes[i] >> 4] - group.zero), group.scale);
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
