#include "ort/router_probs_op.h"

#include <algorithm>

#include "ort/cuda_status.h"
#include "ort/router_node.h"
#include "ort/status.h"

namespace ort_moe {
namespace {

enum Input : size_t { kLogits, kSelectionBias, kExpertScale };
enum Output : size_t { kProbs, kMap, kIndices, kBitmap };

OpSpec MakeSpec() {
  OpSpec spec;
  spec.name = "RouterProbs";
  spec.inputs = {
      {"logits", ActivationTypes()},
      {"selection_bias", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, true},
      {"expert_scale", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, true},
  };
  spec.outputs = {
      {"probs", ActivationTypes()},
      TrainingMapSpec(MapFormat::kByte),
      {"indices", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}, true},
      TrainingMapSpec(MapFormat::kBit),
  };
  spec.attributes = TrainingRouterAttributes();
  return spec;
}

}  // namespace

const OpSpec& RouterProbsOp::Spec() {
  static const OpSpec spec = MakeSpec();
  return spec;
}

void RouterProbsOp::InferShapes(ShapeInference& node) {
  // Maps and indices stay open: here nobody tells which outputs a node has.
  if (const auto shape = node.Input(kLogits)) node.SetOutput(kProbs, *shape, node.Type(kLogits));
}

RouterProbsOp::RouterProbsOp(const Node& node, Device device)
    : maps_(node, kMap, kBitmap),
      device_(device),
      has_selection_bias_(node.HasInput(kSelectionBias)),
      has_indices_(node.HasOutput(kIndices)) {
  config_.router = ReadTrainingRouterConfig(node);
  const KnownTensor logits = node.Input(kLogits);
  CheckType(Spec().inputs[kLogits], logits.type);
  const int64_t experts = logits.shape.empty() ? -1 : logits.shape.back();
  CheckExperts(experts);
  CheckExpertVector(node, Spec(), kSelectionBias, experts);
  CheckExpertVector(node, Spec(), kExpertScale, experts);
}

void RouterProbsOp::CheckExperts(int64_t experts) const {
  const std::string refusal = CheckRouterProbsConfig(config_, experts, has_selection_bias_);
  if (!refusal.empty()) throw Error(refusal);
}

void RouterProbsOp::Compute(Context& context) const {
  const InputTensor logits = Logits(context, kLogits);
  std::vector<int64_t> shape = logits.shape;
  const int64_t experts = shape.back();
  CheckExperts(experts);

  RouterProbsArgs args{};
  args.logits = logits.data;
  args.dtype = DTypeOf(logits.type);
  args.rows = RowCount(shape);
  args.experts = experts;
  args.selection_bias = ExpertVector(context, Spec(), kSelectionBias, experts);
  args.expert_scale = ExpertVector(context, Spec(), kExpertScale, experts);
  args.probs = context.Output(kProbs, shape);
  shape.back() = config_.router.k;
  if (has_indices_) args.indices = static_cast<int32_t*>(context.Output(kIndices, shape));
  maps_.ForEach(context, logits.shape, [&](MapFormat format, uint8_t* map) {
    RouterProbsConfig config = config_;
    config.map_format = format;
    args.map = map;
#if defined(ORT_MOE_WITH_CUDA)
    if (device_ == Device::kCuda) {
      return CheckLaunch(LaunchRouterProbs(config, args, static_cast<cudaStream_t>(context.CudaStream())));
    }
#endif
    const int64_t grain = std::max<int64_t>(1, kLogitsPerTask / experts);
    context.ParallelFor(args.rows, grain,
                        [&](int64_t begin, int64_t end) { RouterProbsCpu(config, args, begin, end); });
  });
}

}  // namespace ort_moe
