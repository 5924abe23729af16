// GatherFinalize on the CPU: FinalizeRouting's sum, with rows from the masked layout.
#include "kernels/finalize/gather_finalize.h"

#include "kernels/finalize/finalize_rows_cpu.h"

namespace ort_moe {

void GatherFinalizeCpu(const GatherFinalizeArgs& args, int64_t begin, int64_t end) {
  const FinalizeArgs& f = args.finalize;
  FinalizeTokens(f, args.padded, begin, end, [&](int64_t token, int64_t j) -> int64_t {
    const int32_t expert = f.indices[token * f.k + j];
    if (!args.IsLocal(expert)) return -1;
    return args.Row(f.unpermuted_to_permuted[j * f.tokens + token], expert, args.expert_first_token_offset[expert]);
  });
}

}  // namespace ort_moe
