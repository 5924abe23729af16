// FinalizeRouting on the CPU: the weighted sum of the rows that belong to a token.
//
// Mapping: one thread owns a token and goes through its columns in runs whose sums stay in the first-level cache, so
// every row is read once and y is written once.
// Bytes: (K + 1) * H * sizeof(type) a token, twice H more with a residual. Bound by memory, and little work in half
// precision: conversions vectorise.
#include <algorithm>

#include "kernels/finalize_routing.h"
#include "kernels/half_float.h"
#include "kernels/with_fma.h"

namespace ort_moe {
namespace {

constexpr int64_t kRun = 256;  // columns at a time

template <typename Type>
void FinalizeRun(const FinalizeArgs& args, int64_t token, int64_t first, int64_t count) {
  using Storage = typename Type::Storage;
  const Storage* rows = static_cast<const Storage*>(args.expert_output);
  float sum[kRun] = {};
  for (int64_t j = 0; j < args.k; ++j) {
    const int64_t row = args.unpermuted_to_permuted[j * args.tokens + token];
    if (row < 0 || row >= args.tokens * args.k) continue;
    const float weight = args.weights[token * args.k + j];
    const Storage* output = rows + row * args.hidden + first;
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

}  // namespace

void FinalizeRoutingCpu(const FinalizeArgs& args, int64_t begin, int64_t end) {
  WithType(args.dtype, [&](auto type) {
    WithFma([&] {
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t first = 0; first < args.hidden; first += kRun) {
          FinalizeRun<decltype(type)>(args, token, first, std::min(kRun, args.hidden - first));
        }
      }
    });
  });
}

}  // namespace ort_moe
