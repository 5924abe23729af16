// FusedRouter: from attributes and arguments to the parameters of its kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/router/fused_router.h"
#include "kernels/router/fused_router_row.cuh"

namespace ort_moe {

inline RouterParams MakeRouterParams(const RouterConfig& config, const RouterArgs& args) {
  const bool softmax = config.score == Score::kSoftmax;
  const bool from_selection = config.weights_from == WeightsFrom::kSelection;
  // softmax + normalisation without limits is the softmax over the chosen.
  const bool normalizes_softmax = softmax && !config.score_after_topk && config.normalize &&
                                  config.normalize_eps == 0.0f && config.normalize_min == 0.0f && !from_selection;
  RouterParams p{};
  p.logits = args.logits;
  p.selection_bias = args.selection_bias;
  p.expert_scale = args.expert_scale;
  p.weights = args.weights;
  p.indices = args.indices;
  p.rows = args.rows;
  p.experts = static_cast<int32_t>(args.experts);
  p.k = static_cast<int32_t>(config.k);
  p.columns = static_cast<int32_t>(args.columns == 0 ? config.k : args.columns);
  p.num_groups = static_cast<int32_t>(config.num_groups);
  p.topk_groups = static_cast<int32_t>(config.topk_groups);
  p.group_size = static_cast<int32_t>(args.experts / config.num_groups);
  p.group_score_top = static_cast<int32_t>(config.group_score_top);
  const int32_t chunks = p.group_size % kChunk == 0 ? p.group_size / kChunk : 0;
  p.log2_group_chunks = -1;
  for (int32_t log2 = 0; 1 << log2 <= kWarp; ++log2) {
    if (chunks == 1 << log2) p.log2_group_chunks = log2;
  }
  p.group_fill = config.group_fill;
  p.softcap = config.softcap;
  p.mixer_threshold = config.mixer_threshold;
  p.normalize_eps = config.normalize_eps;
  p.normalize_min = config.normalize_min;
  p.scale = config.scale;
  p.score = config.score;
  p.score_after_topk = config.score_after_topk;
  p.from_selection = from_selection;
  p.normalize = config.normalize && !normalizes_softmax;
  p.softmax_of_chosen = normalizes_softmax || (softmax && config.score_after_topk);
  p.grouped = config.has_groups();
  p.ranks_logits = config.score_after_topk || config.score == Score::kNone || config.score == Score::kSparseMixer ||
                   (softmax && args.selection_bias == nullptr && !p.grouped);
  p.softmax_of_experts =
      softmax && !config.score_after_topk && (!p.ranks_logits || (!from_selection && !normalizes_softmax));
  p.vector_loads = args.experts % kChunk == 0 && reinterpret_cast<uintptr_t>(args.logits) % sizeof(uint4) == 0;
  const int32_t ranked = p.grouped ? p.topk_groups * p.group_size : p.experts;
  p.few_reach_bound = p.vector_loads && std::min(ranked, kWarp * kChunk) >= 2 * p.k * kChunk;
  return p;
}

}  // namespace ort_moe
