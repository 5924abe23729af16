// Where the scales and zero points of a weight row lie, for the grouped product.
#pragma once

#include <cstdint>

#include "kernels/experts/gemm/codes.cuh"
#include "kernels/experts/gemm/params.cuh"

namespace ort_moe {

// The byte addresses of a row's scales and zero points.
struct SlotSource {
  uint64_t scales, zero_points;
  bool within;

  // Of a row, in bytes.
  template <typename Code>
  static __device__ __forceinline__ int ScaleBytes(const LayerParams& layer) {
    return Code::ScaleAt(layer.depth + layer.block_size - 1, layer.block_size);
  }
  template <typename Code>
  static __device__ __forceinline__ int ZeroBytes(const LayerParams& layer) {
    return (Code::ZeroAt(layer.depth, layer.block_size) + 1) / 2;
  }

  template <typename Code, bool kFirst>
  static __device__ __forceinline__ SlotSource Of(const GemmParams& p, const GemmTile& tile, int at_row) {
    const LayerParams& layer = kFirst ? p.experts.fc1 : p.experts.fc2;
    int row = at_row;
    SlotSource source{};
    source.within = row < layer.rows;
    if (kFirst && p.experts.gated) {
      const int column = row / kSlabRows * kTileRows + row % kTileRows, half = row % kSlabRows / kTileRows;
      row = p.experts.interleaved ? 2 * column + half : half * (layer.rows / 2) + column;
    }
    if (!source.within) row = 0;
    const int64_t at = static_cast<int64_t>(tile.expert) * layer.rows + row;
    const int block = layer.block_size;
    const int64_t scale_row =
        kSharesRows<Code> ? static_cast<int64_t>(tile.expert) * ((layer.rows + block - 1) / block) + row / block : at;
    source.scales = reinterpret_cast<uint64_t>(layer.scales) + scale_row * ScaleBytes<Code>(layer);
    if constexpr (Code::kHasZeroPoints) {
      if (layer.zero_points != nullptr) {
        source.zero_points = reinterpret_cast<uint64_t>(layer.zero_points) + at * ZeroBytes<Code>(layer);
      }
    }
    return source;
  }
};

}  // namespace ort_moe
