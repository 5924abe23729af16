#include "ort/permute_tokens_op.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "ort/cuda_status.h"
#include "ort/routing_maps_spec.h"
#include "ort/status.h"

namespace ort_moe {
namespace {

enum Input : size_t { kX, kIndices };
enum Output : size_t { kPermutedX, kMaps };

constexpr const char* kExperts = "num_experts";

// Bytes copied by one task on the CPU: some 20 us of work, so that handing it to a thread costs little beside it.
constexpr int64_t kBytesPerTask = 1 << 17;

OpSpec MakeSpec() {
  OpSpec spec;
  spec.name = "PermuteTokens";
  spec.inputs = {{"x", ActivationTypes()}, {"indices", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}}};
  spec.outputs = {{"permuted_x", ActivationTypes()}};
  for (TensorSpec map : RoutingMapSpecs()) {
    map.optional = false;
    spec.outputs.push_back(std::move(map));
  }
  spec.attributes = {{kExperts, AttributeKind::kInt}};
  return spec;
}

// Checks the shapes against each other, as far as they are known: an empty one is a scalar or not known at all.
void CheckShapes(const std::vector<int64_t>& x, const std::vector<int64_t>& indices, bool all_known) {
  const auto& specs = PermuteTokensOp::Spec().inputs;
  if (all_known && x.empty()) throw Error("input 'x' must have rank 1 or more, but is a scalar");
  if (!all_known && (x.empty() || indices.empty())) return;
  std::vector<int64_t> expected = x;
  expected.back() = indices.empty() ? -1 : indices.back();
  CheckShape(specs[kIndices], indices, expected);
  const bool known = std::all_of(indices.begin(), indices.end(), [](int64_t size) { return size >= 0; });
  if (!known) return;
  const int64_t rows = RowCount(indices) * indices.back();
  if (rows > std::numeric_limits<int32_t>::max()) {
    throw Error("input 'indices' must have a number of elements that fits into int32, but has " + std::to_string(rows));
  }
}

int64_t ReadExperts(const Node& node) {
  const int64_t experts = node.Int(kExperts);
  if (experts < 1 || experts >= std::numeric_limits<int32_t>::max()) {
    throw Error("attribute 'num_experts' must be at least 1 and below 2147483647, but is " + std::to_string(experts));
  }
  return experts;
}

}  // namespace

const OpSpec& PermuteTokensOp::Spec() {
  static const OpSpec spec = MakeSpec();
  return spec;
}

void PermuteTokensOp::InferShapes(ShapeInference& node) {
  const auto x = node.Input(kX);
  const auto indices = node.Input(kIndices);
  const auto experts = node.Int(kExperts);
  const auto type = node.Type(kX);
  Dimension rows{1};
  if (indices) {
    for (const Dimension& dimension : *indices) {
      rows.value = rows.value < 0 || dimension.value < 0 ? -1 : rows.value * dimension.value;
    }
  }
  if (!indices || rows.value < 0) rows = ShapeInference::UnknownSize();
  if (x) node.SetOutput(kPermutedX, {rows, x->back()}, type);
  for (size_t i = 0; i + 1 < kRoutingMaps; ++i) {
    node.SetOutput(kMaps + i, {rows}, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
  }
  if (experts && *experts >= 1) {
    node.SetOutput(kMaps + kRoutingMaps - 1, {{*experts + 1}}, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
  }
}

PermuteTokensOp::PermuteTokensOp(const Node& node, Device device) : experts_(ReadExperts(node)), device_(device) {
  if (device == Device::kCuda) scratch_.emplace(node);
  const KnownTensor x = node.Input(kX);
  const KnownTensor indices = node.Input(kIndices);
  CheckType(Spec().inputs[kX], x.type);
  CheckType(Spec().inputs[kIndices], indices.type);
  CheckShapes(x.shape, indices.shape, false);
}

void PermuteTokensOp::Compute(Context& context) const {
  const auto x = context.Input(kX);
  const auto indices = context.Input(kIndices);
  CheckShapes(x->shape, indices->shape, true);

  PermuteArgs args{};
  args.x = x->data;
  args.indices = static_cast<const int32_t*>(indices->data);
  args.dtype = DTypeOf(x->type);
  args.tokens = RowCount(x->shape);
  args.hidden = x->shape.back();
  args.k = indices->shape.back();
  args.experts = experts_;
  const int64_t rows = args.tokens * args.k;
  args.permuted_x = context.Output(kPermutedX, {rows, args.hidden});
  args.maps = OutputRoutingMaps(context, kMaps, rows, experts_);

#if defined(ORT_MOE_WITH_CUDA)
  if (device_ == Device::kCuda) {
    const Scratch scratch = scratch_->Take(context, PermuteTokensScratchBytes(args));
    const cudaError_t status =
        LaunchPermuteTokens(args, scratch.data(), static_cast<cudaStream_t>(context.CudaStream()));
    if (status == cudaErrorInvalidValue) {
      throw Error("attribute 'num_experts' is " + std::to_string(experts_) +
                      ", and counts of as many experts do not fit into this GPU's shared memory",
                  ORT_EP_FAIL);
    }
    return CheckLaunch(status);
  }
#endif
  BuildRoutingMapsCpu(args.indices, args.tokens, args.k, experts_, args.maps);
  const int64_t row_bytes = args.hidden * static_cast<int64_t>(SizeOf(args.dtype));
  const int64_t grain = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, row_bytes));
  context.ParallelFor(rows, grain, [&](int64_t begin, int64_t end) { PermuteRowsCpu(args, begin, end); });
}

}  // namespace ort_moe
