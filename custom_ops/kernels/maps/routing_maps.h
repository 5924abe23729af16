// The maps between a router's choices and the rows of its experts.
//
// T tokens choose K experts each: R = T * K expanded rows, of which number k * T + t is choice k of token t. The
// permuted order lists them by expert ascending, then token ascending, then k ascending. Choices outside [0, E) belong
// to no expert: their rows come last, in the same order, where permuted_to_expert is E.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(ORT_MOE_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace ort_moe {

// All four or none (all null). Every element is written, also with T = 0: the offsets are zero then.
struct RoutingMaps {
  int32_t* permuted_to_unpermuted;     // (R) the expanded row at each permuted position
  int32_t* unpermuted_to_permuted;     // (R) the permuted position of each expanded row, -1 where it has no expert
  int32_t* permuted_to_expert;         // (R) the expert at each permuted position, E where there is none
  int64_t* expert_first_token_offset;  // (E + 1) the first permuted position of each expert; [E]: rows with an expert

  explicit operator bool() const { return expert_first_token_offset != nullptr; }
};

// On the calling thread. `indices` is (tokens, k); tokens * k fits into int32.
void BuildRoutingMapsCpu(const int32_t* indices, int64_t tokens, int64_t k, int64_t experts, const RoutingMaps& maps);

#if defined(ORT_MOE_WITH_CUDA)
// Scratch that LaunchRoutingMaps needs; may be 0.
size_t RoutingMapsScratchBytes(int64_t tokens, int64_t k, int64_t experts);

// On `stream`, for choices from elsewhere than our router: any value may stand in `indices`. The scratch is as it came
// from an allocator.
cudaError_t LaunchRoutingMaps(const int32_t* indices, int64_t tokens, int64_t k, int64_t experts,
                              const RoutingMaps& maps, void* scratch, cudaStream_t stream);
#endif

}  // namespace ort_moe
