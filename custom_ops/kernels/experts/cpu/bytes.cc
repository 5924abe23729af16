// Loops that compilers vectorise.
#include "kernels/experts/cpu/bytes.h"

#include <algorithm>

#include "kernels/common/float8.h"
#include "kernels/common/float_math.h"
#include "kernels/common/half_float.h"
#include "kernels/common/with_fma.h"

namespace ort_moe {

void DecodeInt8(const Int8Row& row, float* out) {
  WithType(row.dtype, [&](auto type) {
    using Type = decltype(type);
    const auto* scales = static_cast<const typename Type::Storage*>(row.scales);
    WithFma([&] {
      for (int64_t b = 0; b < row.blocks; ++b) {
        const float scale = Type::Load(scales[b]);
        const int32_t zero = row.zero_points == nullptr ? 128 : row.zero_points[b];
        const uint8_t* codes = row.codes + b * row.block_size;
        float* weights = out + b * row.block_size;
        for (int64_t i = 0; i < row.block_size; ++i) weights[i] = Mul(static_cast<float>(codes[i] - zero), scale);
      }
    });
  });
}

void DecodeFp8(const uint8_t* bytes, const float* scales, int64_t depth, int64_t block_size, float* out) {
  WithFma([&] {
    for (int64_t first = 0; first < depth; first += block_size) {
      const float scale = scales[first / block_size];
      const int64_t end = std::min(first + block_size, depth);
      for (int64_t d = first; d < end; ++d) out[d] = Mul(E4m3ToFloat(bytes[d]), scale);
    }
  });
}

}  // namespace ort_moe
