// A warp's part of FusedExperts' products: two tiles of 8 weight rows, up to 8 tokens, a slice of the reduction.
//
// Lane 4 * g + q of the warp holds weight row g of each tile and token g; the tensor core takes the tiles as the two
// halves of its 16 rows. Weights stream through a ring in shared memory that each warp fills for itself, several groups
// of two steps ahead: registers would hold as many bytes in flight, but only in unrolled code, and that code, run once
// a warp, arrived more slowly than the weights.
#pragma once

#include <cstdint>

#include "kernels/fused_experts_format.cuh"

namespace ort_moe {

__device__ __forceinline__ void MultiplyPairs(__half, float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void MultiplyPairs(__nv_bfloat16, float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 bytes to shared memory in the background; zeros where not `valid`.
__device__ __forceinline__ void CopyAsync(void* target, const void* source, bool valid = true) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void CopyAsync8(void* target, const void* source, bool valid) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(address), "l"(source), "r"(valid ? 8 : 0)
               : "memory");
}

__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most kPending groups of this thread's copies are under way.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Where one warp's rows lie: the lane's weights at its 16 bytes of step 0, and the scales that the lane copies.
struct LaneRows {
  const uint8_t* weights[2];  // of each tile; null: the tile is empty
  const uint8_t* scales;      // null where the lane's tile is empty
};

template <typename Format, int kRingGroups>
class WeightRing {
 public:
  static constexpr int kTiles = 2;
  static constexpr int kGroupSteps = 2;
  static constexpr int kGroups = kRingGroups;
  static constexpr int kScaleBytes = Format::kScaled ? kTiles * kTileRows * kGroupSteps * 8 : 0;
  static constexpr int kGroupBytes = kTiles * kGroupSteps * kLanes * static_cast<int>(sizeof(uint4)) + kScaleBytes;
  static constexpr int kBytes = kGroups * kGroupBytes;  // of a warp

  __device__ __forceinline__ explicit WeightRing(void* memory) : memory_(static_cast<char*>(memory)) {}

  // `row_of(tile, row)`: the weight row among all experts', or -1 in an empty tile.
  template <typename RowOf>
  __device__ __forceinline__ static LaneRows RowsOf(const LayerParams& layer, RowOf row_of) {
    const int lane = threadIdx.x % kLanes;
    LaneRows rows{};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int64_t row = row_of(tile, lane / 4);
      if (row >= 0) {
        rows.weights[tile] = layer.weights + row * Format::RowBytes(layer.depth) + lane % 4 * sizeof(uint4);
      }
    }
    if constexpr (Format::kScaled) {
      const int64_t row = row_of(lane / 16, lane / 2 % kTileRows);
      if (row >= 0) rows.scales = layer.scales + row * (layer.depth / kNvfp4Block);
    }
    return rows;
  }

  // Starts the copies of steps first and first + 1, as far as they come before `end`, and closes their group.
  __device__ __forceinline__ void Fill(int group, const LaneRows& rows, int depth, int first, int end) {
    if (first < end) {
      const int lane = threadIdx.x % kLanes;
      uint4* const words = Words(group);
      const int row_bytes = static_cast<int>(Format::RowBytes(depth));
#pragma unroll
      for (int step = 0; step < kGroupSteps; ++step) {
        const int offset = (first + step) * kStepBytes;
        const bool valid = first + step < end && offset + lane % 4 * static_cast<int>(sizeof(uint4)) < row_bytes;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const bool reads = valid && rows.weights[tile] != nullptr;
          CopyAsync(words + (step * kTiles + tile) * kLanes, reads ? rows.weights[tile] + offset : nullptr, reads);
        }
      }
      if constexpr (Format::kScaled) FillScales(group, rows.scales, depth, first, end);
    }
    CommitCopies();
  }

  // Adds the products of a filled group, `steps` of it. `vectors`: the lane's activations at the group's first step, in
  // 16 bytes; any token's where its own does not exist. sum: row g of the first tile by tokens 2q and 2q + 1, then of
  // the second.
  __device__ __forceinline__ void Accumulate(int group, const uint4* vectors, int steps, float (&sum)[4]) const {
    const int lane = threadIdx.x % kLanes;
    const uint4* const words = Words(group);
#pragma unroll
    for (int step = 0; step < kGroupSteps; ++step) {
      if (step > 0 && steps <= step) break;
      uint4 weights[kTiles];
      typename Format::Scales scales[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        weights[tile] = words[(step * kTiles + tile) * kLanes];
        if constexpr (Format::kScaled) {
          const char* const row = ScalesOf(group) + (tile * kTileRows + lane / 4) * kGroupSteps * 8;
          scales[tile] = Format::ScalesOf(*reinterpret_cast<const uint16_t*>(row + step * 8 + lane % 4 * 2));
        }
      }
#pragma unroll
      for (int v = 0; v < Format::kVectors; ++v) {
        const uint4 tokens = vectors[step * (Format::kStep / kVectorElements) + v * 4];
        uint32_t pairs[2][4] = {};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) Format::Pairs(weights[tile], v, scales[tile], pairs[tile]);
        using Element = typename Format::Element;
        MultiplyPairs(Element{}, sum, pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1], tokens.x, tokens.y);
        MultiplyPairs(Element{}, sum, pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3], tokens.z, tokens.w);
      }
    }
  }

 private:
  static constexpr int kStepBytes = 64;  // of a row: four lanes' 16

  __device__ __forceinline__ uint4* Words(int group) const {
    return reinterpret_cast<uint4*>(memory_ + group * kGroupBytes) + threadIdx.x % kLanes;
  }
  __device__ __forceinline__ char* ScalesOf(int group) const {
    return memory_ + (group + 1) * kGroupBytes - kScaleBytes;
  }

  // Eight scales of a row and step a lane.
  __device__ __forceinline__ void FillScales(int group, const uint8_t* row, int depth, int first, int end) {
    const int lane = threadIdx.x % kLanes;
    const int step = first + lane % kGroupSteps;
    char* const target = ScalesOf(group) + lane * 8;
    if (depth % Format::kStep == 0) {
      const bool reads = step < end && row != nullptr;
      CopyAsync8(target, reads ? row + step * 8 : nullptr, reads);
      return;
    }
    // Rows that are no multiple of 8 bytes.
    const int row_scales = depth / static_cast<int>(kNvfp4Block);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const bool valid = row != nullptr && step < end && step * 8 + i < row_scales;
      *reinterpret_cast<uint16_t*>(target + i) =
          valid ? __ldg(reinterpret_cast<const uint16_t*>(row + step * 8 + i)) : uint16_t{0};
    }
  }

  char* memory_;
};

// Steps of slice `slice` of a layer's reduction.
template <typename Format>
__device__ __forceinline__ int2 StepsOf(const LayerParams& layer, int slice) {
  const int steps = (layer.depth + Format::kStep - 1) / Format::kStep;
  const int first = min(slice * layer.slice_steps, steps);
  return make_int2(first, min(first + layer.slice_steps, steps));
}

}  // namespace ort_moe
