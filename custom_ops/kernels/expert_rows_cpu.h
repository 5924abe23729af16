// The two inner loops of an expert's layer on the CPU, for rows of weights decoded to float32.
//
// Along the reduction everything stands in blocks of 16, padded with zeros. A block of a decoded NVFP4 row holds the
// low halves of its 8 bytes, then the high ones; activations are put in the same order.
#pragma once

#include <cstdint>

namespace ort_moe {

inline constexpr int64_t kRowBlock = 16;
inline constexpr int64_t kRowsTogether = 4;  // a load of activations serves all of them

// e2m1 bytes and e4m3 scales of `blocks` blocks to 16 * blocks floats, code times scale.
void DecodeNvfp4Row(const uint8_t* bytes, const uint8_t* scales, int64_t blocks, float* out);

// products[r] = rows[r] . activations, `rows` being kRowsTogether rows of 16 * blocks floats. One order of summation on
// every host, whatever the other rows: 16 partial sums over the blocks, then a tree.
void MultiplyRows(const float* rows, const float* activations, int64_t blocks, float products[kRowsTogether]);

}  // namespace ort_moe
