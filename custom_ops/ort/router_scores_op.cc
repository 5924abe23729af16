#include "ort/router_scores_op.h"

#include <algorithm>

#include "ort/cuda_status.h"
#include "ort/router_node.h"
#include "ort/status.h"

namespace ort_moe {
namespace {

enum Output : size_t { kScores, kMap, kBitmap };

// The order of choices is that of the enumerations in kernels/router/fused_router.h.
OpSpec MakeSpec() {
  OpSpec spec;
  spec.name = "RouterScores";
  spec.inputs = {{"logits", ActivationTypes()}};
  spec.outputs = {{"scores", ActivationTypes()}, TrainingMapSpec(MapFormat::kByte), TrainingMapSpec(MapFormat::kBit)};
  spec.attributes = {
      {"k", AttributeKind::kInt},
      {"score", AttributeKind::kString, Words({"softmax", "sigmoid", "sqrtsoftplus"})},
      {"normalize", AttributeKind::kInt, Flag()},
      {"normalize_eps", AttributeKind::kFloat},
      {"softcap", AttributeKind::kFloat},
  };
  return spec;
}

}  // namespace

const OpSpec& RouterScoresOp::Spec() {
  static const OpSpec spec = MakeSpec();
  return spec;
}

void RouterScoresOp::InferShapes(ShapeInference& node) {
  // The map stays open: here nobody tells which outputs a node has.
  if (const auto shape = node.Input(0)) node.SetOutput(kScores, *shape, node.Type(0));
}

RouterScoresOp::RouterScoresOp(const Node& node, Device device) : maps_(node, kMap, kBitmap), device_(device) {
  config_.k = node.Int("k");
  config_.score = static_cast<Score>(node.Choice("score"));
  config_.normalize = node.Int("normalize") != 0;
  config_.normalize_eps = node.Float("normalize_eps");
  config_.softcap = node.Float("softcap");
  const KnownTensor logits = node.Input(0);
  CheckType(Spec().inputs[0], logits.type);
  CheckExperts(logits.shape.empty() ? -1 : logits.shape.back());
}

void RouterScoresOp::CheckExperts(int64_t experts) const {
  const std::string refusal = CheckRouterScoresConfig(config_, experts);
  if (!refusal.empty()) throw Error(refusal);
}

void RouterScoresOp::Compute(Context& context) const {
  const InputTensor logits = Logits(context, 0);
  CheckExperts(logits.shape.back());

  RouterScoresArgs args{};
  args.logits = logits.data;
  args.dtype = DTypeOf(logits.type);
  args.rows = RowCount(logits.shape);
  args.experts = logits.shape.back();
  args.scores = context.Output(kScores, logits.shape);
  maps_.ForEach(context, logits.shape, [&](MapFormat format, uint8_t* map) {
    RouterScoresConfig config = config_;
    config.map_format = format;
    args.map = map;
#if defined(ORT_MOE_WITH_CUDA)
    if (device_ == Device::kCuda) {
      return CheckLaunch(LaunchRouterScores(config, args, static_cast<cudaStream_t>(context.CudaStream())));
    }
#endif
    const int64_t grain = std::max<int64_t>(1, kLogitsPerTask / args.experts);
    context.ParallelFor(args.rows, grain,
                        [&](int64_t begin, int64_t end) { RouterScoresCpu(config, args, begin, end); });
  });
}

}  // namespace ort_moe
