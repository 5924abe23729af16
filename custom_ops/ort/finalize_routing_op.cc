#include "ort/finalize_routing_op.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <vector>

#include "ort/cuda_status.h"
#include "ort/status.h"

namespace ort_moe {
namespace {

enum Input : size_t { kExpertOutput, kWeights, kIndices, kUnpermutedToPermuted, kBias, kResidual, kInputs };

// Elements read by one task on the CPU: some 20 us of work, so that handing it to a thread costs little beside it.
constexpr int64_t kElementsPerTask = 1 << 15;

OpSpec MakeSpec() {
  OpSpec spec;
  spec.name = "FinalizeRouting";
  spec.inputs = {
      {"expert_output", ActivationTypes()},
      {"weights", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}},
      {"indices", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}},
      {"unpermuted_to_permuted", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}},
      {"bias", ActivationTypes(), true},
      {"residual", ActivationTypes(), true},
  };
  spec.outputs = {{"y", ActivationTypes()}};
  return spec;
}

// Checks the inputs against each other, as far as their shapes are known: an empty one is a scalar or not known at all.
template <typename Tensor>
void CheckInputs(const std::array<std::optional<Tensor>, kInputs>& inputs, bool all_known) {
  const auto& specs = FinalizeRoutingOp::Spec().inputs;
  const auto check = [&](Input input, const std::vector<int64_t>& expected) {
    if (!inputs[input] || (inputs[input]->shape.empty() && !all_known)) return;
    CheckShape(specs[input], inputs[input]->shape, expected);
  };
  // A dimension of a matrix; of another rank, which is refused, none says what was expected.
  const auto dimension = [&](Input input, bool last) -> int64_t {
    if (!inputs[input] || inputs[input]->shape.size() != 2) return -1;
    return last ? inputs[input]->shape.back() : inputs[input]->shape.front();
  };
  for (const Input input : {kBias, kResidual}) {
    if (inputs[input])
      CheckSameType(specs[input], inputs[input]->type, specs[kExpertOutput], inputs[kExpertOutput]->type);
  }
  if (inputs[kWeights]->shape.empty()) {
    if (all_known) throw Error("input 'weights' must have rank 1 or more, but is a scalar");
    return;
  }
  std::vector<int64_t> shape = inputs[kWeights]->shape;
  check(kIndices, shape);
  const bool known = std::all_of(shape.begin(), shape.end(), [](int64_t size) { return size >= 0; });
  const int64_t rows = known ? RowCount(shape) * shape.back() : -1;
  if (rows > std::numeric_limits<int32_t>::max()) {
    throw Error("input 'weights' must have a number of elements that fits into int32, but has " + std::to_string(rows));
  }
  const int64_t hidden = dimension(kExpertOutput, true);
  check(kExpertOutput, {rows, hidden});
  check(kUnpermutedToPermuted, {rows});
  check(kBias, {dimension(kBias, false), hidden});
  shape.back() = hidden;
  check(kResidual, shape);
}

}  // namespace

const OpSpec& FinalizeRoutingOp::Spec() {
  static const OpSpec spec = MakeSpec();
  return spec;
}

void FinalizeRoutingOp::InferShapes(ShapeInference& node) {
  const auto output = node.Input(kExpertOutput);
  auto shape = node.Input(kWeights);
  if (!output || !shape) return;
  shape->back() = output->back();
  node.SetOutput(0, *shape, node.Type(kExpertOutput));
}

FinalizeRoutingOp::FinalizeRoutingOp(const Node& node, Device device) : device_(device) {
  std::array<std::optional<KnownTensor>, kInputs> inputs;
  for (size_t i = 0; i < kInputs; ++i) {
    if (!node.HasInput(i)) continue;
    inputs[i] = node.Input(i);
    CheckType(Spec().inputs[i], inputs[i]->type);
  }
  CheckInputs(inputs, false);
}

void FinalizeRoutingOp::Compute(Context& context) const {
  std::array<std::optional<InputTensor>, kInputs> inputs;
  for (size_t i = 0; i < kInputs; ++i) inputs[i] = context.Input(i);
  CheckInputs(inputs, true);
  const auto data = [&](Input input) { return inputs[input] ? inputs[input]->data : nullptr; };

  std::vector<int64_t> shape = inputs[kWeights]->shape;
  FinalizeArgs args{};
  args.tokens = RowCount(shape);
  args.k = static_cast<int32_t>(shape.back());
  args.hidden = inputs[kExpertOutput]->shape.back();
  args.experts = inputs[kBias] ? static_cast<int32_t>(inputs[kBias]->shape.front()) : 0;
  args.expert_output = data(kExpertOutput);
  args.weights = static_cast<const float*>(data(kWeights));
  args.indices = static_cast<const int32_t*>(data(kIndices));
  args.unpermuted_to_permuted = static_cast<const int32_t*>(data(kUnpermutedToPermuted));
  args.bias = data(kBias);
  args.residual = data(kResidual);
  args.dtype = DTypeOf(inputs[kExpertOutput]->type);
  shape.back() = args.hidden;
  args.y = context.Output(0, shape);

#if defined(ORT_MOE_WITH_CUDA)
  if (device_ == Device::kCuda) {
    // Who wrote the routing data is not known here: it is read behind the wait.
    return CheckLaunch(LaunchFinalizeRouting(args, false, static_cast<cudaStream_t>(context.CudaStream())));
  }
#endif
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, args.k * args.hidden));
  context.ParallelFor(args.tokens, grain, [&](int64_t begin, int64_t end) { FinalizeRoutingCpu(args, begin, end); });
}

}  // namespace ort_moe
