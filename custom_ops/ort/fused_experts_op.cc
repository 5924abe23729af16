#include "ort/fused_experts_op.h"

#include <array>

#include "ort/cuda_status.h"
#include "ort/experts_inputs.h"
#include "ort/status.h"

namespace ort_moe {
namespace {

using namespace experts_input;

std::vector<AttributeValue> BlockSizes() { return {int64_t{0}, int64_t{16}, int64_t{32}, int64_t{64}, int64_t{128}}; }

// The order of choices is that of the enumerations in kernels/experts/fused_experts.h.
OpSpec MakeSpec() {
  OpSpec spec;
  spec.name = "FusedExperts";
  spec.inputs = ExpertsInputSpecs();
  spec.outputs = {{"y", ActivationTypes()}};
  spec.attributes = {
      {"weight_format", AttributeKind::kString, Words({"dense", "nvfp4", "mxfp4", "int4", "int8", "fp8"})},
      {"block_size", AttributeKind::kInt, BlockSizes()},
      {"activation", AttributeKind::kString, Words({"silu", "gelu", "gelu_tanh", "relu", "relu2", "identity"})},
      {"gated", AttributeKind::kInt, Flag()},
      {"gate_layout", AttributeKind::kString, Words({"concat", "interleaved"})},
      {"alpha", AttributeKind::kFloat},
      {"beta", AttributeKind::kFloat},
      {"limit", AttributeKind::kFloat},
      {"weight_on", AttributeKind::kString, Words({"output", "input"})},
  };
  return spec;
}

ExpertsConfig ReadConfig(const Node& node) {
  ExpertsConfig config;
  config.weight_format = static_cast<WeightFormat>(node.Choice("weight_format"));
  config.block_size = node.Int("block_size");
  config.activation = static_cast<Activation>(node.Choice("activation"));
  config.gated = node.Int("gated") != 0;
  config.gate_layout = static_cast<GateLayout>(node.Choice("gate_layout"));
  config.alpha = node.Float("alpha");
  config.beta = node.Float("beta");
  config.limit = node.Float("limit");
  config.weight_on = static_cast<WeightOn>(node.Choice("weight_on"));
  const std::string refusal = CheckExpertsConfig(config);
  if (!refusal.empty()) throw Error(refusal);
  return config;
}

}  // namespace

const OpSpec& FusedExpertsOp::Spec() {
  static const OpSpec spec = MakeSpec();
  return spec;
}

void FusedExpertsOp::InferShapes(ShapeInference& node) {
  if (const auto shape = node.Input(kX)) node.SetOutput(0, *shape, node.Type(kX));
}

FusedExpertsOp::FusedExpertsOp(const Node& node, Device device)
    : config_(ReadConfig(node)),
      device_(device),
      has_maps_(HasRoutingMaps("input", [&](size_t i) { return node.HasInput(kMaps + i); })) {
  if (device == Device::kCuda) scratch_.emplace(node);
  ExpertsInputs inputs;
  for (size_t i = 0; i < kCount; ++i) {
    if (!node.HasInput(i)) continue;
    const KnownTensor tensor = node.Input(i);
    CheckType(Spec().inputs[i], tensor.type);
    inputs[i] = {tensor.type, tensor.shape};
  }
  CheckExpertsInputs(config_, inputs, false);
}

void FusedExpertsOp::Compute(Context& context) const {
  std::array<const void*, kCount> data{};
  ExpertsInputs inputs;
  for (size_t i = 0; i < kCount; ++i) {
    auto tensor = context.Input(i);
    if (!tensor) continue;
    data[i] = tensor->data;
    inputs[i] = {tensor->type, std::move(tensor->shape)};
  }
  const ExpertsSizes sizes = CheckExpertsInputs(config_, inputs, true);
  const auto layer = [&](size_t first) {
    return ExpertLayer{data[first + kMatrix], data[first + kScales],
                       static_cast<const float*>(data[first + kGlobalScale]), data[first + kZeroPoints],
                       data[first + kBias]};
  };

  ExpertsArgs args{};
  args.x = data[kX];
  args.weights = static_cast<const float*>(data[kWeights]);
  args.indices = static_cast<const int32_t*>(data[kIndices]);
  if (has_maps_) {
    // The kernels write maps that they build and read those that come.
    const auto map = [&](size_t i) { return const_cast<void*>(data[kMaps + i]); };
    args.maps = {static_cast<int32_t*>(map(0)), static_cast<int32_t*>(map(1)), static_cast<int32_t*>(map(2)),
                 static_cast<int64_t*>(map(3))};
  }
  args.fc1 = layer(kFc1);
  args.fc2 = layer(kFc2);
  args.residual = data[kResidual];
  args.y = context.Output(0, inputs[kX]->shape);
  args.dtype = DTypeOf(inputs[kX]->type);
  args.tokens = RowCount(inputs[kX]->shape);
  args.hidden = sizes.hidden;
  args.inner = sizes.inner;
  args.experts = sizes.experts;
  args.k = sizes.k;

#if defined(ORT_MOE_WITH_CUDA)
  if (device_ == Device::kCuda) {
    const Scratch scratch = scratch_->Take(context, ExpertsScratchBytes(config_, args));
    args.scratch = scratch.data();
    return CheckLaunch(LaunchFusedExperts(config_, args, static_cast<cudaStream_t>(context.CudaStream())));
  }
#endif
  FusedExpertsCpu(config_, args,
                  [&](int64_t total, int64_t grain, const auto& body) { context.ParallelFor(total, grain, body); });
}

}  // namespace ort_moe
