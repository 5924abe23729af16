// A node as its kernel is created: attributes, which inputs it has, and what is known of them.
#pragma once

#include <onnxruntime_c_api.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ort/op_spec.h"

namespace ort_moe {

// What is known of an input before any value came.
struct KnownTensor {
  ONNXTensorElementDataType type;
  // -1: not known yet. Empty: nothing known, or a scalar; ORT does not tell them apart here.
  std::vector<int64_t> shape;
};

class Node {
 public:
  Node(const OrtApi& api, const OrtKernelInfo& info, const OpSpec& spec) : api_(api), info_(info), spec_(spec) {}

  // "FusedRouter node 'router_3'", for the front of a sentence.
  std::string Title() const;

  // Attributes. Throws if it is missing, of another kind, or not among the choices in the spec.
  int64_t Int(const char* name) const;
  float Float(const char* name) const;
  // The number of the string among the choices in the spec.
  size_t Choice(const char* name) const;

  bool HasInput(size_t index) const;
  bool HasOutput(size_t index) const;
  // Of an input that the node has.
  KnownTensor Input(size_t index) const;

  // The allocator of the device that the node runs on; for as long as the session.
  OrtAllocator& Allocator() const;
  const OrtApi& api() const { return api_; }

 private:
  const AttributeSpec& Spec(const char* name) const;
  AttributeValue Read(const char* name) const;
  std::optional<AttributeValue> Find(const char* name, AttributeKind kind) const;
  std::string WhatCame(const char* name) const;

  const OrtApi& api_;
  const OrtKernelInfo& info_;
  const OpSpec& spec_;
};

}  // namespace ort_moe
