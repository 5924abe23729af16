// One call of a kernel: its inputs, outputs, threads and stream.
#pragma once

#include <onnxruntime_c_api.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "ort/op_spec.h"

namespace ort_moe {

// A tensor that came; `data` lies on the kernel's device.
struct InputTensor {
  ONNXTensorElementDataType type;
  std::vector<int64_t> shape;
  const void* data;
};

class Context {
 public:
  Context(const OrtApi& api, OrtKernelContext& context, const OpSpec& spec)
      : api_(api), context_(context), spec_(spec) {}

  // Nothing where the node leaves the input out. Throws if its element type is not in the spec.
  std::optional<InputTensor> Input(size_t index) const;

  // Memory for an output of that shape.
  void* Output(size_t index, const std::vector<int64_t>& shape);

  // Calls body(begin, end) for ranges that cover [0, total), of at least `grain`, on ORT's threads. What a body throws
  // is thrown here.
  void ParallelFor(int64_t total, int64_t grain, const std::function<void(int64_t, int64_t)>& body) const;

  // The CUDA stream of the node.
  void* CudaStream() const;

  // Memory that is tied to the node's stream; scratch.h gives it back.
  void* ScratchBuffer(const OrtMemoryInfo& memory, size_t bytes) const;

 private:
  const OrtApi& api_;
  OrtKernelContext& context_;
  const OpSpec& spec_;
};

// Throws unless `type` is among those of the spec.
void CheckType(const TensorSpec& spec, ONNXTensorElementDataType type);

// Throws unless the input has the type of another one.
void CheckSameType(const TensorSpec& spec, ONNXTensorElementDataType type, const TensorSpec& other,
                   ONNXTensorElementDataType expected);

// Throws unless `shape` is the expected one (-1 on either side: not known yet).
void CheckShape(const TensorSpec& spec, const std::vector<int64_t>& shape, const std::vector<int64_t>& expected);

// Product of the dimensions but the last.
int64_t RowCount(const std::vector<int64_t>& shape);

// "[2, 8]", unknown dimensions as "?".
std::string ShapeText(const std::vector<int64_t>& shape);

}  // namespace ort_moe
