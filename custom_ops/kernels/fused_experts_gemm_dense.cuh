// Dense weights as wgmma's first operand, from shared memory.
#pragma once

#include "kernels/fused_experts_gemm_params.cuh"
#include "kernels/fused_experts_gemm_wgmma.cuh"

namespace ort_moe {

template <typename T>
struct DenseOperand {
  using Element = T;
  static constexpr int kGroups = 2;             // warpgroups that multiply
  static constexpr int kBlocks = 2;             // of 64 weight rows in a warpgroup
  static constexpr int kBlocksOnProcessor = 1;  // that run at the same time on a multiprocessor
  static constexpr int kMaxTokens = 192;        // of a tile
  static constexpr int kDepth = 64;             // elements of the reduction in a stage
  static constexpr int kBoxDepth = 64;          // the same in units of the tensor map
  static constexpr int kTokenBytes = kDepth * sizeof(T);
  static constexpr int kBoxBytes = kGroups * kBlocks * 64 * kDepth * sizeof(T);
  static constexpr int kWeightBytes = kBoxBytes;  // of a stage, ahead of the tokens
  static constexpr int kSums = kMaxTokens / 2;
  static constexpr bool kScaled = false, kPermutes = false, kSparse = false;

  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of a thread

  // Multiples of which an instruction's columns are chosen.
  static __host__ __device__ constexpr int Granule(int n) { return n <= 8 ? 8 : 16; }

  static constexpr CUtensorMapSwizzle kSwizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  static constexpr CUtensorMapDataType kMapType =
      CU_TENSOR_MAP_DATA_TYPE_UINT16;  // zeros behind the end, as of all types
  static int64_t RowBytes(int64_t depth) { return depth * static_cast<int64_t>(sizeof(T)); }
  static int64_t BoxUnits(int64_t depth) { return depth; }

  // Copies of a stage's scales by the threads that copy tokens.
  template <bool kFirst>
  struct ScaleCopies {
    __device__ __forceinline__ ScaleCopies(const GemmParams&, const GemmTile&, int) {}
    __device__ __forceinline__ void Copy(uint32_t, int) {}
  };

  // One tile's products of a warpgroup, in registers; N is tile's tokens rounded up.
  template <int N, bool kFirst>
  static __device__ __forceinline__ void Multiply(float (&sums)[kBlocks][kSums], GemmRing& ring, const GemmParams& p,
                                                  const GemmTile&, uint32_t stages, int stage_bytes, int group) {
    constexpr int kBlockBytes = 64 * kDepth * sizeof(T);
    const bool releases = threadIdx.x % kLanes == 0;
    uint32_t previous = 0;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      const uint32_t stage = stages + ring.at * stage_bytes;
      const uint64_t a = SwizzledMatrix(stage + group * (kBlocks * kBlockBytes));
      const uint64_t b = SwizzledMatrix(stage + kWeightBytes);
      ring.WaitFull();
      FenceForAsyncProxy();  // the rows of tokens came by ordinary copies
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          Wgmma<N>::template Issue<T, true>(sums[block], a + block * (kBlockBytes >> 4) + 2 * k, nullptr, b + 2 * k,
                                            k > 0 || step > 0);
        }
      }
      WgmmaCommit();
      if (step > 0) {
        WgmmaWait<1>();
        if (releases) Arrive(previous);
      }
      previous = ring.Empty();
      ring.Advance();
    }
    WgmmaWait<0>();
    if (releases) Arrive(previous);
  }
};

}  // namespace ort_moe
