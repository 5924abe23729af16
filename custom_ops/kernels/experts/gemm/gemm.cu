// The host's side of FusedExperts' grouped product on Hopper (kernel.cuh): which calls it takes, and which operand of
// wgmma a format of weights is; launch_layer.cuh launches.
#include "kernels/experts/gemm/gemm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "kernels/experts/gemm/dense.cuh"
#include "kernels/experts/gemm/launch_layer.cuh"
#include "kernels/experts/gemm/packed.cuh"
#include "kernels/experts/gemm/sparse.h"

namespace ort_moe {
namespace {

constexpr int64_t kMaxGemmExperts = 4096;  // whose list of tiles fits into shared memory beside the stages

// Up to how many rows an expert has in the mean, low tiles hold most experts' rows, and weights take longer to decode
// than to multiply.
constexpr int64_t kLowMeanRows = 64;

template <typename Code, typename T>
cudaError_t LaunchPacked(const ExpertsParams& p, void* prepared, cudaStream_t stream) {
  return p.slots <= kLowMeanRows * p.experts ? LaunchLayers<PackedOperand<Code, T, true>>(p, prepared, stream)
                                             : LaunchLayers<PackedOperand<Code, T, false>>(p, prepared, stream);
}

template <typename T>
cudaError_t LaunchOfType(const ExpertsParams& p, void* prepared, cudaStream_t stream) {
  switch (p.weight_format) {
    case WeightFormat::kDense:
      return LaunchLayers<DenseOperand<T>>(p, prepared, stream);
    case WeightFormat::kNvfp4:
      return LaunchPacked<Nvfp4Code<T>, T>(p, prepared, stream);
    case WeightFormat::kMxfp4:
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return LaunchPacked<Mxfp4Code<T>, T>(p, prepared, stream);
      }
      break;
    case WeightFormat::kInt4:
      return LaunchPacked<Int4Code<T>, T>(p, prepared, stream);
    case WeightFormat::kInt8:
      return LaunchPacked<Int8Code<T>, T>(p, prepared, stream);
    case WeightFormat::kFp8:
      return LaunchPacked<Fp8Code<T>, T>(p, prepared, stream);
  }
  return cudaErrorInvalidValue;
}

// What the depths of both layers must be a multiple of; 0 where the format has no operand.
int64_t DepthMultiple(const ExpertsConfig& config) {
  switch (config.weight_format) {
    case WeightFormat::kDense:
      return 8;  // vectors of 16 bytes
    case WeightFormat::kNvfp4:
      return 64;  // whole words of scales
    case WeightFormat::kMxfp4:
      return 32;
    case WeightFormat::kInt4:
      return config.block_size == 32 ? 64 : config.block_size > 32 ? config.block_size : 0;
    case WeightFormat::kInt8:
      return config.block_size >= 32 ? config.block_size : 0;
    case WeightFormat::kFp8:
      return config.block_size >= 32 ? 32 : 0;
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

// Bytes times their scale are rounded to the type of the rows, and where squares double all errors, bfloat16 has no
// room for one more; scales of mxfp4 go far beyond float16.
bool HasRoundedWeights(WeightFormat format, Activation activation, DType dtype) {
  const bool bytes = format == WeightFormat::kInt8 || format == WeightFormat::kFp8;
  if (bytes && dtype == DType::kBFloat16 && activation == Activation::kRelu2) return false;
  return format != WeightFormat::kMxfp4 || dtype == DType::kBFloat16;
}

float* PreparedFactors(void* prepared, int64_t tokens, int64_t hidden) {
  return reinterpret_cast<float*>(static_cast<char*>(prepared) + tokens * hidden * sizeof(uint16_t));
}

size_t PreparedBytes(const ExpertsConfig& config, const ExpertsArgs& args) {
  if (config.weight_format == WeightFormat::kDense) return 0;
  return args.tokens * args.hidden * SizeOf(args.dtype) + args.tokens * (1 + args.k) * sizeof(float);
}

bool HasExpertsGemm(const ExpertsConfig& config, const ExpertsArgs& args) {
  if (args.dtype == DType::kFloat32 || args.experts > kMaxGemmExperts) return false;
  const int64_t multiple = DepthMultiple(config);
  // Where rows of tokens lie is counted in 32 bits, in vectors of 16 bytes.
  constexpr int64_t kElements = (int64_t{1} << 32) * kVectorElements;
  if (args.tokens * args.k >= kElements / std::max(args.hidden, args.inner + kGemmRowElements)) return false;
  return multiple != 0 && args.hidden % multiple == 0 && args.inner % multiple == 0 && HasWgmma();
}

cudaError_t LaunchExpertsGemm(DType dtype, const ExpertsParams& p, void* prepared, cudaStream_t stream) {
  if (TakesSparseExperts(dtype, p)) return LaunchSparseExperts(dtype, p, prepared, stream);
  return dtype == DType::kFloat16 ? LaunchOfType<__half>(p, prepared, stream)
                                  : LaunchOfType<__nv_bfloat16>(p, prepared, stream);
}

}  // namespace ort_moe
