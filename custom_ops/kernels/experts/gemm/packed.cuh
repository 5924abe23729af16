// Packed weights as wgmma's first operand: decoded by warpgroups of their own to where dense ones would lie.
//
// A ring of stages holds 64 bytes of each weight row as they are in memory. A thread takes 16 of them at a time, with
// the scale that it has read a step ahead, and writes them swizzled into the stage that those who multiply wait for: a
// weight is decoded once for all tokens of a tile, while the tensor cores are busy with the step before.
#pragma once

#include "kernels/experts/gemm/codes.cuh"
#include "kernels/experts/gemm/dense.cuh"
#include "kernels/experts/gemm/slots.cuh"

namespace ort_moe {

// Lower tiles leave registers for twice as many threads that decode.
template <typename CodeOf, typename T, bool kLow>
struct PackedOperand : DenseOperand<T, kLow ? 96 : 144> {
  using Code = CodeOf;
  static constexpr int kDecoders = kLow ? 2 : 1;
  static constexpr int kRowBytes = 64, kBoxDepth = kRowBytes;
  static constexpr int kBoxBytes = DenseOperand<T>::kGroups * DenseOperand<T>::kBlocks * 64 * kRowBytes;
  static constexpr int kBoxColumns = kRowBytes * 8 / Code::kBits;
  static constexpr int kStepBytes = DenseOperand<T>::kDepth * Code::kBits / 8;  // of a row in a step
  static constexpr bool kScaled = true;
  static constexpr float kFactor = Code::kFactor;

  static constexpr int kProducerRegisters = 48, kConsumerRegisters = kLow ? 128 : 184;  // of a thread
  static constexpr int kDecoderRegisters = kLow ? 88 : 96;

  // Multiples of which an instruction's columns are chosen.
  static __host__ __device__ constexpr int Granule(int) { return 16; }

  static constexpr CUtensorMapSwizzle kSwizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  static int64_t RowBytes(int64_t depth) { return depth * Code::kBits / 8; }
  static int64_t BoxUnits(int64_t depth) { return RowBytes(depth); }
};

// What a thread's weight rows are multiplied with, of a step ahead: loads that nobody waits for yet.
template <typename Code, bool kFirst, int kRows>
class RowScales {
  static constexpr int kColumns = 128 / Code::kBits;  // of 16 bytes

 public:
  // Of rows from `at_row` on, `stride` apart.
  __device__ __forceinline__ RowScales(const GemmParams& p, const GemmTile& tile, int at_row, int stride) {
    const LayerParams& layer = kFirst ? p.experts.fc1 : p.experts.fc2;
    scales_ = reinterpret_cast<uint64_t>(layer.scales);
    zero_points_ = reinterpret_cast<uint64_t>(layer.zero_points);
    shift_ = __ffs(layer.block_size) - 1;
    depth_ = layer.depth;
    const int rows = kSharesRows<Code> ? (layer.rows + layer.block_size - 1) >> shift_ : layer.rows;
    scales_ += static_cast<int64_t>(tile.expert) * rows * SlotSource::ScaleBytes<Code>(layer);
    if constexpr (Code::kHasZeroPoints) {
      zero_points_ += static_cast<int64_t>(tile.expert) * rows * SlotSource::ZeroBytes<Code>(layer);
      has_zero_points_ = layer.zero_points != nullptr;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const SlotSource source = SlotSource::Of<Code, kFirst>(p, tile, at_row + i * stride);
      scale_at_[i] = static_cast<uint32_t>(source.scales - scales_);
      zeros_[i] = Code::kBits == 8 ? 0x80u : 0x88u;  // half of what codes can be
      if constexpr (Code::kHasZeroPoints) zero_at_[i] = static_cast<uint32_t>(source.zero_points - zero_points_);
    }
  }

  // From `column` on; behind the rows' end, of the last ones.
  __device__ __forceinline__ void Load(int column) {
    const int at = min(column, depth_ - kColumns), block = at >> shift_;
#pragma unroll
    for (int i = 0; i < kRows; ++i) scales_of_[i] = Code::Scale(scales_ + scale_at_[i], block, at);
    if constexpr (Code::kHasZeroPoints) {
      if (!has_zero_points_) return;
#pragma unroll
      for (int i = 0; i < kRows; ++i) zeros_[i] = Code::ZeroPoint(zero_points_ + zero_at_[i], block);
    }
  }

  // Behind the rows' end weights are 0.
  __device__ __forceinline__ Code Of(int row, int column) const {
    return Code(column < depth_ ? scales_of_[row] : 0u, zeros_[row], column >> shift_);
  }

 private:
  uint64_t scales_, zero_points_;  // of the expert
  uint32_t scale_at_[kRows], zero_at_[kRows], scales_of_[kRows], zeros_[kRows];
  int shift_, depth_;
  bool has_zero_points_;
};

__device__ __forceinline__ void LoadVector(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void StoreVector(uint32_t address, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

// By the warpgroups that decode.
template <typename Operand, bool kFirst>
__device__ __forceinline__ void DecodeWeights(const GemmParams& p, const GemmShared<Operand>& s,
                                              const GemmTileList& list) {
  using Code = typename Operand::Code;
  constexpr int kVector = 16, kUnits = Operand::kStepBytes / kVector;  // of a row
  constexpr int kColumns = Operand::kDepth / kUnits, kVectors = kColumns / 8;
  constexpr int kStride = Operand::kDecoders * kGroupThreads / kUnits;
  constexpr int kRows = GemmShared<Operand>::kTileRows / kStride;
  constexpr int kSteps = Operand::kRowBytes / Operand::kStepBytes;  // of a stage of bytes
  constexpr int kDenseRow = Operand::kTokenBytes;
  static_assert(kStride % kSlabRows == 0);
  const int thread = threadIdx.x - (1 + Operand::kGroups) * kGroupThreads;
  const int unit = thread % kUnits, first_row = thread / kUnits;
  const uint32_t from = first_row * Operand::kRowBytes + unit * kVector;
  uint32_t to[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    to[j] = first_row * kDenseRow + ((unit * kVectors + j) ^ (first_row % 8)) * kVector;
  }
  GemmRing ring(s.barriers, p.stages), bytes(s.byte_barriers, p.byte_stages);
  GemmTileWalk walk(list);
  GemmTile tile;
  while (walk.Next(list, &tile)) {
    RowScales<Code, kFirst, kRows> scales(p, tile, tile.row_tile * GemmShared<Operand>::kTileRows + first_row, kStride);
    int column = unit * kColumns;
    uint32_t words[kRows][4];
    const auto load = [&](int step) {  // what nobody waits for yet
      scales.Load(column);
      if (step % kSteps == 0) bytes.WaitFull();
      const uint32_t source =
          s.byte_stages + bytes.at * Operand::kBoxBytes + from + step % kSteps * Operand::kStepBytes;
#pragma unroll
      for (int i = 0; i < kRows; ++i) LoadVector(source + i * kStride * Operand::kRowBytes, words[i]);
    };
    load(0);
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      ring.WaitEmpty();
      const uint32_t target = s.stages + ring.at * s.stage_bytes;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        uint32_t vectors[kVectors][4];
        scales.Of(i, column).Decode(words[i], vectors);
#pragma unroll
        for (int j = 0; j < kVectors; ++j) StoreVector(target + to[j] + i * kStride * kDenseRow, vectors[j]);
      }
      FenceForAsyncProxy();
      Arrive(ring.Full());
      ring.Advance();
      if (step % kSteps == kSteps - 1 || step == p.steps - 1) {
        Arrive(bytes.Empty());
        bytes.Advance();
      }
      column += Operand::kDepth;
      if (step + 1 < p.steps) load(step + 1);
    }
  }
}

}  // namespace ort_moe
