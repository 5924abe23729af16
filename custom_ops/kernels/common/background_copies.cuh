// Copies from global to shared memory in the background, in groups that a thread closes and waits for.
#pragma once

#include <cstdint>

namespace ort_moe {

// 16 bytes to an address in shared memory (SharedAddress); zeros where not `valid`.
__device__ __forceinline__ void CopyAsyncAt(uint32_t target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CopyAsync(void* target, const void* source, bool valid) {
  CopyAsyncAt(static_cast<uint32_t>(__cvta_generic_to_shared(target)), source, valid);
}

// 4 bytes, of which the first `bytes` are read and the rest are zeros.
__device__ __forceinline__ void CopyWordAt(uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void CopyWord(void* target, const void* source, int bytes = 4) {
  CopyWordAt(static_cast<uint32_t>(__cvta_generic_to_shared(target)), source, bytes);
}

__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most kPending groups of this thread's copies are under way.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ort_moe
