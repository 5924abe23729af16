// FusedRouter on CUDA: weights and indices of the best k experts of each row, in one launch.
//
// Mapping: who owns a row depends on the configuration alone, never on its values or on other rows.
//   lane   8 lanes a row, 4 rows a warp   E <= 8, no groups
//   warp   a warp a row                   E <= 1024, k <= 32: keys in registers
//   block  128 threads a row              the rest, as far as shared memory goes (E about 16384): keys in shared memory
// Bytes: rows * (E * sizeof(logit) + 8 * k), each once; 1.1 KB for a row of E = 512 in half precision.
// Bound by: at few rows latency: the launch, one load from memory, and how fast one warp's instructions arrive, most of
// them executed once; at many rows instruction issue, 300 to 600 warp instructions a row.
// Why so: sums have one order on all paths (128 partial sums by chunks of 8 experts), which fits lanes that own chunks
// of 16 bytes; then a row needs no exchange but the final butterfly. Selection counts instead of taking a round per
// choice. What most routers are, a softmax over the chosen, has instantiations of its own without the branches over
// everything else; further templates would multiply the library's size. PDL hides the launch behind the previous
// kernel.
#include <algorithm>
#include <cstdint>

#include "kernels/fused_router.h"
#include "kernels/fused_router_block.cuh"
#include "kernels/fused_router_lane.cuh"
#include "kernels/fused_router_row.cuh"
#include "kernels/fused_router_warp.cuh"
#include "kernels/launch.cuh"

namespace ort_moe {
namespace {

constexpr int64_t kMaxGrid = 1 << 20;  // blocks walk over the rows beyond it
constexpr int64_t kManyRows = 512;     // with fewer, a warp to a block spreads them over all multiprocessors

RouterParams MakeParams(const RouterConfig& config, const RouterArgs& args) {
  const bool softmax = config.score == Score::kSoftmax;
  const bool from_selection = config.weights_from == WeightsFrom::kSelection;
  // softmax + normalisation without limits is the softmax over the chosen.
  const bool normalizes_softmax = softmax && !config.score_after_topk && config.normalize &&
                                  config.normalize_eps == 0.0f && config.normalize_min == 0.0f && !from_selection;
  RouterParams p{};
  p.logits = args.logits;
  p.selection_bias = args.selection_bias;
  p.expert_scale = args.expert_scale;
  p.weights = args.weights;
  p.indices = args.indices;
  p.rows = args.rows;
  p.experts = static_cast<int32_t>(args.experts);
  p.k = static_cast<int32_t>(config.k);
  p.num_groups = static_cast<int32_t>(config.num_groups);
  p.topk_groups = static_cast<int32_t>(config.topk_groups);
  p.group_size = static_cast<int32_t>(args.experts / config.num_groups);
  p.group_score_top = static_cast<int32_t>(config.group_score_top);
  const int32_t chunks = p.group_size % kChunk == 0 ? p.group_size / kChunk : 0;
  p.log2_group_chunks = -1;
  for (int32_t log2 = 0; 1 << log2 <= kWarp; ++log2) {
    if (chunks == 1 << log2) p.log2_group_chunks = log2;
  }
  p.group_fill = config.group_fill;
  p.softcap = config.softcap;
  p.mixer_threshold = config.mixer_threshold;
  p.normalize_eps = config.normalize_eps;
  p.normalize_min = config.normalize_min;
  p.scale = config.scale;
  p.score = config.score;
  p.score_after_topk = config.score_after_topk;
  p.from_selection = from_selection;
  p.normalize = config.normalize && !normalizes_softmax;
  p.softmax_of_chosen = normalizes_softmax || (softmax && config.score_after_topk);
  p.grouped = config.has_groups();
  p.ranks_logits = config.score_after_topk || config.score == Score::kNone || config.score == Score::kSparseMixer ||
                   (softmax && args.selection_bias == nullptr && !p.grouped);
  p.softmax_of_experts =
      softmax && !config.score_after_topk && (!p.ranks_logits || (!from_selection && !normalizes_softmax));
  p.vector_loads = args.experts % kChunk == 0 && reinterpret_cast<uintptr_t>(args.logits) % sizeof(uint4) == 0;
  return p;
}

dim3 Grid(int64_t rows, int64_t rows_per_block) {
  return dim3(static_cast<unsigned>(std::min((rows + rows_per_block - 1) / rows_per_block, kMaxGrid)));
}

template <typename T, int kOwned, bool kPlain>
cudaError_t LaunchWarp(const RouterParams& p, cudaStream_t stream) {
  const int warps = p.rows < kManyRows ? 1 : kMaxWarpsPerBlock;
  const size_t shared_bytes = warps * WarpRow<T, kOwned, kPlain>::SharedBytes(p);
  return Launch<FusedRouterWarpKernel<T, kOwned, kPlain>>(Grid(p.rows, warps), warps * kWarp, shared_bytes, stream, p);
}

template <typename T, bool kPlain>
cudaError_t LaunchLanesOrWarp(const RouterParams& p, cudaStream_t stream) {
  if (p.experts <= kChunk && !p.grouped && p.score != Score::kSparseMixer) {
    const int threads = p.rows <= kManyRows ? kWarp : kLaneBlock;
    return Launch<FusedRouterLaneKernel<T, kPlain>>(Grid(p.rows, threads / kChunk), threads, 0, stream, p);
  }
  if constexpr (kPlain) {
    if (p.experts <= 2 * kWarp) return LaunchWarp<T, 2, kPlain>(p, stream);
    if (p.experts <= 4 * kWarp) return LaunchWarp<T, 4, kPlain>(p, stream);
  }
  if (p.experts <= 8 * kWarp) return LaunchWarp<T, 8, kPlain>(p, stream);
  if (p.experts <= 16 * kWarp) return LaunchWarp<T, 16, kPlain>(p, stream);
  return LaunchWarp<T, 32, kPlain>(p, stream);
}

template <typename T, bool kPlain>
cudaError_t LaunchOfKind(const RouterParams& p, cudaStream_t stream) {
  if (p.experts <= kMaxWarpExperts && p.k <= kMaxWarpChosen) return LaunchLanesOrWarp<T, kPlain>(p, stream);
  const size_t shared_bytes = BlockRow<T, kPlain>::SharedBytes(p);
  return Launch<FusedRouterBlockKernel<T, kPlain>>(Grid(p.rows, 1), kBlock, shared_bytes, stream, p);
}

template <typename T>
cudaError_t LaunchOfType(const RouterParams& p, cudaStream_t stream) {
  return IsPlain(p) ? LaunchOfKind<T, true>(p, stream) : LaunchOfKind<T, false>(p, stream);
}

}  // namespace

cudaError_t LaunchFusedRouter(const RouterConfig& config, const RouterArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  constexpr int64_t kMaxSortable = 1 << 20;  // keeps 32-bit arithmetic safe; shared memory ends far below
  if (args.rows < 0 || args.experts > kMaxSortable) return cudaErrorInvalidValue;
  const RouterParams p = MakeParams(config, args);
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
