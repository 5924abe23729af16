#include "ort/node.h"

#include <memory>
#include <stdexcept>

#include "ort/status.h"

namespace ort_moe {
namespace {

// Reads a string with one of ORT's two-step getters: the size, then the text.
template <typename Getter>
std::string ReadText(const OrtApi& api, Getter&& get) {
  size_t size = 0;
  Check(api, get(static_cast<char*>(nullptr), &size));
  std::string text(size, '\0');
  Check(api, get(text.data(), &size));
  text.resize(size > 0 ? size - 1 : 0);  // the size counts the terminator
  return text;
}

}  // namespace

std::string Node::Title() const {
  const std::string name =
      ReadText(api_, [&](char* out, size_t* size) { return api_.KernelInfo_GetNodeName(&info_, out, size); });
  if (!name.empty()) return spec_.name + " node '" + name + "'";
  const std::string output =
      ReadText(api_, [&](char* out, size_t* size) { return api_.KernelInfo_GetOutputName(&info_, 0, out, size); });
  return spec_.name + " node of output '" + output + "'";
}

int64_t Node::Int(const char* name) const { return std::get<int64_t>(Read(name)); }

float Node::Float(const char* name) const { return std::get<float>(Read(name)); }

size_t Node::Choice(const char* name) const {
  const AttributeValue value = Read(name);
  const std::vector<AttributeValue>& choices = Spec(name).choices;
  size_t index = 0;
  while (choices.at(index) != value) ++index;  // Read has found it there
  return index;
}

const AttributeSpec& Node::Spec(const char* name) const {
  for (const AttributeSpec& attribute : spec_.attributes) {
    if (attribute.name == name) return attribute;
  }
  throw std::logic_error(spec_.name + " has no attribute '" + name + "' in its spec");
}

AttributeValue Node::Read(const char* name) const {
  const AttributeSpec& attribute = Spec(name);
  const std::string expected = std::string("attribute '") + name + "' must be ";
  const std::optional<AttributeValue> value = Find(name, attribute.kind);
  if (!value) {
    const std::string article = attribute.kind == AttributeKind::kInt ? "an " : "a ";
    throw Error(expected + article + KindName(attribute.kind) + ", but is " + WhatCame(name));
  }
  if (attribute.choices.empty()) return *value;
  std::vector<std::string> words;
  for (const AttributeValue& choice : attribute.choices) {
    if (choice == *value) return *value;
    words.push_back(Quoted(choice));
  }
  throw Error(expected + Alternatives(words) + ", but is " + Quoted(*value));
}

std::optional<AttributeValue> Node::Find(const char* name, AttributeKind kind) const {
  switch (kind) {
    case AttributeKind::kInt: {
      int64_t value = 0;
      if (Succeeds(api_, api_.KernelInfoGetAttribute_int64(&info_, name, &value))) return value;
      return std::nullopt;
    }
    case AttributeKind::kFloat: {
      float value = 0.0f;
      if (Succeeds(api_, api_.KernelInfoGetAttribute_float(&info_, name, &value))) return value;
      return std::nullopt;
    }
    case AttributeKind::kString:
      break;
  }
  size_t size = 0;
  if (!Succeeds(api_, api_.KernelInfoGetAttribute_string(&info_, name, nullptr, &size))) return std::nullopt;
  return ReadText(api_, [&](char* out, size_t* s) { return api_.KernelInfoGetAttribute_string(&info_, name, out, s); });
}

// ORT's getters fail alike on a missing attribute and on one of another kind: try them all.
std::string Node::WhatCame(const char* name) const {
  for (const AttributeKind kind : {AttributeKind::kInt, AttributeKind::kFloat, AttributeKind::kString}) {
    if (const auto value = Find(name, kind)) return std::string("the ") + KindName(kind) + " " + Quoted(*value);
  }
  // The getters of lists find an attribute of any kind, of no elements where it is of another kind.
  size_t ints = 0;
  size_t floats = 0;
  if (!Succeeds(api_, api_.KernelInfoGetAttributeArray_int64(&info_, name, nullptr, &ints))) return "missing";
  if (ints > 0) return "a list of ints";
  Check(api_, api_.KernelInfoGetAttributeArray_float(&info_, name, nullptr, &floats));
  return floats > 0 ? "a list of floats" : "of another kind";
}

bool Node::HasInput(size_t index) const {
  size_t count = 0;
  Check(api_, api_.KernelInfo_GetInputCount(&info_, &count));
  if (index >= count) return false;
  const auto name =
      ReadText(api_, [&](char* out, size_t* size) { return api_.KernelInfo_GetInputName(&info_, index, out, size); });
  return !name.empty();
}

bool Node::HasOutput(size_t index) const {
  size_t count = 0;
  Check(api_, api_.KernelInfo_GetOutputCount(&info_, &count));
  if (index >= count) return false;
  const auto name =
      ReadText(api_, [&](char* out, size_t* size) { return api_.KernelInfo_GetOutputName(&info_, index, out, size); });
  return !name.empty();
}

KnownTensor Node::Input(size_t index) const {
  OrtTypeInfo* owned = nullptr;
  Check(api_, api_.KernelInfo_GetInputTypeInfo(&info_, index, &owned));
  const std::unique_ptr<OrtTypeInfo, decltype(api_.ReleaseTypeInfo)> type_info(owned, api_.ReleaseTypeInfo);
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  Check(api_, api_.CastTypeInfoToTensorInfo(type_info.get(), &tensor));
  if (tensor == nullptr) throw Error("input '" + spec_.inputs[index].name + "' must be a tensor, but is not");
  KnownTensor known;
  Check(api_, api_.GetTensorElementType(tensor, &known.type));
  size_t rank = 0;
  Check(api_, api_.GetDimensionsCount(tensor, &rank));
  known.shape.resize(rank);
  Check(api_, api_.GetDimensions(tensor, known.shape.data(), rank));
  return known;
}

OrtAllocator& Node::Allocator() const {
  OrtAllocator* allocator = nullptr;
  Check(api_, api_.KernelInfoGetAllocator(&info_, OrtMemTypeDefault, &allocator));
  return *allocator;
}

}  // namespace ort_moe
