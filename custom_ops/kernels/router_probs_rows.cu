// RouterProbs and the forward of RouterScores for what most routers are, a warp to a row (router_probs_row.cuh).
//
// Mapping: as many warps as shared memory has place for, up to 24 to a multiprocessor, each walking over rows: with 16
// or 32, 8192 rows of 512 experts take 10 % more. Bytes: rows * (2 * E * sizeof(logit) + E, or E / 8), each once. Bound
// by: at E = 2304 memory, 75 to 80 % of a copy's bandwidth; at E = 512 and below a row's chain of steps, some 5000
// cycles, of which more warps hide no more, for they share the issue of instructions (600 to 1000 a row).
// Tried: rows stored by the lanes in place of bulk copies, 15.3 us for 14.4 at 512/10; keys in registers, with code
// unrolled over all of a lane's experts, 17.7, and 88 for 52 at 2304/36: warps then wait for their instructions.
#include <algorithm>

#include "kernels/router_probs_row.cuh"
#include "kernels/switches.h"

namespace ort_moe {
namespace {

template <typename T, ProbsKind kKind, bool kAllScores>
cudaError_t LaunchRows(ProbsParams p, cudaStream_t stream) {
  constexpr auto* kKernel = &ProbsRowsKernel<T, kKind, kAllScores>;
  // Two rows of logits to a warp, unless that leaves too few warps for what the kind computes.
  constexpr int64_t kMostWarps = 24, kEnoughWarps = kKind == ProbsKind::kSoftmaxOfChosen ? 6 : 12;
  KernelTraits traits;
  if (cudaError_t error = QueryKernel<kKernel>(&traits); error != cudaSuccess) return error;
  p.row_bytes = static_cast<int32_t>(p.experts * sizeof(Bits<T>));
  p.map_bytes = static_cast<int32_t>(MapBytes(p.map_format, p.experts));
  p.shared_row_bytes = static_cast<int32_t>((p.experts + kChunk - 1) / kChunk * kChunk * sizeof(Bits<T>));
  const uint64_t alignment = reinterpret_cast<uint64_t>(p.logits) | reinterpret_cast<uint64_t>(p.probs) |
                             reinterpret_cast<uint64_t>(p.map) | static_cast<uint64_t>(p.row_bytes | p.map_bytes);
  p.bulk = traits.hopper && alignment % 16 == 0 && p.experts % kChunk == 0;
  p.aligned_bias = reinterpret_cast<uint64_t>(p.selection_bias) % 16 == 0;
  p.listed = p.k <= std::min(ListedChoices(), kMaxListed);
  RowGrid grid;
  for (p.stages = 2; p.stages > 0; --p.stages) {
    p.warp_bytes = static_cast<int32_t>(ProbsRow<T, kKind, kAllScores>::Bytes(p));
    grid = FillMultiprocessor(traits.max_shared_bytes, p.warp_bytes, kMostWarps);
    if (grid.all() >= kEnoughWarps || p.stages == 1) break;
  }
  return LaunchOverRows<kKernel>(grid, p.rows, p.warp_bytes, p, stream);
}

template <typename T>
cudaError_t LaunchOfType(ProbsKind kind, bool all_scores, const ProbsParams& p, cudaStream_t stream) {
  switch (kind) {
    case ProbsKind::kSoftmaxOfChosen:
      return LaunchRows<T, ProbsKind::kSoftmaxOfChosen, false>(p, stream);
    case ProbsKind::kSoftmaxOfExperts:
      return all_scores ? LaunchRows<T, ProbsKind::kSoftmaxOfExperts, true>(p, stream)
                        : LaunchRows<T, ProbsKind::kSoftmaxOfExperts, false>(p, stream);
    case ProbsKind::kSigmoid:
      return all_scores ? LaunchRows<T, ProbsKind::kSigmoid, true>(p, stream)
                        : LaunchRows<T, ProbsKind::kSigmoid, false>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchProbsRows(ProbsKind kind, bool all_scores, DType dtype, ProbsParams p, cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat32:
      return LaunchOfType<float>(kind, all_scores, p, stream);
    case DType::kFloat16:
      return LaunchOfType<Float16>(kind, all_scores, p, stream);
    case DType::kBFloat16:
      return LaunchOfType<BFloat16>(kind, all_scores, p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ort_moe
