// Rows of two weights a byte on the CPU: decoded to float32, or multiplied as they are decoded.
//
// A decoded row has the order that vector instructions give it: each block of kRowBlock holds the low halves of its 8
// bytes, then the high ones.
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/experts/fused_experts.h"

namespace ort_moe {

struct NibbleFormat {
  WeightFormat weight_format;  // nvfp4, mxfp4 or int4
  DType dtype;                 // of int4's scales
  int64_t group;               // weights that share a scale, a multiple of kRowBlock
};

// A row from the start of a group on.
struct NibbleRow {
  const uint8_t* codes;
  const void* scales;          // nvfp4: e4m3; mxfp4: e8m0; int4: of dtype
  const uint8_t* zero_points;  // int4: two a byte, from an even one on; null: 8
};

// (code - zero point) times scale of `groups` groups.
void DecodeNibbles(const NibbleFormat& format, const NibbleRow& row, int64_t groups, float* out);

// The partial sums of MultiplyPanel for kPanelRows whole rows with few tokens, without a buffer in between; `next`:
// rows to bring into the caches meanwhile. False where this host has no such kernel for as many tokens.
bool MultiplyNibbles(const NibbleFormat& format, const NibbleRow* rows, const NibbleRow* next, int64_t groups,
                     const float* const* activations, int64_t tokens, float* sums);

}  // namespace ort_moe
