// Routing maps of up to 1024 choices from a list in shared memory, by some threads of one block, or of each block of a
// cluster, which then share the writing.
//
// A choice's key is its expert over its slot, t * k + j, so that the permuted order is that of the keys.
//   few choices    every threshold, a choice's key or an expert's first, counts the keys below it: no step waits for
//                  another
//   more choices   a bit per choice in its expert's mask; sums of the masks' bits over the experts are the offsets, and
//                  the bits before a choice's own its place behind them. The order in which bits are set has no effect.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cluster.cuh"
#include "kernels/group_scan.cuh"
#include "kernels/routing_maps.h"

namespace ort_moe {

constexpr int kLog2ListedChoices = 10;
constexpr int32_t kMaxListedChoices = 1 << kLog2ListedChoices;
constexpr int32_t kMaxListedExperts = 1 << (31 - kLog2ListedChoices);

// What is to be built, of which a list's size in shared memory follows.
struct MapsParams {
  RoutingMaps maps;
  int32_t tokens;
  int32_t k;
  int32_t experts;
  int32_t choices_per_bit;  // k where a token's experts are known to differ, so that it needs one bit; else 1

  static constexpr int32_t kMaxCounted = 48;  // choices; beyond, masks are faster

  __host__ __device__ int32_t choices() const { return tokens * k; }
  __host__ __device__ bool counts() const { return choices() <= kMaxCounted; }
  // Words of one expert's mask, and from one word of it to the next.
  __host__ __device__ int32_t mask_words() const { return (choices() / choices_per_bit + 31) / 32; }
  __host__ __device__ int32_t mask_stride() const { return (experts + 4) / 4 * 4; }
  __host__ __device__ int32_t key_words() const { return (choices() + 3) / 4 * 4; }
  __host__ __device__ size_t mask_bytes() const {
    return counts() ? 0 : static_cast<size_t>(mask_words() + 1) * mask_stride() * sizeof(uint32_t);
  }
  __host__ __device__ size_t SharedBytes() const { return key_words() * sizeof(uint32_t) + mask_bytes(); }
};

// Used by kThreads threads of a block, which count from 0 and share `barrier`: Prepare() ahead of the keys, Build()
// once Key() of every slot is written, in every block of the cluster.
template <int kThreads>
class MapsFromList {
 public:
  __device__ MapsFromList(const MapsParams& p, unsigned char* shared, int thread, int barrier)
      : p_(p),
        keys_(reinterpret_cast<uint32_t*>(shared)),
        masks_(keys_ + p.key_words()),
        starts_(reinterpret_cast<int32_t*>(masks_ + p.mask_words() * p.mask_stride())),
        thread_(thread),
        barrier_(barrier) {}

  static __device__ uint32_t Key(int32_t expert, int32_t slot) {
    return static_cast<uint32_t>(expert) << kLog2ListedChoices | static_cast<uint32_t>(slot);
  }

  __device__ void Prepare() {
    for (int32_t i = p_.choices() + thread_; i < p_.key_words(); i += kThreads) keys_[i] = 0xffffffffu;
    if (p_.counts()) return;
    uint4* masks = reinterpret_cast<uint4*>(masks_);
    const int32_t vectors = p_.mask_words() * p_.mask_stride() / 4;
    for (int32_t i = thread_; i < vectors; i += kThreads) masks[i] = make_uint4(0u, 0u, 0u, 0u);
  }

  __device__ void Build() {
    if (p_.counts()) {
      BuildByCounting();
    } else {
      BuildByMasks();
    }
  }

 private:
  // Thresholds are the experts' first possible keys, then the choices' own.
  __device__ void BuildByCounting() {
    constexpr int kAtOnce = 2;
    const int32_t firsts = p_.experts + 1;
    const int32_t thresholds = firsts + p_.choices();
    const int32_t first = static_cast<int32_t>(ClusterRank()) * kThreads + thread_;
    const int32_t step = static_cast<int32_t>(ClusterBlocks()) * kThreads;
#pragma unroll 1
    for (int32_t i = first; i < thresholds; i += kAtOnce * step) {
      uint32_t threshold[kAtOnce];
      int32_t below[kAtOnce] = {};
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int32_t which = min(i + n * step, thresholds - 1);
        threshold[n] = which < firsts ? Key(which, 0) : keys_[which - firsts];
      }
#pragma unroll 2
      for (int32_t v = 0; v < p_.key_words() / 4; ++v) {
        const uint4 four = reinterpret_cast<const uint4*>(keys_)[v];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          below[n] += four.x < threshold[n];
          below[n] += four.y < threshold[n];
          below[n] += four.z < threshold[n];
          below[n] += four.w < threshold[n];
        }
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int32_t which = i + n * step;
        if (which < firsts) {
          p_.maps.expert_first_token_offset[which] = below[n];
        } else if (which < thresholds) {
          Write(threshold[n], below[n]);
        }
      }
    }
  }

  __device__ void BuildByMasks() {
    __shared__ int32_t of_warps[kThreads / 32];
    const int32_t words = p_.mask_words(), stride = p_.mask_stride();
    for (int32_t i = thread_; i < p_.choices(); i += kThreads) {
      const uint32_t bit = BitOf(keys_[i]);
      atomicOr(masks_ + bit / 32 * stride + ExpertOf(keys_[i]), 1u << bit % 32);
    }
    BlockSync(barrier_, kThreads);
    // A thread's experts are neighbours.
    const int32_t per_thread = (p_.experts + kThreads) / kThreads;
    const int32_t begin = thread_ * per_thread, end = min(begin + per_thread, p_.experts + 1);
    int32_t count = 0;
    for (int32_t e = begin; e < end; ++e) count += CountOf(e, words);
    int32_t start = ExclusiveSum<kThreads>(count, thread_, barrier_, of_warps);
    for (int32_t e = begin; e < end; ++e) {
      starts_[e] = start;
      start += CountOf(e, words);
    }
    BlockSync(barrier_, kThreads);
    const int32_t first = static_cast<int32_t>(ClusterRank()) * kThreads + thread_;
    const int32_t step = static_cast<int32_t>(ClusterBlocks()) * kThreads;
    for (int32_t i = first; i < p_.choices(); i += step) {
      const uint32_t bit = BitOf(keys_[i]);
      const int32_t expert = ExpertOf(keys_[i]);
      const uint32_t before = masks_[bit / 32 * stride + expert] & ((1u << bit % 32) - 1u);
      Write(keys_[i], starts_[expert] + CountOf(expert, bit / 32) + __popc(before));
    }
    for (int32_t e = first; e <= p_.experts; e += step) p_.maps.expert_first_token_offset[e] = starts_[e];
  }

  static __device__ int32_t ExpertOf(uint32_t key) { return static_cast<int32_t>(key >> kLog2ListedChoices); }
  static __device__ int32_t SlotOf(uint32_t key) { return static_cast<int32_t>(key & (kMaxListedChoices - 1)); }
  __device__ uint32_t BitOf(uint32_t key) const {
    return static_cast<uint32_t>(SlotOf(key)) / static_cast<uint32_t>(p_.choices_per_bit);
  }

  // Bits in the first words of an expert's mask.
  __device__ int32_t CountOf(int32_t expert, int32_t words) const {
    int32_t count = 0;
    for (int32_t word = 0; word < words; ++word) count += __popc(masks_[word * p_.mask_stride() + expert]);
    return count;
  }

  __device__ void Write(uint32_t key, int32_t position) const {
    const int32_t expert = ExpertOf(key), slot = SlotOf(key);
    const int32_t token = slot / p_.k;
    const int32_t row = (slot - token * p_.k) * p_.tokens + token;
    p_.maps.permuted_to_unpermuted[position] = row;
    p_.maps.unpermuted_to_permuted[row] = expert < p_.experts ? position : -1;
    p_.maps.permuted_to_expert[position] = expert;
  }

  const MapsParams& p_;
  uint32_t* keys_;
  uint32_t* masks_;
  int32_t* starts_;  // of the experts
  const int thread_;
  const int barrier_;
};

}  // namespace ort_moe
