#include "ort/scratch.h"

#include "ort/status.h"

namespace ort_moe {

ScratchAllocator::ScratchAllocator(const Node& node)
    : api_(node.api()), allocator_(&node.Allocator()), memory_(allocator_->Info(allocator_)) {}

Scratch ScratchAllocator::Take(const Context& context, size_t bytes) const {
  if (bytes == 0) return Scratch(allocator_, nullptr);
  // ORT's function for scratch of a stream ends the process where there is no memory. So ask for much first in a way
  // that can be refused; what is given so belongs to no stream, and could not be given back before kernels have run.
  constexpr size_t kMuch = size_t{1} << 20;
  if (bytes >= kMuch) {
    void* probe = nullptr;
    OrtStatus* const refusal = api_.AllocatorAlloc(allocator_, bytes, &probe);
    if (refusal != nullptr) api_.ReleaseStatus(refusal);
    if (probe == nullptr) throw Error(std::to_string(bytes) + " bytes of scratch memory cannot be had", ORT_EP_FAIL);
    allocator_->Free(allocator_, probe);
  }
  return Scratch(allocator_, context.ScratchBuffer(*memory_, bytes));
}

}  // namespace ort_moe
