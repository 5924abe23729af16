// What three warps copy into a stage of the grouped product for few tokens (fused_experts_gemm_sparse.cuh): rows of
// tokens, and the weight rows' slots.
#pragma once

#include "kernels/cluster.cuh"
#include "kernels/fused_experts_copies.cuh"
#include "kernels/fused_experts_gemm_finish.cuh"
#include "kernels/fused_experts_gemm_slots.cuh"
#include "kernels/fused_experts_gemm_sparse.cuh"

namespace ort_moe {

__device__ __forceinline__ void CopyTwoWords(uint32_t target, uint64_t source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}

// The slots of one stage after another. Where rows begin anywhere, whole words around the bytes that a stage needs.
template <typename Operand, bool kFirst>
class SlotCopies {
 public:
  __device__ __forceinline__ SlotCopies(const GemmParams& p, const GemmTile& tile, int thread) : thread_(thread) {
    const LayerParams& layer = kFirst ? p.experts.fc1 : p.experts.fc2;
    const int row_bytes = SlotSource::ScaleBytes<Code>(layer);
    stage_bytes_ = Code::ScaleAt(Operand::kDepth, layer.block_size);
    const int unaligned = row_bytes % 4 == 0 ? 0 : 4 - Code::kScaleSize;
    words_ = (stage_bytes_ + unaligned + 3) / 4;
    width_ = (row_bytes | stage_bytes_) % 16 == 0 ? 16 : (row_bytes | stage_bytes_) % 8 == 0 ? 8 : 4;
    if constexpr (Code::kHasZeroPoints) zero_stage_bytes_ = Code::ZeroAt(Operand::kDepth, layer.block_size) / 2;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int row = min(thread + i * kTokenThreads, Operand::kRows - 1);
      const SlotSource source = SlotSource::Of<Code, kFirst>(p, tile, tile.row_tile * Operand::kRows + row);
      source_[i] = source.scales;
      left_[i] = source.within ? row_bytes : 0;
      if constexpr (Code::kHasZeroPoints) {
        zero_source_[i] = source.zero_points;
        zero_left_[i] = source.within ? SlotSource::ZeroBytes<Code>(layer) : 0;
      }
    }
  }

  __device__ __forceinline__ void Copy(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int row = thread_ + i * kTokenThreads;
      if (row >= Operand::kRows) break;
      const uint32_t slot = stage + Operand::kBoxBytes + row * Code::kSlotBytes;
      if (width_ == 16) {
        CopyVector(true, slot, reinterpret_cast<const void*>(source_[i]), min(max(left_[i], 0), 16));
      } else if (width_ == 8) {
        for (int byte = 0; byte < stage_bytes_; byte += 8) {
          const int bytes = min(max(left_[i] - byte, 0), 8);
          CopyTwoWords(slot + byte, bytes > 0 ? source_[i] + byte : source_[i], bytes);
        }
      } else {
        CopyAround(slot, source_[i], left_[i], words_);
      }
      source_[i] += left_[i] > stage_bytes_ ? stage_bytes_ : 0;  // the address stays within the row
      left_[i] -= stage_bytes_;
      if constexpr (Code::kHasZeroPoints) {
        if (zero_source_[i] != 0) {
          CopyAround(slot + kZeroPointsAt, zero_source_[i], zero_left_[i], 2);
          zero_source_[i] += zero_left_[i] > zero_stage_bytes_ ? zero_stage_bytes_ : 0;
          zero_left_[i] -= zero_stage_bytes_;
        }
      }
    }
  }

 private:
  using Code = typename Operand::Code;
  static constexpr int kRowsOfThread = (Operand::kRows + kTokenThreads - 1) / kTokenThreads;

  // Words from that of `source` on, of which `left` bytes are the row's; zeros behind them.
  static __device__ __forceinline__ void CopyAround(uint32_t target, uint64_t source, int left, int words) {
    const uint64_t first = source & ~uint64_t{3};
    if (left > 0) left += static_cast<int>(source - first);
    for (int word = 0; word < words; ++word) {
      const int bytes = min(max(left - 4 * word, 0), 4);
      CopyWord(target + 4 * word, bytes > 0 ? first + 4 * word : first, bytes);
    }
  }

  int thread_, stage_bytes_, words_, width_, zero_stage_bytes_ = 0;  // bytes that a stage needs; words, bytes of a copy
  uint64_t source_[kRowsOfThread], zero_source_[kRowsOfThread] = {};
  int left_[kRowsOfThread], zero_left_[kRowsOfThread] = {};  // bytes of the row
};

// By three warps; beside a tile's first stage, the numbers that its tokens' sums are multiplied with.
template <typename Operand, bool kFirst>
__device__ __forceinline__ void CopySparseTokens(const GemmParams& p, const GemmShared<Operand>& s,
                                                 const GemmTileList& list) {
  constexpr int kVector = 16, kVectors = Operand::kTokenBytes / kVector, kPanelVectors = 8;  // of a row in a stage
  constexpr int kStride = kTokenThreads / kVectors;                                          // rows at once
  static_assert(kTokenThreads % kVectors == 0 && Operand::kMaxTokens <= kTokenThreads);
  const LayerParams& layer = kFirst ? p.experts.fc1 : p.experts.fc2;
  const int row_bytes = layer.depth * static_cast<int>(sizeof(typename Operand::Element));
  const bool mixes = kFirst && p.experts.mix_input;
  GemmRing ring(s.barriers, p.stages);
  GemmTileWalk walk(list);
  GemmTile tile;
  const int thread = threadIdx.x - kLanes, vector = thread % kVectors, first_row = thread / kVectors;
  const uint32_t panel = Operand::kWeightBytes + vector / kPanelVectors * p.max_tokens * (kPanelVectors * kVector);
  const uint32_t row_vectors = p.source_stride / kVector, numbers = SharedAddress(s.mix);
  int buffer = 0;
  while (walk.Next(list, &tile)) {
    uint32_t* const rows = s.rows + buffer * p.max_tokens;
    buffer ^= 1;
    int row = tile.first + thread, slot = 0;
    if (thread < tile.tokens) {
      if constexpr (kFirst) {  // maps of other indices do no harm
        const int expanded = min(max(p.experts.maps.permuted_to_unpermuted[row], 0), p.experts.slots - 1);
        row = expanded % p.experts.tokens;
        slot = row * p.experts.k + expanded / p.experts.tokens;
        if (mixes && tile.row_tile == 0) p.experts.ones[slot] = 1.0f;
      }
      rows[thread] = row * row_vectors;
    }
    __syncwarp();
    BlockSync(kTokenBarrier, kTokenThreads);
    SlotCopies<Operand, kFirst> slots(p, tile, thread);
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      ring.WaitEmpty();
      const uint32_t stage = s.stages + ring.at * s.stage_bytes;
      if (step == 0 && thread < tile.tokens) {
        const uint32_t number = numbers + (ring.at * 2 * p.max_tokens + thread) * static_cast<int>(sizeof(float));
        if constexpr (Operand::kConverts) CopyWord(number, reinterpret_cast<uint64_t>(p.factors + row), 4);
        if (mixes) {
          CopyWord(number + p.max_tokens * static_cast<int>(sizeof(float)),
                   reinterpret_cast<uint64_t>(p.experts.mix + slot), 4);
        }
      }
      slots.Copy(stage);
      const int column = step * Operand::kTokenBytes + vector * kVector;
      const int bytes = column < row_bytes ? kVector : 0;
      const char* const source = static_cast<const char*>(p.source) + (bytes > 0 ? column : 0);
#pragma unroll 1
      for (int r = first_row; r < tile.tokens; r += kStride) {
        const uint32_t at = r * (kPanelVectors * kVector) + (vector ^ r) % kPanelVectors * kVector;
        CopyVector(true, stage + panel + at, source + static_cast<uint64_t>(rows[r]) * kVector, bytes);
      }
      ArriveAfterCopies(ring.Full());
      ring.Advance();
    }
  }
  WaitForCopies<0>();
}

}  // namespace ort_moe
