#include "ort/router_node.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

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

InputTensor Logits(const Context& context, size_t index) {
  auto logits = context.Input(index);
  if (!logits || logits->shape.empty()) throw Error("input 'logits' must have rank 1 or more, but is a scalar");
  return *std::move(logits);
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

#if defined(ORT_MOE_WITH_CUDA)
void CheckRouterLaunch(cudaError_t status, int64_t experts, int64_t k) {
  if (status != cudaErrorInvalidValue) return CheckLaunch(status);
  cudaGetLastError();
  throw Error("input 'logits' has " + std::to_string(experts) + " experts, and with k = " + std::to_string(k) +
                  " a row does not fit into this GPU's shared memory",
              ORT_EP_FAIL);
}
#endif

TensorSpec TrainingMapSpec(MapFormat format) {
  if (format == MapFormat::kByte) return {"routing_map", {ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL}, true};
  return {"routing_bitmap", {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}, true};
}

TrainingMaps::TrainingMaps(const Node& node, size_t byte_output, size_t bit_output)
    : outputs_{byte_output, bit_output}, has_{node.HasOutput(byte_output), node.HasOutput(bit_output)} {
  if (!has_[0] && !has_[1]) throw Error("output 'routing_map' or 'routing_bitmap' must be there, but neither is");
}

}  // namespace ort_moe
