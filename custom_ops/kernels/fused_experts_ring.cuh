// A warp's stream of weights for FusedExperts: two tiles of 8 rows, a group of two steps of the reduction at a time.
//
// Weights stream through a ring in shared memory that each warp fills for itself, groups ahead: registers would hold as
// many bytes in flight, but only in unrolled code, and that code, run once a warp, arrived more slowly than the
// weights. A group is 128 bytes of a row, one line of the L1, whose tags a copy pays for.
#pragma once

#include <cstdint>

#include "kernels/fused_experts_format.cuh"

namespace ort_moe {

// 16 bytes to shared memory in the background; zeros where not `valid`.
__device__ __forceinline__ void CopyAsync(void* target, const void* source, bool valid) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void CopyAsync4(void* target, const void* source, bool valid) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(source), "r"(valid ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most kPending groups of this thread's copies are under way.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A lane's part of one step: 16 bytes of each tile's row.
struct StepWeights {
  uint4 words[2];
};

template <typename Format, int kRingGroups>
class WeightRing {
 public:
  static constexpr int kSteps = 2;  // of a group
  static constexpr int kGroups = kRingGroups;
  static constexpr int kTileBytes = kLanes * static_cast<int>(sizeof(uint4));
  static constexpr int kStepBytes = 2 * kTileBytes + 64;  // so that a line's two halves go to different banks
  static constexpr int kScaleBytes = Format::kScaled ? 2 * kTileRows * kSteps * Format::kStepScales : 0;
  static constexpr int kGroupBytes = kSteps * kStepBytes + kScaleBytes;
  static constexpr int kBytes = kGroups * kGroupBytes;  // of a warp

  // `row_step`: from one row of a tile to the next.
  __device__ __forceinline__ WeightRing(void* memory, const LayerParams& layer, int row_step)
      : memory_(static_cast<char*>(memory)), row_bytes_(static_cast<int>(Format::RowBytes(layer.depth))) {
    // Weights: eight lanes to a row and four rows to a copy.
    const int lane = threadIdx.x % kLanes, chunk = lane % 8;
    lane_weights_ = lane / 8 * row_step * row_bytes_ + chunk * 16;
    lane_target_ = chunk / 4 * kStepBytes + (lane / 8 * 4 + chunk % 4) * 16;
    if constexpr (Format::kScaled) {
      row_scales_ = layer.depth / static_cast<int>(kNvfp4Block);
      lane_scales_ = lane / 4 % 4 * row_step * row_scales_ + lane % 4 * 4;  // four lanes to a row
    }
  }

  // The next Fill() starts with group `group`. `rows`: the first of the tiles' four times four rows, among all
  // experts'.
  __device__ __forceinline__ void Start(const LayerParams& layer, const int64_t (&rows)[4], int group) {
    const int at = group * kRowBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) weights_[i] = layer.weights + rows[i] * row_bytes_ + (lane_weights_ + at);
    bytes_left_ = row_bytes_ - at - static_cast<int>(threadIdx.x % 8) * 16;
    if constexpr (Format::kScaled) {
      const int scales_at = group * kRowScales;
      const bool upper = threadIdx.x % kLanes >= kLanes / 2;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int64_t row = upper ? rows[2 * tile + 1] : rows[2 * tile];
        scales_[tile] = layer.scales + row * row_scales_ + (lane_scales_ + scales_at);
      }
      scales_left_ = row_scales_ - scales_at - static_cast<int>(threadIdx.x % 4) * 4;
    }
  }

  // Starts the copies of a group into place `at`, zeros behind the rows' ends; CommitCopies() closes them.
  __device__ __forceinline__ void Fill(int at) {
    char* const target = memory_ + at + lane_target_;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      CopyAsync(target + i * (kTileBytes / 2), weights_[i], bytes_left_ > 0);
      weights_[i] += kRowBytes;
    }
    bytes_left_ -= kRowBytes;
    if constexpr (Format::kScaled) {
      char* const scale_target = memory_ + at + kSteps * kStepBytes + threadIdx.x % kLanes * 4;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        CopyAsync4(scale_target + tile * kScaleBytes / 2, scales_[tile], scales_left_ > 0);
        scales_[tile] += kRowScales;
      }
      scales_left_ -= kRowScales;
    }
  }

  __device__ __forceinline__ static int Next(int at) { return at == kBytes - kGroupBytes ? 0 : at + kGroupBytes; }

  __device__ __forceinline__ StepWeights Weights(int at, int step) const {
    const uint4* const words = reinterpret_cast<const uint4*>(memory_ + at + step * kStepBytes) + threadIdx.x % kLanes;
    return {{words[0], words[kLanes]}};
  }

  // The scales of row `row` of a tile.
  __device__ __forceinline__ const uint8_t* Scales(int at, int step, int tile, int row) const {
    return reinterpret_cast<const uint8_t*>(memory_) + at + kSteps * kStepBytes +
           (tile * kTileRows + row) * kRowScales + step * Format::kStepScales;
  }

 private:
  static constexpr int kRowBytes = 128;  // of a row in a group
  static constexpr int kRowScales = kSteps * Format::kStepScales;

  char* memory_;
  int row_bytes_, lane_weights_, lane_target_;
  int row_scales_ = 0, lane_scales_ = 0;
  const uint8_t* weights_[4];
  const uint8_t* scales_[2];
  int bytes_left_, scales_left_;
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
