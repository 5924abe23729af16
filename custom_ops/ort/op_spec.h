// What an op looks like from outside. ort_moe/ops/table.py says the same with documentation; a test holds them
// together.
#pragma once

#include <onnxruntime_c_api.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/common/dtype.h"

namespace ort_moe {

struct TensorSpec {
  std::string name;
  std::vector<ONNXTensorElementDataType> types;  // several for an output: that of the first input
  bool optional = false;
};

// The kind of an attribute is the alternative's number.
enum class AttributeKind : size_t { kInt, kFloat, kString };
using AttributeValue = std::variant<int64_t, float, std::string>;

// float, float16 and bfloat16: what activations may be.
const std::vector<ONNXTensorElementDataType>& ActivationTypes();

struct AttributeSpec {
  std::string name;
  AttributeKind kind;
  std::vector<AttributeValue> choices = {};  // empty: any
  // Another attribute and the value of it without which this one has no effect and may be missing.
  std::pair<std::string, std::string> only_with = {};
};

struct OpSpec {
  std::string name;
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;
  std::vector<AttributeSpec> attributes;
};

// Where a kernel runs.
enum class Device { kCpu, kCuda };

const char* ExecutionProvider(Device device);

// As ONNX writes it in its text format: "float16".
const char* TypeName(ONNXTensorElementDataType type);

// Of an activation type.
DType DTypeOf(ONNXTensorElementDataType type);

// Choices of an attribute.
std::vector<AttributeValue> Words(std::initializer_list<const char*> words);
std::vector<AttributeValue> Flag();  // 0 or 1

// "int", "float" or "string".
const char* KindName(AttributeKind kind);

// For a sentence: 2, -inf, 'softmax'.
std::string Quoted(const AttributeValue& value);

// "a, b or c" ("no value" of nothing).
std::string Alternatives(const std::vector<std::string>& words);

}  // namespace ort_moe
