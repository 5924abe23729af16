// RouterProbs and the forward of RouterScores for what most routers are, a warp to a row (router_probs_row.cuh).
//
// Mapping: as many warps as shared memory has place for, each walking over rows, up to 24 to a multiprocessor, and up
// to 32, with fewer registers to each, for rows of up to 1 KB (8192 rows of 256 float logits: 9.4 us for 10.6) and
// where all scores come out, which they do in the place of the logits.
// Bytes: rows * (2 * E * sizeof(logit) + E, or E / 8), each once.
// Bound by: at E = 2304 memory, 75 to 80 % of a copy's bandwidth; at E = 512 and below a row's chain of steps, some
// 5000 cycles, and the issue of instructions, 600 to 1000 a row.
// Tried, in us at 512/10 and 2304/36 for 14.4 and 52: rows stored by the lanes in place of bulk copies, 15.3; keys in
// registers, with code unrolled over all of a lane's experts, 17.7 and 88, for warps then wait for their instructions;
// zeros copied out of one row for all warps, and what is chosen stored on top of them, 15.7 and 59, for such a store
// writes a part of a sector. Sigmoids estimated by one tanh.approx gain nothing: more are then too close to tell
// apart.
#include <algorithm>

#include "kernels/common/switches.h"
#include "kernels/training/router_probs_row.cuh"

namespace ort_moe {
namespace {

// As many as registers allow: where they leave place, blocks of the next launch come early to some multiprocessors and
// are missing on others.
constexpr int kManyWarps = 32, kFewerWarps = 24;
constexpr int64_t kShortRow = 1024;  // bytes

template <typename T, ProbsKind kKind, bool kAllScores, int kMostWarps>
cudaError_t LaunchRows(ProbsParams p, cudaStream_t stream) {
  constexpr auto* kKernel = &ProbsRowsKernel<T, kKind, kAllScores, kMostWarps>;
  // Two rows of logits to a warp, unless that leaves too few warps for what the kind computes.
  constexpr int64_t kEnoughWarps = kKind == ProbsKind::kSoftmaxOfChosen ? 6 : 12;
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

template <typename T, ProbsKind kKind>
cudaError_t LaunchProbs(const ProbsParams& p, cudaStream_t stream) {
  const bool is_short = p.experts * static_cast<int64_t>(sizeof(Bits<T>)) <= kShortRow;
  return is_short ? LaunchRows<T, kKind, false, kManyWarps>(p, stream)
                  : LaunchRows<T, kKind, false, kFewerWarps>(p, stream);
}

template <typename T>
cudaError_t LaunchOfType(ProbsKind kind, bool all_scores, const ProbsParams& p, cudaStream_t stream) {
  switch (kind) {
    case ProbsKind::kSoftmaxOfChosen:
      return LaunchProbs<T, ProbsKind::kSoftmaxOfChosen>(p, stream);
    case ProbsKind::kSoftmaxOfExperts:
      return all_scores ? LaunchRows<T, ProbsKind::kSoftmaxOfExperts, true, kManyWarps>(p, stream)
                        : LaunchProbs<T, ProbsKind::kSoftmaxOfExperts>(p, stream);
    case ProbsKind::kSigmoid:
      return all_scores ? LaunchRows<T, ProbsKind::kSigmoid, true, kManyWarps>(p, stream)
                        : LaunchProbs<T, ProbsKind::kSigmoid>(p, stream);
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
