// What the launchers' C exports share; ort_moe/kernels/ reaches them by ctypes, and with it tests, benchmarks and
// PyTorch. A function ..._launch_... takes device memory, launches on `stream` and returns at once, also while the
// stream is being captured; a function ..._run_... takes host memory and returns when it is done. Both return null, or
// a sentence that says what was wrong, valid until the thread's next call.
#pragma once

#include <exception>
#include <string>

#if defined(ORT_MOE_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

#define ORT_MOE_C_EXPORT extern "C" __attribute__((visibility("default")))

namespace ort_moe {

inline const char* CallError(const char* op, const std::string& clause) {
  static thread_local std::string error;
  error = std::string(op) + ": " + clause;
  return error.c_str();
}

// Runs a kernel on the host; what it throws becomes the sentence.
template <typename Body>
const char* CallOnHost(const char* op, Body&& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return CallError(op, error.what());
  }
}

#if defined(ORT_MOE_WITH_CUDA)
// The thread's last CUDA error is cleared, so that nobody else finds it.
inline const char* CallError(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();
  return CallError(op, std::string("the CUDA launch failed: ") + cudaGetErrorString(status));
}
#endif

}  // namespace ort_moe
