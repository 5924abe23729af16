// What FinalizeRouting and GatherFinalize share on the CPU: the weighted sum of the rows that belong to a token.
//
// One thread owns a token and goes through its columns in runs whose sums stay in the first-level cache, so every row
// is read once and y is written once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/half_float.h"
#include "kernels/common/with_fma.h"
#include "kernels/finalize/finalize_routing.h"

namespace ort_moe {

constexpr int64_t kFinalizeRun = 256;  // columns at a time

// Columns [first, first + count) of a token. `row_of(j)` is the row of its choice j, -1: none; rows lie `padded`
// elements apart.
template <typename Type, typename RowOf>
void FinalizeRun(const FinalizeArgs& args, int64_t padded, int64_t token, int64_t first, int64_t count, RowOf row_of) {
  using Storage = typename Type::Storage;
  const Storage* rows = static_cast<const Storage*>(args.expert_output);
  float sum[kFinalizeRun] = {};
  for (int64_t j = 0; j < args.k; ++j) {
    const int64_t row = row_of(j);
    if (row < 0) continue;
    const float weight = args.weights[token * args.k + j];
    const Storage* output = rows + row * padded + first;
    if (args.bias == nullptr) {
      for (int64_t i = 0; i < count; ++i) sum[i] = Fma(weight, Type::Load(output[i]), sum[i]);
      continue;
    }
    const int64_t expert = args.indices[token * args.k + j];
    if (expert < 0 || expert >= args.experts) continue;
    const Storage* bias = static_cast<const Storage*>(args.bias) + expert * args.hidden + first;
    for (int64_t i = 0; i < count; ++i) {
      sum[i] = Fma(weight, Add(Type::Load(output[i]), Type::Load(bias[i])), sum[i]);
    }
  }
  if (args.residual != nullptr) {
    const Storage* residual = static_cast<const Storage*>(args.residual) + token * args.hidden + first;
    for (int64_t i = 0; i < count; ++i) sum[i] = Add(sum[i], Type::Load(residual[i]));
  }
  Storage* y = static_cast<Storage*>(args.y) + token * args.hidden + first;
  for (int64_t i = 0; i < count; ++i) y[i] = Type::Store(sum[i]);
}

// Tokens [begin, end) on the calling thread. `row_of(token, j)`: see above.
template <typename RowOf>
void FinalizeTokens(const FinalizeArgs& args, int64_t padded, int64_t begin, int64_t end, RowOf row_of) {
  WithType(args.dtype, [&](auto type) {
    WithFma([&] {
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t first = 0; first < args.hidden; first += kFinalizeRun) {
          FinalizeRun<decltype(type)>(args, padded, token, first, std::min(kFinalizeRun, args.hidden - first),
                                      [&](int64_t j) { return row_of(token, j); });
        }
      }
    });
  });
}

}  // namespace ort_moe
