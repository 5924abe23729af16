// FusedExperts' two layers as a grouped product on Hopper (fused_experts_gemm_kernel.cuh), for fused_experts.cu.
#pragma once

#include "kernels/fused_experts_params.cuh"

namespace ort_moe {

constexpr int64_t kGemmRowElements = 64;  // multiples of which an activated row is long

// Whether the layers can be computed so: by the current device, the code that is loaded for it, shapes and attributes.
// Weights of int4, int8 and fp8 are rounded to the type of the rows, in whose range they are to lie.
bool HasExpertsGemm(const ExpertsConfig& config, const ExpertsArgs& args);

// Whether FC1 reads x from a copy with columns in another order.
bool PreparesTokens(const ExpertsConfig& config);

// FC1 from p.x to p.activated and FC2 from there to p.output, by the maps in p. `prepared`: (tokens, hidden) of dtype
// where PreparesTokens.
cudaError_t LaunchExpertsGemm(DType dtype, const ExpertsParams& p, void* prepared, cudaStream_t stream);

}  // namespace ort_moe
