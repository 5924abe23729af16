// Routing maps of up to 1024 choices from a list in shared memory, by some threads of one block, or of each block of a
// cluster, which then share the writing.
//
// Every choice sets a bit of its expert's mask, whose number is its place in the order of the expert's rows; the order
// in which bits are set has no effect. Sums of the masks' bits over the experts are the offsets, and the bits before a
// choice's own are its place behind them. The code is short rather than unrolled: it runs once, and its instructions
// take longer to arrive than to execute. (Counting, for every expert, the keys below it is no faster for one token and
// slower for four.)
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/cluster.cuh"
#include "kernels/maps/group_scan.cuh"
#include "kernels/maps/routing_maps.h"

namespace ort_moe {

constexpr int32_t kMaxListedChoices = 1 << 10;
constexpr int32_t kListedExpertsPerThread = 8;

// A choice: its expert (E: none), the number of its bit, and its expanded row. A list has them in any order.
struct ListedChoice {
  uint32_t key;
  int32_t row;

  static constexpr int kLog2Bits = 10;
  static_assert(kMaxListedChoices <= 1 << kLog2Bits);

  __device__ ListedChoice(int32_t expert, int32_t bit, int32_t row)
      : key(static_cast<uint32_t>(expert) << kLog2Bits | static_cast<uint32_t>(bit)), row(row) {}

  __device__ int32_t expert() const { return static_cast<int32_t>(key >> kLog2Bits); }
  __device__ uint32_t bit() const { return key & ((1u << kLog2Bits) - 1u); }
};

// What is to be built, of which a list's size in shared memory follows.
struct MapsParams {
  RoutingMaps maps;
  int32_t experts;
  int32_t choices;
  int32_t bits;  // of a mask: tokens, where a token's experts are known to differ; else choices

  __host__ __device__ int32_t mask_words() const { return (bits + 31) / 32; }
  // From one word of a mask to the next; the last thread's experts are whole.
  __host__ __device__ int32_t mask_stride() const {
    return (experts + kListedExpertsPerThread) / kListedExpertsPerThread * kListedExpertsPerThread;
  }
  __host__ __device__ size_t list_bytes() const { return static_cast<size_t>(choices + 1) / 2 * 16; }
  __host__ __device__ size_t SharedBytes() const {
    return list_bytes() + static_cast<size_t>(mask_words() + 1) * mask_stride() * sizeof(uint32_t);
  }
};

// Used by kThreads threads of a block, which count from 0 and share `barrier`: Prepare() ahead, Build() once the list
// is complete in every block of the cluster.
template <int kThreads>
class MapsFromList {
 public:
  static constexpr int32_t kMaxExperts = kThreads * kListedExpertsPerThread - 1;

  __device__ MapsFromList(const MapsParams& p, unsigned char* shared, int thread, int barrier)
      : p_(p),
        list_(reinterpret_cast<ListedChoice*>(shared)),
        masks_(reinterpret_cast<uint32_t*>(shared + p.list_bytes())),
        starts_(reinterpret_cast<int32_t*>(masks_ + p.mask_words() * p.mask_stride())),
        thread_(thread),
        barrier_(barrier) {}

  __device__ ListedChoice* list() const { return list_; }

  __device__ void Prepare() {
    uint4* masks = reinterpret_cast<uint4*>(masks_);
    const int32_t vectors = p_.mask_words() * p_.mask_stride() / 4;
#pragma unroll 1
    for (int32_t i = thread_; i < vectors; i += kThreads) masks[i] = make_uint4(0u, 0u, 0u, 0u);
    BlockSync(barrier_, kThreads);
  }

  __device__ void Build() {
    const int32_t stride = p_.mask_stride();
#pragma unroll 1
    for (int32_t i = thread_; i < p_.choices; i += kThreads) {
      const ListedChoice choice = list_[i];
      atomicOr(masks_ + choice.bit() / 32 * stride + choice.expert(), 1u << choice.bit() % 32);
    }
    BlockSync(barrier_, kThreads);
    SumCounts();
    BlockSync(barrier_, kThreads);
    const int32_t first = static_cast<int32_t>(ClusterRank()) * kThreads + thread_;
    const int32_t step = static_cast<int32_t>(ClusterBlocks()) * kThreads;
#pragma unroll 1
    for (int32_t i = first; i < p_.choices; i += step) {
      const ListedChoice choice = list_[i];
      const int32_t expert = choice.expert();
      int32_t position = starts_[expert];
      const uint32_t* word = masks_ + expert;
#pragma unroll 1
      for (uint32_t bits = choice.bit(); bits >= 32; bits -= 32, word += stride) position += __popc(*word);
      position += __popc(*word & ((1u << choice.bit() % 32) - 1u));
      p_.maps.permuted_to_unpermuted[position] = choice.row;
      p_.maps.unpermuted_to_permuted[choice.row] = expert < p_.experts ? position : -1;
      p_.maps.permuted_to_expert[position] = expert;
    }
#pragma unroll 2
    for (int32_t e = first; e <= p_.experts; e += step) p_.maps.expert_first_token_offset[e] = starts_[e];
  }

 private:
  // starts_ of all experts; a thread has eight neighbours.
  __device__ void SumCounts() {
    __shared__ int32_t of_warps[kThreads / 32];
    constexpr int kOwned = kListedExpertsPerThread;
    const bool owns = thread_ * kOwned < p_.mask_stride();
    int32_t count[kOwned] = {};
    if (owns) {
      const uint32_t* word = masks_ + thread_ * kOwned;
#pragma unroll 1
      for (int32_t w = 0; w < p_.mask_words(); ++w, word += p_.mask_stride()) {
        const uint4 low = reinterpret_cast<const uint4*>(word)[0], high = reinterpret_cast<const uint4*>(word)[1];
        const uint32_t words[kOwned] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int n = 0; n < kOwned; ++n) count[n] += __popc(words[n]);
      }
    }
    int32_t start[kOwned + 1] = {};
#pragma unroll
    for (int n = 0; n < kOwned; ++n) start[n + 1] = start[n] + count[n];
    const int32_t before = ExclusiveSum<kThreads>(start[kOwned], thread_, barrier_, of_warps);
    if (!owns) return;
    int4* starts = reinterpret_cast<int4*>(starts_ + thread_ * kOwned);
    starts[0] = make_int4(before, before + start[1], before + start[2], before + start[3]);
    starts[1] = make_int4(before + start[4], before + start[5], before + start[6], before + start[7]);
  }

  const MapsParams& p_;
  ListedChoice* list_;
  uint32_t* masks_;
  int32_t* starts_;  // of the experts
  const int thread_;
  const int barrier_;
};

}  // namespace ort_moe
