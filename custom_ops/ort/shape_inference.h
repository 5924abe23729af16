// Shapes of a node's outputs while ORT loads the graph. What is not known is left open, never refused: the kernel's
// creation says what is wrong, with the node's name.
#pragma once

#include <onnxruntime_c_api.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ort_moe {

// A size, or the name of one that is not known yet (value -1; the name may be empty).
struct Dimension {
  int64_t value = -1;
  std::string name = {};
};

using SymbolicShape = std::vector<Dimension>;

class ShapeInference {
 public:
  ShapeInference(const OrtApi& api, OrtShapeInferContext& context) : api_(api), context_(context) {}

  // A size that is not known, with a name of its own.
  static Dimension UnknownSize();

  // Nothing where it is unknown, or a scalar.
  std::optional<SymbolicShape> Input(size_t index) const;
  // Undefined where it is unknown.
  ONNXTensorElementDataType Type(size_t index) const;
  std::optional<int64_t> Int(const char* attribute) const;
  void SetOutput(size_t index, const SymbolicShape& shape, ONNXTensorElementDataType type);

 private:
  // The context's; null where it knows nothing.
  const OrtTensorTypeAndShapeInfo* Info(size_t index) const;

  const OrtApi& api_;
  OrtShapeInferContext& context_;
};

}  // namespace ort_moe
