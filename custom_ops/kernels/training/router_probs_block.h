// RouterProbs and the forward of RouterScores by blocks: every configuration.
#pragma once

#include "kernels/router/fused_router.h"
#include "kernels/training/training_map.h"

namespace ort_moe {

// What a block makes of a row that FusedRouter routes; its args' weights, indices and maps are not looked at.
struct ProbsBlockOutputs {
  void* probs;  // or all scores
  uint8_t* map;
  int32_t* indices;  // or null
  MapFormat map_format;
  bool all_scores;        // RouterScores
  bool normalize_scores;  // by their sum plus normalize_eps
};

// On `stream`; cudaErrorInvalidValue where a row does not fit the shared memory of a block.
cudaError_t LaunchProbsBlocks(const RouterConfig& config, const RouterArgs& args, const ProbsBlockOutputs& outputs,
                              cudaStream_t stream);

}  // namespace ort_moe
