// What a CUDA launcher returns, as an Error.
#pragma once

#if defined(ORT_MOE_WITH_CUDA)
#include <cuda_runtime_api.h>

#include <string>

#include "ort/status.h"

namespace ort_moe {

// Throws unless the launch succeeded; the thread's last CUDA error is cleared, so that nobody else finds it.
inline void CheckLaunch(cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw Error(std::string("the CUDA kernel was not launched: ") + cudaGetErrorString(status), ORT_EP_FAIL);
}

}  // namespace ort_moe
#endif
