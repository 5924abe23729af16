// SharedGateRouter: what the launchers take. The semantics are docs/ops.md's; ort_moe/reference/shared_gate_router.py
// is the executable form, and every kernel returns its bits.
//
// FusedRouter (fused_router.h) into the first K columns of weights and indices, and into the S columns behind them, for
// shared expert s of token t:
//   weight = sigmoid(hidden[t] . gate_weight[s]) * scale, index = base + s.
// The product is float32: 128 partial sums from +0; element e goes into number (e / 8) mod 128 by one fused
// multiply-add, in ascending e; then a butterfly with strides 64, 32, 16, 8, 4, 2, 1. Sigmoid is float_math.h's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/router/fused_router.h"

namespace ort_moe {

struct SharedGates {
  const void* hidden;       // (rows, size) of the logits' dtype
  const void* gate_weight;  // (count, size) of the same
  int64_t size;             // H
  int32_t count;            // S, at least 1
  int32_t base;             // index of the first shared expert
  float scale;
};

// In `router`, columns is k + gates.count, and the maps are of all columns over experts + gates.count experts.
//
// Rows [begin, end) on the calling thread; the maps follow from BuildRoutingMapsCpu.
void SharedGateRouterCpu(const RouterConfig& config, const RouterArgs& router, const SharedGates& gates, int64_t begin,
                         int64_t end);

#if defined(ORT_MOE_WITH_CUDA)
// From shapes and whether maps are wanted alone; may be 0.
size_t SharedGateRouterScratchBytes(const RouterConfig& config, const RouterArgs& router, const SharedGates& gates);

// On `stream`: one launch for weights and indices of up to 512 experts and k up to 32, else the gates' and the
// router's; maps take a launcher of their own. rows = 0 zeroes the offsets. The configuration has been checked.
cudaError_t LaunchSharedGateRouter(const RouterConfig& config, const RouterArgs& router, const SharedGates& gates,
                                   cudaStream_t stream);
#endif

}  // namespace ort_moe
