// FusedRouter, a warp to a row: up to 1024 experts and few enough chosen that one lane each holds them.
//
// Lane l owns the chunks of 8 experts l, l + 32, l + 64, l + 96, so partial sums need no exchange before the butterfly,
// and the keys stay in registers. Each round finds the best key of the warp with redux.sync; where 16-bit logits rank,
// key and expert share one 32-bit word and a round is a single redux and one add-max per key. Lane j keeps the j-th
// choice.
#pragma once

#include "kernels/fused_router_groups.cuh"
#include "kernels/fused_router_row.cuh"
#include "kernels/launch.cuh"

namespace ort_moe {

constexpr int kMaxWarpExperts = kPartials * kChunk;

// A 16-bit key over the complement of the expert: unique, never 0, and its order is the ranking.
template <typename T>
__device__ __forceinline__ uint32_t PackKey(float x, int32_t expert) {
  const uint32_t bits = Storage<T>::Narrow(Add(x, 0.0f));
  const uint32_t ordered = IsNaN(x) ? 0u : ((bits & 0x8000u) ? ~bits & 0xffffu : bits | 0x8000u);
  return ordered << 16 | (0xffffu - static_cast<uint32_t>(expert));
}

__device__ __forceinline__ int32_t PackedExpert(uint32_t packed) {
  return static_cast<int32_t>(0xffffu - (packed & 0xffffu));
}

// The packed key's logit, but for the sign of zero and the payload of NaN.
template <typename T>
__device__ __forceinline__ float PackedLogit(uint32_t packed) {
  const uint32_t ordered = packed >> 16;
  const uint32_t bits = (ordered & 0x8000u) ? ordered ^ 0x8000u : ~ordered;
  return Storage<T>::Widen(static_cast<uint16_t>(bits));
}

template <typename T, int kChunks>
class WarpRow {
 public:
  static constexpr int kOwned = kChunks * kChunk;  // experts of a lane
  static constexpr int kSumFloats = kChunks * kWarp * kChunk;

  // Shared memory of one warp: a float per expert, zero between uses, and two words per group.
  static __host__ __device__ int SharedFloats(const RouterParams& p) {
    return kSumFloats + (p.grouped ? (2 * p.num_groups + 3) / 4 * 4 : 0);
  }

  __device__ WarpRow(const RouterParams& p, float* shared)
      : p_(p),
        lane_(threadIdx.x % kWarp),
        by_expert_(shared),
        group_keys_(reinterpret_cast<uint32_t*>(shared + kSumFloats)),
        keep_(group_keys_ + p.num_groups) {
    ClearSums();
  }

  __device__ void Route(int64_t row) {
    row_ = row;
    float x[kOwned];
    bool nan = false;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      LoadChunk<T>(p_, row, Chunk(c), *reinterpret_cast<float (*)[kChunk]>(x + c * kChunk));
#pragma unroll
    for (int i = 0; i < kOwned; ++i) nan |= IsNaN(x[i]);
    nan = __any_sync(kAllLanes, nan);
    if (p_.softcap > 0.0f) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) x[i] = Expert(i) < p_.experts ? Softcap(p_, x[i]) : -Infinity();
    }
    RowSoftmax softmax;
    if (p_.softmax_of_experts) softmax = SoftmaxOfExperts(x);

    if (sizeof(typename Storage<T>::Bits) == 2 && p_.plain_keys() && p_.softcap == 0.0f) {
      if constexpr (sizeof(typename Storage<T>::Bits) == 2) ChoosePacked(x);
    } else {
      ChooseByKey(x, softmax);
    }
    if (p_.score == Score::kSparseMixer) {
      WeighSparseMixer(*this, p_, __shfl_sync(kAllLanes, expert_, 0), __shfl_sync(kAllLanes, expert_, 1));
    }
    WeighChosen(*this, p_, softmax, nan);
    if (lane_ < p_.k) {
      p_.weights[row * p_.k + lane_] = value_;
      p_.indices[row * p_.k + lane_] = expert_;
    }
  }

  template <typename F>
  __device__ void ForEachChosen(F f) {
    if (lane_ < p_.k) f(expert_, value_);
  }

  __device__ float MaxOfChosen() const { return KeyValue(WarpMax(lane_ < p_.k ? RankKey(value_) : 0u)); }

  __device__ float SumOfChosen() {
    __syncwarp();
    if (lane_ < p_.k) by_expert_[expert_] = value_;
    __syncwarp();
    float partial[4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float4* chunk = reinterpret_cast<const float4*>(by_expert_ + Chunk(c) * kChunk);
      const float4 low = chunk[0], high = chunk[1];
      const float values[kChunk] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kChunk; ++i) partial[c] = Add(partial[c], values[i]);
    }
    __syncwarp();
    if (lane_ < p_.k) by_expert_[expert_] = 0.0f;
    return Butterfly(partial[0], partial[1], partial[2], partial[3]);
  }

  template <typename F>
  __device__ float SumOfExperts(F f) const {
    float partial[4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float x[kChunk];
      LoadChunk<T>(p_, row_, Chunk(c), x);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const int32_t expert = Chunk(c) * kChunk + i;
        if (expert < p_.experts) partial[c] = Add(partial[c], f(expert, Softcap(p_, x[i])));
      }
    }
    return Butterfly(partial[0], partial[1], partial[2], partial[3]);
  }

  __device__ float Logit(int32_t expert) const {
    // The key still holds it, but for the sign of zero, which the score `none` would show.
    if (p_.plain_keys() && p_.score != Score::kNone && p_.score != Score::kSparseMixer && !p_.from_selection) return x_;
    return LoadLogit<T>(p_, row_, expert);
  }

  __device__ bool IsMasked(int32_t expert) const { return p_.grouped && keep_[expert / p_.group_size] == 0u; }

 private:
  __device__ int32_t Chunk(int c) const { return lane_ + c * kWarp; }
  __device__ int32_t Expert(int i) const { return Chunk(i / kChunk) * kChunk + i % kChunk; }

  __device__ void ClearSums() {
    for (int i = lane_ * 4; i < kSumFloats; i += kWarp * 4) {
      *reinterpret_cast<float4*>(by_expert_ + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  __device__ RowSoftmax SoftmaxOfExperts(const float (&x)[kOwned]) const {
    uint32_t best = 0u;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) best = max(best, RankKey(x[i]));
    RowSoftmax softmax;
    softmax.max = KeyValue(WarpMax(best));
    float partial[4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        partial[c] = Add(partial[c], Exp(Add(x[c * kChunk + i], -softmax.max)));  // past the end: e^-inf = 0
      }
    }
    softmax.sum = Butterfly(partial[0], partial[1], partial[2], partial[3]);
    return softmax;
  }

  __device__ void ChoosePacked(const float (&x)[kOwned]) {
    uint32_t key[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) key[i] = Expert(i) < p_.experts ? PackKey<T>(x[i], Expert(i)) : 0u;
    uint32_t best = 0u;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) best = max(best, key[i]);
    uint32_t mine = 0u;
    for (int j = 0; j < p_.k; ++j) {
      const uint32_t chosen = WarpMax(best);
      if (lane_ == j) mine = chosen;
      // The best key below `chosen`: subtracting it wraps the smaller ones above all that were taken already.
      constexpr int kChains = 4;
      uint32_t next[kChains] = {0u - chosen, 0u - chosen, 0u - chosen, 0u - chosen};  // that of "no expert"
#pragma unroll
      for (int i = 0; i < kOwned; ++i) next[i % kChains] = __viaddmax_u32(key[i], 0u - chosen, next[i % kChains]);
      best = max(max(next[0], next[1]), max(next[2], next[3])) + chosen;
    }
    expert_ = PackedExpert(mine);
    x_ = PackedLogit<T>(mine);
  }

  __device__ void ChooseByKey(float (&x)[kOwned], const RowSoftmax& softmax) {
    if (!p_.ranks_logits) ScoreEach(p_, softmax, x);
    if (p_.selection_bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        if (Expert(i) < p_.experts) x[i] = Add(x[i], p_.selection_bias[Expert(i)]);
      }
    }
    uint32_t key[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) key[i] = Expert(i) < p_.experts ? RankKey(x[i]) : 0u;
    if (p_.grouped) MaskGroups(key);

    uint32_t mine = 0u;
    for (int j = 0; j < p_.k; ++j) {
      uint32_t best[kOwned];
      int at[kOwned];  // position in the lane; the expert grows with it
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        best[i] = key[i];
        at[i] = i;
      }
#pragma unroll
      for (int step = 1; step < kOwned; step *= 2) {
#pragma unroll
        for (int i = 0; i + step < kOwned; i += 2 * step) {
          if (best[i + step] > best[i]) {
            best[i] = best[i + step];
            at[i] = at[i + step];
          }
        }
      }
      const uint32_t chosen = WarpMax(best[0]);
      const uint32_t candidate = best[0] == chosen ? static_cast<uint32_t>(Expert(at[0])) : 0xffffffffu;
      const uint32_t expert = WarpMin(candidate);
      if (lane_ == j) {
        mine = chosen;
        expert_ = static_cast<int32_t>(expert);
      }
      const int taken = candidate == expert ? at[0] : -1;
#pragma unroll
      for (int i = 0; i < kOwned; ++i) key[i] = i == taken ? 0u : key[i];
    }
    x_ = KeyValue(mine);
  }

  __device__ void MaskGroups(uint32_t (&key)[kOwned]) {
    __syncwarp();
    const int32_t chunks = p_.group_size / kChunk;  // of a group
    const bool in_lanes = p_.group_size % kChunk == 0 && chunks <= kWarp && (chunks & (chunks - 1)) == 0;
    if (in_lanes && p_.group_score_top <= 2) {
      GroupKeysFromLanes(key, chunks);
    } else {
      GroupKeysFromShared(key);
    }
    __syncwarp();
    KeepGroups(p_, group_keys_, keep_, lane_, kWarp);
    __syncwarp();
    const uint32_t fill = RankKey(p_.group_fill);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      if (Expert(i) < p_.experts && keep_[Expert(i) / p_.group_size] == 0u) key[i] = fill;
    }
  }

  // A group is `chunks` neighbouring lanes: the two best of each chunk, merged over the lanes.
  __device__ void GroupKeysFromLanes(const uint32_t (&key)[kOwned], int32_t chunks) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint32_t first = 0u, second = 0u;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        second = max(second, min(first, key[c * kChunk + i]));
        first = max(first, key[c * kChunk + i]);
      }
      for (int stride = 1; stride < chunks; stride *= 2) {
        const uint32_t other_first = __shfl_xor_sync(kAllLanes, first, stride);
        const uint32_t other_second = __shfl_xor_sync(kAllLanes, second, stride);
        second = max(min(first, other_first), max(second, other_second));
        first = max(first, other_first);
      }
      const int32_t chunk = Chunk(c);
      if (chunk % chunks == 0 && chunk * kChunk < p_.experts) {
        float sum = Add(0.0f, KeyValue(first));
        if (p_.group_score_top == 2) sum = Add(sum, KeyValue(second));
        group_keys_[chunk / chunks] = RankKey(sum);
      }
    }
  }

  __device__ void GroupKeysFromShared(const uint32_t (&key)[kOwned]) {
    uint32_t* keys = reinterpret_cast<uint32_t*>(by_expert_);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) keys[Expert(i)] = key[i];
    __syncwarp();
    for (int32_t g = 0; g < p_.num_groups; ++g) {
      const uint32_t group_key = GroupKey(keys, g * p_.group_size, p_.group_size, p_.group_score_top);
      if (lane_ == 0) group_keys_[g] = group_key;
    }
    __syncwarp();
    ClearSums();
  }

  const RouterParams& p_;
  const int lane_;
  float* by_expert_;
  uint32_t* group_keys_;
  uint32_t* keep_;
  int64_t row_ = 0;
  int32_t expert_ = 0;  // the choice of rank `lane`, its value and, where the key holds it, its logit
  float value_ = 0.0f;
  float x_ = 0.0f;
};

constexpr int kMaxWarpsPerBlock = 4;

template <typename T, int kChunks>
__global__ void __launch_bounds__(kMaxWarpsPerBlock* kWarp)
    FusedRouterWarpKernel(const __grid_constant__ RouterParams p) {
  extern __shared__ __align__(16) float shared[];
  AllowNext();
  const int warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
  WarpRow<T, kChunks> router(p, shared + warp * WarpRow<T, kChunks>::SharedFloats(p));
  WaitForPrevious();
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * warps + warp; row < p.rows;
       row += static_cast<int64_t>(gridDim.x) * warps) {
    router.Route(row);
  }
}

}  // namespace ort_moe
