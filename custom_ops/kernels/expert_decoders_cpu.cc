// Two weights a byte: a build with AVX2 beside a plain one, because compilers find no table lookup for the codes; the
// bits are the same. One weight a byte: loops that compilers vectorise.
#include "kernels/expert_decoders_cpu.h"

#include <algorithm>
#include <array>

#include "kernels/expert_rows_cpu.h"
#include "kernels/float_math.h"
#include "kernels/half_float.h"
#include "kernels/with_fma.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define ORT_MOE_AVX2 __attribute__((target("avx2,fma")))
#include <immintrin.h>
#endif

namespace ort_moe {
namespace {

constexpr int64_t kHalf = kRowBlock / 2;

using NibbleCodes = int8_t[16];
constexpr NibbleCodes kDoubledE2m1 = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr NibbleCodes kUnsigned = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// What neighbouring weights have in common: (value of the code - zero) * scale.
struct Group {
  float scale;
  int8_t zero;
};

float E4m3ToFloat(uint8_t x) {
  const uint32_t magnitude = x & 0x7fu;
  const uint32_t sign = static_cast<uint32_t>(x & 0x80u) << 24;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t subnormal = FloatBits(Add(BitsToFloat((magnitude << 20) + (121u << 23)), -BitsToFloat(121u << 23)));
  const uint32_t finite = magnitude >= 8u ? normal : subnormal;
  return BitsToFloat((magnitude == 0x7fu ? 0x7fc00000u : finite) | sign);
}

const std::array<float, 256>& HalvedE4m3() {
  static const std::array<float, 256> scales = [] {
    std::array<float, 256> values;
    for (int32_t x = 0; x < 256; ++x) values[x] = Mul(0.5f, E4m3ToFloat(static_cast<uint8_t>(x)));
    return values;
  }();
  return scales;
}

// Half of 2^(x - 127), by its bits: the least two are subnormal.
float HalvedE8m0(uint8_t x) {
  if (x == 0xff) return NaN();
  return BitsToFloat(x >= 2 ? static_cast<uint32_t>(x - 1) << 23 : 0x00200000u << x);
}

float LoadScale(const void* scales, DType dtype, int64_t i) {
  float scale = 0.0f;
  WithType(dtype, [&](auto type) {
    using Type = decltype(type);
    scale = Type::Load(static_cast<const typename Type::Storage*>(scales)[i]);
  });
  return scale;
}

#if defined(ORT_MOE_AVX2)

template <typename GroupOf>
ORT_MOE_AVX2 void DecodeNibblesAvx2(const NibbleCodes& table, const uint8_t* bytes, int64_t groups,
                                    int64_t group_blocks, const GroupOf& group_of, float* out) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  const __m128i low_bits = _mm_set1_epi8(0x0f);
  for (int64_t g = 0; g < groups; ++g) {
    const Group group = group_of(g);
    const __m256 scale = _mm256_set1_ps(group.scale);
    const __m128i zero = _mm_set1_epi8(group.zero);
    for (int64_t b = 0; b < group_blocks; ++b, bytes += kHalf, out += kRowBlock) {
      const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
      const __m128i nibbles = _mm_unpacklo_epi64(packed, _mm_srli_epi16(packed, 4));
      const __m128i values = _mm_sub_epi8(_mm_shuffle_epi8(codes, _mm_and_si128(nibbles, low_bits)), zero);
      const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values));
      const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(values, kHalf)));
      _mm256_storeu_ps(out, _mm256_mul_ps(low, scale));
      _mm256_storeu_ps(out + kHalf, _mm256_mul_ps(high, scale));
    }
  }
}

#endif

template <typename GroupOf>
void DecodeNibblesPlain(const NibbleCodes& table, const uint8_t* bytes, int64_t groups, int64_t group_blocks,
                        const GroupOf& group_of, float* out) {
  for (int64_t g = 0; g < groups; ++g) {
    const Group group = group_of(g);
    for (int64_t b = 0; b < group_blocks; ++b, bytes += kHalf, out += kRowBlock) {
      for (int64_t i = 0; i < kHalf; ++i) {
        out[i] = Mul(static_cast<float>(table[bytes[i] & 0x0f] - group.zero), group.scale);
        out[kHalf + i] = Mul(static_cast<float>(table[bytes[i] >> 4] - group.zero), group.scale);
      }
    }
  }
}

// `groups` groups of `group_blocks` blocks of kRowBlock weights.
template <typename GroupOf>
void DecodeNibbles(const NibbleCodes& table, const uint8_t* bytes, int64_t groups, int64_t group_blocks,
                   const GroupOf& group_of, float* out) {
#if defined(ORT_MOE_AVX2)
  if (HasFma()) return DecodeNibblesAvx2(table, bytes, groups, group_blocks, group_of, out);
#endif
  DecodeNibblesPlain(table, bytes, groups, group_blocks, group_of, out);
}

}  // namespace

void DecodeNvfp4Row(const uint8_t* bytes, const uint8_t* scales, int64_t blocks, float* out) {
  const std::array<float, 256>& halved = HalvedE4m3();
  DecodeNibbles(kDoubledE2m1, bytes, blocks, 1, [&](int64_t b) { return Group{halved[scales[b]], 0}; }, out);
}

void DecodeMxfp4Row(const uint8_t* bytes, const uint8_t* scales, int64_t blocks, float* out) {
  DecodeNibbles(kDoubledE2m1, bytes, blocks, 2, [&](int64_t b) { return Group{HalvedE8m0(scales[b]), 0}; }, out);
}

void DecodeInt4Row(const IntegerRow& row, float* out) {
  const auto group_of = [&](int64_t b) {
    const int zero = row.zero_points == nullptr ? 8 : row.zero_points[b / 2] >> (b % 2 * 4) & 0x0f;
    return Group{LoadScale(row.scales, row.dtype, b), static_cast<int8_t>(zero)};
  };
  DecodeNibbles(kUnsigned, row.codes, row.blocks, row.block_size / kRowBlock, group_of, out);
}

void DecodeInt8Row(const IntegerRow& row, float* out) {
  WithFma([&] {
    for (int64_t b = 0; b < row.blocks; ++b) {
      const float scale = LoadScale(row.scales, row.dtype, b);
      const int32_t zero = row.zero_points == nullptr ? 128 : row.zero_points[b];
      const uint8_t* codes = row.codes + b * row.block_size;
      float* weights = out + b * row.block_size;
      for (int64_t i = 0; i < row.block_size; ++i) weights[i] = Mul(static_cast<float>(codes[i] - zero), scale);
    }
  });
}

void DecodeFp8Row(const uint8_t* bytes, const float* scales, int64_t depth, int64_t block_size, float* out) {
  WithFma([&] {
    for (int64_t first = 0; first < depth; first += block_size) {
      const float scale = scales[first / block_size];
      const int64_t end = std::min(first + block_size, depth);
      for (int64_t d = first; d < end; ++d) out[d] = Mul(E4m3ToFloat(bytes[d]), scale);
    }
  });
}

}  // namespace ort_moe
