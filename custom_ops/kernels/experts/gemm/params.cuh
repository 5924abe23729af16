// Parameters and shared memory of the grouped product's kernels.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/experts/gemm/hopper.cuh"
#include "kernels/experts/gemm/tiles.cuh"

namespace ort_moe {

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kSlabRows = 16;       // weight rows of a warp: FC1 with gates: 8 gates, then their 8 values
constexpr int kTokenThreads = kGroupThreads - kLanes;  // that copy rows of tokens; a fourth warp has weights copied
constexpr int kChunkTokens = 32;                       // that a warpgroup finishes at once
constexpr int kGemmAlignment = 1024;                   // of a stage: swizzled matrices

// Arrivals by which a warp says that it has read a stage: its first lane's, behind the warp's barrier, which takes up
// to 2.5 % less time than every lane's own. racecheck follows an order through arrivals, but not through a warp's
// barrier ahead of one; a build for it (ORT_MOE_RACECHECK) has every lane arrive.
#ifdef ORT_MOE_RACECHECK
constexpr int kArrivalsOfWarp = kLanes;
#else
constexpr int kArrivalsOfWarp = 1;
#endif

__device__ __forceinline__ void ArriveAsWarp(uint32_t barrier) {
  if constexpr (kArrivalsOfWarp == 1) __syncwarp();
  if (threadIdx.x % kLanes < kArrivalsOfWarp) Arrive(barrier);
}

struct GemmParams {
  CUtensorMap weights;  // (k, 8 rows, 1 or 2 halves, groups of 8 rows, experts)
  ExpertsParams experts;
  int32_t steps;       // stages of the reduction
  int32_t row_tiles;   // of an expert's weight rows
  int32_t max_tokens;  // of a tile
  int32_t stages;
  int32_t byte_stages;    // of packed weights ahead of their decoding
  int32_t source_stride;  // bytes between rows of tokens
  const void* source;     // rows of tokens: x, or its prepared copy, by token, or the activated, by permuted row
  const float* factors;   // of the same rows, where they were converted; or null
};

// A ring of stages. Of each, one barrier ends a phase when it is full, and one when it is empty.
struct GemmRing {
  static constexpr int kBytes = 2 * 8;  // of a stage's barriers
  uint32_t barriers;
  int stages;
  int at = 0, phase = 0;

  __device__ __forceinline__ GemmRing(uint32_t barriers, int stages) : barriers(barriers), stages(stages) {}
  __device__ __forceinline__ uint32_t Full() const { return barriers + at * kBytes; }
  __device__ __forceinline__ uint32_t Empty() const { return barriers + at * kBytes + 8; }
  __device__ __forceinline__ void WaitFull() const { WaitBarrier(Full(), phase); }
  __device__ __forceinline__ void WaitEmpty() const { WaitBarrier(Empty(), phase ^ 1); }
  __device__ __forceinline__ void Advance() {
    if (++at == stages) {
      at = 0;
      phase ^= 1;
    }
  }
};

// Whether rows of tokens are converted ahead of an Operand's layers.
template <typename Operand>
constexpr bool ConvertsTokens() {
  if constexpr (Operand::kSparse) return Operand::kConverts;
  return false;
}

// Of a warpgroup: what its results pass through.
template <typename Operand>
constexpr int ResultBytes(int pitch) {
  if constexpr (Operand::kSparse) return Operand::kExchangeBytes;
  return kChunkTokens * pitch * 4;
}

// What a block's shared memory holds, in order, for an Operand (dense.cuh) and its stages.
template <typename Operand>
struct GemmShared {
  static constexpr int kTileRows = Operand::kGroups * Operand::kBlocks * 64;
  static constexpr int kThreads = (1 + Operand::kGroups + Operand::kDecoders) * kGroupThreads;
  static constexpr int kMaxStages = Operand::kSparse ? 8 : 24;
  static constexpr int kPitch = Operand::kBlocks * 32 + 4;  // words of a token: results of a warpgroup, two to a word
  static constexpr int kResultBytes = ResultBytes<Operand>(kPitch);
  static constexpr int kMixStride = (Operand::kMaxTokens + kChunkTokens - 1) / kChunkTokens * kChunkTokens;
  static constexpr int kMaxByteStages = Operand::kDecoders > 0 ? 8 : 0;
  static constexpr int kByteStage = Operand::kDecoders > 0 ? Operand::kBoxBytes : 0;

  static __host__ __device__ __forceinline__ int StageBytes(int max_tokens) {
    return Operand::kWeightBytes + max_tokens * Operand::kTokenBytes;
  }
  static __host__ __device__ __forceinline__ int MixNumbers(int max_tokens) {
    return Operand::kSparse ? 2 * kMaxStages * max_tokens : Operand::kGroups * kMixStride;
  }
  static __host__ __device__ __forceinline__ int FixedBytes(int max_tokens, int experts) {
    return kGemmAlignment + Operand::kGroups * kResultBytes + MixNumbers(max_tokens) * static_cast<int>(sizeof(float)) +
           2 * max_tokens * static_cast<int>(sizeof(int)) + (kMaxStages + kMaxByteStages) * GemmRing::kBytes +
           GemmTileList::Bytes(experts);
  }

  __device__ __forceinline__ GemmShared(uint4* memory, const GemmParams& p) {
    const uint32_t address = SharedAddress(memory);
    const uint32_t skipped = (kGemmAlignment - address % kGemmAlignment) % kGemmAlignment;
    char* at = reinterpret_cast<char*>(memory) + skipped;
    stages = address + skipped;
    stage_bytes = StageBytes(p.max_tokens);
    at += p.stages * stage_bytes;
    byte_stages = SharedAddress(at);
    at += p.byte_stages * kByteStage;
    results = reinterpret_cast<uint32_t*>(at);
    at += Operand::kGroups * kResultBytes;
    barriers = SharedAddress(at);
    at += kMaxStages * GemmRing::kBytes;
    byte_barriers = SharedAddress(at);
    at += kMaxByteStages * GemmRing::kBytes;
    mix = reinterpret_cast<float*>(at);
    at += MixNumbers(p.max_tokens) * sizeof(float);
    rows = reinterpret_cast<uint32_t*>(at);
    at += 2 * p.max_tokens * sizeof(int);
    list = at;
  }

  uint32_t stages;
  int stage_bytes;
  uint32_t* results;  // (warpgroups, kChunkTokens, kPitch)
  uint32_t barriers;
  uint32_t byte_stages, byte_barriers;
  float* mix;      // (warpgroups, kMixStride), or where sparse (stages, 2, max_tokens)
  uint32_t* rows;  // (2, max_tokens): where a tile's tokens are, in vectors of 16 bytes
  char* list;
};

}  // namespace ort_moe
