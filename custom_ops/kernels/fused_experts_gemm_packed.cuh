// Packed weights as wgmma's first operand: decoded from shared memory into its registers.
//
// A stage holds 64 bytes of each weight row, swizzled by the tensor map so that the quads of 8 rows read without bank
// conflicts, the rows' slots (fused_experts_gemm_codes.cuh) and one or two panels of tokens. A lane's words of a row
// are other columns than the instruction gives it, so tokens lie permuted: with four bits, column 8 q + 4 h + i of
// every 32 at 8 i + 2 q + h; with bytes, column 4 q + 2 i + h of every 16 at 8 i + 2 q + h. FC1 leaves them so for FC2;
// PrepareTokensKernel does it for FC1.
#pragma once

#include "kernels/fused_experts_gemm_codes.cuh"
#include "kernels/fused_experts_gemm_params.cuh"
#include "kernels/fused_experts_gemm_slots.cuh"
#include "kernels/fused_experts_gemm_wgmma.cuh"
#include "kernels/launch.cuh"

namespace ort_moe {

template <typename CodeOf, typename T>
struct PackedOperand {
  using Element = T;
  using Code = CodeOf;
  static constexpr int kGroups = 4;  // decoding is a matter of latency
  static constexpr int kBlocks = 1;
  static constexpr int kBlocksOnProcessor = 1;  // that run at the same time on a multiprocessor
  static constexpr int kMaxTokens = 64;
  static constexpr int kRowBytes = 64, kBoxDepth = kRowBytes;
  static constexpr int kDepth = kRowBytes * 8 / Code::kBits;
  static constexpr int kPairs = 16 / Code::kBits;  // of a word
  static constexpr int kTokenBytes = kDepth * sizeof(T);
  static constexpr int kRows = kGroups * 64;
  static constexpr int kBoxBytes = kRows * kRowBytes;
  static constexpr int kWeightBytes = kBoxBytes + kRows * Code::kSlotBytes;
  static constexpr int kSums = kMaxTokens / 2;
  static constexpr bool kScaled = true, kPermutes = true, kSparse = false;
  static constexpr float kFactor = Code::kFactor;
  static_assert(kWeightBytes % kGemmAlignment == 0);

  static constexpr int kProducerRegisters = 64, kConsumerRegisters = 104;  // of a thread

  // Multiples of which an instruction's columns are chosen.
  static __host__ __device__ constexpr int Granule(int n) { return n <= 8 ? 8 : n <= 64 ? 16 : 32; }

  static constexpr CUtensorMapSwizzle kSwizzle = CU_TENSOR_MAP_SWIZZLE_64B;
  static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  static int64_t RowBytes(int64_t depth) { return depth * Code::kBits / 8; }
  static int64_t BoxUnits(int64_t depth) { return RowBytes(depth); }

  // Which column lies at `position`.
  static __device__ __forceinline__ int SourceColumn(int position) {
    const int q = position % 8 / 2, h = position % 2, i = position / 8;
    return Code::kBits == 4 ? position / 32 * 32 + q * 8 + h * 4 + i % 4 : position / 16 * 16 + q * 4 + i % 2 * 2 + h;
  }

  // A stage's slots, by the threads that copy tokens: whole words around the bytes that the stage needs.
  template <bool kFirst>
  struct ScaleCopies {
    static constexpr int kRowsOfThread = (kRows + kTokenThreads - 1) / kTokenThreads;
    SlotSource sources[kRowsOfThread];
    int block, scale_bytes, zero_bytes;  // the latter of a row
    int thread;

    __device__ __forceinline__ ScaleCopies(const GemmParams& p, const GemmTile& tile, int thread) : thread(thread) {
      const LayerParams& layer = kFirst ? p.experts.fc1 : p.experts.fc2;
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        sources[i] =
            SlotSource::Of<Code, kFirst>(p, tile, tile.row_tile * kRows + min(thread + i * kTokenThreads, kRows - 1));
      }
      block = layer.block_size;
      scale_bytes = SlotSource::ScaleBytes<Code>(layer);
      if constexpr (Code::kHasZeroPoints) zero_bytes = SlotSource::ZeroBytes<Code>(layer);
    }

    __device__ __forceinline__ void Copy(uint32_t stage, int step) {
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        const int row = thread + i * kTokenThreads;
        if (row >= kRows) break;
        const uint32_t slot = stage + kBoxBytes + row * Code::kSlotBytes;
        CopyWords(slot, sources[i].scales, Code::ScaleAt(step * kDepth, block), sources[i].within ? scale_bytes : 0);
        if constexpr (Code::kHasZeroPoints) {
          if (sources[i].zero_points != 0) {
            CopyWords(slot + 8, sources[i].zero_points, Code::ZeroAt(step * kDepth, block) / 2,
                      sources[i].within ? zero_bytes : 0);
          }
        }
      }
    }

    // Two words around byte `at` of a row's; zeros behind the row's end.
    static __device__ __forceinline__ void CopyWords(uint32_t target, uint64_t row, int at, int row_bytes) {
      const uint64_t source = (row + at) & ~uint64_t{3};
      const int left = static_cast<int>(row - source) + row_bytes;
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const int bytes = min(max(left - 4 * word, 0), 4);
        CopyWord(target + 4 * word, bytes > 0 ? source + 4 * word : row & ~uint64_t{3}, bytes);
      }
    }
  };

  // One tile's products of a warpgroup, in registers; N is the tile's tokens rounded up.
  template <int N, bool kFirst>
  static __device__ __forceinline__ void Multiply(float (&sums)[kBlocks][kSums], GemmRing& ring, const GemmParams& p,
                                                  const GemmTile& tile, uint32_t stages, int stage_bytes, int group) {
    const LayerParams& layer = kFirst ? p.experts.fc1 : p.experts.fc2;
    const int warp = threadIdx.x / kLanes % 4, lane = threadIdx.x % kLanes, q = lane % 4;
    const int row = group * 64 + warp * kSlabRows + lane / 4;
    const uint32_t words = row * kRowBytes + q * 4, swizzle = row / 2 % 4;
    int shifts[2], zero_shifts[2];  // of the first stage
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const SlotSource source = SlotSource::Of<Code, kFirst>(p, tile, tile.row_tile * kRows + row + half * kTileRows);
      shifts[half] = source.scales % 4;
      zero_shifts[half] = source.zero_points % 4 * 2;
    }
    const uint32_t panel_bytes = p.max_tokens * 128;
    uint32_t a[2][4 * kPairs];

#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      const uint32_t stage = stages + ring.at * stage_bytes;
      ring.WaitFull();
      FenceForAsyncProxy();  // the rows of tokens came by ordinary copies
      const uint32_t slot = stage + kBoxBytes + row * Code::kSlotBytes;
      const int scale_at = Code::ScaleAt(step * kDepth, layer.block_size);
      int zero_at = 0;
      if constexpr (Code::kHasZeroPoints) zero_at = Code::ZeroAt(step * kDepth, layer.block_size);
      const Code low(slot, (shifts[0] + scale_at) % 4, (zero_shifts[0] + zero_at) % 8, layer, q);
      const Code high(slot + kTileRows * Code::kSlotBytes, (shifts[1] + scale_at) % 4, (zero_shifts[1] + zero_at) % 8,
                      layer, q);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int w = part * 2 + i;
          const uint32_t at = stage + words + ((w ^ swizzle) << 4);
          uint32_t pairs[2][kPairs];
          low.Decode(w, LoadWord(at), pairs[0]);
          high.Decode(w, LoadWord(at + kTileRows * kRowBytes), pairs[1]);
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            a[part][i * 2 * kPairs + pair * 2] = pairs[0][pair];
            a[part][i * 2 * kPairs + pair * 2 + 1] = pairs[1][pair];
          }
        }
        PinRegisters(a[part]);
        WgmmaFence();
        const uint64_t b =
            SwizzledMatrix(stage + kWeightBytes + part * kPairs / 4 * panel_bytes) + part * kPairs % 4 * 2;
#pragma unroll
        for (int k = 0; k < kPairs; ++k) {
          Wgmma<N>::template Issue<T, false>(sums[0], 0, &a[part][4 * k], b + 2 * k, k > 0 || part > 0 || step > 0);
        }
        WgmmaCommit();
      }
      WgmmaWait<0>();
      if (lane == 0) Arrive(ring.Empty());
      ring.Advance();
    }
  }

  static __device__ __forceinline__ uint32_t LoadWord(uint32_t address) {
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
  }
};

}  // namespace ort_moe
