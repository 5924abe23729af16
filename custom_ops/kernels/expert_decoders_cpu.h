// Rows of packed weights decoded to float32 on the CPU, one function a format.
//
// Formats with two weights a byte leave a row in the order that vector instructions give it: each block of kRowBlock
// holds the low halves of its 8 bytes, then the high ones. The others keep the order of the weights.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace ort_moe {

// e2m1 bytes and e4m3 scales of `blocks` blocks of 16: code times scale.
void DecodeNvfp4Row(const uint8_t* bytes, const uint8_t* scales, int64_t blocks, float* out);

// e2m1 bytes and e8m0 scales of `blocks` blocks of 32: code times scale.
void DecodeMxfp4Row(const uint8_t* bytes, const uint8_t* scales, int64_t blocks, float* out);

// A row of `blocks` blocks of `block_size` (a multiple of kRowBlock) unsigned codes: (code - zero point) times scale.
struct IntegerRow {
  const uint8_t* codes;
  const void* scales;          // (blocks) of dtype
  const uint8_t* zero_points;  // packed like the codes; null: half the number of codes
  DType dtype;
  int64_t blocks;
  int64_t block_size;
};

void DecodeInt4Row(const IntegerRow& row, float* out);
void DecodeInt8Row(const IntegerRow& row, float* out);

// `depth` e4m3 bytes times the scale of each `block_size` of them.
void DecodeFp8Row(const uint8_t* bytes, const float* scales, int64_t depth, int64_t block_size, float* out);

}  // namespace ort_moe
