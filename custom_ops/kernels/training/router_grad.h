// Gradients of RouterProbs and RouterScores on CUDA: one launcher for both.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/common/dtype.h"

namespace ort_moe {

struct RouterGradParams;

// On `stream`; what follows from the rest is filled in. rows = 0 is a no-op.
cudaError_t LaunchRouterGrad(DType dtype, RouterGradParams params, cudaStream_t stream);

}  // namespace ort_moe
