// The host's side of FusedExperts' grouped product on Hopper (fused_experts_gemm_kernel.cuh): which calls it takes, the
// tensor maps by which weights are copied, and how high token tiles and how deep rings are.
#include "kernels/fused_experts_gemm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "kernels/fused_experts_gemm_dense.cuh"
#include "kernels/fused_experts_gemm_kernel.cuh"
#include "kernels/fused_experts_gemm_packed.cuh"

namespace ort_moe {
namespace {

constexpr int64_t kMaxGemmExperts = 4096;  // whose list of tiles fits into shared memory beside the stages
constexpr int kMinGemmStages = 3;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, without linking to it; null where the driver has none.
EncodeTiled DriverEncode() {
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
  constexpr int kUsual = 128, kManyRows = 512;
  const int64_t mean = CeilDiv(p.slots, std::min(p.experts, p.slots)), most = mean + mean / 2 + kTokenGranule;
  for (int tokens = 16; tokens < std::min(Operand::kMaxTokens, kUsual); tokens *= 2) {
    if (most <= tokens) return tokens;
  }
  return mean > kManyRows ? Operand::kMaxTokens : std::min(Operand::kMaxTokens, kUsual);
}

template <typename Operand, bool kFirst>
cudaError_t LaunchLayer(const ExpertsParams& experts, const void* source, cudaStream_t stream) {
  using Shared = GemmShared<Operand>;
  const LayerParams& layer = kFirst ? experts.fc1 : experts.fc2;
  const bool paired = kFirst && experts.gated;
  GemmParams p{};
  p.experts = experts;
  p.steps = static_cast<int32_t>(CeilDiv(layer.depth, Operand::kDepth));
  p.row_tiles = static_cast<int32_t>(CeilDiv(layer.rows, Shared::kTileRows));
  p.source = source;
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
  for (p.max_tokens = MaxTokens<Operand>(experts);; p.max_tokens = p.max_tokens / 32 * 16) {
    const int room = traits.max_shared_bytes - Shared::FixedBytes(p.max_tokens, experts.experts);
    p.stages = std::min(room / Shared::StageBytes(p.max_tokens), Shared::kMaxStages);
    if (p.stages >= kMinGemmStages) break;
    if (p.max_tokens <= 16) return cudaErrorInvalidValue;
  }
  const size_t bytes = p.stages * Shared::StageBytes(p.max_tokens) + Shared::FixedBytes(p.max_tokens, experts.experts);
  return LaunchClusters<ExpertsGemmKernel<Operand, kFirst>>(kFirst ? Switch::kFc1Pdl : Switch::kPdl, 1, processors,
                                                            Shared::kThreads, bytes, stream, p);
}

template <typename Operand>
cudaError_t LaunchLayers(const ExpertsParams& p, void* prepared, cudaStream_t stream) {
  const void* source = p.x;
  if constexpr (Operand::kPermutes) {
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
  if (cudaError_t error = LaunchLayer<Operand, true>(p, source, stream); error != cudaSuccess) return error;
  return LaunchLayer<Operand, false>(p, p.activated, stream);
}

template <typename T>
cudaError_t LaunchOfType(const ExpertsParams& p, void* prepared, cudaStream_t stream) {
  switch (p.weight_format) {
    case WeightFormat::kDense:
      return LaunchLayers<DenseOperand<T>>(p, prepared, stream);
    case WeightFormat::kNvfp4:
      return LaunchLayers<PackedOperand<Nvfp4Code<T>, T>>(p, prepared, stream);
    case WeightFormat::kMxfp4:
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return LaunchLayers<PackedOperand<Mxfp4Code<T>, T>>(p, prepared, stream);
      }
      break;
    case WeightFormat::kInt4:
      return LaunchLayers<PackedOperand<Int4Code<T>, T>>(p, prepared, stream);
    case WeightFormat::kInt8:
      return LaunchLayers<PackedOperand<Int8Code<T>, T>>(p, prepared, stream);
    case WeightFormat::kFp8:
      return LaunchLayers<PackedOperand<Fp8Code<T>, T>>(p, prepared, stream);
  }
  return cudaErrorInvalidValue;
}

// What the depths of both layers must be a multiple of; 0 where the format has no operand. Bytes times their scale are
// rounded to the type of the rows, and where squares double all errors, bfloat16 has no room for one more.
int64_t DepthMultiple(const ExpertsConfig& config, DType dtype) {
  const bool rounds = dtype == DType::kBFloat16 && config.activation == Activation::kRelu2;
  switch (config.weight_format) {
    case WeightFormat::kDense:
      return 8;  // vectors of 16 bytes
    case WeightFormat::kNvfp4:
      return 64;  // whole words of scales
    case WeightFormat::kMxfp4:
      return dtype == DType::kBFloat16 ? 32 : 0;
    case WeightFormat::kInt4:
      return config.block_size == 32 ? 64 : config.block_size > 32 ? config.block_size : 0;
    case WeightFormat::kInt8:
      return config.block_size >= 32 && !rounds ? config.block_size : 0;
    case WeightFormat::kFp8:
      return config.block_size >= 32 && !rounds ? 32 : 0;
  }
  return 0;
}

// Whether the current device has wgmma and runs code with it; asked once for each device.
bool HasWgmma() {
  constexpr int kDevices = 64, kHopper = 9;
  constexpr int8_t kUnknown = 0, kNo = 1, kYes = 2;
  static std::array<std::atomic<int8_t>, kDevices> known{};  // a race computes the same value twice
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  int8_t state = known[device].load(std::memory_order_relaxed);
  if (state == kUnknown) {
    constexpr int kEmptyRegisters = 64;  // code without wgmma is empty and needs fewer
    int major = 0;
    KernelTraits traits;
    cudaFuncAttributes code{};
    const bool has =
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == kHopper &&
        QueryKernel<ExpertsGemmKernel<DenseOperand<__half>, true>>(&traits) == cudaSuccess && traits.hopper &&
        cudaFuncGetAttributes(&code, ExpertsGemmKernel<DenseOperand<__half>, true>) == cudaSuccess &&
        code.numRegs > kEmptyRegisters && DriverEncode() != nullptr;
    state = has ? kYes : kNo;
    if (!has) cudaGetLastError();
    known[device].store(state, std::memory_order_relaxed);
  }
  return state == kYes;
}

}  // namespace

bool PreparesTokens(const ExpertsConfig& config) { return config.weight_format != WeightFormat::kDense; }

bool HasExpertsGemm(const ExpertsConfig& config, const ExpertsArgs& args) {
  if (args.dtype == DType::kFloat32 || args.experts > kMaxGemmExperts) return false;
  const int64_t multiple = DepthMultiple(config, args.dtype);
  return multiple != 0 && args.hidden % multiple == 0 && args.inner % multiple == 0 && HasWgmma();
}

cudaError_t LaunchExpertsGemm(DType dtype, const ExpertsParams& p, void* prepared, cudaStream_t stream) {
  return dtype == DType::kFloat16 ? LaunchOfType<__half>(p, prepared, stream)
                                  : LaunchOfType<__nv_bfloat16>(p, prepared, stream);
}

}  // namespace ort_moe
