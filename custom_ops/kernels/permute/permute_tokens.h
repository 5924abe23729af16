// PermuteTokens: what the launchers take. The semantics are docs/ops.md's; ort_moe/reference/permute_tokens.py is the
// executable form, and every kernel returns its bits.
//
// The four routing maps of the indices (routing_maps.h), and for each permuted position p before the rows without an
// expert: permuted_x[p] = x[permuted_to_unpermuted[p] mod T]. The rows without an expert are zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/maps/routing_maps.h"

#if defined(ORT_MOE_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace ort_moe {

struct PermuteArgs {
  const void* x;           // (tokens, hidden) of dtype
  const int32_t* indices;  // (tokens, k), any values
  void* permuted_x;        // (tokens * k, hidden) of dtype
  RoutingMaps maps;        // written
  DType dtype;
  int64_t tokens;
  int64_t hidden;
  int64_t k;        // tokens * k fits into int32
  int64_t experts;  // at least 1, below the largest int32
};

// Rows [begin, end) of permuted_x on the calling thread, by maps that are there.
void PermuteRowsCpu(const PermuteArgs& args, int64_t begin, int64_t end);

#if defined(ORT_MOE_WITH_CUDA)
// Scratch that LaunchPermuteTokens needs; may be 0.
size_t PermuteTokensScratchBytes(const PermuteArgs& args);

// On `stream`; with tokens = 0 the offsets alone are written. The scratch is as it came from an allocator.
// cudaErrorInvalidValue where there are more experts than a block's shared memory can count.
cudaError_t LaunchPermuteTokens(const PermuteArgs& args, void* scratch, cudaStream_t stream);
#endif

}  // namespace ort_moe
