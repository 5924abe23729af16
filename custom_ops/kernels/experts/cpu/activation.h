// The activation between an expert's layers on the CPU.
#pragma once

#include <cstdint>

#include "kernels/experts/fused_experts.h"

namespace ort_moe {

// x[i] = act(x[i]), and with `values`, which it may change: act(min(x[i], limit)) * (clamp(values[i]) + beta).
void ActivateCpu(const ExpertsConfig& config, int64_t count, float* x, float* values);

}  // namespace ort_moe
