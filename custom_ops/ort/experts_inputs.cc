#include "ort/experts_inputs.h"

#include <algorithm>
#include <limits>
#include <string>

#include "ort/context.h"
#include "ort/fused_experts_op.h"
#include "ort/status.h"

namespace ort_moe {
namespace {

using namespace experts_input;

class Checker {
 public:
  Checker(const ExpertsConfig& config, const ExpertsInputs& inputs, bool all_known)
      : config_(config), inputs_(inputs), all_known_(all_known) {}

  ExpertsSizes Check() {
    CheckPresence();
    CheckTypes();
    TakeSizes();
    CheckSizes();
    CheckShapes();
    return sizes_;
  }

 private:
  const TensorSpec& Spec(size_t input) const { return FusedExpertsOp::Spec().inputs[input]; }

  bool Is(WeightFormat a, WeightFormat b) const { return config_.weight_format == a || config_.weight_format == b; }
  bool dense() const { return config_.weight_format == WeightFormat::kDense; }
  bool fp8() const { return config_.weight_format == WeightFormat::kFp8; }

  // The format, for the end of a clause.
  std::string WithFormat() const {
    const int64_t block = config_.block_size;
    return std::string(" with weight_format = ") + FormatName(config_.weight_format) +
           (block == 0 ? "" : " and block_size = " + std::to_string(block));
  }

  bool Takes(OfLayer input) const {
    switch (input) {
      case kScales:
        return !dense();
      case kGlobalScale:
        return Is(WeightFormat::kNvfp4, WeightFormat::kMxfp4);
      case kZeroPoints:
        return Is(WeightFormat::kInt4, WeightFormat::kInt8);
      default:
        return true;
    }
  }

  void CheckPresence() const {
    for (const size_t layer : {size_t{kFc1}, kFc2}) {
      if (Takes(kScales) && !inputs_[layer + kScales]) {
        throw Error("input '" + Spec(layer + kScales).name + "' must be given" + WithFormat() + ", but is left out");
      }
      for (const OfLayer input : {kScales, kGlobalScale, kZeroPoints}) {
        if (!inputs_[layer + input] || Takes(input)) continue;
        throw Error("input '" + Spec(layer + input).name + "' must be left out" + WithFormat() + ", but is given");
      }
    }
  }

  void CheckTypes() const {
    const ONNXTensorElementDataType x = inputs_[kX]->type;
    for (const size_t input : {kFc1 + kBias, kFc2 + kBias, kResidual}) {
      if (inputs_[input]) CheckSameType(Spec(input), inputs_[input]->type, Spec(kX), x);
    }
    for (const size_t layer : {size_t{kFc1}, kFc2}) {
      if (dense()) {
        CheckSameType(Spec(layer), inputs_[layer]->type, Spec(kX), x);
        continue;
      }
      CheckTypeOfFormat(layer,
                        fp8() ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN : ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8);
      if (Takes(kZeroPoints)) {
        CheckSameType(Spec(layer + kScales), inputs_[layer + kScales]->type, Spec(kX), x);
      } else {
        CheckTypeOfFormat(layer + kScales, ScaleType());
      }
    }
  }

  // Of the formats whose scales do not follow x.
  ONNXTensorElementDataType ScaleType() const {
    if (fp8()) return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    return config_.weight_format == WeightFormat::kMxfp4 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8
                                                         : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN;
  }

  void CheckTypeOfFormat(size_t input, ONNXTensorElementDataType expected) const {
    const ONNXTensorElementDataType type = inputs_[input]->type;
    if (type == expected) return;
    throw Error("input '" + Spec(input).name + "' must have type " + TypeName(expected) + WithFormat() + ", but has " +
                TypeName(type));
  }

  void TakeSizes() {
    for (const size_t input : {size_t{kX}, size_t{kWeights}}) {
      if (all_known_ && inputs_[input]->shape.empty()) {
        throw Error("input '" + Spec(input).name + "' must have rank 1 or more, but is a scalar");
      }
    }
    sizes_.hidden = Dimension(kX, -1);
    sizes_.k = Dimension(kWeights, -1);
    for (const size_t input : {size_t{kFc1}, kFc2}) {
      const std::vector<int64_t>& shape = inputs_[input]->shape;
      if (shape.size() == 3 || (shape.empty() && !all_known_)) continue;
      throw Error("input '" + Spec(input).name + "' must have rank 3, but has shape " + ShapeText(shape));
    }
    sizes_.experts = Known(Dimension(kFc1, 0), Dimension(kFc2, 0));
    sizes_.hidden = Known(sizes_.hidden, Dimension(kFc2, 1));
    const int64_t rows = Dimension(kFc1, 1);
    if (config_.gated && rows >= 0 && rows % 2 != 0) {
      throw Error("input 'fc1_weights' must have an even second dimension with gated = 1, but has shape " +
                  ShapeText(inputs_[kFc1]->shape));
    }
    sizes_.inner = rows < 0 ? -1 : rows / (config_.gated ? 2 : 1);
  }

  void CheckSizes() const {
    const auto refuse = [this](const std::string& what, int64_t size, int64_t divisor) {
      if (size == 0) throw Error(what + " must be at least 1, but is 0");
      if (size < 0 || size % divisor == 0) return;
      throw Error(what + " must be a multiple of " + std::to_string(divisor) + WithFormat() + ", but is " +
                  std::to_string(size));
    };
    const int64_t block = fp8() ? 1 : config_.scale_block();
    refuse("the last dimension of input 'weights', K,", sizes_.k, 1);
    refuse("the first dimension of input 'fc1_weights', E,", sizes_.experts, 1);
    refuse("the last dimension of input 'x', H,", sizes_.hidden, block);
    refuse(config_.gated ? "half the second dimension of input 'fc1_weights', I,"
                         : "the second dimension of input 'fc1_weights', I,",
           sizes_.inner, block);
  }

  void CheckShapes() const {
    const std::vector<int64_t>& x = inputs_[kX]->shape;
    if (!x.empty()) {
      std::vector<int64_t> chosen = x;
      chosen.back() = sizes_.k;
      CheckInput(kWeights, chosen);
      CheckInput(kIndices, chosen);
      CheckInput(kResidual, x);
    }
    const int64_t rows = sizes_.inner < 0 ? -1 : config_.fc1_rows(sizes_.inner);
    CheckLayer(kFc1, rows, sizes_.hidden);
    CheckLayer(kFc2, sizes_.hidden, sizes_.inner);
    // After the layers: where these differ in E, it is not the maps that are wrong.
    if (!x.empty()) CheckMaps(x);
  }

  void CheckMaps(const std::vector<int64_t>& x) const {
    const bool known = sizes_.k >= 0 && std::all_of(x.begin(), x.end() - 1, [](int64_t size) { return size >= 0; });
    const int64_t rows = known ? RowCount(x) * sizes_.k : -1;
    if (rows > std::numeric_limits<int32_t>::max()) {
      throw Error("input 'weights' must have a number of elements that fits into int32, but has " +
                  std::to_string(rows));
    }
    for (size_t i = 0; i + 1 < kRoutingMaps; ++i) CheckInput(kMaps + i, {rows});
    CheckInput(kMaps + kRoutingMaps - 1, {sizes_.experts < 0 ? -1 : sizes_.experts + 1});
  }

  void CheckLayer(size_t layer, int64_t rows, int64_t depth) const {
    const auto divided = [](int64_t size, int64_t divisor) { return size < 0 ? -1 : (size + divisor - 1) / divisor; };
    const int64_t block = config_.scale_block();
    const int64_t blocks = divided(depth, block);
    CheckInput(layer + kMatrix, {sizes_.experts, rows, divided(depth, config_.nibbles() ? 2 : 1)});
    CheckInput(layer + kScales, {sizes_.experts, fp8() ? divided(rows, block) : rows, blocks});
    CheckInput(layer + kGlobalScale, {sizes_.experts});
    CheckInput(layer + kZeroPoints, {sizes_.experts, rows, divided(blocks, config_.nibbles() ? 2 : 1)});
    CheckInput(layer + kBias, {sizes_.experts, rows});
  }

  void CheckInput(size_t input, const std::vector<int64_t>& expected) const {
    if (!inputs_[input] || (inputs_[input]->shape.empty() && !all_known_)) return;
    CheckShape(Spec(input), inputs_[input]->shape, expected);
  }

  // A dimension, counted from the back where it is negative; -1: not known.
  int64_t Dimension(size_t input, int axis) const {
    const std::vector<int64_t>& shape = inputs_[input]->shape;
    if (shape.empty()) return -1;
    return axis < 0 ? shape[shape.size() + axis] : shape[axis];
  }

  static int64_t Known(int64_t a, int64_t b) { return a >= 0 ? a : b; }

  const ExpertsConfig& config_;
  const ExpertsInputs& inputs_;
  bool all_known_;
  ExpertsSizes sizes_;
};

}  // namespace

std::vector<TensorSpec> ExpertsInputSpecs() {
  std::vector<TensorSpec> specs = {
      {"x", ActivationTypes()},
      {"weights", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}},
      {"indices", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}},
  };
  specs.insert(specs.end(), RoutingMapSpecs().begin(), RoutingMapSpecs().end());
  for (const std::string layer : {"fc1_", "fc2_"}) {
    std::vector<ONNXTensorElementDataType> matrix = ActivationTypes();
    matrix.push_back(ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8);
    matrix.push_back(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN);
    std::vector<ONNXTensorElementDataType> scales = ActivationTypes();
    scales.insert(scales.begin(), {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8});
    specs.push_back({layer + "weights", matrix});
    specs.push_back({layer + "scales", scales, true});
    specs.push_back({layer + "global_scale", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, true});
    specs.push_back({layer + "zero_points", {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}, true});
    specs.push_back({layer + "bias", ActivationTypes(), true});
  }
  specs.push_back({"residual", ActivationTypes(), true});
  return specs;
}

ExpertsSizes CheckExpertsInputs(const ExpertsConfig& config, const ExpertsInputs& inputs, bool all_known) {
  return Checker(config, inputs, all_known).Check();
}

}  // namespace ort_moe
