// The host's side of the grouped product where experts have few rows each (sparse.cuh).
#include "kernels/experts/gemm/sparse.h"

#include "kernels/experts/gemm/launch_layer.cuh"
#include "kernels/experts/gemm/sparse.cuh"

namespace ort_moe {
namespace {

// Up to how many rows an expert has in the mean, as measured on an H200: at 16 int8 takes 239 us here and 250 with
// wgmma, fp8 217 and 233, at 24 int8 309 and 257; at 20 nvfp4 takes 714 and 945, int4 896 and 978.
int64_t MaxMeanRows(WeightFormat format) {
  return format == WeightFormat::kInt8 || format == WeightFormat::kFp8 ? 16 : 20;
}

template <typename T>
cudaError_t LaunchOfType(const ExpertsParams& p, void* prepared, cudaStream_t stream) {
  switch (p.weight_format) {
    case WeightFormat::kDense:
      break;
    case WeightFormat::kNvfp4:
      return LaunchLayers<SparseOperand<Nvfp4Exact, T>>(p, prepared, stream);
    case WeightFormat::kMxfp4:
      return LaunchLayers<SparseOperand<Mxfp4Exact, T>>(p, prepared, stream);
    case WeightFormat::kInt4:
      return LaunchLayers<SparseOperand<Int4Exact<T>, T>>(p, prepared, stream);
    case WeightFormat::kInt8:
      return LaunchLayers<SparseOperand<Int8Exact<T>, T>>(p, prepared, stream);
    case WeightFormat::kFp8:
      return LaunchLayers<SparseOperand<Fp8Exact, T>>(p, prepared, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

bool TakesSparseExperts(DType dtype, const ExpertsParams& p) {
  if (p.weight_format == WeightFormat::kDense) return false;
  return p.slots <= MaxMeanRows(p.weight_format) * p.experts ||
         !HasRoundedWeights(p.weight_format, p.activation, dtype);
}

cudaError_t LaunchSparseExperts(DType dtype, const ExpertsParams& p, void* prepared, cudaStream_t stream) {
  return dtype == DType::kFloat16 ? LaunchOfType<__half>(p, prepared, stream)
                                  : LaunchOfType<__nv_bfloat16>(p, prepared, stream);
}

}  // namespace ort_moe
