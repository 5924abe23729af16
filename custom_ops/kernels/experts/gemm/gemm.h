// FusedExperts' two layers as a grouped product on Hopper (kernel.cuh), for fused_experts.cu.
#pragma once

#include "kernels/experts/params.cuh"

namespace ort_moe {

constexpr int64_t kGemmRowElements = 64;  // multiples of which an activated row is long

// Whether the layers can be computed so: by the current device, the code that is loaded for it, shapes and attributes.
// Where experts have many rows, weights of int4, int8 and fp8 are rounded to the type of the rows, in whose range they
// are to lie.
bool HasExpertsGemm(const ExpertsConfig& config, const ExpertsArgs& args);

// Whether weights may become numbers of the type of the rows, as wgmma takes them.
bool HasRoundedWeights(WeightFormat format, Activation activation, DType dtype);

// Bytes of `prepared`: where weights are packed and experts have few rows, FC1 reads x from a copy with columns in
// another order, and bfloat16 may become float16 with a factor for each row of x and of the activated.
size_t PreparedBytes(const ExpertsConfig& config, const ExpertsArgs& args);
float* PreparedFactors(void* prepared, int64_t tokens, int64_t hidden);

// FC1 from p.x to p.activated and FC2 from there to p.output, by the maps in p. `prepared`: aligned to 256 bytes.
cudaError_t LaunchExpertsGemm(DType dtype, const ExpertsParams& p, void* prepared, cudaStream_t stream);

}  // namespace ort_moe
