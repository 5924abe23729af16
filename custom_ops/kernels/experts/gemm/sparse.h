// FusedExperts' two layers with packed weights where experts have few rows each (sparse.cuh), for gemm.cu.
#pragma once

#include "kernels/experts/params.cuh"

namespace ort_moe {

// Whether they are faster, or the only ones. They take every size and address that the kernels for wgmma do.
bool TakesSparseExperts(DType dtype, const ExpertsParams& p);

// As LaunchExpertsGemm.
cudaError_t LaunchSparseExperts(DType dtype, const ExpertsParams& p, void* prepared, cudaStream_t stream);

}  // namespace ort_moe
