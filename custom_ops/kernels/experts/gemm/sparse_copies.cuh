// What three warps copy into a stage of the grouped product for few tokens (sparse.cuh): one the rows of tokens, two
// the weight rows' slots.
#pragma once

#include "kernels/common/background_copies.cuh"
#include "kernels/common/cluster.cuh"
#include "kernels/experts/gemm/finish.cuh"
#include "kernels/experts/gemm/slots.cuh"
#include "kernels/experts/gemm/sparse.cuh"

namespace ort_moe {

constexpr int kSlotThreads = kTokenThreads - kLanes;

// Bytes that other copies will bring to the barrier; not an arrival.
__device__ __forceinline__ void ExpectBytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void StoreZeros(uint32_t target) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(target), "r"(0) : "memory");
}

__device__ __forceinline__ void CopyTwoWords(uint32_t target, uint64_t source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}

// The slots of one stage after another; a thread has rows kSlotThreads apart. Where rows begin anywhere, whole words
// around the bytes that a stage needs. What rows behind the layer's last get does not matter: another row's.
template <typename Operand, bool kFirst>
class SlotCopies {
 public:
  __device__ __forceinline__ SlotCopies(const GemmParams& p, int thread) : thread_(thread) {
    const LayerParams& layer = kFirst ? p.experts.fc1 : p.experts.fc2;
    row_bytes_ = SlotSource::ScaleBytes<Code>(layer);
    stage_bytes_ = Code::ScaleAt(Operand::kDepth, layer.block_size);
    const int unaligned = row_bytes_ % 4 == 0 ? 0 : 4 - Code::kScaleSize;
    words_ = (stage_bytes_ + unaligned + 3) / 4;
    width_ = (row_bytes_ | stage_bytes_) % 16 == 0 ? 16 : (row_bytes_ | stage_bytes_) % 8 == 0 ? 8 : 4;
    if constexpr (Code::kHasZeroPoints) {
      zero_row_bytes_ = SlotSource::ZeroBytes<Code>(layer);
      zero_stage_bytes_ = Code::ZeroAt(Operand::kDepth, layer.block_size) / 2;
    }
  }

  __device__ __forceinline__ void Begin(const GemmParams& p, const GemmTile& tile) {
    left_ = row_bytes_;
    zero_left_ = zero_row_bytes_;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int row = tile.row_tile * Operand::kRows + thread_ + i * kSlotThreads;
      const SlotSource source = SlotSource::Of<Code, kFirst>(p, tile, row);
      source_[i] = source.scales;
      if constexpr (Code::kHasZeroPoints) zero_source_[i] = source.zero_points;
    }
  }

  __device__ __forceinline__ void Copy(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int row = thread_ + i * kSlotThreads;
      const uint32_t slot = stage + Operand::kBoxBytes + row * kScaleSlotBytes;
      if (width_ == 16) {
        CopyVector(true, slot, reinterpret_cast<const void*>(source_[i]), min(max(left_, 0), 16));
      } else if (width_ == 8) {
        for (int byte = 0; byte < stage_bytes_; byte += 8) {
          const int bytes = min(max(left_ - byte, 0), 8);
          CopyTwoWords(slot + byte, bytes > 0 ? source_[i] + byte : source_[i], bytes);
        }
      } else {
        CopyAround(slot, source_[i], left_, words_);
      }
      source_[i] += left_ > stage_bytes_ ? stage_bytes_ : 0;  // the address stays within the row
      if constexpr (Code::kHasZeroPoints) {
        if (zero_source_[i] != 0) {
          CopyAround(stage + Operand::kZeroSlotsAt + row * kZeroSlotBytes, zero_source_[i], zero_left_,
                     kZeroSlotBytes / 4);
          zero_source_[i] += zero_left_ > zero_stage_bytes_ ? zero_stage_bytes_ : 0;
        }
      }
    }
    left_ -= stage_bytes_;
    zero_left_ -= zero_stage_bytes_;
  }

 private:
  using Code = typename Operand::Code;
  static constexpr int kRowsOfThread = Operand::kRows / kSlotThreads;
  static_assert(Operand::kRows % kSlotThreads == 0);

  // Words from that of `source` on, of which `left` bytes are the row's; zeros behind them.
  static __device__ __forceinline__ void CopyAround(uint32_t target, uint64_t source, int left, int words) {
    const uint64_t first = source & ~uint64_t{3};
    if (left > 0) left += static_cast<int>(source - first);
    for (int word = 0; word < words; ++word) {
      const int bytes = min(max(left - 4 * word, 0), 4);
      CopyWordAt(target + 4 * word, reinterpret_cast<const void*>(bytes > 0 ? first + 4 * word : first), bytes);
    }
  }

  int thread_, row_bytes_, stage_bytes_, words_, width_;  // bytes of a row, and that a stage needs; of a copy
  int zero_row_bytes_ = 0, zero_stage_bytes_ = 0;
  int left_ = 0, zero_left_ = 0;  // bytes of the row
  uint64_t source_[kRowsOfThread], zero_source_[kRowsOfThread] = {};
};

template <typename Operand, bool kFirst>
__device__ __forceinline__ void CopySparseSlots(const GemmParams& p, const GemmShared<Operand>& s,
                                                const GemmTileList& list) {
  GemmRing ring(s.barriers, p.stages);
  GemmTileWalk walk(list);
  GemmTile tile;
  SlotCopies<Operand, kFirst> slots(p, threadIdx.x - 2 * kLanes);
  while (walk.Next(list, &tile)) {
    slots.Begin(p, tile);
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      ring.WaitEmpty();
      slots.Copy(s.stages + ring.at * s.stage_bytes);
      ArriveAfterCopies(ring.Full());
      ring.Advance();
    }
  }
  WaitForCopies<0>();
}

// A lane takes a row of a tile, and beside its first stage writes the numbers that the row's sums are multiplied with.
// Zeros follow a row within the half of a stage where it ends: weights of integers are not 0 there.
template <typename Operand, bool kFirst>
__device__ __forceinline__ void CopySparseRows(const GemmParams& p, const GemmShared<Operand>& s,
                                               const GemmTileList& list) {
  constexpr int kHalfBytes = Operand::kTokenBytes / 2, kVector = 16;
  static_assert(Operand::kMaxTokens <= kLanes);
  const LayerParams& layer = kFirst ? p.experts.fc1 : p.experts.fc2;
  const int row_bytes = layer.depth * static_cast<int>(sizeof(typename Operand::Element));
  const bool mixes = kFirst && p.experts.mix_input;
  GemmRing ring(s.barriers, p.stages);
  GemmTileWalk walk(list);
  GemmTile tile;
  const int lane = threadIdx.x % kLanes;
  while (walk.Next(list, &tile)) {
    const bool has_row = lane < tile.tokens;
    int row = tile.first + lane;
    float factor = 1.0f, mix = 1.0f;
    if (has_row) {
      if constexpr (kFirst) {  // maps of other indices do no harm
        const int expanded = min(max(p.experts.maps.permuted_to_unpermuted[row], 0), p.experts.slots - 1);
        row = expanded % p.experts.tokens;
        if (mixes) {
          const int slot = row * p.experts.k + expanded / p.experts.tokens;
          mix = p.experts.mix[slot];
          if (tile.row_tile == 0) p.experts.ones[slot] = 1.0f;
        }
      }
      if constexpr (Operand::kConverts) factor = p.factors[row];
    }
    const char* source = static_cast<const char*>(p.source) + static_cast<int64_t>(row) * p.source_stride;
    int left = row_bytes;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      ring.WaitEmpty();
      const uint32_t target = s.stages + ring.at * s.stage_bytes + Operand::kTokensAt + lane * Operand::kTokenPitch;
      const int bytes = min(left, Operand::kTokenBytes);
      if (lane == 0) ExpectBytes(ring.Full(), tile.tokens * bytes);
      if (has_row) {
        if (step == 0) {
          float* const numbers = s.mix + ring.at * 2 * p.max_tokens + lane;
          numbers[0] = factor;
          numbers[p.max_tokens] = mix;
        }
        CopyBulk(target, source, bytes, ring.Full());
        if (bytes % kHalfBytes != 0) {
          for (int at = bytes; at % kHalfBytes != 0; at += kVector) StoreZeros(target + at);
          FenceForAsyncProxy();  // ahead of a later copy to the same place, by this thread
        }
        source += Operand::kTokenBytes;
        left -= Operand::kTokenBytes;
      }
      Arrive(ring.Full());
      ring.Advance();
    }
  }
}

template <typename Operand, bool kFirst>
__device__ __forceinline__ void CopySparseTokens(const GemmParams& p, const GemmShared<Operand>& s,
                                                 const GemmTileList& list) {
  if (threadIdx.x / kLanes == 1) {
    CopySparseRows<Operand, kFirst>(p, s, list);
  } else {
    CopySparseSlots<Operand, kFirst>(p, s, list);
  }
}

}  // namespace ort_moe
