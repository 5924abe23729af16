// What a router's launcher takes, in C.
#pragma once

#include <cstdint>

#include "kernels/router/fused_router.h"

// RouterArgs and RouterConfig, flat; the enumerations count as in fused_router.h. Mirrored by
// ort_moe/kernels/router.py.
struct OrtMoeFusedRouterCall {
  const void* logits;
  const float* selection_bias;  // or null
  const float* expert_scale;    // or null
  float* weights;
  int32_t* indices;
  ort_moe::RoutingMaps maps;  // or all null
  void* scratch;              // ort_moe_router_scratch_bytes
  int64_t rows;
  int64_t experts;
  int64_t k;
  int64_t num_groups;
  int64_t topk_groups;
  int64_t group_score_top;
  int32_t dtype;
  int32_t score;
  int32_t score_after_topk;
  int32_t bias_on;
  int32_t weights_from;
  int32_t normalize;
  float mixer_threshold;
  float group_fill;
  float normalize_eps;
  float normalize_min;
  float scale;
  float softcap;
};

namespace ort_moe {
// The attributes that the calls of all routers have, in fields of the same names.
template <typename Call>
RouterConfig CommonConfigOf(const Call& call) {
  RouterConfig config;
  config.k = call.k;
  config.score = static_cast<Score>(call.score);
  config.score_after_topk = call.score_after_topk != 0;
  config.bias_on = static_cast<BiasOn>(call.bias_on);
  config.num_groups = call.num_groups;
  config.topk_groups = call.topk_groups;
  config.group_score_top = call.group_score_top;
  config.group_fill = call.group_fill;
  config.normalize = call.normalize != 0;
  config.normalize_eps = call.normalize_eps;
  config.normalize_min = call.normalize_min;
  config.scale = call.scale;
  config.softcap = call.softcap;
  return config;
}

inline RouterConfig ConfigOf(const OrtMoeFusedRouterCall& call) {
  RouterConfig config = CommonConfigOf(call);
  config.mixer_threshold = call.mixer_threshold;
  config.weights_from = static_cast<WeightsFrom>(call.weights_from);
  return config;
}

inline RouterArgs ArgsOf(const OrtMoeFusedRouterCall& call) {
  RouterArgs args{};
  args.logits = call.logits;
  args.selection_bias = call.selection_bias;
  args.expert_scale = call.expert_scale;
  args.weights = call.weights;
  args.indices = call.indices;
  args.maps = call.maps;
  args.scratch = call.scratch;
  args.dtype = static_cast<DType>(call.dtype);
  args.rows = call.rows;
  args.experts = call.experts;
  return args;
}

}  // namespace ort_moe
