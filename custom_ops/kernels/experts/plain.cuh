// FusedExperts without tensor cores: every format of weights, float32 too, and any size and address.
//
// Mapping: a warp to an element, of FC1's output or of y. Order of a sum: lane l takes the elements l, l + 32, ... of
// the reduction by fma from +0, then a butterfly with strides 16, 8, 4, 2, 1; the global scale after that. Tokens that
// share an expert read its weights again, from the L2 mostly. Kept simple: it is also what the fast kernels are held
// against.
#pragma once

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/experts/activation.cuh"
#include "kernels/experts/decode.cuh"

namespace ort_moe {

constexpr int kPlainWarps = 8;

// Weight row `row` of all experts' rows times `activations`, in every lane.
template <typename T>
__device__ __forceinline__ float PlainProduct(const ExpertsParams& p, const LayerParams& layer, int64_t expert, int row,
                                              const T* activations) {
  float sum = WithReader<T>(p.weight_format, layer, expert, row, [&](const auto& weight) {
    float partial = 0.0f;
#pragma unroll 4
    for (int d = threadIdx.x % kLanes; d < layer.depth; d += kLanes) {
      partial = Fma(weight(d), HalfTraits<T>::ToFloat(activations[d]), partial);
    }
    return partial;
  });
#pragma unroll
  for (int stride = kLanes / 2; stride > 0; stride /= 2) sum = Add(sum, __shfl_xor_sync(0xffffffffu, sum, stride));
  return layer.global_scale == nullptr ? sum : Mul(sum, layer.global_scale[expert]);
}

template <typename T>
__device__ __forceinline__ float WithBias(const LayerParams& layer, int64_t expert, int row, float product) {
  if (layer.bias == nullptr) return Rounded<T>(product);
  const T bias = static_cast<const T*>(layer.bias)[expert * layer.rows + row];
  return Rounded<T>(Add(product, HalfTraits<T>::ToFloat(bias)));
}

template <typename T>
__global__ void __launch_bounds__(kPlainWarps* kLanes) PlainFc1Kernel(const ExpertsParams p) {
  WaitForPrevious();
  AllowNext();
  const int inner = p.fc2.depth;
  const int column = blockIdx.x * kPlainWarps + threadIdx.x / kLanes;
  if (column >= inner) return;
  for (int64_t slot = blockIdx.y; slot < p.slots; slot += gridDim.y) {
    const int expert = p.indices[slot];
    if (expert < 0 || expert >= p.experts) continue;
    const T* x = static_cast<const T*>(p.x) + slot / p.k * p.fc1.depth;
    const float mix = p.mix_input ? p.mix[slot] : 1.0f;
    const int gate_row = p.gated && p.interleaved ? 2 * column : column;
    const float gate = WithBias<T>(p.fc1, expert, gate_row, Mul(PlainProduct(p, p.fc1, expert, gate_row, x), mix));
    float up = 0.0f;
    if (p.gated) {
      const int up_row = p.interleaved ? gate_row + 1 : inner + column;
      up = WithBias<T>(p.fc1, expert, up_row, Mul(PlainProduct(p, p.fc1, expert, up_row, x), mix));
    }
    const float value = Activated(p, gate, up);
    if (threadIdx.x % kLanes == 0) {
      static_cast<T*>(p.activated)[slot * p.activated_stride + column] = HalfTraits<T>::FromFloat(value);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kPlainWarps* kLanes) PlainFc2Kernel(const ExpertsParams p) {
  WaitForPrevious();
  AllowNext();
  const int column = blockIdx.x * kPlainWarps + threadIdx.x / kLanes;
  if (column >= p.fc2.rows) return;
  for (int64_t token = blockIdx.y; token < p.tokens; token += gridDim.y) {
    float y = 0.0f;
    for (int64_t slot = token * p.k; slot < (token + 1) * p.k; ++slot) {
      const int expert = p.indices[slot];
      if (expert < 0 || expert >= p.experts) continue;
      const T* activated = static_cast<const T*>(p.activated) + slot * p.activated_stride;
      const float product = PlainProduct(p, p.fc2, expert, column, activated);
      y = Fma(p.mix_input ? 1.0f : p.mix[slot], WithBias<T>(p.fc2, expert, column, product), y);
    }
    const int64_t at = token * p.fc2.rows + column;
    if (p.residual != nullptr) y = Add(y, HalfTraits<T>::ToFloat(static_cast<const T*>(p.residual)[at]));
    if (threadIdx.x % kLanes == 0) static_cast<T*>(p.y)[at] = HalfTraits<T>::FromFloat(y);
  }
}

}  // namespace ort_moe
