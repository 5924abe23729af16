// A warp's stream of weights for FusedExperts: two tiles of 8 rows, a group of two steps of the reduction at a time.
//
// Weights stream through a ring in shared memory that each warp fills for itself, groups ahead: registers would hold as
// many bytes in flight, but only in unrolled code, and that code, run once a warp, arrived more slowly than the
// weights. A group is 128 bytes of a row, one line of the L1, whose tags a copy pays for.
#pragma once

#include <cstdint>

#include "kernels/common/background_copies.cuh"
#include "kernels/experts/mma/ring_scales.cuh"

namespace ort_moe {

// A lane's part of one step: 16 bytes of each tile's row.
struct StepWeights {
  uint4 words[2];
};

template <typename Format, int kRingGroups>
class WeightRing {
 public:
  using Scales = RingScales<Format>;
  static constexpr int kGroups = kRingGroups;
  static constexpr int kTileBytes = kLanes * static_cast<int>(sizeof(uint4));
  static constexpr int kStepBytes = 2 * kTileBytes + 64;  // so that a line's two halves go to different banks
  static constexpr int kGroupBytes = kGroupSteps * kStepBytes + Scales::kBytes;
  static constexpr int kBytes = kGroups * kGroupBytes;  // of a warp

  // `row_step`: from one row of a tile to the next.
  __device__ __forceinline__ WeightRing(void* memory, const LayerParams& layer, int row_step)
      : memory_(static_cast<char*>(memory)),
        row_bytes_(static_cast<int>(Format::RowBytes(layer.depth))),
        row_step_(row_step),
        scales_(layer) {
    // Weights: eight lanes to a row and four rows to a copy.
    const int lane = threadIdx.x % kLanes, chunk = lane % 8;
    lane_weights_ = lane / 8 * row_step * row_bytes_ + chunk * 16;
    // Kept, for the compiler would work it out anew for each group.
    lane_target_ = static_cast<uint32_t>(__cvta_generic_to_shared(memory_)) + chunk / 4 * kStepBytes +
                   (lane / 8 * 4 + chunk % 4) * 16;
    asm volatile("" : "+r"(lane_target_));
  }

  // The next Fill() starts with group `group`. The tiles' four times four rows begin at `rows` of their experts, which
  // one call of Choose() behind this one tells. Where kBegins is 2, a tile's second four lie four row steps behind its
  // first and are of the same expert.
  __device__ __forceinline__ void Start(const LayerParams& layer, const int (&rows)[4], int group) {
    const int at = group * kRowBytes;
    const uint8_t* const begin = layer.weights + (lane_weights_ + at);
#pragma unroll
    for (int i = 0; i < kBegins; ++i) weights_[i] = begin + Wide(rows[i * (4 / kBegins)], row_bytes_);
    bytes_left_ = row_bytes_ - at - static_cast<int>(threadIdx.x % 8) * 16;
    scales_.Start(layer, rows, row_step_, group);
  }
  __device__ __forceinline__ void Choose(const LayerParams& layer, const int (&experts)[4]) {
#pragma unroll
    for (int i = 0; i < kBegins; ++i) weights_[i] += Wide(experts[i * (4 / kBegins)], layer.rows * row_bytes_);
    scales_.Choose(layer, experts);
  }

  // For WaitForPreviousBehind(): what Start() and what is ahead of it worked out.
  __device__ __forceinline__ uint32_t Started() const {
    uint32_t all = lane_target_ | bytes_left_;
#pragma unroll
    for (const uint8_t* weights : weights_) all |= static_cast<uint32_t>(reinterpret_cast<uintptr_t>(weights));
    return all;
  }

  // Starts the copies of a group into place `at`, zeros behind the rows' ends; CommitCopies() closes them.
  __device__ __forceinline__ void Fill(int at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint8_t* const from = kBegins == 4 ? weights_[i] : weights_[i / 2] + i % 2 * (4 * row_step_ * row_bytes_);
      CopyAsyncAt(lane_target_ + at + i * (kTileBytes / 2), from, bytes_left_ > 0);
    }
#pragma unroll
    for (const uint8_t*& weights : weights_) weights += kRowBytes;
    bytes_left_ -= kRowBytes;
    scales_.Fill(memory_ + at + kGroupSteps * kStepBytes);
  }

  __device__ __forceinline__ static int Next(int at) { return at == kBytes - kGroupBytes ? 0 : at + kGroupBytes; }

  __device__ __forceinline__ StepWeights Weights(int at, int step) const {
    const uint4* const words = reinterpret_cast<const uint4*>(memory_ + at + step * kStepBytes) + threadIdx.x % kLanes;
    return {{words[0], words[kLanes]}};
  }

  // The scales of the group at place `at`, where `scales()` reads them.
  __device__ __forceinline__ const char* ScalesOf(int at) const { return memory_ + at + kGroupSteps * kStepBytes; }
  __device__ __forceinline__ const Scales& scales() const { return scales_; }

 private:
  static constexpr int kRowBytes = 128;  // of a row in a group
  // Of the tiles' four times four rows, those whose addresses are kept: where all rows of a tile are one expert's, the
  // second four lie behind the first.
  static constexpr int kBegins = Format::kFc2Columns < kTileRows ? 4 : 2;

  char* memory_;
  int row_bytes_, row_step_, lane_weights_;
  uint32_t lane_target_;
  const uint8_t* weights_[kBegins];
  int bytes_left_;
  Scales scales_;
};

// Part of a layer's reduction, in groups; the last one may have a single step.
struct Slice {
  int first, end;
  bool is_odd;
};

template <typename Format>
__device__ __forceinline__ Slice SliceOf(const LayerParams& layer, int slice) {
  const int steps = (layer.depth + Format::kStep - 1) / Format::kStep, groups = (steps + 1) / 2;
  const int first = slice * layer.slice_groups, end = min(first + layer.slice_groups, groups);
  return {first, end, 2 * end > steps};
}

}  // namespace ort_moe
