// Rows of activations of FusedExperts in a block's shared memory, as the tensor core takes them; and what becomes of
// the sums over them.
#pragma once

#include <cstdint>

#include "kernels/common/float_math.h"
#include "kernels/experts/mma/ring.cuh"

namespace ort_moe {

// A staged row: the activations at Position, zeros up to a whole step; then, for formats that convert, a factor for
// each block of Format::kBlock.
template <typename Format>
__host__ __device__ __forceinline__ int PaddedDepth(int depth) {
  return (depth + Format::kStep - 1) / Format::kStep * Format::kStep;
}

// Bytes between two rows: 64 past a multiple of 128, so that no two rows' vectors meet in a bank.
template <typename Format>
__host__ __device__ __forceinline__ int StagedStride(int depth) {
  constexpr int kLine = 128;
  const int padded = PaddedDepth<Format>(depth);
  const int bytes = padded * static_cast<int>(sizeof(typename Format::Element)) +
                    (Format::kConverts ? padded / Format::kBlock * static_cast<int>(sizeof(float)) : 0);
  return (bytes + kLine - 1) / kLine * kLine + kLine / 2;
}

// Asks for block `block` of a row; CommitCopies() closes the group. `arranged`: the row has its elements at Position.
template <typename Format>
__device__ __forceinline__ void BeginBlock(const typename Format::Element* row, char* target, int depth, int block,
                                           bool arranged) {
#pragma unroll
  for (int i = 0; i < Format::kBlock / kVectorElements; ++i) {
    const int element = block * Format::kBlock + i * kVectorElements, position = Format::Position(element);
    CopyAsync(reinterpret_cast<uint4*>(target) + position / kVectorElements, row + (arranged ? position : element),
              element < depth);
  }
}

// A block on its way through registers, of kBlock activations.
template <typename Format>
class BlockInRegisters {
  static constexpr int kVectors = Format::kBlock / kVectorElements;

 public:
  // As BeginBlock.
  __device__ __forceinline__ void Load(const typename Format::Element* row, int depth, int block, bool arranged) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int element = block * Format::kBlock + i * kVectorElements;
      const auto* const from = row + (arranged ? Format::Position(element) : element);
      vectors_[i] = element < depth ? *reinterpret_cast<const uint4*>(from) : uint4{};
    }
  }

  // What BeginBlock has brought into a staged row.
  __device__ __forceinline__ void Fetch(char* target, int block) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vectors_[i] = *At(target, block, i);
  }

  // Into a staged row, as the tensor core takes it.
  __device__ __forceinline__ void Stage(char* target, int depth, int block, bool arranged) {
    if (Format::kArranges && !arranged) {
#pragma unroll
      for (uint4& vector : vectors_) vector = ArrangeNibbles(vector);
    }
    if constexpr (Format::kConverts) {
      reinterpret_cast<float*>(target + PaddedDepth<Format>(depth) * sizeof(typename Format::Element))[block] =
          ConvertBlock(vectors_);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) *At(target, block, i) = vectors_[i];
  }

 private:
  __device__ __forceinline__ static uint4* At(char* target, int block, int vector) {
    return reinterpret_cast<uint4*>(target) +
           Format::Position(block * Format::kBlock + vector * kVectorElements) / kVectorElements;
  }

  uint4 vectors_[kVectors];
};

// Turns a block that has arrived into what the tensor core takes; by the thread that asked for it.
template <typename Format>
__device__ __forceinline__ void FinishBlock(char* target, int depth, int block, bool arranged) {
  if constexpr (Format::kArranges || Format::kConverts) {
    if (arranged && !Format::kConverts) return;
    BlockInRegisters<Format> arrived;
    arrived.Fetch(target, block);
    arrived.Stage(target, depth, block, arranged);
  }
}

// Asks for the global scale of an expert, 1 where there is none.
__device__ __forceinline__ void BeginGlobalScale(const LayerParams& layer, int expert, float* target) {
  if (layer.global_scale == nullptr) {
    *target = 1.0f;
  } else {
    CopyWord(target, layer.global_scale + expert);
  }
}

// What the sums of one expert's weights are multiplied with.
template <typename Format>
__device__ __forceinline__ float LayerScale(float global_scale) {
  return Mul(Format::kFactor, global_scale);
}

// Bias of weight row `row` of all experts'.
template <typename T>
__device__ __forceinline__ float BiasOf(const LayerParams& layer, int64_t row) {
  return layer.bias == nullptr ? 0.0f : HalfTraits<T>::ToFloat(static_cast<const T*>(layer.bias)[row]);
}

// A layer's output from the sum over a row of activations.
template <typename T>
__device__ __forceinline__ float LayerOutput(float sum, float scale, float mix, float bias) {
  return Rounded<T>(Add(Mul(Mul(sum, scale), mix), bias));
}

}  // namespace ort_moe
