#include "ort/context.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>

#include "ort/status.h"

namespace ort_moe {

std::optional<InputTensor> Context::Input(size_t index) const {
  size_t count = 0;
  Check(api_, api_.KernelContext_GetInputCount(&context_, &count));
  if (index >= count) return std::nullopt;
  const OrtValue* value = nullptr;
  Check(api_, api_.KernelContext_GetInput(&context_, index, &value));
  if (value == nullptr) return std::nullopt;
  OrtTensorTypeAndShapeInfo* owned = nullptr;
  Check(api_, api_.GetTensorTypeAndShape(value, &owned));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(api_.ReleaseTensorTypeAndShapeInfo)> info(
      owned, api_.ReleaseTensorTypeAndShapeInfo);
  InputTensor tensor;
  Check(api_, api_.GetTensorElementType(info.get(), &tensor.type));
  CheckType(spec_.inputs[index], tensor.type);
  size_t rank = 0;
  Check(api_, api_.GetDimensionsCount(info.get(), &rank));
  tensor.shape.resize(rank);
  Check(api_, api_.GetDimensions(info.get(), tensor.shape.data(), rank));
  void* data = nullptr;
  // ORT has one getter, for writers; inputs are not written.
  Check(api_, api_.GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  tensor.data = data;
  return tensor;
}

void* Context::Output(size_t index, const std::vector<int64_t>& shape) {
  OrtValue* value = nullptr;
  Check(api_, api_.KernelContext_GetOutput(&context_, index, shape.data(), shape.size(), &value));
  if (value == nullptr) throw Error("output '" + spec_.outputs[index].name + "' must be there, but is left out");
  void* data = nullptr;
  Check(api_, api_.GetTensorMutableData(value, &data));
  return data;
}

void Context::ParallelFor(int64_t total, int64_t grain, const std::function<void(int64_t, int64_t)>& body) const {
  struct Work {
    const std::function<void(int64_t, int64_t)>& body;
    int64_t total;
    int64_t grain;
    std::atomic<bool> failed{false};
    std::exception_ptr exception{};

    static void Run(void* self, size_t task) {
      Work& work = *static_cast<Work*>(self);
      const int64_t begin = static_cast<int64_t>(task) * work.grain;
      try {
        work.body(begin, std::min(begin + work.grain, work.total));
      } catch (...) {
        if (!work.failed.exchange(true)) work.exception = std::current_exception();
      }
    }
  };
  if (total <= grain) {
    if (total > 0) body(0, total);
    return;
  }
  Work work{body, total, grain};
  const int64_t tasks = (total + grain - 1) / grain;
  Check(api_, api_.KernelContext_ParallelFor(&context_, Work::Run, static_cast<size_t>(tasks), 0, &work));
  if (work.failed) std::rethrow_exception(work.exception);
}

void* Context::CudaStream() const {
  void* stream = nullptr;
  Check(api_, api_.KernelContext_GetGPUComputeStream(&context_, &stream));
  return stream;
}

void* Context::ScratchBuffer(const OrtMemoryInfo& memory, size_t bytes) const {
  void* data = nullptr;
  Check(api_, api_.KernelContext_GetScratchBuffer(&context_, &memory, bytes, &data));
  return data;
}

void CheckType(const TensorSpec& spec, ONNXTensorElementDataType type) {
  std::vector<std::string> names;
  for (const ONNXTensorElementDataType allowed : spec.types) {
    if (allowed == type) return;
    names.emplace_back(TypeName(allowed));
  }
  throw Error("input '" + spec.name + "' must have type " + Alternatives(names) + ", but has " + TypeName(type));
}

void CheckSameType(const TensorSpec& spec, ONNXTensorElementDataType type, const TensorSpec& other,
                   ONNXTensorElementDataType expected) {
  if (type == expected) return;
  throw Error("input '" + spec.name + "' must have type " + TypeName(expected) + " as '" + other.name +
              "' has, but has " + TypeName(type));
}

void CheckShape(const TensorSpec& spec, const std::vector<int64_t>& shape, const std::vector<int64_t>& expected) {
  bool fits = shape.size() == expected.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    fits = shape[i] == expected[i] || shape[i] < 0 || expected[i] < 0;
  }
  if (fits) return;
  throw Error("input '" + spec.name + "' must have shape " + ShapeText(expected) + ", but has " + ShapeText(shape));
}

int64_t RowCount(const std::vector<int64_t>& shape) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  return rows;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += shape[i] < 0 ? "?" : std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace ort_moe
