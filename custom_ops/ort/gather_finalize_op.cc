#include "ort/gather_finalize_op.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "ort/cuda_status.h"
#include "ort/status.h"

namespace ort_moe {
namespace {

enum Input : size_t {
  kExpertOutput,
  kWeights,
  kIndices,
  kUnpermutedToPermuted,
  kOffset,
  kBias,
  kResidual,
  kInputs,
};

constexpr const char* kHiddenSize = "hidden_size";
constexpr const char* kLocalBegin = "local_begin";
constexpr const char* kLocalCount = "local_count";

// Elements read by one task on the CPU: some 20 us of work, so that handing it to a thread costs little beside it.
constexpr int64_t kElementsPerTask = 1 << 15;

OpSpec MakeSpec() {
  OpSpec spec;
  spec.name = "GatherFinalize";
  spec.inputs = {
      {"expert_output", ActivationTypes()},
      {"weights", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}},
      {"indices", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}},
      {"unpermuted_to_permuted", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}},
      {"expert_first_token_offset", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64}},
      {"bias", ActivationTypes(), true},
      {"residual", ActivationTypes(), true},
  };
  spec.outputs = {{"y", ActivationTypes()}};
  spec.attributes = {
      {kHiddenSize, AttributeKind::kInt}, {kLocalBegin, AttributeKind::kInt}, {kLocalCount, AttributeKind::kInt}};
  return spec;
}

int64_t ReadInt(const Node& node, const char* name, int64_t least) {
  const int64_t value = node.Int(name);
  if (value < least || value > std::numeric_limits<int32_t>::max()) {
    throw Error("attribute '" + std::string(name) + "' must be at least " + std::to_string(least) +
                " and fit into int32, but is " + std::to_string(value));
  }
  return value;
}

// Checks the inputs against each other and against the attributes, as far as their shapes are known: an empty one is a
// scalar or not known at all.
template <typename Tensor>
void CheckInputs(const std::array<std::optional<Tensor>, kInputs>& inputs, int64_t hidden, int64_t local_begin,
                 int64_t local_count, bool all_known) {
  const auto& specs = GatherFinalizeOp::Spec().inputs;
  const auto shape_of = [&](Input input) { return inputs[input] ? inputs[input]->shape : std::vector<int64_t>(); };
  const auto check = [&](Input input, const std::vector<int64_t>& expected) {
    if (!inputs[input] || (inputs[input]->shape.empty() && !all_known)) return;
    CheckShape(specs[input], inputs[input]->shape, expected);
  };
  for (const Input input : {kBias, kResidual}) {
    if (inputs[input])
      CheckSameType(specs[input], inputs[input]->type, specs[kExpertOutput], inputs[kExpertOutput]->type);
  }
  const std::vector<int64_t> output = shape_of(kExpertOutput);
  check(kExpertOutput, {local_count, -1, -1});
  if (output.size() == 3 && output.back() >= 0 && output.back() < hidden) {
    throw Error("attribute 'hidden_size' must be at most the last dimension of input 'expert_output', " +
                std::to_string(output.back()) + ", but is " + std::to_string(hidden));
  }
  const std::vector<int64_t> offset = shape_of(kOffset);
  check(kOffset, {-1});
  const int64_t experts = offset.size() == 1 && offset.front() >= 0 ? offset.front() - 1 : -1;
  if (offset.size() == 1 && offset.front() >= 0 && experts < local_begin + local_count) {
    throw Error("attributes 'local_begin' and 'local_count' must name experts below " + std::to_string(experts) +
                ", one less than input 'expert_first_token_offset' has elements, but name those below " +
                std::to_string(local_begin + local_count));
  }
  if (experts > std::numeric_limits<int32_t>::max()) {
    throw Error("input 'expert_first_token_offset' must have a number of elements that fits into int32");
  }
  check(kBias, {experts, hidden});
  std::vector<int64_t> shape = shape_of(kWeights);
  if (shape.empty()) {
    if (all_known) throw Error("input 'weights' must have rank 1 or more, but is a scalar");
    return;
  }
  check(kIndices, shape);
  const bool known = std::all_of(shape.begin(), shape.end(), [](int64_t size) { return size >= 0; });
  const int64_t rows = known ? RowCount(shape) * shape.back() : -1;
  if (rows > std::numeric_limits<int32_t>::max()) {
    throw Error("input 'weights' must have a number of elements that fits into int32, but has " + std::to_string(rows));
  }
  check(kUnpermutedToPermuted, {rows});
  shape.back() = hidden;
  check(kResidual, shape);
}

}  // namespace

const OpSpec& GatherFinalizeOp::Spec() {
  static const OpSpec spec = MakeSpec();
  return spec;
}

void GatherFinalizeOp::InferShapes(ShapeInference& node) {
  auto shape = node.Input(kWeights);
  const auto hidden = node.Int(kHiddenSize);
  if (!shape || !hidden || *hidden < 1) return;
  shape->back() = {*hidden};
  node.SetOutput(0, *shape, node.Type(kExpertOutput));
}

GatherFinalizeOp::GatherFinalizeOp(const Node& node, Device device)
    : hidden_(ReadInt(node, kHiddenSize, 1)),
      local_begin_(ReadInt(node, kLocalBegin, 0)),
      local_count_(ReadInt(node, kLocalCount, 1)),
      device_(device) {
  std::array<std::optional<KnownTensor>, kInputs> inputs;
  for (size_t i = 0; i < kInputs; ++i) {
    if (!node.HasInput(i)) continue;
    inputs[i] = node.Input(i);
    CheckType(Spec().inputs[i], inputs[i]->type);
  }
  CheckInputs(inputs, hidden_, local_begin_, local_count_, false);
}

void GatherFinalizeOp::Compute(Context& context) const {
  std::array<std::optional<InputTensor>, kInputs> inputs;
  for (size_t i = 0; i < kInputs; ++i) inputs[i] = context.Input(i);
  CheckInputs(inputs, hidden_, local_begin_, local_count_, true);
  const auto data = [&](Input input) { return inputs[input] ? inputs[input]->data : nullptr; };

  std::vector<int64_t> shape = inputs[kWeights]->shape;
  GatherFinalizeArgs args{};
  FinalizeArgs& finalize = args.finalize;
  finalize.tokens = RowCount(shape);
  finalize.k = static_cast<int32_t>(shape.back());
  finalize.hidden = hidden_;
  finalize.experts = static_cast<int32_t>(inputs[kOffset]->shape.front() - 1);
  finalize.expert_output = data(kExpertOutput);
  finalize.weights = static_cast<const float*>(data(kWeights));
  finalize.indices = static_cast<const int32_t*>(data(kIndices));
  finalize.unpermuted_to_permuted = static_cast<const int32_t*>(data(kUnpermutedToPermuted));
  finalize.bias = data(kBias);
  finalize.residual = data(kResidual);
  finalize.dtype = DTypeOf(inputs[kExpertOutput]->type);
  shape.back() = hidden_;
  finalize.y = context.Output(0, shape);
  args.expert_first_token_offset = static_cast<const int64_t*>(data(kOffset));
  args.capacity = inputs[kExpertOutput]->shape[1];
  args.padded = inputs[kExpertOutput]->shape[2];
  args.local_begin = local_begin_;
  args.local_count = local_count_;

#if defined(ORT_MOE_WITH_CUDA)
  if (device_ == Device::kCuda) {
    return CheckLaunch(LaunchGatherFinalize(args, static_cast<cudaStream_t>(context.CudaStream())));
  }
#endif
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, finalize.k * hidden_));
  context.ParallelFor(finalize.tokens, grain, [&](int64_t begin, int64_t end) { GatherFinalizeCpu(args, begin, end); });
}

}  // namespace ort_moe
