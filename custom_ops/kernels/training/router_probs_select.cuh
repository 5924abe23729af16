// Which of a row's experts are the k best, by one warp, from the row's keys in shared memory; no order among them is
// needed. Lane l owns the chunks of 8 experts l, l + 32, ..., and walks over them.
//
// The choice is narrowed in two steps. Collect: the keys that reach a bound, which the lanes' bests give. The few that
// do rank themselves by counting (router_probs_row.cuh). Narrow, where too many reach the bound (large k, sorted rows,
// floods of equal keys) or too few are numbers: the threshold, bit by bit among the bits in which the keys differ,
// until few enough reach it; what equals it then is taken in the order of experts.
#pragma once

#include "kernels/router/fused_router_row.cuh"
#include "kernels/training/training_rows.cuh"

namespace ort_moe {

// Sum over the lanes before this one, and over all.
__device__ __forceinline__ int32_t SumBefore(int32_t value, int32_t* total) {
  const int lane = threadIdx.x % kWarp;
  int32_t sum = value;
#pragma unroll
  for (int stride = 1; stride < kWarp; stride *= 2) {
    const int32_t before = __shfl_up_sync(kAllLanes, sum, stride);
    if (lane >= stride) sum += before;
  }
  *total = __shfl_sync(kAllLanes, sum, kWarp - 1);
  return sum - value;
}

// The lowest `count` of the bits that are set in a byte.
__device__ __forceinline__ uint32_t LowestBits(uint32_t byte, int32_t count) {
  uint32_t lowest = 0u;
  for (; byte != 0u && count > 0; --count) {
    lowest |= byte & -byte;
    byte &= byte - 1u;
  }
  return lowest;
}

// Keys of type K, in shared memory: a logit's, or float.
template <typename K>
class RowChoice {
 public:
  // A word for each lane and each four of its chunks: which of those experts are chosen.
  static __host__ __device__ uint32_t Words(int32_t experts) { return (experts + 1023) / 1024 * kWarp; }

  __device__ RowChoice(int32_t experts, uint32_t* bits)
      : experts_(experts), chunks_((experts + kChunk - 1) / kChunk), lane_(threadIdx.x % kWarp), bits_(bits) {}

  __device__ __forceinline__ void PointTo(const void* keys) { keys_ = keys; }

  // Behind the words.
  __device__ __forceinline__ uint32_t* end() const { return bits_ + Words(experts_); }
  __device__ __forceinline__ int32_t chunks() const { return chunks_; }
  __device__ __forceinline__ int32_t words() const { return (chunks_ + 127) / 128; }
  __device__ __forceinline__ uint32_t bits(int word) const { return bits_[word * kWarp + lane_]; }
  // Of the chunk lane + lap * 32.
  __device__ __forceinline__ uint32_t byte(int lap) const { return bits(lap / 4) >> (lap % 4 * kChunk) & 0xffu; }

  // Chooses all that reach the bound; how many, and how many of this lane.
  __device__ __forceinline__ int32_t Collect(float bound, int32_t* mine) {
    return Collect(bound, mine, [this](int32_t chunk, float (&key)[kChunk]) { ReadChunk<K>(keys_, chunk, key); });
  }

  // The same of keys that are computed: read(chunk, key).
  template <typename Read>
  __device__ __forceinline__ int32_t Collect(float bound, int32_t* mine, Read read) {
    *mine = 0;
#pragma unroll 1
    for (int word = 0; word < words(); ++word) {
      uint32_t bits = 0u;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int32_t chunk = lane_ + (word * 4 + q) * kWarp;
        if (chunk >= chunks_) continue;
        float key[kChunk];
        read(chunk, key);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          if (key[i] >= bound) bits |= 1u << (q * kChunk + i);
        }
      }
      if (ORT_MOE_RARE(experts_ % kChunk != 0)) bits &= InsideBits(word);
      bits_[word * kWarp + lane_] = bits;
      *mine += __popc(bits);
    }
    return __reduce_add_sync(kAllLanes, *mine);
  }

  struct Counts {
    int32_t all;
    int32_t mine;  // of this lane
  };

  // From all that reach `bound`, `total` of them, to at most `limit` and at least k; `best` is the row's best key. To k
  // where total < k: then every number is among them, and NaNs fill up. Called where that is rare: a copy of the choice
  // comes in, so that the caller's stays in registers.
  static __device__ __noinline__ Counts Narrow(RowChoice choice, float bound, float best, int32_t total, int32_t k,
                                               int32_t limit) {
    Counts counts{};
    counts.all = choice.NarrowHere(bound, best, total, k, limit, &counts.mine);
    return counts;
  }

 private:
  __device__ __forceinline__ int32_t NarrowHere(float bound, float best, int32_t total, int32_t k, int32_t limit,
                                                int32_t* mine) {
    if (total < k) {
      TakeTies(k - total, mine, [](float key) { return IsNaN(key); }, [](float key) { return !IsNaN(key); });
      return k;
    }
    const uint32_t one = RankKey(best);
    uint32_t differing = 0u;
    ForEachKey([&](float key) { differing |= key >= bound ? RankKey(key) ^ one : 0u; });
    differing = __reduce_or_sync(kAllLanes, differing);
    uint32_t threshold = one & ~differing;
#pragma unroll 1
    while (differing != 0u) {
      const uint32_t bit = 0x80000000u >> __clz(differing);
      differing ^= bit;
      const float value = ValueOf(threshold | bit);
      int32_t reached = 0;
      ForEachKey([&](float key) { reached += key >= value; });
      reached = __reduce_add_sync(kAllLanes, reached);
      if (reached < k) continue;
      threshold |= bit;
      if (reached <= limit) return Collect(value, mine);
    }
    const float value = ValueOf(threshold);
    int32_t above = 0;
    ForEachKey([&](float key) { above += key > value; });
    TakeTies(
        k - __reduce_add_sync(kAllLanes, above), mine, [&](float key) { return key == value; },
        [&](float key) { return key > value; });
    return k;
  }

  // Of a word: which of this lane's places are experts, where the last chunk is not whole.
  __device__ __forceinline__ uint32_t InsideBits(int word) const {
    uint32_t inside = 0xffffffffu;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (lane_ + (word * 4 + q) * kWarp == chunks_ - 1)
        inside ^= (0xffu & 0xffu << (experts_ % kChunk)) << (q * kChunk);
    }
    return inside;
  }

  // Of a rank key that need not be a number's: none lie between -inf and NaN.
  static __device__ __forceinline__ float ValueOf(uint32_t rank_key) {
    return rank_key <= 0x007fffffu ? -Infinity() : KeyValue(rank_key);
  }

  template <typename F>
  __device__ __forceinline__ void ForEachKey(F f) const {
#pragma unroll 1
    for (int32_t chunk = lane_; chunk < chunks_; chunk += kWarp) {
      float key[kChunk];
      ReadChunk<K>(keys_, chunk, key);
      if (ORT_MOE_RARE(chunk * kChunk + kChunk > experts_)) {
#pragma unroll
        for (int i = 1; i < kChunk; ++i) key[i] = i < experts_ % kChunk ? key[i] : NaN();
      }
#pragma unroll
      for (int i = 0; i < kChunk; ++i) f(key[i]);
    }
  }

  // Chooses what is above, and the first `count` of the experts whose keys tie.
  template <typename Ties, typename Above>
  __device__ __forceinline__ void TakeTies(int32_t count, int32_t* mine, Ties ties, Above above) {
    *mine = 0;
    uint32_t bits = 0u;
#pragma unroll 1
    for (int lap = 0; lap * kWarp < chunks_; ++lap) {
      const int32_t chunk = lane_ + lap * kWarp;
      uint32_t chosen = 0u, tied = 0u;
      if (chunk < chunks_) {
        float key[kChunk];
        ReadChunk<K>(keys_, chunk, key);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          chosen |= uint32_t{above(key[i])} << i;
          tied |= uint32_t{ties(key[i])} << i;
        }
        const uint32_t inside = chunk * kChunk + kChunk > experts_ ? (1u << (experts_ % kChunk)) - 1u : 0xffu;
        chosen &= inside;
        tied &= inside;
      }
      int32_t in_all;
      const int32_t before = SumBefore(__popc(tied), &in_all);
      chosen |= LowestBits(tied, count - before);
      count -= in_all;
      bits |= chosen << (lap % 4 * kChunk);
      *mine += __popc(chosen);
      if (lap % 4 == 3 || (lap + 1) * kWarp >= chunks_) {
        bits_[lap / 4 * kWarp + lane_] = bits;
        bits = 0u;
      }
    }
  }

  const int32_t experts_;
  const int32_t chunks_;
  const int lane_;
  uint32_t* const bits_;
  const void* keys_ = nullptr;
};

}  // namespace ort_moe
