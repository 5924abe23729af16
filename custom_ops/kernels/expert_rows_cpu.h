// The inner loop of an expert's layer on the CPU, for rows of weights decoded to float32.
//
// Along the reduction everything stands in blocks of 16, padded with zeros; activations are put in the order of the
// decoded weights (expert_decoders_cpu.h).
#pragma once

#include <cstdint>

namespace ort_moe {

inline constexpr int64_t kRowBlock = 16;
inline constexpr int64_t kRowsTogether = 4;  // a load of activations serves all of them

// products[r] = rows[r] . activations, `rows` being kRowsTogether rows of 16 * blocks floats. One order of summation on
// every host, whatever the other rows: 16 partial sums over the blocks, then a tree.
void MultiplyRows(const float* rows, const float* activations, int64_t blocks, float products[kRowsTogether]);

}  // namespace ort_moe
