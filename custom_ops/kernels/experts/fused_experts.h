// FusedExperts: what the launchers take. The semantics are docs/ops.md's; ort_moe/reference/fused_experts.py computes
// them in float64, which every kernel meets within a tolerance.
//
// For each token t and choice k with e = indices[t, k] in [0, E), accumulating in float32:
//   fc1 = round(w1[e] . x[t] (* weights[t, k] with weight_on = input) + bias1[e])
//   a = round(activation of fc1)
//   fc2 = round(w2[e] . a + bias2[e])
//   y[t] = round(sum over k in rank order, by fma from +0, of weights[t, k] (1 with weight_on = input) * fc2, +
//   residual[t])
// where round is to dtype. Choices outside [0, E) contribute nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "kernels/common/dtype.h"
#include "kernels/maps/routing_maps.h"

#if defined(ORT_MOE_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace ort_moe {

enum class WeightFormat : int { kDense, kNvfp4, kMxfp4, kInt4, kInt8, kFp8 };
enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kIdentity };
enum class GateLayout : int { kConcat, kInterleaved };  // gate rows first; or gate in the even rows, value in the odd
enum class WeightOn : int { kOutput, kInput };

inline constexpr int64_t kNvfp4Block = 16;  // weights that share a scale
inline constexpr int64_t kMxfp4Block = 32;

// The op's attributes, one field each.
//
// Activations: silu x * sigmoid(alpha * x); gelu x * Phi(x); gelu_tanh its tanh approximation; relu2 max(x, 0)^2.
// Gated: fc1 has a gate g and a value u per inner element; with limit > 0: g = min(g, limit), u = clamp(u, -limit,
// limit); a = activation(g) * (u + beta). Not gated: a = activation(fc1), where beta and limit are 0. NaN stays NaN.
struct ExpertsConfig {
  WeightFormat weight_format = WeightFormat::kDense;
  int64_t block_size = 0;  // int4, int8, fp8: weights along D that share a scale; otherwise 0
  Activation activation = Activation::kSilu;
  bool gated = true;
  GateLayout gate_layout = GateLayout::kConcat;
  float alpha = 1.0f;
  float beta = 0.0f;
  float limit = 0.0f;  // 0: none
  WeightOn weight_on = WeightOn::kOutput;

  int64_t fc1_rows(int64_t inner) const { return gated ? 2 * inner : inner; }

  // Weights along D that share a scale; 1 where there are no scales.
  int64_t scale_block() const {
    if (weight_format == WeightFormat::kNvfp4) return kNvfp4Block;
    if (weight_format == WeightFormat::kMxfp4) return kMxfp4Block;
    return weight_format == WeightFormat::kDense ? 1 : block_size;
  }

  // Whether a byte holds two weights.
  bool nibbles() const {
    return weight_format == WeightFormat::kNvfp4 || weight_format == WeightFormat::kMxfp4 ||
           weight_format == WeightFormat::kInt4;
  }
};

// One of an expert's two layers, for all experts: N rows, D elements along the reduction, b = block_size.
struct ExpertLayer {
  const void* weights;        // dense: (E, N, D) of dtype; fp8: (E, N, D) of e4m3; int8: (E, N, D) bytes;
                              // nvfp4, mxfp4, int4: (E, N, D / 2) bytes, the even element in the low bits
  const void* scales;         // nvfp4: (E, N, D / 16) of e4m3; mxfp4: (E, N, D / 32) of e8m0; int4, int8: (E, N, D / b)
                              // of dtype; fp8: (E, ceil(N / b), ceil(D / b)) of float32; dense: null
  const float* global_scale;  // nvfp4, mxfp4: (E), null counts as 1; otherwise null
  const void* zero_points;    // int4: (E, N, ceil(D / b / 2)) bytes, the even block low; int8: (E, N, D / b) bytes;
                              // null counts as 8 or 128, and stands with the other formats
  const void* bias;           // (E, N) of dtype, or null
};

struct ExpertsArgs {
  const void* x;           // (tokens, hidden) of dtype
  const float* weights;    // (tokens, k)
  const int32_t* indices;  // (tokens, k), any value
  RoutingMaps maps;        // of the same indices and read only; all null: built inside
  ExpertLayer fc1;         // N = config.fc1_rows(inner), D = hidden
  ExpertLayer fc2;         // N = hidden, D = inner
  const void* residual;    // (tokens, hidden) of dtype, or null
  void* y;                 // (tokens, hidden) of dtype
  DType dtype;
  int64_t tokens;
  int64_t hidden;
  int64_t inner;
  int64_t experts;
  int64_t k;
  void* scratch;  // on the device, ExpertsScratchBytes; the CPU needs none
};

const char* FormatName(WeightFormat format);

// Empty where the attributes go together; else one clause that names the attribute, what was expected and what came.
std::string CheckExpertsConfig(const ExpertsConfig& config);

// Calls body(begin, end) for ranges of at least `grain` that cover [0, total), on many threads.
using ParallelFor =
    std::function<void(int64_t total, int64_t grain, const std::function<void(int64_t, int64_t)>& body)>;

void FusedExpertsCpu(const ExpertsConfig& config, const ExpertsArgs& args, const ParallelFor& parallel_for);

#if defined(ORT_MOE_WITH_CUDA)
// From shapes, attributes and which pointers are null alone; may be 0.
size_t ExpertsScratchBytes(const ExpertsConfig& config, const ExpertsArgs& args);

// On `stream`; tokens = 0 is a no-op. The scratch is as it came from an allocator, aligned to 256 bytes. The
// configuration and the shapes have been checked; addresses of weights are aligned to 16 bytes at least where a row's
// bytes are a multiple of 16.
cudaError_t LaunchFusedExperts(const ExpertsConfig& config, const ExpertsArgs& args, cudaStream_t stream);
#endif

}  // namespace ort_moe
