#include "ort/aux_loss_op.h"

#include <algorithm>

#include "ort/cuda_status.h"
#include "ort/status.h"

namespace ort_moe {
namespace {

enum Input : size_t { kProbs, kTokensPerExpert, kTotal };

// Elements read by one task on the CPU: some 20 us of work, so that handing it to a thread costs little beside it.
constexpr int64_t kElementsPerTask = 1 << 15;

// The order is that of CountType.
const std::vector<ONNXTensorElementDataType>& CountTypes() {
  static const std::vector<ONNXTensorElementDataType> types = {
      ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT};
  return types;
}

// Of a type that was checked.
CountType CountTypeOf(ONNXTensorElementDataType type) {
  return static_cast<CountType>(std::find(CountTypes().begin(), CountTypes().end(), type) - CountTypes().begin());
}

OpSpec MakeSpec() {
  OpSpec spec;
  spec.name = "AuxLoss";
  spec.inputs = {{"probs", ActivationTypes()}, {"tokens_per_expert", CountTypes()}, {"total", CountTypes(), true}};
  spec.outputs = {{"loss", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}}};
  spec.attributes = {
      {"k", AttributeKind::kInt}, {"coeff", AttributeKind::kFloat}, {"total_tokens", AttributeKind::kInt}};
  return spec;
}

}  // namespace

const OpSpec& AuxLossOp::Spec() {
  static const OpSpec spec = MakeSpec();
  return spec;
}

void AuxLossOp::InferShapes(ShapeInference& node) { node.SetOutput(0, {}, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT); }

AuxLossOp::AuxLossOp(const Node& node, Device device) : device_(device) {
  config_.k = node.Int("k");
  config_.coeff = node.Float("coeff");
  config_.total = node.Int("total_tokens");
  if (device == Device::kCuda) scratch_.emplace(node);
  const KnownTensor probs = node.Input(kProbs);
  CheckType(Spec().inputs[kProbs], probs.type);
  const int64_t experts = probs.shape.empty() ? -1 : probs.shape.back();
  CheckExperts(experts);
  const KnownTensor counts = node.Input(kTokensPerExpert);
  CheckType(Spec().inputs[kTokensPerExpert], counts.type);
  if (!counts.shape.empty()) CheckShape(Spec().inputs[kTokensPerExpert], counts.shape, {experts});
  if (!node.HasInput(kTotal)) return;
  const KnownTensor total = node.Input(kTotal);
  CheckType(Spec().inputs[kTotal], total.type);
  if (!total.shape.empty()) CheckShape(Spec().inputs[kTotal], total.shape, {1});
}

void AuxLossOp::CheckExperts(int64_t experts) const {
  const std::string refusal = CheckAuxLossConfig(config_, experts);
  if (!refusal.empty()) throw Error(refusal);
}

void AuxLossOp::Compute(Context& context) const {
  const auto probs = context.Input(kProbs);
  if (!probs || probs->shape.empty()) throw Error("input 'probs' must have rank 1 or more, but is a scalar");
  const int64_t experts = probs->shape.back();
  CheckExperts(experts);
  const auto counts = context.Input(kTokensPerExpert);
  CheckShape(Spec().inputs[kTokensPerExpert], counts->shape, {experts});
  const auto total = context.Input(kTotal);
  if (total && !total->shape.empty()) CheckShape(Spec().inputs[kTotal], total->shape, {1});

  AuxLossArgs args{};
  args.probs = probs->data;
  args.tokens_per_expert = counts->data;
  args.count_type = CountTypeOf(counts->type);
  args.total = total ? total->data : nullptr;
  args.total_type = total ? CountTypeOf(total->type) : CountType::kInt64;
  args.dtype = DTypeOf(probs->type);
  args.rows = RowCount(probs->shape);
  args.experts = experts;
  args.loss = static_cast<float*>(context.Output(0, {}));

#if defined(ORT_MOE_WITH_CUDA)
  if (device_ == Device::kCuda) {
    const Scratch scratch = scratch_->Take(context, AuxLossScratchBytes(args));
    args.scratch = scratch.data();
    return CheckLaunch(LaunchAuxLoss(config_, args, static_cast<cudaStream_t>(context.CudaStream())));
  }
#endif
  float parts[kAuxLossParts];
  args.scratch = parts;
  const int64_t elements_of_part = args.rows * experts / kAuxLossParts + 1;
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / elements_of_part);
  context.ParallelFor(kAuxLossParts, grain, [&](int64_t begin, int64_t end) { AuxLossCpu(config_, args, begin, end); });
  FinishAuxLossCpu(config_, args);
}

}  // namespace ort_moe
