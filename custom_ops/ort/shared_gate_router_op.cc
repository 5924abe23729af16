#include "ort/shared_gate_router_op.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "ort/router_node.h"
#include "ort/routing_maps_spec.h"
#include "ort/status.h"

namespace ort_moe {
namespace {

enum Input : size_t { kLogits, kHidden, kGateWeight, kSelectionBias, kExpertScale };
enum Output : size_t { kWeights, kIndices, kMaps };

constexpr const char* kScale = "shared_scale";
constexpr const char* kBase = "shared_base";

// Elements of hidden rows of one task on the CPU: some 50 us of work, as kLogitsPerTask.
constexpr int64_t kElementsPerTask = 1 << 15;

OpSpec MakeSpec() {
  OpSpec spec;
  spec.name = "SharedGateRouter";
  spec.inputs = {
      {"logits", ActivationTypes()},
      {"hidden", ActivationTypes()},
      {"gate_weight", ActivationTypes()},
      {"selection_bias", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, true},
      {"expert_scale", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, true},
  };
  spec.outputs = {
      {"weights", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}},
      {"indices", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}},
  };
  spec.outputs.insert(spec.outputs.end(), RoutingMapSpecs().begin(), RoutingMapSpecs().end());
  spec.attributes = RouterAttributes();
  spec.attributes.push_back({kScale, AttributeKind::kFloat});
  spec.attributes.push_back({kBase, AttributeKind::kInt});
  return spec;
}

// Checks hidden and gate_weight, as far as their shapes are known: an empty one is a scalar or not known at all.
template <typename Tensor>
void CheckGates(const Tensor& logits, const Tensor& hidden, const Tensor& gate_weight, int64_t base, bool all_known) {
  const auto& specs = SharedGateRouterOp::Spec().inputs;
  CheckSameType(specs[kHidden], hidden.type, specs[kLogits], logits.type);
  CheckSameType(specs[kGateWeight], gate_weight.type, specs[kLogits], logits.type);
  const std::vector<int64_t>&shape = hidden.shape, &gates = gate_weight.shape;
  const int64_t size = shape.empty() ? -1 : shape.back();
  if (!gates.empty() || all_known) CheckShape(specs[kGateWeight], gates, {-1, size});
  if (!gates.empty() && gates.front() == 0) {
    throw Error("input 'gate_weight' must have a row for each shared expert, 1 or more, but has shape " +
                ShapeText(gates));
  }
  if (!gates.empty() && base > std::numeric_limits<int32_t>::max() - std::max<int64_t>(gates.front(), 1)) {
    throw Error("attribute 'shared_base' must leave the indices of shared experts within int32, but is " +
                std::to_string(base));
  }
  if (size == 0) throw Error("input 'hidden' must have a last dimension of 1 or more, but has " + ShapeText(shape));
  if ((shape.empty() || logits.shape.empty()) && !all_known) return;
  std::vector<int64_t> expected = logits.shape;
  if (!expected.empty()) expected.back() = size;
  CheckShape(specs[kHidden], shape, expected);
}

int64_t ReadBase(const Node& node) {
  const int64_t base = node.Int(kBase);
  if (base < 0) throw Error("attribute 'shared_base' must be at least 0, but is " + std::to_string(base));
  return base;
}

}  // namespace

const OpSpec& SharedGateRouterOp::Spec() {
  static const OpSpec spec = MakeSpec();
  return spec;
}

void SharedGateRouterOp::InferShapes(ShapeInference& node) {
  auto shape = node.Input(kLogits);
  const auto gates = node.Input(kGateWeight);
  const auto k = node.Int("k");
  if (!shape || !k || *k < 1) return;
  const int64_t count = gates && gates->size() == 2 ? gates->front().value : -1;
  shape->back() = count < 0 ? ShapeInference::UnknownSize() : Dimension{*k + count};
  node.SetOutput(kWeights, *shape, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
  node.SetOutput(kIndices, *shape, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
  // The maps stay open: here nobody tells which outputs a node has.
}

SharedGateRouterOp::SharedGateRouterOp(const Node& node, Device device)
    : config_(ReadRouterConfig(node)),
      scale_(node.Float(kScale)),
      base_(ReadBase(node)),
      device_(device),
      has_selection_bias_(node.HasInput(kSelectionBias)),
      has_maps_(HasRoutingMaps("output", [&](size_t i) { return node.HasOutput(kMaps + i); })) {
  if (device == Device::kCuda && has_maps_) scratch_.emplace(node);
  for (const size_t index : {kLogits, kHidden, kGateWeight}) CheckType(Spec().inputs[index], node.Input(index).type);
  const KnownTensor logits = node.Input(kLogits);
  const int64_t experts = logits.shape.empty() ? -1 : logits.shape.back();
  CheckExperts(experts);
  for (const size_t index : {kSelectionBias, kExpertScale}) CheckExpertVector(node, Spec(), index, experts);
  CheckGates(logits, node.Input(kHidden), node.Input(kGateWeight), base_, false);
}

void SharedGateRouterOp::CheckExperts(int64_t experts) const {
  const std::string refusal = CheckRouterConfig(config_, experts, has_selection_bias_);
  if (!refusal.empty()) throw Error(refusal);
}

void SharedGateRouterOp::Compute(Context& context) const {
  const InputTensor logits = Logits(context, kLogits);
  const auto hidden = context.Input(kHidden);
  const auto gate_weight = context.Input(kGateWeight);
  std::vector<int64_t> shape = logits.shape;
  const int64_t experts = shape.back();
  CheckExperts(experts);
  CheckGates(logits, *hidden, *gate_weight, base_, true);

  SharedGates gates{};
  gates.hidden = hidden->data;
  gates.gate_weight = gate_weight->data;
  gates.size = hidden->shape.back();
  gates.count = static_cast<int32_t>(gate_weight->shape.front());
  gates.base = static_cast<int32_t>(base_);
  gates.scale = scale_;
  RouterArgs args{};
  args.logits = logits.data;
  args.dtype = DTypeOf(logits.type);
  args.experts = experts;
  args.rows = RowCount(shape);
  args.columns = config_.k + gates.count;
  args.selection_bias = ExpertVector(context, Spec(), kSelectionBias, experts);
  args.expert_scale = ExpertVector(context, Spec(), kExpertScale, experts);
  shape.back() = args.columns;
  args.weights = static_cast<float*>(context.Output(kWeights, shape));
  args.indices = static_cast<int32_t*>(context.Output(kIndices, shape));
  const int64_t all_experts = experts + gates.count;
  if (has_maps_) args.maps = OutputRoutingMaps(context, kMaps, MapRows(args.rows, args.columns), all_experts);

#if defined(ORT_MOE_WITH_CUDA)
  if (device_ == Device::kCuda) {
    const Scratch scratch = scratch_ ? scratch_->Take(context, SharedGateRouterScratchBytes(config_, args, gates))
                                     : Scratch(nullptr, nullptr);
    args.scratch = scratch.data();
    const cudaError_t status =
        LaunchSharedGateRouter(config_, args, gates, static_cast<cudaStream_t>(context.CudaStream()));
    return CheckRouterLaunch(status, experts, config_.k);
  }
#endif
  const int64_t elements = std::max<int64_t>(1, gates.size * gates.count);
  const int64_t grain = std::max<int64_t>(1, std::min(kLogitsPerTask / experts, kElementsPerTask / elements));
  context.ParallelFor(args.rows, grain,
                      [&](int64_t begin, int64_t end) { SharedGateRouterCpu(config_, args, gates, begin, end); });
  if (has_maps_) BuildRoutingMapsCpu(args.indices, args.rows, args.columns, all_experts, args.maps);
}

}  // namespace ort_moe
