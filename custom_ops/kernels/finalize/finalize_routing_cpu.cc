// FinalizeRouting on the CPU: the weighted sum of the rows that belong to a token.
//
// Bytes: (K + 1) * H * sizeof(type) a token, twice H more with a residual. Bound by memory, and little work in half
// precision: conversions vectorise. The mapping is finalize_rows_cpu.h's.
#include "kernels/finalize/finalize_routing.h"
#include "kernels/finalize/finalize_rows_cpu.h"

namespace ort_moe {

void FinalizeRoutingCpu(const FinalizeArgs& args, int64_t begin, int64_t end) {
  const int64_t rows = args.tokens * args.k;
  FinalizeTokens(args, args.hidden, begin, end, [&](int64_t token, int64_t j) {
    const int64_t row = args.unpermuted_to_permuted[j * args.tokens + token];
    return row < rows ? row : -1;
  });
}

}  // namespace ort_moe
