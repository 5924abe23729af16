// FusedRouter: what the launchers take. The semantics are docs/ops.md's; the NumPy emulation in
// ort_moe/reference/fused_router.py is the executable form, and every kernel returns its bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/dtype.h"
#include "kernels/maps/routing_maps.h"

#if defined(ORT_MOE_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace ort_moe {

enum class Score : int { kSoftmax, kSigmoid, kSqrtSoftplus, kNone, kSparseMixer };
enum class BiasOn : int { kScore, kLogits };
enum class WeightsFrom : int { kScores, kSelection };

// The op's attributes, one field each.
struct RouterConfig {
  int64_t k = 1;
  Score score = Score::kSoftmax;
  float mixer_threshold = 0.0f;  // sparse_mixer only
  bool score_after_topk = false;
  BiasOn bias_on = BiasOn::kScore;
  int64_t num_groups = 1;
  int64_t topk_groups = 1;
  int64_t group_score_top = 1;
  float group_fill = 0.0f;
  WeightsFrom weights_from = WeightsFrom::kScores;
  bool normalize = false;
  float normalize_eps = 0.0f;
  float normalize_min = 0.0f;
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: off

  bool has_groups() const { return topk_groups < num_groups; }
};

struct RouterArgs {
  const void* logits;           // (rows, experts) of dtype
  const float* selection_bias;  // (experts) or null
  const float* expert_scale;    // (experts) or null
  float* weights;               // (rows, k), of `columns` elements a row
  int32_t* indices;             // the same
  RoutingMaps maps;             // of the indices, or all null: not wanted
  void* scratch;                // on the device, RouterScratchBytes; the CPU needs none
  DType dtype;
  int64_t rows;
  int64_t experts;
  int64_t columns;  // of weights and indices, at least k; 0: k. Maps need k
};

// Empty where the configuration is valid for this many experts (-1: not known yet); else one clause that names the
// attribute, what was expected and what came.
std::string CheckRouterConfig(const RouterConfig& config, int64_t experts, bool has_selection_bias);

// Weights and indices of rows [begin, end) on the calling thread; the maps follow from BuildRoutingMapsCpu once all
// rows are there. The configuration has been checked.
void FusedRouterCpu(const RouterConfig& config, const RouterArgs& args, int64_t begin, int64_t end);

#if defined(ORT_MOE_WITH_CUDA)
// From shapes, attributes and whether maps are wanted alone; may be 0.
size_t RouterScratchBytes(const RouterConfig& config, const RouterArgs& args);

// On `stream`, weights, indices and, where wanted, maps; rows = 0 zeroes the offsets. The configuration has been
// checked. The scratch is as it came from an allocator.
cudaError_t LaunchFusedRouter(const RouterConfig& config, const RouterArgs& args, cudaStream_t stream);
#endif

}  // namespace ort_moe
