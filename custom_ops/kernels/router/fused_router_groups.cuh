// FusedRouter's groups on the device: their keys, and which of them stay, from a row's keys in shared memory or in
// lanes.
#pragma once

#include "kernels/router/fused_router_row.cuh"

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
#pragma unroll 1
    for (int32_t chunk = first_chunk + skip; chunk * kChunk < end; chunk += kPartials) {
#pragma unroll 1
      for (int32_t e = max(chunk * kChunk, begin); e < min(chunk * kChunk + kChunk, end); ++e) {
        const bool counts = keys[e] > last_key || (keys[e] == last_key && e <= last);
        if (counts) partial[q] = Add(partial[q], KeyValue(keys[e]));
      }
    }
  }
  return Butterfly(partial[0], partial[1], partial[2], partial[3]);
}

struct Ranked {
  uint32_t key = 0xffffffffu;
  int32_t expert = -1;
};

// The best of keys[begin .. begin + size) among those that rank below `last`, by one warp.
__device__ inline Ranked BestBelow(const uint32_t* keys, int32_t begin, int32_t size, Ranked last) {
  constexpr int32_t kNone = 0x7fffffff;
  Ranked best{0u, kNone};
#pragma unroll 2
  for (int32_t e = begin + static_cast<int32_t>(threadIdx.x % kWarp); e < begin + size; e += kWarp) {
    const uint32_t key = keys[e];
    const bool below = key < last.key || (key == last.key && e > last.expert);
    if (below && key > best.key) best = {key, e};
  }
  const uint32_t key = WarpMax(best.key);
  return {key, static_cast<int32_t>(WarpMin(best.key == key ? best.expert : kNone))};
}

// Ranking key of one group, by one warp; `keys` are RankKeys of all experts.
__device__ inline uint32_t GroupKey(const uint32_t* keys, int32_t begin, int32_t size, int32_t score_top) {
  Ranked last;
  float sum = 0.0f;
#pragma unroll 1
  for (int32_t n = 0; n < score_top; ++n) {
    last = BestBelow(keys, begin, size, last);
    sum = Add(sum, KeyValue(last.key));
  }
  if (score_top > 2) sum = SumOfBest(keys, begin, size, last.key, last.expert);  // the order of two does not matter
  return RankKey(sum);
}

// Words for an entry per group, whole 16 bytes.
__host__ __device__ inline int32_t GroupWords(const RouterParams& p) {
  return p.grouped ? (p.num_groups + 3) / 4 * 4 : 0;
}

// keep[g] for the groups that this thread owns: whether fewer than topk_groups rank before it.
__device__ inline void KeepGroups(const RouterParams& p, const uint32_t* group_keys, uint32_t* keep, int thread,
                                  int threads) {
  for (int32_t g = thread; g < p.num_groups; g += threads) {
    const uint32_t key = group_keys[g];
    int32_t better = 0;
#pragma unroll 4
    for (int32_t h = 0; h < p.num_groups; ++h) {
      better += group_keys[h] > key || (group_keys[h] == key && h < g);
    }
    keep[g] = better < p.topk_groups;
  }
}

// Whether chunk lane + c * 32 of this lane's keys is in a group that is left out. A group is 2^log2_group_chunks
// neighbouring lanes, and its score the sum of one or two keys.
template <int kChunks>
__device__ __forceinline__ void MaskedInLanes(const RouterParams& p, const uint32_t (&key)[kChunks * kChunk],
                                              bool (&masked)[kChunks]) {
  const int32_t lane = threadIdx.x % kWarp;
  const int32_t chunks = 1 << p.log2_group_chunks;
  uint32_t group_key[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    uint32_t first = 0u, second = 0u;  // best of the chunk, then of the group
#pragma unroll
    for (int i = c * kChunk; i < (c + 1) * kChunk; ++i) {
      second = max(second, min(first, key[i]));
      first = max(first, key[i]);
    }
#pragma unroll 1
    for (int stride = 1; stride < chunks; stride *= 2) {
      const uint32_t other_first = __shfl_xor_sync(kAllLanes, first, stride);
      const uint32_t other_second = __shfl_xor_sync(kAllLanes, second, stride);
      second = max(min(first, other_first), max(second, other_second));
      first = max(first, other_first);
    }
    float sum = Add(0.0f, KeyValue(first));
    if (p.group_score_top == 2) sum = Add(sum, KeyValue(second));
    group_key[c] = first == 0u ? 0u : RankKey(sum);
  }
  int32_t better[kChunks] = {};
#pragma unroll
  for (int other_c = 0; other_c < kChunks; ++other_c) {
#pragma unroll 1
    for (int32_t other = 0; other < kWarp; other += 4 * chunks) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int32_t other_lane = other + n * chunks;
        const uint32_t other_key = __shfl_sync(kAllLanes, group_key[other_c], other_lane);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const bool lower = other_c * kWarp + other_lane < ((lane + c * kWarp) & -chunks);
          better[c] += other_lane < kWarp && (other_key > group_key[c] || (other_key == group_key[c] && lower));
        }
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) masked[c] = group_key[c] != 0u && better[c] >= p.topk_groups;
}

}  // namespace ort_moe
