// Device memory for the length of one call, from ORT's own arena.
#pragma once

#include <onnxruntime_c_api.h>

#include <cstddef>

#include "ort/context.h"
#include "ort/node.h"

namespace ort_moe {

// Given back when it goes, which may be before the kernels that were launched on it have run: the arena hands it to
// later work of the same stream alone.
class Scratch {
 public:
  Scratch(OrtAllocator* allocator, void* data) : allocator_(allocator), data_(data) {}
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    if (data_ != nullptr) allocator_->Free(allocator_, data_);
  }
  void* data() const { return data_; }

 private:
  OrtAllocator* allocator_;
  void* data_;
};

// The allocator of a node's device, taken when the kernel is created.
class ScratchAllocator {
 public:
  explicit ScratchAllocator(const Node& node);
  ScratchAllocator(const ScratchAllocator&) = delete;
  ~ScratchAllocator() { api_.ReleaseAllocator(allocator_); }

  // Null for 0 bytes. Only where the node has a stream. Throws if the memory cannot be had.
  Scratch Take(const Context& context, size_t bytes) const;

 private:
  const OrtApi& api_;
  OrtAllocator* allocator_;
  const OrtMemoryInfo* memory_;  // the allocator's
};

}  // namespace ort_moe
