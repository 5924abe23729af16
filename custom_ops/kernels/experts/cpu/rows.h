// The inner loops of an expert's layer on the CPU, for rows of weights decoded to float32.
//
// Along the reduction everything stands in blocks of 16, padded with zeros; activations are put in the order of the
// decoded weights (nibbles.h). One order of summation on every host, whatever the other rows and tokens: 16 partial
// sums over the blocks, then a tree.
#pragma once

#include <cstdint>

namespace ort_moe {

inline constexpr int64_t kRowBlock = 16;
inline constexpr int64_t kPanelRows = 8;  // that are multiplied together

// Adds `blocks` blocks of products to the partial sums of kPanelRows rows with `tokens` rows of activations, from their
// element `offset` on: sums[(t * kPanelRows + r) * kRowBlock + i] += rows[r] * activations[t]. `first`: in place of
// what stands there.
void MultiplyPanel(const float* const rows[kPanelRows], const float* const* activations, int64_t offset, int64_t tokens,
                   int64_t blocks, bool first, float* sums);

// products[n] = the sum of 16 partial sums, for `count` products, a multiple of 4.
void AddPartialSums(const float* sums, int64_t count, float* products);

}  // namespace ort_moe
