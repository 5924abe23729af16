// Gradients of RouterProbs and RouterScores on the device: what their kernels share. The formulas are router_probs.h's
// and router_scores.h's.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/router/fused_router.h"
#include "kernels/router/fused_router_row.cuh"
#include "kernels/training/training_map.h"

namespace ort_moe {

struct RouterGradParams {
  const void* logits;
  const void* grad;
  const uint8_t* map;         // null: every expert takes part
  const float* expert_scale;  // or null
  void* grad_logits;
  int64_t rows;
  int32_t experts;
  int32_t row_bytes;  // of logits and gradients
  int32_t map_bytes;
  int32_t shared_row_bytes;  // row_bytes of whole chunks
  int32_t warp_bytes;        // shared memory of a warp
  MapFormat map_format;
  Score score;
  bool over_experts;  // a softmax is over all experts, not over those of the map
  bool normalize;     // and it is not the softmax itself
  bool vectors;       // rows are whole chunks, aligned to 16 bytes
  bool bulk;          // rows come and go by bulk copies
  float normalize_eps;
  float normalize_min;
  float scale;
  float softcap;

  // Of what comes out of sums over the experts of the map.
  struct Normalization {
    float q = 0.0f;
    float r = 1.0f;
  };
};

// From D's sum and the sum of g * v: g becomes Mul(Add(g, -q), r).
__device__ __forceinline__ RouterGradParams::Normalization NormalizationOf(const RouterGradParams& p, float sum,
                                                                           float sum_of_products) {
  const float divisor = Add(sum, p.normalize_eps);
  if (divisor < p.normalize_min) return {0.0f, Div(1.0f, p.normalize_min)};
  return {Div(sum_of_products, divisor), Div(1.0f, divisor)};
}

__device__ __forceinline__ float ScaledGrad(const RouterGradParams& p, float grad, int32_t expert) {
  if (p.expert_scale != nullptr) grad = Mul(grad, p.expert_scale[expert]);
  return Mul(grad, p.scale);
}

// Of a score that is no softmax: v from x.
__device__ __forceinline__ float ElementScore(Score score, float x) {
  if (score == Score::kSigmoid) return Sigmoid(x);
  if (score == Score::kSqrtSoftplus) return SqrtSoftplus(x);
  return x;
}

// Its gradient, g being that of v.
__device__ __forceinline__ float ElementGrad(Score score, float x, float v, float g) {
  if (score == Score::kSigmoid) return Mul(g, Mul(v, Add(1.0f, -v)));
  if (score == Score::kSqrtSoftplus) return Mul(g, x < -64.0f ? Mul(v, 0.5f) : Div(Sigmoid(x), Add(v, v)));
  return g;
}

// Bit i: whether the map's row marks expert chunk * 8 + i.
__device__ __forceinline__ uint32_t MapBits(MapFormat format, const uint8_t* row, int32_t experts, int32_t chunk) {
  if (format == MapFormat::kBit) return row[chunk];
  const uint8_t* bytes = row + chunk * kChunk;
  if ((reinterpret_cast<uint64_t>(bytes) % 8) == 0 && (chunk + 1) * kChunk <= experts) {
    const uint2 eight = *reinterpret_cast<const uint2*>(bytes);
    // Bytes of 0 or 1 to the bits of a nibble: the products' bits never meet.
    return ((eight.x & 0x01010101u) * 0x10204080u >> 28) | (eight.y & 0x01010101u) * 0x10204080u >> 28 << 4;
  }
  uint32_t bits = 0u;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (chunk * kChunk + i < experts) bits |= (bytes[i] & 1u) << i;
  }
  return bits;
}

}  // namespace ort_moe
