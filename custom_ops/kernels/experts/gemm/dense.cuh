// Dense weights as wgmma's first operand, from shared memory; packed ones are decoded into the same place.
#pragma once

#include "kernels/experts/gemm/params.cuh"
#include "kernels/experts/gemm/wgmma.cuh"

namespace ort_moe {

template <typename T, int kMostTokens = 176>
struct DenseOperand {
  using Element = T;
  static constexpr int kGroups = 2;               // warpgroups that multiply
  static constexpr int kDecoders = 0;             // warpgroups that decode
  static constexpr int kBlocks = 2;               // of 64 weight rows in a warpgroup
  static constexpr int kBlocksOnProcessor = 1;    // that run at the same time on a multiprocessor
  static constexpr int kMaxTokens = kMostTokens;  // of a tile
  static constexpr int kDepth = 64;               // elements of the reduction in a stage
  static constexpr int kBoxDepth = 64;            // the same in units of the tensor map
  static constexpr int kBoxColumns = kDepth;      // elements of a row in a box
  static constexpr int kTokenBytes = kDepth * sizeof(T);
  static constexpr int kWeightBytes = kGroups * kBlocks * 64 * kDepth * sizeof(T);  // of a stage, ahead of the tokens
  static constexpr int kBoxBytes = kWeightBytes;
  static constexpr int kSums = kMaxTokens / 2;
  static constexpr bool kScaled = false, kSparse = false;

  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224, kDecoderRegisters = 0;  // of a thread

  // Multiples of which an instruction's columns are chosen.
  static __host__ __device__ constexpr int Granule(int n) { return n <= 8 ? 8 : 16; }

  static constexpr CUtensorMapSwizzle kSwizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  static constexpr CUtensorMapDataType kMapType =
      CU_TENSOR_MAP_DATA_TYPE_UINT16;  // zeros behind the end, as of all types
  static int64_t RowBytes(int64_t depth) { return depth * static_cast<int64_t>(sizeof(T)); }
  static int64_t BoxUnits(int64_t depth) { return depth; }

  // One tile's products of a warpgroup, in registers; N is tile's tokens rounded up.
  template <int N>
  static __device__ __forceinline__ void Multiply(float (&sums)[kBlocks][kSums], GemmRing& ring, int steps,
                                                  uint32_t stages, int stage_bytes, int group) {
    constexpr int kBlockBytes = 64 * kDepth * sizeof(T);
    const bool releases = threadIdx.x % kLanes == 0;
    uint32_t previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
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
          Wgmma<N>::template Issue<T>(sums[block], a + block * (kBlockBytes >> 4) + 2 * k, b + 2 * k,
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
