// FusedRouter's group mask on the device: scores of groups from keys in shared memory, and which groups stay.
#pragma once

#include "kernels/fused_router_row.cuh"

namespace ort_moe {

// Sum of the values of keys[begin .. begin + size) that rank no lower than (last_key, last), by one warp.
__device__ inline float SumOfBest(const uint32_t* keys, int32_t begin, int32_t size, uint32_t last_key, int32_t last) {
  const int lane = threadIdx.x % kWarp;
  const int32_t end = begin + size;
  float partial[4] = {};
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int32_t first_chunk = begin / kChunk;
    const int32_t skip = (lane + q * kWarp - first_chunk) & (kPartials - 1);
    for (int32_t chunk = first_chunk + skip; chunk * kChunk < end; chunk += kPartials) {
      for (int32_t e = max(chunk * kChunk, begin); e < min(chunk * kChunk + kChunk, end); ++e) {
        const bool counts = keys[e] > last_key || (keys[e] == last_key && e <= last);
        if (counts) partial[q] = Add(partial[q], KeyValue(keys[e]));
      }
    }
  }
  return Butterfly(partial[0], partial[1], partial[2], partial[3]);
}

// Ranking key of one group, by one warp; `keys` are RankKeys of all experts.
__device__ inline uint32_t GroupKey(const uint32_t* keys, int32_t begin, int32_t size, int32_t score_top) {
  const int lane = threadIdx.x % kWarp;
  uint32_t last_key = 0xffffffffu;
  int32_t last = -1;
  float sum = 0.0f;
  for (int32_t n = 0; n < score_top; ++n) {  // the best of those that rank below the last one
    uint32_t best = 0u;
    int32_t best_expert = 0x7fffffff;
    for (int32_t e = begin + lane; e < begin + size; e += kWarp) {
      const uint32_t key = keys[e];
      if ((key < last_key || (key == last_key && e > last)) && key > best) {
        best = key;
        best_expert = e;
      }
    }
    last_key = WarpMax(best);
    last = static_cast<int32_t>(WarpMin(best == last_key ? best_expert : 0x7fffffff));
    sum = Add(sum, KeyValue(last_key));
  }
  if (score_top > 2) sum = SumOfBest(keys, begin, size, last_key, last);  // the order of two does not matter
  return RankKey(sum);
}

// keep[g] for the groups that this thread owns: whether fewer than topk_groups rank before it.
__device__ inline void KeepGroups(const RouterParams& p, const uint32_t* group_keys, uint32_t* keep, int thread,
                                  int threads) {
  for (int32_t g = thread; g < p.num_groups; g += threads) {
    const uint32_t key = group_keys[g];
    int32_t better = 0;
    for (int32_t h = 0; h < p.num_groups; ++h) {
      better += group_keys[h] > key || (group_keys[h] == key && h < g);
    }
    keep[g] = better < p.topk_groups;
  }
}

}  // namespace ort_moe
