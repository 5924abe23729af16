#include "ort/scratch.h"

#include "ort/status.h"

namespace ort_moe {

ScratchAllocator::ScratchAllocator(const Node& node)
    : api_(node.api()), allocator_(&node.Allocator()), memory_(allocator_->Info(allocator_)) {}

Scratch ScratchAllocator::Take(const Context& context, size_t bytes) const {
  if (bytes == 0) return Scratch(allocator_, nullptr);
  void* data = context.ScratchBuffer(*memory_, bytes);
  if (data == nullptr) throw Error(std::to_string(bytes) + " bytes of scratch memory cannot be had", ORT_EP_FAIL);
  return Scratch(allocator_, data);
}

}  // namespace ort_moe
