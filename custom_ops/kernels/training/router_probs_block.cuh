// RouterProbs and the forward of RouterScores for every configuration and any number of experts: FusedRouter's block
// of 128 threads routes the row into shared memory, and what it has chosen is then spread over the experts. For what
// router_probs_row.cuh leaves: groups, soft caps, rare scores.
#pragma once

#include "kernels/router/fused_router_block.cuh"
#include "kernels/training/router_probs_params.cuh"

namespace ort_moe {

struct ProbsBlockParams {
  RouterParams router;  // weights and indices are not looked at
  void* probs;          // or all scores
  uint8_t* map;
  int32_t* indices;  // or null
  int32_t map_bytes;
  MapFormat map_format;
  bool all_scores;
  bool normalize_scores;

  size_t SharedBytes(size_t router_bytes) const { return router_bytes + (router.k + 1) / 2 * 2 * 2 * sizeof(float); }
};

// Scores of all experts of a row, x being its logits, into `scores`.
template <typename T>
__device__ __forceinline__ void StoreAllScores(const ProbsBlockParams& p, const Bits<T>* logits, Bits<T>* scores) {
  __shared__ float partials[kPartials];
  __shared__ uint32_t bests[kBlock / kWarp];
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t experts = p.router.experts;
  const auto for_each = [&](auto f) {
    for (int32_t chunk = thread; chunk * kChunk < experts; chunk += kBlock) {
      for (int32_t e = chunk * kChunk; e < min(chunk * kChunk + kChunk, experts); ++e) f(e);
    }
  };
  const auto sum_of = [&](auto f) {
    float partial = 0.0f;
    for_each([&](int32_t e) { partial = Add(partial, f(e)); });
    __syncthreads();
    partials[thread] = partial;
    __syncthreads();
    const int lane = thread % kWarp;
    return Butterfly(partials[lane], partials[lane + 32], partials[lane + 64], partials[lane + 96]);
  };
  const auto x = [&](int32_t e) { return LoadLogit<T>(p.router, logits, e); };
  RowSoftmax softmax;
  if (p.router.score == Score::kSoftmax) {
    uint32_t best = 0u;
    for_each([&](int32_t e) { best = max(best, RankKey(x(e))); });
    best = WarpMax(best);
    __syncthreads();
    if (thread % kWarp == 0) bests[thread / kWarp] = best;
    __syncthreads();
    softmax.max = KeyValue(max(max(bests[0], bests[1]), max(bests[2], bests[3])));
    softmax.sum = sum_of([&](int32_t e) { return Exp(Add(x(e), -softmax.max)); });
  }
  const auto score = [&](int32_t e) { return ScoreOf(p.router, softmax, x(e)); };
  float divisor = 1.0f;
  if (p.normalize_scores) divisor = Add(sum_of(score), p.router.normalize_eps);
  for_each([&](int32_t e) {
    const float value = score(e);
    scores[e] = Storage<T>::Round(p.normalize_scores ? Div(value, divisor) : value);
  });
}

template <typename T>
__global__ void __launch_bounds__(kBlock, 8) ProbsBlockKernel(const __grid_constant__ ProbsBlockParams p) {
  extern __shared__ __align__(16) uint64_t block_shared[];
  constexpr int kMarkWords = kMaxTrainingExperts / kWarp;
  __shared__ uint32_t marks[kMarkWords];
  __shared__ __align__(16) unsigned char row_params[sizeof(RouterParams)];
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t experts = p.router.experts, k = p.router.k;
  RouterParams& router = *reinterpret_cast<RouterParams*>(row_params);
  float* weights = reinterpret_cast<float*>(block_shared);
  int32_t* indices = reinterpret_cast<int32_t*>(weights + (k + 1) / 2 * 2);
  uint64_t* row_shared = block_shared + (k + 1) / 2 * 2;
  WaitForPrevious();
  AllowNext();
  for (int64_t row = blockIdx.x; row < p.router.rows; row += gridDim.x) {
    const int64_t offset = row * experts;
    const Bits<T>* logits = static_cast<const Bits<T>*>(p.router.logits) + offset;
    Bits<T>* probs = static_cast<Bits<T>*>(p.probs) + offset;
    __syncthreads();
    if (thread == 0) {
      router = p.router;
      router.logits = logits;
      router.weights = weights;
      router.indices = indices;
    }
    for (int32_t w = thread; w < kMarkWords; w += kBlock) marks[w] = 0u;
    __syncthreads();
    BlockRow<T, RouterKind::kAny>(router, row_shared).Route(0);
    __syncthreads();
    for (int32_t j = thread; j < k; j += kBlock) {
      atomicOr(&marks[indices[j] / kWarp], 1u << (indices[j] % kWarp));
      if (p.indices != nullptr) p.indices[row * k + j] = indices[j];
    }
    if (p.all_scores) {
      StoreAllScores<T>(p, logits, probs);
    } else {
      for (int32_t e = thread; e < experts; e += kBlock) probs[e] = 0;
    }
    __syncthreads();
    if (!p.all_scores) {
      for (int32_t j = thread; j < k; j += kBlock) probs[indices[j]] = Storage<T>::Round(weights[j]);
    }
    uint8_t* map = p.map + row * p.map_bytes;
    for (int32_t n = thread; n < p.map_bytes; n += kBlock) {
      const bool bits = p.map_format == MapFormat::kBit;
      map[n] = bits ? marks[n / 4] >> (n % 4 * kChunk) & 0xffu : marks[n / kWarp] >> (n % kWarp) & 1u;
    }
  }
}

}  // namespace ort_moe
