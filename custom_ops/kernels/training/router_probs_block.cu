// RouterProbs and the forward of RouterScores by blocks.
//
// Mapping: 128 threads to a row, as FusedRouter has them for long rows.
// Bytes: rows * (2 * E * sizeof(logit) + E, or E / 8). Bound by: instructions, a few thousand of a warp to a row.
#include "kernels/training/router_probs_block.h"

#include <algorithm>

#include "kernels/router/fused_router_params.cuh"
#include "kernels/training/router_probs_block.cuh"

namespace ort_moe {
namespace {

template <typename T>
cudaError_t LaunchOfType(const ProbsBlockParams& p, cudaStream_t stream) {
  constexpr int64_t kMaxGrid = 1 << 20;  // blocks walk over the rows beyond it
  const size_t shared_bytes = p.SharedBytes(BlockRow<T, RouterKind::kAny>::SharedBytes(p.router));
  return Launch<ProbsBlockKernel<T>>(static_cast<unsigned>(std::min(p.router.rows, kMaxGrid)), kBlock, shared_bytes,
                                     stream, p);
}

}  // namespace

cudaError_t LaunchProbsBlocks(const RouterConfig& config, const RouterArgs& args, const ProbsBlockOutputs& outputs,
                              cudaStream_t stream) {
  ProbsBlockParams p{};
  p.router = MakeRouterParams(config, args);
  p.router.vector_loads = p.router.vector_loads && args.experts * SizeOf(args.dtype) % 16 == 0;
  p.probs = outputs.probs;
  p.map = outputs.map;
  p.indices = outputs.indices;
  p.map_bytes = static_cast<int32_t>(MapBytes(outputs.map_format, args.experts));
  p.map_format = outputs.map_format;
  p.all_scores = outputs.all_scores;
  p.normalize_scores = outputs.normalize_scores;
  switch (args.dtype) {
    case DType::kFloat32:
      return LaunchOfType<float>(p, stream);
    case DType::kFloat16:
      return LaunchOfType<Float16>(p, stream);
    case DType::kBFloat16:
      return LaunchOfType<BFloat16>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ort_moe
