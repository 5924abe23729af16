#include "ort/describe.h"

#include <cmath>

#include "kernels/common/float_text.h"

namespace ort_moe {
namespace {

// Our names need no escapes.
std::string Json(const std::string& text) { return "\"" + text + "\""; }

std::string Json(const AttributeValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return Json(*text);
  if (const auto* number = std::get_if<int64_t>(&value)) return std::to_string(*number);
  const float number = std::get<float>(value);
  return std::isfinite(number) ? FloatText(number) : Json(FloatText(number));  // JSON has no infinity: "-inf"
}

template <typename Items, typename ToJson>
std::string List(const Items& items, ToJson&& to_json) {
  std::string text = "[";
  for (const auto& item : items) {
    if (text.size() > 1) text += ", ";
    text += to_json(item);
  }
  return text + "]";
}

std::string DescribeTensor(const TensorSpec& tensor) {
  return "{\"name\": " + Json(tensor.name) +
         ", \"types\": " + List(tensor.types, [](auto type) { return Json(std::string(TypeName(type))); }) +
         ", \"optional\": " + (tensor.optional ? "true" : "false") + "}";
}

std::string DescribeAttribute(const AttributeSpec& attribute) {
  const auto& [other, value] = attribute.only_with;
  return "{\"name\": " + Json(attribute.name) + ", \"kind\": " + Json(std::string(KindName(attribute.kind))) +
         ", \"choices\": " + List(attribute.choices, [](const AttributeValue& choice) { return Json(choice); }) +
         ", \"only_with\": " + (other.empty() ? "null" : "[" + Json(other) + ", " + Json(value) + "]") + "}";
}

}  // namespace

std::string DescribeOps(const std::vector<const OpSpec*>& specs, const std::vector<Device>& devices) {
  const auto describe = [&](const OpSpec* spec) {
    return "{\"name\": " + Json(spec->name) + ", \"inputs\": " + List(spec->inputs, DescribeTensor) +
           ", \"outputs\": " + List(spec->outputs, DescribeTensor) +
           ", \"attributes\": " + List(spec->attributes, DescribeAttribute) + ", \"providers\": " +
           List(devices, [](Device device) { return Json(std::string(ExecutionProvider(device))); }) + "}";
  };
  return "{\"domain\": " + Json(std::string(kDomain)) + ", \"version\": " + std::to_string(kDomainVersion) +
         ", \"ops\": " + List(specs, describe) + "}";
}

}  // namespace ort_moe
