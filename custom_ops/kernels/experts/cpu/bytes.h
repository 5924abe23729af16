// Rows of one weight a byte decoded to float32 on the CPU, in their order.
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"

namespace ort_moe {

// `blocks` blocks of `block_size` unsigned codes: (code - zero point) times scale.
struct Int8Row {
  const uint8_t* codes;
  const void* scales;          // (blocks) of dtype
  const uint8_t* zero_points;  // (blocks); null: 128
  DType dtype;
  int64_t blocks;
  int64_t block_size;
};

void DecodeInt8(const Int8Row& row, float* out);

// `depth` e4m3 bytes times the scale of each `block_size` of them.
void DecodeFp8(const uint8_t* bytes, const float* scales, int64_t depth, int64_t block_size, float* out);

}  // namespace ort_moe
