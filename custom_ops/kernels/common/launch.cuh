// Launches with programmatic dependent launch (PDL): the next kernel of a stream starts while the previous one drains.
//
// Contract of a kernel that is launched here: every thread's path executes WaitForPrevious() or
// WaitForPreviousBehind(), and before that it writes nothing global and reads nothing but its parameters. AllowNext()
// may come first: the next kernel's own wait still holds it until this one has finished and its writes are visible. One
// exception: where the kernel before is known to call AllowNext() behind its own wait, all that was written ahead of
// that one is complete and may be read. So FC2 of FusedExperts, which follows FC1, reads weights and routing early,
// FinalizeRouting does with routing_settled, and the rows of PermuteTokens behind its maps read x.
//
// The environment's ORT_MOE_PDL=0, read once, turns the overlap off: results are the same.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/common/switches.h"

namespace ort_moe {

__device__ __forceinline__ void WaitForPrevious() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same, behind the work that `values` come from. The assembler puts a wait that depends on nothing first, and what
// could be worked out ahead of it behind it; so the wait stands under a condition of theirs and under its opposite.
template <typename... Values>
__device__ __forceinline__ void WaitForPreviousBehind(Values... values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t all = (static_cast<uint32_t>(values) | ...);
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0xffffffff;\n@p griddepcontrol.wait;\n@!p griddepcontrol.wait;\n}\n" ::"r"(
          all)
      : "memory");
#endif
}

__device__ __forceinline__ void AllowNext() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Also ahead of a wait: nothing is read, so whoever still writes it is not missed.
__device__ __forceinline__ void PrefetchIntoL2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// The same address, which the compiler is not to compute anew at each use. Where it is computed stays open:
// the assembler may still put that behind a wait (WaitForPreviousBehind holds it ahead).
template <typename T>
__device__ __forceinline__ T* Settled(T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

struct KernelTraits {
  bool hopper = false;       // the device and the code that is loaded have PDL and clusters
  int max_shared_bytes = 0;  // dynamic shared memory that a block may have
};

// Asked once per kernel and device: raises the kernel's limit of dynamic shared memory to the device's.
template <auto kKernel>
cudaError_t QueryKernel(KernelTraits* traits) {
  constexpr int kDevices = 64;
  constexpr int64_t kKnown = 1, kHopper = 2;
  constexpr int kSharedShift = 2;
  static std::array<std::atomic<int64_t>, kDevices> known{};  // a race computes the same value twice

  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  int64_t state = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (state == 0) {
    const void* kernel = reinterpret_cast<const void*>(kKernel);
    int major = 0, block_bytes = 0;
    cudaFuncAttributes code{};
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&code, kernel);
    const int shared_bytes = block_bytes - static_cast<int>(code.sharedSizeBytes);
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    }
    // All of it for shared memory, always: a multiprocessor changes the split only when it is idle, and kernels that
    // overlap would wait for that.
    if (error == cudaSuccess) {
      error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    }
    if (error != cudaSuccess) return error;
    // Code of an older architecture, just-in-time compiled for a newer device, has no wait in it.
    const bool hopper = major >= 9 && code.binaryVersion >= 90 && code.ptxVersion >= 90;
    state = kKnown | (hopper ? kHopper : 0) | static_cast<int64_t>(shared_bytes) << kSharedShift;
    if (device < kDevices) known[device].store(state, std::memory_order_relaxed);
  }
  traits->hopper = (state & kHopper) != 0;
  traits->max_shared_bytes = static_cast<int>(state >> kSharedShift);
  return cudaSuccess;
}

// One launch in clusters of `cluster` neighbouring blocks, which divides the grid and is 1 where the kernel's traits
// say no; cudaErrorInvalidValue where a block would need more shared memory than the device has. `overlap` is a switch
// besides ORT_MOE_PDL that must be on for the launch to overlap.
template <auto kKernel, typename... Arguments>
cudaError_t LaunchClusters(Switch overlap, unsigned cluster, dim3 grid, dim3 block, size_t shared_bytes,
                           cudaStream_t stream, const Arguments&... arguments) {
  KernelTraits traits;
  if (cudaError_t error = QueryKernel<kKernel>(&traits); error != cudaSuccess) return error;
  if (shared_bytes > static_cast<size_t>(traits.max_shared_bytes)) return cudaErrorInvalidValue;
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {cluster, 1, 1};
    ++config.numAttrs;
  }
  const unsigned plain_attributes = config.numAttrs;
  if (traits.hopper && IsSwitchedOn(Switch::kPdl) && IsSwitchedOn(overlap)) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  cudaError_t error = cudaLaunchKernelEx(&config, kKernel, arguments...);
  if (error == cudaErrorNotSupported && config.numAttrs > plain_attributes) {
    cudaGetLastError();  // refused (a driver or a sharing service without PDL): launch plainly
    config.numAttrs = plain_attributes;
    error = cudaLaunchKernelEx(&config, kKernel, arguments...);
  }
  return error;
}

template <auto kKernel, typename... Arguments>
cudaError_t LaunchClusters(unsigned cluster, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                           const Arguments&... arguments) {
  return LaunchClusters<kKernel>(Switch::kPdl, cluster, grid, block, shared_bytes, stream, arguments...);
}

template <auto kKernel, typename... Arguments>
cudaError_t Launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  return LaunchClusters<kKernel>(1, grid, block, shared_bytes, stream, arguments...);
}

}  // namespace ort_moe
