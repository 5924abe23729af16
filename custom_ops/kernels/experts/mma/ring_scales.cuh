// What a group of FusedExperts' ring of weights holds beside the weights: their scales, and zero points.
//
// Lanes 4 * g to 4 * g + 3 copy those of row g of each tile and read them again. nvfp4's are whole words of four bytes.
// Those of the formats of format_codes.cuh begin at any byte: a row's place has the words that they lie in, and each
// lane keeps where in them its rows' begin.
//
// All have
//   Start     the next Fill is group `group` of `rows`, the first of the tiles' four times four rows, of their experts
//   Choose    which experts those four are of
//   Fill      starts a group's copies into its place, zeros behind the rows' ends
#pragma once

#include <cstdint>

#include "kernels/common/background_copies.cuh"
#include "kernels/experts/mma/format.cuh"
#include "kernels/experts/mma/format_codes.cuh"

namespace ort_moe {

constexpr int kGroupSteps = 2;

// A product of 64 bits in one operation, of numbers that are not negative; an expert's bytes are below 2^31
// (FitsOffsets).
__device__ __forceinline__ int64_t Wide(int a, int b) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(a)) * static_cast<uint32_t>(b));
}

// The row of a tile that belongs to a lane and its three neighbours; or its expert, with a step of 0.
__device__ __forceinline__ int LaneRow(const int (&rows)[4], int tile, int row_step) {
  const int row = threadIdx.x % kLanes / 4;
  return (row >= kTileRows / 2 ? rows[2 * tile + 1] : rows[2 * tile]) + row % (kTileRows / 2) * row_step;
}

template <typename Format>
class RingScales;

template <typename T>
class RingScales<DenseFormat<T>> {
 public:
  static constexpr int kBytes = 0;

  __device__ __forceinline__ explicit RingScales(const LayerParams&) {}
  __device__ __forceinline__ void Start(const LayerParams&, const int (&)[4], int, int) {}
  __device__ __forceinline__ void Choose(const LayerParams&, const int (&)[4]) {}
  __device__ __forceinline__ void Fill(char*) {}
};

template <typename T>
class RingScales<Nvfp4Format<T>> {
 public:
  static constexpr int kRowScales = kGroupSteps * Nvfp4Format<T>::kStepScales;  // of a row in a group
  static constexpr int kBytes = 2 * kTileRows * kRowScales;

  __device__ __forceinline__ explicit RingScales(const LayerParams& layer)
      : row_scales_(layer.depth / static_cast<int>(kNvfp4Block)) {}

  __device__ __forceinline__ void Start(const LayerParams& layer, const int (&rows)[4], int row_step, int group) {
    const int at = group * kRowScales + threadIdx.x % 4 * 4;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      scales_[tile] = layer.scales + at + Wide(LaneRow(rows, tile, row_step), row_scales_);
    }
    left_ = row_scales_ - at;
  }
  __device__ __forceinline__ void Choose(const LayerParams& layer, const int (&experts)[4]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) scales_[tile] += Wide(LaneRow(experts, tile, 0), layer.rows * row_scales_);
  }

  __device__ __forceinline__ void Fill(char* target) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      CopyWord(target + tile * (kBytes / 2) + threadIdx.x % kLanes * 4, scales_[tile], left_ > 0 ? 4 : 0);
      scales_[tile] += kRowScales;
    }
    left_ -= kRowScales;
  }

  // The scales of a step of row `row` of a tile.
  __device__ __forceinline__ static const uint8_t* Row(const char* place, int step, int tile, int row) {
    return reinterpret_cast<const uint8_t*>(place) + (tile * kTileRows + row) * kRowScales +
           step * Nvfp4Format<T>::kStepScales;
  }

 private:
  int row_scales_;
  const uint8_t* scales_[2];
  int left_;
};

// Pieces of the tiles' rows in an array of bytes: kWords words of each. The array begins at a whole word.
template <int kWords>
class RowPieces {
 public:
  static constexpr int kRowBytes = kWords * 4;
  static constexpr int kBytes = 2 * kTileRows * kRowBytes;

  // The next Fill() is byte `first` of the rows and what follows.
  __device__ __forceinline__ void Start(const uint8_t* array, const int64_t (&rows)[2], int row_bytes, int first) {
    const int at = first + threadIdx.x % 4 * 4;
    left_ = row_bytes - at;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) next_[tile] = array + rows[tile] * row_bytes + at;
  }

  // A piece into its place, zeros behind the rows' ends: there, weights of 0 meet a scale that is not to be another
  // row's NaN. The next one begins `step` bytes behind this one. Returns where the piece lands in its row's place, the
  // second tile's in the second byte.
  __device__ __forceinline__ uint32_t Fill(char* target, int step) {
    const int word = threadIdx.x % 4;
    uint32_t shifts = 0;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(next_[tile])) & 3;
      shifts |= static_cast<uint32_t>(shift) << (8 * tile);
      if (word < kWords) CopyWord(Row(target, tile) + 4 * word, next_[tile] - shift, min(max(left_ + shift, 0), 4));
      next_[tile] += step;
    }
    left_ -= step;
    return shifts;
  }

  // The place of the lane's row of a tile.
  template <typename Char>
  __device__ __forceinline__ static Char* Row(Char* place, int tile) {
    return place + (tile * kTileRows + static_cast<int>(threadIdx.x % kLanes / 4)) * kRowBytes;
  }

 private:
  const uint8_t* next_[2];  // the lane's, a word behind that of the lane before
  int left_;                // bytes from there to the rows' ends
};

// Of the formats of format_codes.cuh; blocks have a power of 2 of weights, a lane's part of a step at least and a group
// at most.
template <typename Format>
class RingScales {
  using Scales = RowPieces<4>;
  using Zeros = RowPieces<2>;
  static constexpr bool kHasZeros = Format::kZeroBits > 0;
  static constexpr int kZerosAt = Scales::kBytes, kShiftsAt = kZerosAt + (kHasZeros ? Zeros::kBytes : 0);

 public:
  static constexpr int kBytes = kShiftsAt + kLanes * static_cast<int>(sizeof(uint32_t));

  __device__ __forceinline__ explicit RingScales(const LayerParams& layer) {
    block_bits_ = __ffs(layer.block_size) - 1;
    blocks_ = (layer.depth + layer.block_size - 1) >> block_bits_;
    given_zeros_ = kHasZeros && layer.zero_points != nullptr;
  }

  __device__ __forceinline__ void Start(const LayerParams&, const int (&rows)[4], int row_step, int group) {
    group_ = group;
    rows_[0] = LaneRow(rows, 0, row_step);
    rows_[1] = LaneRow(rows, 1, row_step);
  }
  __device__ __forceinline__ void Choose(const LayerParams& layer, const int (&experts)[4]) {
    int64_t own[2], own_scales[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int expert = LaneRow(experts, tile, 0);
      own[tile] = own_scales[tile] = Wide(expert, layer.rows) + rows_[tile];
      if constexpr (Format::kSharesRows) {
        const int row_blocks = (layer.rows + layer.block_size - 1) >> block_bits_;
        own_scales[tile] = Wide(expert, row_blocks) + (rows_[tile] >> block_bits_);
      }
    }
    const int first = group_ * GroupBlocks();
    if (given_zeros_) {
      zeros_.Start(layer.zero_points, own, (blocks_ * Format::kZeroBits + 7) / 8, first * Format::kZeroBits / 8);
    }
    scales_.Start(layer.scales, own_scales, blocks_ * Format::kScaleBytes, first * Format::kScaleBytes);
  }

  __device__ __forceinline__ void Fill(char* target) {
    uint32_t shifts = scales_.Fill(target, GroupBlocks() * Format::kScaleBytes);
    if (given_zeros_) shifts |= zeros_.Fill(target + kZerosAt, GroupBlocks() * Format::kZeroBits / 8) << 16;
    reinterpret_cast<uint32_t*>(target + kShiftsAt)[threadIdx.x % kLanes] = shifts;
  }

  // The scale of a lane's part of a step, `part` of four, of the lane's row of a tile.
  __device__ __forceinline__ float Scale(const char* place, int step, int tile, int part) const {
    const char* const at = Scales::Row(place, tile) + Shift(place, tile) + BlockOf(step, part) * Format::kScaleBytes;
    if constexpr (Format::kScaleBytes == 1) {
      return Format::Scale(*reinterpret_cast<const uint8_t*>(at));
    } else if constexpr (Format::kScaleBytes == 2) {
      return Format::Scale(*reinterpret_cast<const uint16_t*>(at));
    } else {
      return Format::Scale(*reinterpret_cast<const uint32_t*>(at));
    }
  }

  // Its zero point.
  __device__ __forceinline__ uint32_t Zero(const char* place, int step, int tile, int part) const {
    if (!given_zeros_) return Format::kZero;
    const int block = BlockOf(step, part);
    const char* const row = Zeros::Row(place + kZerosAt, tile) + Shift(place, 2 + tile);
    const uint32_t byte = *reinterpret_cast<const uint8_t*>(row + block * Format::kZeroBits / 8);
    return Format::kZeroBits == 8 ? byte : byte >> block % 2 * 4 & 15u;
  }

 private:
  __device__ __forceinline__ int GroupBlocks() const { return kGroupSteps * Format::kStep >> block_bits_; }
  __device__ __forceinline__ int BlockOf(int step, int part) const {
    return (step * Format::kStep + part * Format::kBlock) >> block_bits_;
  }
  __device__ __forceinline__ static int Shift(const char* place, int array) {
    return reinterpret_cast<const uint8_t*>(place + kShiftsAt)[threadIdx.x % kLanes * 4 + array];
  }

  int block_bits_, blocks_;  // of a row
  bool given_zeros_;
  int rows_[2];  // the lane's, of their experts
  int group_;
  Scales scales_;
  Zeros zeros_;
};

}  // namespace ort_moe
