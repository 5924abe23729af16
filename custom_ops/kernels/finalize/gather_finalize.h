// GatherFinalize: what the launchers take. The semantics are docs/ops.md's; ort_moe/reference/gather_finalize.py is the
// executable form, and every kernel returns its bits.
//
// FinalizeRouting's sum (finalize_routing.h) over rows that lie in a masked layout: every local expert has room for
// `capacity` rows, of which its first ones are in use. Choice k of token t with expert e = indices[t, k] is row
// c = unpermuted_to_permuted[k * T + t] - expert_first_token_offset[e] of that expert. It is skipped where e is not
// local or c lies outside [0, capacity).
#pragma once

#include <cstdint>

#include "kernels/common/float_math.h"
#include "kernels/finalize/finalize_routing.h"

namespace ort_moe {

struct GatherFinalizeArgs {
  // Of the result. expert_output is (local_count, capacity, padded) of dtype; experts counts those of the offsets and
  // of the bias; indices is always read.
  FinalizeArgs finalize;
  const int64_t* expert_first_token_offset;  // (experts + 1)
  int64_t padded;                            // elements from row to row, at least hidden
  int64_t capacity;
  int64_t local_begin;  // the first local expert; local_begin + local_count <= experts
  int64_t local_count;

  ORT_MOE_HD bool IsLocal(int32_t expert) const { return expert >= local_begin && expert < local_begin + local_count; }

  // The row of expert_output that a local expert has at a permuted position whose offset is `first`; -1: none.
  ORT_MOE_HD int64_t Row(int32_t permuted, int32_t expert, int64_t first) const {
    const uint64_t row = static_cast<uint64_t>(permuted) - static_cast<uint64_t>(first);  // wraps around: too large
    return row < static_cast<uint64_t>(capacity) ? (expert - local_begin) * capacity + static_cast<int64_t>(row) : -1;
  }
};

// Tokens [begin, end) on the calling thread.
void GatherFinalizeCpu(const GatherFinalizeArgs& args, int64_t begin, int64_t end);

#if defined(ORT_MOE_WITH_CUDA)
// One launch on `stream`; tokens = 0 or hidden = 0 is a no-op.
cudaError_t LaunchGatherFinalize(const GatherFinalizeArgs& args, cudaStream_t stream);
#endif

}  // namespace ort_moe
