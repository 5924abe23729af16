#include "ort/fused_router_op.h"

#include <algorithm>

#include "ort/router_node.h"
#include "ort/routing_maps_spec.h"
#include "ort/status.h"

namespace ort_moe {
namespace {

enum Input : size_t { kLogits, kSelectionBias, kExpertScale };
enum Output : size_t { kWeights, kIndices, kMaps };

OpSpec MakeSpec() {
  OpSpec spec;
  spec.name = "FusedRouter";
  spec.inputs = {
      {"logits", ActivationTypes()},
      {"selection_bias", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, true},
      {"expert_scale", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, true},
  };
  spec.outputs = {
      {"weights", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}},
      {"indices", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}},
  };
  spec.outputs.insert(spec.outputs.end(), RoutingMapSpecs().begin(), RoutingMapSpecs().end());
  spec.attributes = RouterAttributes();
  return spec;
}

}  // namespace

const OpSpec& FusedRouterOp::Spec() {
  static const OpSpec spec = MakeSpec();
  return spec;
}

void FusedRouterOp::InferShapes(ShapeInference& node) {
  auto shape = node.Input(kLogits);
  const auto k = node.Int("k");
  if (!shape || !k || *k < 1) return;
  shape->back() = {*k};
  node.SetOutput(kWeights, *shape, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
  node.SetOutput(kIndices, *shape, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
  // The maps stay open: here nobody tells which outputs a node has.
}

FusedRouterOp::FusedRouterOp(const Node& node, Device device)
    : config_(ReadRouterConfig(node)),
      device_(device),
      has_selection_bias_(node.HasInput(kSelectionBias)),
      has_maps_(HasRoutingMaps("output", [&](size_t i) { return node.HasOutput(kMaps + i); })) {
  if (device == Device::kCuda && has_maps_) scratch_.emplace(node);
  const KnownTensor logits = node.Input(kLogits);
  CheckType(Spec().inputs[kLogits], logits.type);
  const int64_t experts = logits.shape.empty() ? -1 : logits.shape.back();
  CheckExperts(experts);
  CheckExpertVector(node, Spec(), kSelectionBias, experts);
  CheckExpertVector(node, Spec(), kExpertScale, experts);
}

void FusedRouterOp::CheckExperts(int64_t experts) const {
  const std::string refusal = CheckRouterConfig(config_, experts, has_selection_bias_);
  if (!refusal.empty()) throw Error(refusal);
}

void FusedRouterOp::Compute(Context& context) const {
  const InputTensor logits = Logits(context, kLogits);
  std::vector<int64_t> shape = logits.shape;
  const int64_t experts = shape.back();
  CheckExperts(experts);

  RouterArgs args{};
  args.logits = logits.data;
  args.dtype = DTypeOf(logits.type);
  args.experts = experts;
  args.rows = RowCount(shape);
  args.selection_bias = ExpertVector(context, Spec(), kSelectionBias, experts);
  args.expert_scale = ExpertVector(context, Spec(), kExpertScale, experts);
  shape.back() = config_.k;
  args.weights = static_cast<float*>(context.Output(kWeights, shape));
  args.indices = static_cast<int32_t*>(context.Output(kIndices, shape));
  if (has_maps_) args.maps = OutputRoutingMaps(context, kMaps, MapRows(args.rows, config_.k), experts);

#if defined(ORT_MOE_WITH_CUDA)
  if (device_ == Device::kCuda) {
    const Scratch scratch =
        scratch_ ? scratch_->Take(context, RouterScratchBytes(config_, args)) : Scratch(nullptr, nullptr);
    args.scratch = scratch.data();
    const cudaError_t status = LaunchFusedRouter(config_, args, static_cast<cudaStream_t>(context.CudaStream()));
    return CheckRouterLaunch(status, experts, config_.k);
  }
#endif
  const int64_t grain = std::max<int64_t>(1, kLogitsPerTask / experts);
  context.ParallelFor(args.rows, grain, [&](int64_t begin, int64_t end) { FusedRouterCpu(config_, args, begin, end); });
  if (has_maps_) BuildRoutingMapsCpu(args.indices, args.rows, config_.k, experts, args.maps);
}

}  // namespace ort_moe
