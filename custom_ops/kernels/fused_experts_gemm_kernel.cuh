// One layer of FusedExperts on Hopper, for any number of tokens: a grouped product, on wgmma, or on mma.sync where
// experts have few rows each (fused_experts_gemm_sparse.cuh).
//
// Weights are the instruction's 64 rows, or 16, and tokens its N columns, so that N follows what an expert has. A block
// runs on each multiprocessor, or two: one warpgroup fills a ring of stages, weights by the bulk tensor copy and rows
// of tokens, wherever they lie, by 16-byte copies; two warpgroups, or four, multiply and finish. FC1 with gates has the
// map bring 8 gates, then the 8 values they meet, so that both end in one thread. Sums run over the reduction in order,
// in one accumulator each, or in two on mma.sync: a token's results depend on nothing else in its tile.
#pragma once

#include "kernels/fused_experts_gemm_finish.cuh"
#include "kernels/fused_experts_gemm_params.cuh"
#include "kernels/fused_experts_gemm_sparse_copies.cuh"
#include "kernels/fused_experts_gemm_sparse_product.cuh"
#include "kernels/fused_experts_ring.cuh"
#include "kernels/launch.cuh"

namespace ort_moe {

// By one warp.
template <typename Operand, bool kFirst>
__device__ __forceinline__ void CopyWeights(const GemmParams& p, const GemmShared<Operand>& s,
                                            const GemmTileList& list) {
  constexpr int kGroups = GemmShared<Operand>::kTileRows / kTileRows;
  const int groups = kFirst && p.experts.gated ? kGroups / 2 : kGroups;
  const bool leads = threadIdx.x % kLanes == 0;
  GemmRing ring(s.barriers, p.stages);
  GemmTileWalk walk(list);
  GemmTile tile;
  while (walk.Next(list, &tile)) {
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      ring.WaitEmpty();
      if (leads) {
        ArriveExpecting(ring.Full(), Operand::kBoxBytes);
        CopyBox(s.stages + ring.at * s.stage_bytes, &p.weights, ring.Full(), step * Operand::kBoxDepth, 0, 0,
                tile.row_tile * groups, tile.expert);
      }
      __syncwarp();
      ring.Advance();
    }
  }
}

// By three warps. Rows of tokens as the second operand: 16-byte vector v of row r lies at v ^ (r % 8) of its 128 bytes.
template <typename Operand, bool kFirst>
__device__ __forceinline__ void CopyTokens(const GemmParams& p, const GemmShared<Operand>& s,
                                           const GemmTileList& list) {
  constexpr int kVector = 16, kVectors = 8, kPanelBytes = kVectors * kVector;  // of a row in a panel of 64 elements
  constexpr int kPanels = Operand::kTokenBytes / kPanelBytes;
  constexpr int kStride = kTokenThreads / kVectors, kAtOnce = 4;  // rows from one copy to the next; copies
  static_assert(kStride % 8 == 4 && kAtOnce % 2 == 0);
  const LayerParams& layer = kFirst ? p.experts.fc1 : p.experts.fc2;
  const int row_bytes = layer.depth * static_cast<int>(sizeof(typename Operand::Element));
  GemmRing ring(s.barriers, p.stages);
  GemmTileWalk walk(list);
  GemmTile tile;
  const int thread = threadIdx.x - kLanes, vector = thread % kVectors, first_row = thread / kVectors;
  // Of the copies to even and odd multiples of kStride.
  const uint32_t place = Operand::kWeightBytes + first_row * kPanelBytes, swizzled = vector ^ (first_row % 8);
  const uint32_t places[2] = {place + swizzled * kVector, place + (swizzled ^ 4) * kVector};
  const uint32_t row_vectors = p.source_stride / kVector;
  int buffer = 0;
  while (walk.Next(list, &tile)) {
    uint32_t* const rows = s.rows + buffer * p.max_tokens;
    buffer ^= 1;
    for (int r = thread; r < tile.tokens; r += kTokenThreads) {
      int row = tile.first + r;
      if constexpr (kFirst) {  // maps of other indices do no harm
        row = min(max(p.experts.maps.permuted_to_unpermuted[row], 0), p.experts.slots - 1) % p.experts.tokens;
      }
      rows[r] = row * row_vectors;
    }
    __syncwarp();
    BlockSync(kTokenBarrier, kTokenThreads);
    typename Operand::template ScaleCopies<kFirst> scales(p, tile, thread);
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      ring.WaitEmpty();
      const uint32_t stage = s.stages + ring.at * s.stage_bytes;
      scales.Copy(stage, step);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const int column = (step * kPanels + panel) * kPanelBytes + vector * kVector;
        const int bytes = column < row_bytes ? kVector : 0;
        const char* const source = static_cast<const char*>(p.source) + (bytes > 0 ? column : 0);
        uint32_t target = stage + panel * p.max_tokens * kPanelBytes;
#pragma unroll 1
        for (int r = first_row; r < tile.tokens; r += kAtOnce * kStride) {
          const uint32_t* const offsets = rows + r;
          uint32_t from[kAtOnce];  // behind the tile's end: not used
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) from[i] = offsets[i * kStride];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            CopyVector(r + i * kStride < tile.tokens, target + places[i % 2] + i * kStride * kPanelBytes,
                       source + static_cast<uint64_t>(from[i]) * kVector, bytes);
          }
          target += kAtOnce * kStride * kPanelBytes;
        }
      }
      ArriveAfterCopies(ring.Full());
      ring.Advance();
    }
  }
  WaitForCopies<0>();
}

template <typename Operand, bool kFirst>
__device__ __forceinline__ void MultiplyTiles(const GemmParams& p, const GemmShared<Operand>& s,
                                              const GemmTileList& list) {
  GemmRing ring(s.barriers, p.stages);
  GemmTileWalk walk(list);
  GemmTile tile;
  const int group = threadIdx.x / kGroupThreads - 1;
  float sums[Operand::kBlocks][Operand::kSums];
  while (walk.Next(list, &tile)) {
    GemmFinish<Operand, kFirst> finish(p, s, tile, group);
#define ORT_MOE_TOKENS(n)                                                                         \
  case n:                                                                                         \
    if constexpr (n <= Operand::kMaxTokens && n % Operand::Granule(n) == 0) {                     \
      Operand::template Multiply<n, kFirst>(sums, ring, p, tile, s.stages, s.stage_bytes, group); \
    }                                                                                             \
    break;
    const int granule = Operand::Granule(tile.tokens);
    switch ((tile.tokens + granule - 1) / granule * granule) {
      ORT_MOE_TOKENS(8)
      ORT_MOE_TOKENS(16)
      ORT_MOE_TOKENS(32)
      ORT_MOE_TOKENS(48)
      ORT_MOE_TOKENS(64)
      ORT_MOE_TOKENS(80)
      ORT_MOE_TOKENS(96)
      ORT_MOE_TOKENS(112)
      ORT_MOE_TOKENS(128)
      ORT_MOE_TOKENS(144)
      ORT_MOE_TOKENS(160)
      ORT_MOE_TOKENS(176)
      ORT_MOE_TOKENS(192)
      ORT_MOE_TOKENS(208)
      ORT_MOE_TOKENS(224)
      ORT_MOE_TOKENS(240)
      ORT_MOE_TOKENS(256)
    }
#undef ORT_MOE_TOKENS
#pragma unroll
    for (int block = 0; block < Operand::kBlocks; ++block) PinRegisters(sums[block]);
    finish.Run(sums);
  }
}

template <typename Operand, bool kFirst>
__global__ void __launch_bounds__(GemmShared<Operand>::kThreads, Operand::kBlocksOnProcessor)
    ExpertsGemmKernel(const __grid_constant__ GemmParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Registers that one role takes must be among those that the block has got, or it waits for ever.
  constexpr int kThreads = GemmShared<Operand>::kThreads, kBlocks = Operand::kBlocksOnProcessor,
                kRegisters = 65536 / kBlocks / kThreads / 8 * 8 * kThreads;
  static_assert(kGroupThreads * (Operand::kProducerRegisters + Operand::kGroups * Operand::kConsumerRegisters) <=
                kRegisters);
  extern __shared__ uint4 shared[];
  const GemmShared<Operand> s(shared, p);
  GemmTileList list(s.list, p.experts.experts, p.row_tiles, p.max_tokens);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < p.stages; ++stage) {
      GemmRing ring(s.barriers, p.stages);
      ring.at = stage;
      InitBarrier(ring.Full(), 1 + kTokenThreads);
      InitBarrier(ring.Empty(), Operand::kGroups * kGroupThreads / kLanes);
    }
    FenceBarrierInit();
    PrefetchTensorMap(&p.weights);
  }
  if constexpr (kFirst) {
    WaitForPrevious();
    AllowNext();
  }
  list.Build(p.experts.maps.expert_first_token_offset, p.experts.slots);  // FC1 has waited for them
  if (threadIdx.x < kGroupThreads) {
    GiveRegisters<Operand::kProducerRegisters>();
    if (threadIdx.x < kLanes) {
      CopyWeights<Operand, kFirst>(p, s, list);
      if constexpr (!kFirst) WaitForPrevious();
    } else {
      if constexpr (!kFirst) WaitForPrevious();
      if constexpr (Operand::kSparse) {
        CopySparseTokens<Operand, kFirst>(p, s, list);
      } else {
        CopyTokens<Operand, kFirst>(p, s, list);
      }
    }
  } else {
    TakeRegisters<Operand::kConsumerRegisters>();
    if constexpr (!kFirst) {
      WaitForPrevious();
      AllowNext();
    }
    if constexpr (Operand::kSparse) {
      MultiplySparse<Operand, kFirst>(p, s, list);
    } else {
      MultiplyTiles<Operand, kFirst>(p, s, list);
    }
  }
#endif
}

}  // namespace ort_moe
