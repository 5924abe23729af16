// FusedExperts for few tokens: FC1 (fc1.cuh), then FC2 with finalize (fc2.cuh), for fused_experts.cu.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/experts/params.cuh"

namespace ort_moe {

// How a call's layers are cut.
struct LayersPlan {
  LayerParams fc1{}, fc2{};  // depth and slices
  int chunk = 1;
  int fc2_tile_columns = 0, fc2_columns = 0;  // few tokens: of a tile of FC2, and of a block's tiles at most
  unsigned fc1_blocks = 0, fc2_blocks = 0;    // few tokens
  int64_t activated_stride = 0;               // elements
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What H and I must be multiples of for the fast kernels: a half-precision row's copies take 16 bytes, its tiles up to
// 32 columns, and four e4m3 scales at once.
inline int64_t WidthMultiple(WeightFormat format) { return format == WeightFormat::kDense ? 32 : 64; }

// Cuts the reduction into kMaxSlices slices at most, of four groups at least, or of three where that makes them even.
template <typename Format>
void CutInSlices(LayerParams* layer, int64_t depth) {
  constexpr int64_t kGroups = 4, kEvenGroups = 3;
  const int64_t groups = CeilDiv(depth, 2 * Format::kStep);
  int64_t slices = std::clamp<int64_t>(groups / kGroups, 1, kMaxSlices);
  for (int64_t even = slices + 1; even <= kMaxSlices; ++even) {
    if (groups % even == 0 && groups / even >= kEvenGroups) slices = even;
  }
  layer->depth = static_cast<int32_t>(depth);
  layer->slice_groups = static_cast<int32_t>(CeilDiv(groups, slices));
  layer->slices = static_cast<int32_t>(CeilDiv(groups, layer->slice_groups));
}

// Whether an expert's weights of each layer are so few bytes that the rings work with 32-bit numbers (Wide).
inline bool FitsOffsets(const ExpertsConfig& config, const ExpertsArgs& args) {
  const int64_t bits = config.weight_format == WeightFormat::kDense ? 16 : config.nibbles() ? 4 : 8;
  const int64_t bytes = config.fc1_rows(args.inner) * args.hidden * bits / 8;  // FC2 has no more
  return bytes <= std::numeric_limits<int32_t>::max();
}

// Whether the kernels take the call, on a device of so many multiprocessors and so much shared memory for a block; the
// plan is set where they do.
bool PlanFew(const ExpertsConfig& config, const ExpertsArgs& args, int processors, size_t shared_limit,
             LayersPlan* plan);

// By a plan of theirs, whose layers are `p`'s.
cudaError_t LaunchFew(DType dtype, const LayersPlan& plan, const ExpertsParams& p, cudaStream_t stream);

}  // namespace ort_moe
