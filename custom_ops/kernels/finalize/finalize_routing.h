// FinalizeRouting: what the launchers take. The semantics are docs/ops.md's; ort_moe/reference/finalize_routing.py is
// the executable form, and every kernel returns its bits.
//
// For each token t and column h, in float32:
//   sum = +0; for k in 0 .. K-1: p = unpermuted_to_permuted[k * T + t]; a choice with p outside [0, R), or with a bias
//   and its index outside [0, E), is skipped; v = expert_output[p, h] (+ bias[indices[t, k], h], one add);
//   sum = fma(weights[t, k], v, sum).   Then one add of residual[t, h] if given, and one rounding to dtype.
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"

#if defined(ORT_MOE_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace ort_moe {

struct FinalizeArgs {
  const void* expert_output;              // (tokens * k, hidden) of dtype, in permuted order
  const float* weights;                   // (tokens, k)
  const int32_t* indices;                 // (tokens, k); read only with a bias
  const int32_t* unpermuted_to_permuted;  // (tokens * k)
  const void* bias;                       // (experts, hidden) of dtype, or null
  const void* residual;                   // (tokens, hidden) of dtype, or null; may be y
  void* y;                                // (tokens, hidden) of dtype
  DType dtype;
  int64_t tokens;
  int64_t hidden;
  int32_t k;
  int32_t experts;  // of the bias
};

// Tokens [begin, end) on the calling thread.
void FinalizeRoutingCpu(const FinalizeArgs& args, int64_t begin, int64_t end);

#if defined(ORT_MOE_WITH_CUDA)
// One launch on `stream`; tokens = 0 or hidden = 0 is a no-op. `routing_settled`: a kernel between the writer of
// weights, indices and map and this one has waited for its own predecessor before it let the next start, so that this
// one may read them ahead of its wait (PDL).
cudaError_t LaunchFinalizeRouting(const FinalizeArgs& args, bool routing_settled, cudaStream_t stream);
#endif

}  // namespace ort_moe
