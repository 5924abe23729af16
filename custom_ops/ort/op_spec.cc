#include "ort/op_spec.h"

#include "kernels/common/float_text.h"

namespace ort_moe {

const std::vector<ONNXTensorElementDataType>& ActivationTypes() {
  static const std::vector<ONNXTensorElementDataType> types = {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
                                                               ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
                                                               ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16};
  return types;
}

DType DTypeOf(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return DType::kFloat16;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return DType::kBFloat16;
    default:
      return DType::kFloat32;
  }
}

std::vector<AttributeValue> Words(std::initializer_list<const char*> words) { return {words.begin(), words.end()}; }

std::vector<AttributeValue> Flag() { return {int64_t{0}, int64_t{1}}; }

const char* ExecutionProvider(Device device) {
  return device == Device::kCuda ? "CUDAExecutionProvider" : "CPUExecutionProvider";
}

const char* TypeName(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return "float";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
      return "uint8";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
      return "int8";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16:
      return "uint16";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16:
      return "int16";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return "int32";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return "int64";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING:
      return "string";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
      return "bool";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return "float16";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
      return "double";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32:
      return "uint32";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64:
      return "uint64";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return "bfloat16";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN:
      return "float8e4m3fn";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2:
      return "float8e5m2";
    default:
      return "another type";
  }
}

const char* KindName(AttributeKind kind) {
  static constexpr const char* kNames[] = {"int", "float", "string"};
  return kNames[static_cast<size_t>(kind)];
}

std::string Quoted(const AttributeValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return "'" + *text + "'";
  if (const auto* number = std::get_if<int64_t>(&value)) return std::to_string(*number);
  return FloatText(std::get<float>(value));
}

std::string Alternatives(const std::vector<std::string>& words) {
  if (words.empty()) return "no value";
  std::string text = words.front();
  for (size_t i = 1; i < words.size(); ++i) text += (i + 1 < words.size() ? ", " : " or ") + words[i];
  return text;
}

}  // namespace ort_moe
