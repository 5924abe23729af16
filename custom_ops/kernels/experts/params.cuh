// What the kernels of FusedExperts share: their parameters, and the conversions of element types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/experts/fused_experts.h"

namespace ort_moe {

constexpr int kLanes = 32;
constexpr int kTileRows = 8;  // weight rows of a tile: half of the tensor core's 16
constexpr int kSetRows = 2 * kTileRows;
constexpr int kMaxSlices = 4;
constexpr int kMaxChunk = 8;          // tokens of one expert that are computed at once: the tensor core's columns
constexpr int kFewChunk = 4;          // the same in FC1 for few tokens; FC2 has Format::kFc2Tokens
constexpr int kVectorElements = 8;    // of activations in 16 bytes
constexpr int kMaxDirectSlots = 128;  // up to here each block finds the items by itself, without maps

// One layer of all experts: `rows` outputs, `depth` elements along the reduction.
struct LayerParams {
  const uint8_t* weights;
  const uint8_t* scales;
  const float* global_scale;   // or null
  const uint8_t* zero_points;  // or null
  const void* bias;            // or null
  int32_t block_size;          // weights along the reduction that share a scale; 1 where there are no scales
  int32_t rows;
  int32_t depth;
  int32_t slices;  // parts of the reduction with a partial sum each; from the depth alone, so is every sum's order
  int32_t slice_groups;  // of two steps of Format::kStep elements
};

struct ExpertsParams {
  const void* x;
  const float* mix;  // the router's weights
  const int32_t* indices;
  RoutingMaps maps;
  LayerParams fc1, fc2;
  const void* residual;
  void* y;
  void* activated;  // (slots, activated_stride): what FC1 leaves for FC2
  void* output;     // (slots, hidden) in permuted order, where finalize is a kernel of its own
  float* ones;      // (slots): what that kernel mixes with where FC1 has applied the weights, and writes these; or null
  int32_t tokens, k, slots;  // slots = tokens * k; slot t * k + j is choice j of token t
  int32_t experts;
  int32_t activated_stride;  // elements
  int32_t chunk;             // tokens of an expert that are computed at once, <= kMaxChunk; not of FC2 for few tokens
  bool by_expert;            // blocks walk over an expert's chunks instead of taking one each
  WeightFormat weight_format;
  Activation activation;
  bool gated, interleaved, mix_input;
  float alpha, beta, limit;
};

// An element type: to float32 and, rounded, from it.
template <typename T>
struct HalfTraits;

template <>
struct HalfTraits<__half> {
  static __device__ __forceinline__ float ToFloat(__half value) { return __half2float(value); }
  static __device__ __forceinline__ __half FromFloat(float value) { return __float2half_rn(value); }
};

template <>
struct HalfTraits<__nv_bfloat16> {
  static __device__ __forceinline__ float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }
  static __device__ __forceinline__ __nv_bfloat16 FromFloat(float value) { return __float2bfloat16_rn(value); }
};

template <>
struct HalfTraits<float> {
  static __device__ __forceinline__ float ToFloat(float value) { return value; }
  static __device__ __forceinline__ float FromFloat(float value) { return value; }
};

template <typename T>
__device__ __forceinline__ float Rounded(float value) {
  return HalfTraits<T>::ToFloat(HalfTraits<T>::FromFloat(value));
}

}  // namespace ort_moe
