// RouterProbs and the forward of RouterScores on the device: what a row's kernel takes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/training/training_map.h"

namespace ort_moe {

// What the rows' kernel computes; everything else goes to blocks.
enum class ProbsKind : int {
  kSoftmaxOfChosen,   // ranks the logits
  kSoftmaxOfExperts,  // ranks the logits
  kSigmoid,           // ranks the score plus the bias
};

struct ProbsParams {
  const void* logits;
  const float* selection_bias;  // or null; sigmoid only
  const float* expert_scale;    // or null
  void* probs;                  // or all scores
  uint8_t* map;
  int32_t* indices;  // or null
  int64_t rows;
  int32_t experts;
  int32_t k;
  int32_t row_bytes;  // of the logits, and of the probs
  int32_t map_bytes;
  int32_t shared_row_bytes;  // row_bytes of whole chunks
  int32_t warp_bytes;        // shared memory of a warp
  int32_t stages;            // rows of logits that it holds: 1 or 2
  MapFormat map_format;
  bool normalize;
  bool bulk;          // rows come and go by bulk copies
  bool listed;        // few enough are chosen for a list of candidates
  bool aligned_bias;  // to 16 bytes
  float normalize_eps;
  float normalize_min;
  float scale;
};

// On `stream`; what follows from the rest is filled in. `all_scores`: RouterScores, every expert's score is stored, and
// the choice only in the map.
cudaError_t LaunchProbsRows(ProbsKind kind, bool all_scores, DType dtype, ProbsParams params, cudaStream_t stream);

}  // namespace ort_moe
