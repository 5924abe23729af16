#include "ort/shape_inference.h"

#include <atomic>
#include <memory>

#include "ort/status.h"

namespace ort_moe {
namespace {

// ORT writes an unnamed -1 into the graph as a size, and takes one name for one size: unnamed ones get fresh names.
std::string FreshName() {
  static std::atomic<uint64_t> count{0};
  return "ort_moe_unnamed_" + std::to_string(count++);
}

}  // namespace

Dimension ShapeInference::UnknownSize() { return {-1, FreshName()}; }

const OrtTensorTypeAndShapeInfo* ShapeInference::Info(size_t index) const {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  return Succeeds(api_, api_.ShapeInferContext_GetInputTypeShape(&context_, index, &info)) ? info : nullptr;
}

ONNXTensorElementDataType ShapeInference::Type(size_t index) const {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  if (const OrtTensorTypeAndShapeInfo* info = Info(index)) Check(api_, api_.GetTensorElementType(info, &type));
  return type;
}

std::optional<SymbolicShape> ShapeInference::Input(size_t index) const {
  const OrtTensorTypeAndShapeInfo* info = Info(index);
  if (info == nullptr) return std::nullopt;
  size_t rank = 0;
  Check(api_, api_.GetDimensionsCount(info, &rank));
  if (rank == 0) return std::nullopt;
  std::vector<int64_t> values(rank);
  std::vector<const char*> names(rank);
  Check(api_, api_.GetDimensions(info, values.data(), rank));
  Check(api_, api_.GetSymbolicDimensions(info, names.data(), rank));
  SymbolicShape shape(rank);
  for (size_t i = 0; i < rank; ++i) {
    shape[i].value = values[i];
    if (values[i] < 0) shape[i].name = names[i] != nullptr && *names[i] != '\0' ? names[i] : FreshName();
  }
  return shape;
}

std::optional<int64_t> ShapeInference::Int(const char* attribute) const {
  const OrtOpAttr* found = nullptr;
  if (!Succeeds(api_, api_.ShapeInferContext_GetAttribute(&context_, attribute, &found))) return std::nullopt;
  int64_t value = 0;
  size_t size = 0;
  if (!Succeeds(api_, api_.ReadOpAttr(found, ORT_OP_ATTR_INT, &value, sizeof value, &size))) return std::nullopt;
  return value;
}

void ShapeInference::SetOutput(size_t index, const SymbolicShape& shape, ONNXTensorElementDataType type) {
  OrtTensorTypeAndShapeInfo* owned = nullptr;
  Check(api_, api_.CreateTensorTypeAndShapeInfo(&owned));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(api_.ReleaseTensorTypeAndShapeInfo)> info(
      owned, api_.ReleaseTensorTypeAndShapeInfo);
  Check(api_, api_.SetTensorElementType(info.get(), type));  // newer versions take it for the output's
  std::vector<int64_t> values;
  std::vector<const char*> names;
  for (const Dimension& dimension : shape) {
    values.push_back(dimension.value);
    names.push_back(dimension.name.c_str());
  }
  Check(api_, api_.SetDimensions(info.get(), values.data(), values.size()));
  Check(api_, api_.SetSymbolicDimensions(info.get(), names.data(), names.size()));
  Check(api_, api_.ShapeInferContext_SetOutputTypeShape(&context_, index, info.get()));
}

}  // namespace ort_moe
