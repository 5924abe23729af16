// What the launchers' C exports share; ort_moe/kernels.py reaches them by ctypes, and with it tests, benchmarks and
// PyTorch. All addresses are device memory; a call launches on `stream` and returns at once, also while the stream is
// being captured. It returns null, or a sentence that says what was wrong, valid until the thread's next call.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#define ORT_MOE_C_EXPORT extern "C" __attribute__((visibility("default")))

namespace ort_moe {

inline const char* CallError(const char* op, const std::string& clause) {
  static thread_local std::string error;
  error = std::string(op) + ": " + clause;
  return error.c_str();
}

// The thread's last CUDA error is cleared, so that nobody else finds it.
inline const char* CallError(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();
  return CallError(op, std::string("the CUDA launch failed: ") + cudaGetErrorString(status));
}

}  // namespace ort_moe
