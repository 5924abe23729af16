// How the host launches a layer of FusedExperts' grouped product (kernel.cuh): the tensor map by which weights are
// copied, how high token tiles and how deep rings are.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/experts/few/few.h"
#include "kernels/experts/gemm/gemm.h"
#include "kernels/experts/gemm/kernel.cuh"
#include "kernels/experts/gemm/prepare.cuh"

namespace ort_moe {

constexpr int kMinGemmStages = 3, kMinSparseStages = 2;  // the latter are larger

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, without linking to it; null where the driver has none.
inline EncodeTiled DriverEncode() {
  static const EncodeTiled function = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found{};
    constexpr unsigned kSince = 12000;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, kSince, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      cudaGetLastError();
      return EncodeTiled{};
    }
    return reinterpret_cast<EncodeTiled>(address);
  }();
  return function;
}

// Weights as (k, 8 rows, halves, groups of 8 rows, experts): with gates, a group is 8 gates and their 8 values.
template <typename Operand>
cudaError_t EncodeWeights(const LayerParams& layer, bool paired, bool interleaved, int64_t experts, CUtensorMap* map) {
  const EncodeTiled encode = DriverEncode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t row = Operand::RowBytes(layer.depth), rows = layer.rows;
  const cuuint64_t halves = paired ? 2 : 1, groups = rows / halves / kTileRows;
  const cuuint64_t step = paired && interleaved ? 2 : 1;
  const cuuint64_t units = Operand::BoxUnits(layer.depth), count = experts;
  const cuuint64_t sizes[5] = {units, kTileRows, halves, groups, count};
  const cuuint64_t strides[4] = {step * row, paired ? (interleaved ? row : rows / 2 * row) : 8 * row,
                                 step * kTileRows * row, rows * row};
  constexpr cuuint32_t kGroups = GemmShared<Operand>::kTileRows / kTileRows;
  const cuuint32_t box[5] = {Operand::kBoxDepth, kTileRows, static_cast<cuuint32_t>(halves),
                             kGroups / static_cast<cuuint32_t>(halves), 1};
  const cuuint32_t unit[5] = {1, 1, 1, 1, 1};
  const CUresult result = encode(map, Operand::kMapType, 5, const_cast<uint8_t*>(layer.weights), sizes, strides, box,
                                 unit, CU_TENSOR_MAP_INTERLEAVE_NONE, Operand::kSwizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Height of token tiles: from the mean number of rows of an expert alone, so that launches can be captured. Beside
// lower tiles more stages fit, and the height that takes the most sums pays where experts have many rows.
template <typename Operand>
int MaxTokens(const ExpertsParams& p) {
  const int64_t mean = CeilDiv(p.slots, std::min(p.experts, p.slots));
  if constexpr (Operand::kSparse) {
    return mean <= 2 ? 8 : mean <= 8 ? 16 : mean <= 14 ? 24 : Operand::kMaxTokens;
  } else {
    constexpr int kUsual = 144, kManyRows = 512;
    const int64_t most = mean + mean / 2 + kTokenGranule;
    for (int tokens = 16; tokens < std::min(Operand::kMaxTokens, kUsual); tokens *= 2) {
      if (most <= tokens) return tokens;
    }
    return mean > kManyRows ? Operand::kMaxTokens : std::min(Operand::kMaxTokens, kUsual);
  }
}

// The next height, beside which more stages fit; of the lowest the same.
inline int LowerTile(int tokens) { return tokens > 32 ? tokens / 32 * 16 : std::max(tokens - 8, 8); }

template <typename Operand, bool kFirst>
cudaError_t LaunchLayer(const ExpertsParams& experts, const void* source, const float* factors, cudaStream_t stream) {
  using Shared = GemmShared<Operand>;
  const LayerParams& layer = kFirst ? experts.fc1 : experts.fc2;
  const bool paired = kFirst && experts.gated;
  GemmParams p{};
  p.experts = experts;
  p.steps = static_cast<int32_t>(CeilDiv(layer.depth, Operand::kDepth));
  p.row_tiles = static_cast<int32_t>(CeilDiv(layer.rows, Shared::kTileRows));
  p.source = source;
  p.factors = factors;
  p.source_stride =
      (kFirst ? layer.depth : experts.activated_stride) * static_cast<int>(sizeof(typename Operand::Element));
  if (cudaError_t error = EncodeWeights<Operand>(layer, paired, experts.interleaved, experts.experts, &p.weights);
      error != cudaSuccess) {
    return error;
  }
  KernelTraits traits;
  if (cudaError_t error = QueryKernel<ExpertsGemmKernel<Operand, kFirst>>(&traits); error != cudaSuccess) return error;
  int device = 0, processors = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  constexpr int kLeastByteStages = 3;
  constexpr int kBlocks = Operand::kBlocksOnProcessor, kReserved = 1024;  // bytes of each block
  for (p.max_tokens = MaxTokens<Operand>(experts);; p.max_tokens = LowerTile(p.max_tokens)) {
    const int room =
        (traits.max_shared_bytes + kReserved) / kBlocks - kReserved - Shared::FixedBytes(p.max_tokens, experts.experts);
    p.stages =
        std::min((room - kLeastByteStages * Shared::kByteStage) / Shared::StageBytes(p.max_tokens), Shared::kMaxStages);
    if constexpr (Operand::kDecoders > 0) {
      p.byte_stages =
          std::min((room - p.stages * Shared::StageBytes(p.max_tokens)) / Shared::kByteStage, Shared::kMaxByteStages);
    }
    if (p.stages >= (Operand::kSparse ? kMinSparseStages : kMinGemmStages)) break;
    if (p.max_tokens == LowerTile(p.max_tokens)) return cudaErrorInvalidValue;
  }
  const size_t bytes = p.stages * Shared::StageBytes(p.max_tokens) + p.byte_stages * Shared::kByteStage +
                       Shared::FixedBytes(p.max_tokens, experts.experts);
  return LaunchClusters<ExpertsGemmKernel<Operand, kFirst>>(kFirst ? Switch::kFc1Pdl : Switch::kPdl, 1,
                                                            processors * Operand::kBlocksOnProcessor, Shared::kThreads,
                                                            bytes, stream, p);
}

// Rows of bfloat16 as float16 (ConvertRowsKernel).
template <int kBits>
cudaError_t ConvertRows(Switch overlap, const void* source, void* target, float* factors, int64_t rows, int columns,
                        int stride, const int64_t* limit, cudaStream_t stream) {
  const unsigned threads = columns <= 32 * kPermutedColumns ? 32 : 128;
  return LaunchClusters<ConvertRowsKernel<kBits>>(overlap, 1, static_cast<unsigned>(rows), threads, 0, stream,
                                                  static_cast<const uint4*>(source), static_cast<uint4*>(target),
                                                  factors, columns, stride, limit);
}

template <typename Operand>
cudaError_t LaunchLayers(const ExpertsParams& p, void* prepared, cudaStream_t stream) {
  const void* source = p.x;
  float* factors = nullptr;
  if constexpr (ConvertsTokens<Operand>()) {
    factors = PreparedFactors(prepared, p.tokens, p.fc1.depth);
    if (cudaError_t error = ConvertRows<Operand::Code::kBits>(Switch::kFc1Pdl, p.x, prepared, factors, p.tokens,
                                                              p.fc1.depth, p.fc1.depth, nullptr, stream);
        error != cudaSuccess) {
      return error;
    }
    source = prepared;
  } else if constexpr (Operand::kSparse) {
    constexpr int kThreads = 256, kMaxBlocks = 4096;
    const int64_t groups = static_cast<int64_t>(p.tokens) * p.fc1.depth / kPermutedColumns;
    const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(CeilDiv(groups, kThreads), kMaxBlocks));
    if (cudaError_t error = LaunchClusters<PrepareTokensKernel<Operand::Code::kBits>>(
            Switch::kFc1Pdl, 1, blocks, kThreads, 0, stream, static_cast<const uint4*>(p.x),
            static_cast<uint4*>(prepared), groups);
        error != cudaSuccess) {
      return error;
    }
    source = prepared;
  }
  if (cudaError_t error = LaunchLayer<Operand, true>(p, source, factors, stream); error != cudaSuccess) return error;
  if constexpr (ConvertsTokens<Operand>()) {
    factors += p.tokens;
    if (cudaError_t error = ConvertRows<0>(Switch::kPdl, p.activated, p.activated, factors, p.slots, p.fc2.depth,
                                           p.activated_stride, p.maps.expert_first_token_offset + p.experts, stream);
        error != cudaSuccess) {
      return error;
    }
  }
  return LaunchLayer<Operand, false>(p, p.activated, factors, stream);
}

}  // namespace ort_moe
