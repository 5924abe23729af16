// FusedExperts without tensor cores: float32, and sizes or addresses that the other kernels' 16-byte loads do not fit.
//
// Mapping: a warp to an element, of FC1's output or of y; lanes take the reduction's elements in turn, then a
// butterfly. Tokens that share an expert read its weights again, from the L2 mostly. Kept simple: it is also what the
// fast kernels are held against.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/fused_experts_activation.cuh"
#include "kernels/launch.cuh"

namespace ort_moe {

constexpr int kPlainWarps = 8;

__device__ __forceinline__ float Float4ToFloat(uint32_t nibble) {
  return Mul(BitsToFloat((nibble & 7u) << 22 | (nibble & 8u) << 28), 0x1p126f);
}

__device__ __forceinline__ float Float8ToFloat(uint8_t value) {
  return __half2float(__nv_cvt_fp8_to_halfraw(value, __NV_E4M3));
}

// Weight row `row` of all experts' rows times `activations`, in every lane.
template <typename T, bool kNvfp4>
__device__ __forceinline__ float PlainProduct(const LayerParams& layer, int64_t expert, int row, const T* activations) {
  const int lane = threadIdx.x % kLanes;
  const int64_t at = expert * layer.rows + row;
  float sum = 0.0f;
#pragma unroll 4
  for (int k = lane; k < layer.depth; k += kLanes) {
    float weight;
    if constexpr (kNvfp4) {
      const uint32_t byte = layer.weights[at * (layer.depth / 2) + k / 2];
      const float scale = Float8ToFloat(layer.scales[at * (layer.depth / kNvfp4Block) + k / kNvfp4Block]);
      weight = Mul(Float4ToFloat(k % 2 ? byte >> 4 : byte), scale);
    } else {
      weight = HalfTraits<T>::ToFloat(reinterpret_cast<const T*>(layer.weights)[at * layer.depth + k]);
    }
    sum = Fma(weight, HalfTraits<T>::ToFloat(activations[k]), sum);
  }
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

template <typename T, bool kNvfp4>
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
    const float gate =
        WithBias<T>(p.fc1, expert, gate_row, Mul(PlainProduct<T, kNvfp4>(p.fc1, expert, gate_row, x), mix));
    float up = 0.0f;
    if (p.gated) {
      const int up_row = p.interleaved ? gate_row + 1 : inner + column;
      up = WithBias<T>(p.fc1, expert, up_row, Mul(PlainProduct<T, kNvfp4>(p.fc1, expert, up_row, x), mix));
    }
    const float value = Activated(p, gate, up);
    if (threadIdx.x % kLanes == 0) {
      static_cast<T*>(p.activated)[slot * p.activated_stride + column] = HalfTraits<T>::FromFloat(value);
    }
  }
}

template <typename T, bool kNvfp4>
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
      const float product = PlainProduct<T, kNvfp4>(p.fc2, expert, column, activated);
      y = Fma(p.mix_input ? 1.0f : p.mix[slot], WithBias<T>(p.fc2, expert, column, product), y);
    }
    const int64_t at = token * p.fc2.rows + column;
    if (p.residual != nullptr) y = Add(y, HalfTraits<T>::ToFloat(static_cast<const T*>(p.residual)[at]));
    if (threadIdx.x % kLanes == 0) static_cast<T*>(p.y)[at] = HalfTraits<T>::FromFloat(y);
  }
}

}  // namespace ort_moe
