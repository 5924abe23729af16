// One layer of FusedExperts on Hopper, for any number of tokens: a grouped product, on wgmma, or on mma.sync where
// experts have few rows each (sparse.cuh).
//
// Weights are the instruction's 64 rows, or 16, and tokens its N columns, so that N follows what an expert has. A block
// runs on each multiprocessor, or two: one warpgroup fills a ring of stages, weights by the bulk tensor copy and rows
// of tokens, wherever they lie, by 16-byte copies, or for mma.sync by one bulk copy each (sparse_copies.cuh); two
// warpgroups multiply and finish; for wgmma, one or two more decode packed weights, which a ring of their own brings
// (packed.cuh). FC1 with gates has the map bring 8 gates, then the 8 values they meet, so that both end in one thread.
// Sums run over the reduction in order, in one accumulator each, or in two on mma.sync: a token's results depend on
// nothing else in its tile.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/experts/gemm/finish.cuh"
#include "kernels/experts/gemm/packed.cuh"
#include "kernels/experts/gemm/params.cuh"
#include "kernels/experts/gemm/sparse_copies.cuh"
#include "kernels/experts/gemm/sparse_product.cuh"
#include "kernels/experts/mma/ring.cuh"

namespace ort_moe {

// By one warp.
template <typename Operand, bool kFirst>
__device__ __forceinline__ void CopyWeights(const GemmParams& p, const GemmShared<Operand>& s,
                                            const GemmTileList& list) {
  constexpr int kGroups = GemmShared<Operand>::kTileRows / kTileRows;
  const int groups = kFirst && p.experts.gated ? kGroups / 2 : kGroups;
  const bool leads = threadIdx.x % kLanes == 0;
  constexpr bool kPacked = Operand::kDecoders > 0;
  GemmRing ring(kPacked ? s.byte_barriers : s.barriers, kPacked ? p.byte_stages : p.stages);
  const uint32_t stages = kPacked ? s.byte_stages : s.stages;
  const int stage_bytes = kPacked ? Operand::kBoxBytes : s.stage_bytes;
  const int steps = (p.steps * Operand::kDepth - 1) / Operand::kBoxColumns + 1;
  GemmTileWalk walk(list);
  GemmTile tile;
  while (walk.Next(list, &tile)) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      ring.WaitEmpty();
      if (leads) {
        ArriveExpecting(ring.Full(), Operand::kBoxBytes);
        CopyBox(stages + ring.at * stage_bytes, &p.weights, ring.Full(), step * Operand::kBoxDepth, 0, 0,
                tile.row_tile * groups, tile.expert);
      }
      __syncwarp();
      ring.Advance();
    }
  }
}

// By three warps. Rows of tokens as the second operand: 16-byte vector v of row r lies at v ^ (r % 8) of its 128 bytes.
// A thread copies one vector of every 12th row and keeps in registers where these rows are.
template <typename Operand, bool kFirst>
__device__ __forceinline__ void CopyTokens(const GemmParams& p, const GemmShared<Operand>& s,
                                           const GemmTileList& list) {
  constexpr int kVector = 16, kVectors = 8, kRowBytes = kVectors * kVector;
  constexpr int kStride = kTokenThreads / kVectors, kAtOnce = 4;  // rows from one copy to the next; copies
  constexpr int kRows = (Operand::kMaxTokens + kStride * kAtOnce - 1) / (kStride * kAtOnce) * kAtOnce;
  static_assert(kStride % 8 == 4 && Operand::kTokenBytes == kRowBytes);
  const LayerParams& layer = kFirst ? p.experts.fc1 : p.experts.fc2;
  const int row_bytes = layer.depth * static_cast<int>(sizeof(typename Operand::Element));
  GemmRing ring(s.barriers, p.stages);
  GemmTileWalk walk(list);
  GemmTile tile;
  const int thread = threadIdx.x - kLanes, vector = thread % kVectors, first_row = thread / kVectors;
  // Of the copies to even and odd multiples of kStride.
  const uint32_t place = Operand::kWeightBytes + first_row * kRowBytes, swizzled = vector ^ (first_row % 8);
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
    const int count = (tile.tokens - first_row + kStride - 1) / kStride;
    uint32_t from[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) from[i] = i < count ? rows[first_row + i * kStride] : 0;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      ring.WaitEmpty();
      const uint32_t stage = s.stages + ring.at * s.stage_bytes;
      const int column = step * kRowBytes + vector * kVector;
      const int bytes = column < row_bytes ? kVector : 0;
      const char* const source = Settled(static_cast<const char*>(p.source) + (bytes > 0 ? column : 0));
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i % kAtOnce == 0 && i * kStride >= tile.tokens) break;
        CopyVector(i < count, stage + places[i % 2] + i * kStride * kRowBytes,
                   source + static_cast<uint64_t>(from[i]) * kVector, bytes);
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
#define ORT_MOE_TOKENS(n)                                                                 \
  case n:                                                                                 \
    if constexpr (n <= Operand::kMaxTokens && n % Operand::Granule(n) == 0) {             \
      Operand::template Multiply<n>(sums, ring, p.steps, s.stages, s.stage_bytes, group); \
    }                                                                                     \
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
  static_assert(kGroupThreads * (Operand::kProducerRegisters + Operand::kGroups * Operand::kConsumerRegisters +
                                 Operand::kDecoders * Operand::kDecoderRegisters) <=
                kRegisters);
  constexpr int kDecoderThreads = Operand::kDecoders * kGroupThreads;
  constexpr int kEmptyArrivals = Operand::kGroups * kGroupThreads / kLanes * (Operand::kSparse ? kArrivalsOfWarp : 1);
  extern __shared__ uint4 shared[];
  const GemmShared<Operand> s(shared, p);
  GemmTileList list(s.list, p.experts.experts, p.row_tiles, p.max_tokens);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < p.stages; ++stage) {
      GemmRing ring(s.barriers, p.stages);
      ring.at = stage;
      InitBarrier(ring.Full(), kTokenThreads + (Operand::kDecoders > 0 ? kDecoderThreads : 1));
      InitBarrier(ring.Empty(), kEmptyArrivals);
    }
    for (int stage = 0; stage < p.byte_stages; ++stage) {
      GemmRing ring(s.byte_barriers, p.byte_stages);
      ring.at = stage;
      InitBarrier(ring.Full(), 1);
      InitBarrier(ring.Empty(), kDecoderThreads);
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
  } else if (Operand::kDecoders > 0 && threadIdx.x >= (1 + Operand::kGroups) * kGroupThreads) {
    if constexpr (Operand::kDecoders > 0) {
      GiveRegisters<Operand::kDecoderRegisters>();
      DecodeWeights<Operand, kFirst>(p, s, list);
      if constexpr (!kFirst) WaitForPrevious();
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
