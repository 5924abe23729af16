#include "ort/router_node.h"

#include <algorithm>
#include <cmath>

#include "ort/status.h"

namespace ort_moe {
namespace {

std::vector<AttributeSpec> WithoutMixerAndSelection(std::vector<AttributeSpec> attributes) {
  const auto left_out = [](const AttributeSpec& attribute) {
    return attribute.name == "mixer_threshold" || attribute.name == "weights_from";
  };
  attributes.erase(std::remove_if(attributes.begin(), attributes.end(), left_out), attributes.end());
  for (AttributeSpec& attribute : attributes) {
    if (attribute.name == "score") attribute.choices = Words({"softmax", "sigmoid", "sqrtsoftplus", "none"});
  }
  return attributes;
}

}  // namespace

const std::vector<AttributeSpec>& RouterAttributes() {
  static const std::vector<AttributeSpec> attributes = {
      {"k", AttributeKind::kInt},
      {"score", AttributeKind::kString, Words({"softmax", "sigmoid", "sqrtsoftplus", "none", "sparse_mixer"})},
      {"mixer_threshold", AttributeKind::kFloat, {}, {"score", "sparse_mixer"}},
      {"score_after_topk", AttributeKind::kInt, Flag()},
      {"bias_on", AttributeKind::kString, Words({"score", "logits"})},
      {"num_groups", AttributeKind::kInt},
      {"topk_groups", AttributeKind::kInt},
      {"group_score_top", AttributeKind::kInt},
      {"group_fill", AttributeKind::kFloat, {-INFINITY, 0.0f}},
      {"weights_from", AttributeKind::kString, Words({"scores", "selection"})},
      {"normalize", AttributeKind::kInt, Flag()},
      {"normalize_eps", AttributeKind::kFloat},
      {"normalize_min", AttributeKind::kFloat},
      {"scale", AttributeKind::kFloat},
      {"softcap", AttributeKind::kFloat},
  };
  return attributes;
}

const std::vector<AttributeSpec>& TrainingRouterAttributes() {
  static const std::vector<AttributeSpec> attributes = WithoutMixerAndSelection(RouterAttributes());
  return attributes;
}

RouterConfig ReadRouterConfig(const Node& node) {
  RouterConfig config = ReadTrainingRouterConfig(node);
  if (config.score == Score::kSparseMixer) config.mixer_threshold = node.Float("mixer_threshold");
  config.weights_from = static_cast<WeightsFrom>(node.Choice("weights_from"));
  return config;
}

RouterConfig ReadTrainingRouterConfig(const Node& node) {
  RouterConfig config;
  config.k = node.Int("k");
  config.score = static_cast<Score>(node.Choice("score"));
  config.score_after_topk = node.Int("score_after_topk") != 0;
  config.bias_on = static_cast<BiasOn>(node.Choice("bias_on"));
  config.num_groups = node.Int("num_groups");
  config.topk_groups = node.Int("topk_groups");
  config.group_score_top = node.Int("group_score_top");
  config.group_fill = node.Float("group_fill");
  config.normalize = node.Int("normalize") != 0;
  config.normalize_eps = node.Float("normalize_eps");
  config.normalize_min = node.Float("normalize_min");
  config.scale = node.Float("scale");
  config.softcap = node.Float("softcap");
  return config;
}

const float* ExpertVector(const Context& context, const OpSpec& spec, size_t index, int64_t experts) {
  const auto tensor = context.Input(index);
  if (!tensor) return nullptr;
  CheckShape(spec.inputs[index], tensor->shape, {experts});
  return static_cast<const float*>(tensor->data);
}

void CheckExpertVector(const Node& node, const OpSpec& spec, size_t index, int64_t experts) {
  if (!node.HasInput(index)) return;
  const KnownTensor tensor = node.Input(index);
  CheckType(spec.inputs[index], tensor.type);
  if (!tensor.shape.empty()) CheckShape(spec.inputs[index], tensor.shape, {experts});
}

std::vector<TensorSpec> TrainingMapSpecs() {
  return {{"routing_map", {ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL}, true},
          {"routing_bitmap", {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}, true}};
}

MapFormat TrainingMapFormat(const Node& node, size_t index) {
  const bool has_map = node.HasOutput(index);
  const bool has_bitmap = node.HasOutput(index + 1);
  if (has_map && has_bitmap) throw Error("output 'routing_bitmap' must be absent beside 'routing_map', but is there");
  if (!has_map && !has_bitmap) throw Error("output 'routing_map' or 'routing_bitmap' must be there, but neither is");
  return has_map ? MapFormat::kByte : MapFormat::kBit;
}

uint8_t* OutputTrainingMap(Context& context, size_t index, MapFormat format, std::vector<int64_t> shape) {
  shape.back() = MapBytes(format, shape.back());
  return static_cast<uint8_t*>(context.Output(format == MapFormat::kByte ? index : index + 1, shape));
}

}  // namespace ort_moe
