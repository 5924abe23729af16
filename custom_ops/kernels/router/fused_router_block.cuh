// FusedRouter, a block of 128 threads to a row: any number of experts and of chosen that fits shared memory.
//
// Keys lie in shared memory. Thread t owns partial sum t of the contract. For k <= 128 the k-th best of the threads'
// own bests bounds the k-th best of the row from below; the few keys that reach it are ranked by counting. Where that
// fails (large k, floods of equal keys) a bitonic network sorts the whole row.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/router/fused_router_groups.cuh"
#include "kernels/router/fused_router_row.cuh"

namespace ort_moe {

constexpr int kBlock = kPartials;
constexpr int kMaxCandidates = 4 * kBlock;  // a power of two

template <typename T, RouterKind kKind>
class BlockRow {
 public:
  // Words for sorting: all experts, rounded up to a power of two.
  static __host__ __device__ int32_t SortSize(int32_t experts) {
    int32_t size = 1;
    while (size < experts) size *= 2;
    return size;
  }

  static __host__ size_t SharedBytes(const RouterParams& p) {
    const size_t experts = static_cast<size_t>(p.experts + kChunk - 1) / kChunk * kChunk;
    return SortSize(p.experts) * sizeof(uint64_t) + experts * sizeof(float) + 2 * GroupWords(p) * sizeof(uint32_t);
  }

  __device__ BlockRow(const RouterParams& p, uint64_t* shared)
      : p_(WrittenOut<kKind>(p)),
        thread_(threadIdx.x),
        sort_size_(SortSize(p.experts)),
        chunks_((p.experts + kChunk - 1) / kChunk),
        sorted_(shared),
        by_expert_(reinterpret_cast<float*>(shared + sort_size_)),
        keys_(reinterpret_cast<uint32_t*>(by_expert_)),
        group_keys_(keys_ + chunks_ * kChunk),
        keep_(group_keys_ + GroupWords(p)) {}

  __device__ void Route(int64_t row) {
    row_ = row;
    __syncthreads();  // shared memory is free of the last row
    bool nan = false;
    for (int32_t chunk = thread_; chunk < chunks_; chunk += kBlock) {
      float x[kChunk];
      LoadChunks<T, 1>(p_, LogitsOfRow<T>(p_, row), chunk, 0, x);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        nan |= IsNaN(x[i]);
        by_expert_[chunk * kChunk + i] = x[i];
      }
    }
    nan = __syncthreads_or(nan);
    if (p_.softcap > 0.0f) ForEachExpert([&](int32_t, float x) { return Softcap(p_, x); });
    RowSoftmax softmax;
    if (p_.softmax_of_experts) {
      uint32_t best = 0u;
      for (int32_t e = thread_; e < p_.experts; e += kBlock) best = max(best, RankKey(by_expert_[e]));
      softmax.max = KeyValue(BlockMax(best));
      softmax.sum = SumOverChunks([&](float x) { return Exp(Add(x, -softmax.max)); });  // past the end: e^-inf = 0
    }
    MakeKeys(softmax);
    if (p_.grouped) MaskGroups();
    Choose();
    ClearByExpert();
    if (ORT_MOE_RARE(p_.score == Score::kSparseMixer)) WeighSparseMixer(*this, p_, Chosen(0).expert, Chosen(1).expert);
    WeighChosen(*this, p_, softmax, nan);
    ForEachSlot([&](int32_t j, Slot& slot) {
      p_.weights[row * p_.columns + j] = slot.value;
      p_.indices[row * p_.columns + j] = slot.expert;
    });
  }

  template <typename F>
  __device__ void ForEachChosen(F f) {
    ForEachSlot([&](int32_t, Slot& slot) { f(slot.expert, slot.value); });
  }

  __device__ float MaxOfChosen() {
    uint32_t best = 0u;
    ForEachSlot([&](int32_t, Slot& slot) { best = max(best, RankKey(slot.value)); });
    return KeyValue(BlockMax(best));
  }

  __device__ float SumOfChosen() {
    ForEachSlot([&](int32_t, Slot& slot) { by_expert_[slot.expert] = slot.value; });  // zero elsewhere
    __syncthreads();
    return SumOverChunks([](float value) { return value; });
  }

  template <typename F>
  __device__ float SumOfExperts(F f) {
    ForEachExpert([&](int32_t expert, float) { return f(expert, Logit(expert)); });
    const float sum = SumOverChunks([](float value) { return value; });
    ClearByExpert();
    return sum;
  }

  __device__ float Logit(int32_t expert) const { return LoadLogit<T>(p_, LogitsOfRow<T>(p_, row_), expert); }

  __device__ float Score(int32_t expert, const RowSoftmax& softmax) const {
    return ScoreOf(p_, softmax, Logit(expert));
  }

  __device__ bool IsMasked(int32_t expert) const { return p_.grouped && keep_[expert / p_.group_size] == 0u; }

 private:
  // A chosen expert; takes the place of its sorted key.
  struct Slot {
    float value;
    int32_t expert;
  };
  static_assert(sizeof(Slot) == sizeof(uint64_t));

  // Key and complement of the expert: unique, and its order is the ranking; 0 is "no expert".
  __device__ uint64_t Candidate(int32_t expert) const {
    return static_cast<uint64_t>(keys_[expert]) << 32 | (0xffffffffu - static_cast<uint32_t>(expert));
  }

  __device__ Slot& Chosen(int32_t j) const { return reinterpret_cast<Slot*>(sorted_)[j]; }

  template <typename F>
  __device__ void ForEachSlot(F f) const {
    for (int32_t j = thread_; j < p_.k; j += kBlock) f(j, Chosen(j));
  }

  __device__ uint32_t BlockMin(uint32_t value) { return ~BlockMax(~value); }

  __device__ uint32_t BlockMax(uint32_t value) {
    __shared__ uint32_t of_warps[kBlock / kWarp];
    value = WarpMax(value);
    if (thread_ % kWarp == 0) of_warps[thread_ / kWarp] = value;
    __syncthreads();
    value = max(max(of_warps[0], of_warps[1]), max(of_warps[2], of_warps[3]));
    __syncthreads();
    return value;
  }

  // by_expert[e] = f(e, by_expert[e]) for all experts.
  template <typename F>
  __device__ void ForEachExpert(F f) {
#pragma unroll 2
    for (int32_t e = thread_; e < p_.experts; e += kBlock) by_expert_[e] = f(e, by_expert_[e]);
    __syncthreads();
  }

  // Sum of f(by_expert[e]) in the order of the contract.
  template <typename F>
  __device__ float SumOverChunks(F f) {
    __shared__ float partials[kPartials];
    float partial = 0.0f;
#pragma unroll 1
    for (int32_t chunk = thread_; chunk < chunks_; chunk += kBlock) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) partial = Add(partial, f(by_expert_[chunk * kChunk + i]));
    }
    partials[thread_] = partial;
    __syncthreads();
    const int lane = thread_ % kWarp;
    const float sum = Butterfly(partials[lane], partials[lane + 32], partials[lane + 64], partials[lane + 96]);
    __syncthreads();
    return sum;
  }

  __device__ void MakeKeys(const RowSoftmax& softmax) {
    ForEachExpert([&](int32_t expert, float x) {
      float key = p_.ranks_logits ? x : ScoreOf(p_, softmax, x);
      if (p_.selection_bias != nullptr) key = Add(key, p_.selection_bias[expert]);
      return BitsToFloat(RankKey(key));
    });
  }

  __device__ void MaskGroups() {
    for (int32_t g = thread_ / kWarp; g < p_.num_groups; g += kBlock / kWarp) {
      const uint32_t group_key = GroupKey(keys_, g * p_.group_size, p_.group_size, p_.group_score_top);
      if (thread_ % kWarp == 0) group_keys_[g] = group_key;
    }
    __syncthreads();
    KeepGroups(p_, group_keys_, keep_, thread_, kBlock);
    __syncthreads();
    const uint32_t fill = RankKey(p_.group_fill);
    for (int32_t e = thread_; e < p_.experts; e += kBlock) {
      if (keep_[e / p_.group_size] == 0u) keys_[e] = fill;
    }
    __syncthreads();
  }

  // The k best into the first slots, in rank order.
  __device__ void Choose() {
    const int32_t count = GatherCandidates(LowerBound());
    if (ORT_MOE_RARE(count > kMaxCandidates)) {
      SortAll();
    } else {
      RankByCounting(count);
    }
    for (int32_t j = thread_; j < p_.k; j += kBlock) {
      const uint32_t expert = 0xffffffffu - static_cast<uint32_t>(sorted_[j]);
      Chosen(j) = Slot{0.0f, static_cast<int32_t>(expert)};
    }
    __syncthreads();
  }

  // A key that at least k experts reach: the k-th best of the threads' bests, or the lowest of all.
  __device__ uint32_t LowerBound() {
    if (p_.k > kBlock) return 0u;
    __shared__ __align__(16) uint32_t bests[kBlock];
    uint32_t best = 0u;
    for (int32_t e = thread_; e < p_.experts; e += kBlock) best = max(best, keys_[e]);
    bests[thread_] = best;
    __syncthreads();
    int32_t better = 0;
#pragma unroll 8
    for (int v = 0; v < kBlock / 4; ++v) {
      const uint4 four = reinterpret_cast<const uint4*>(bests)[v];
      better += (four.x > best) + (four.y > best) + (four.z > best) + (four.w > best);
    }
    return BlockMin(better < p_.k ? best : 0xffffffffu);
  }

  // Experts whose key reaches the bound into sorted_, in any order, as far as kMaxCandidates; how many there are.
  __device__ int32_t GatherCandidates(uint32_t bound) {
    __shared__ int32_t count;
    if (thread_ == 0) count = 0;
    __syncthreads();
    for (int32_t e = thread_; e < p_.experts; e += kBlock) {
      if (keys_[e] >= bound) {
        const int32_t position = atomicAdd(&count, 1);
        if (position < kMaxCandidates) sorted_[position] = Candidate(e);
      }
    }
    __syncthreads();
    return count;
  }

  __device__ void RankByCounting(int32_t count) {
    constexpr int kOwned = kMaxCandidates / kBlock;
    uint64_t mine[kOwned];
    int32_t rank[kOwned] = {};
#pragma unroll
    for (int n = 0; n < kOwned; ++n) {
      const int32_t position = thread_ + n * kBlock;
      if (position >= count) continue;
      mine[n] = sorted_[position];
#pragma unroll 4
      for (int32_t other = 0; other < count; ++other) rank[n] += sorted_[other] > mine[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kOwned; ++n) {
      if (thread_ + n * kBlock < count) sorted_[rank[n]] = mine[n];
    }
    __syncthreads();
  }

  // Bitonic, largest first.
  __device__ void SortAll() {
    for (int32_t e = thread_; e < sort_size_; e += kBlock) sorted_[e] = e < p_.experts ? Candidate(e) : 0u;
    __syncthreads();
    for (int32_t run = 2; run <= sort_size_; run *= 2) {
      for (int32_t stride = run / 2; stride > 0; stride /= 2) {
        for (int32_t pair = thread_; pair < sort_size_ / 2; pair += kBlock) {
          const int32_t low = 2 * pair - (pair & (stride - 1));
          const int32_t high = low + stride;
          const uint64_t a = sorted_[low], b = sorted_[high];
          const bool descending = (low & run) == 0;
          if (descending ? a < b : a > b) {
            sorted_[low] = b;
            sorted_[high] = a;
          }
        }
        __syncthreads();
      }
    }
  }

  __device__ void ClearByExpert() {
    for (int32_t e = thread_; e < chunks_ * kChunk; e += kBlock) by_expert_[e] = 0.0f;
    __syncthreads();
  }

  ParamsOfKind<kKind> p_;
  const int32_t thread_;
  const int32_t sort_size_;
  const int32_t chunks_;
  uint64_t* sorted_;
  float* by_expert_;  // logits, then (as keys_) ranking keys, then values to sum
  uint32_t* keys_;
  uint32_t* group_keys_;
  uint32_t* keep_;
  int64_t row_ = 0;
};

template <typename T, RouterKind kKind>
__global__ void __launch_bounds__(kBlock, 8) FusedRouterBlockKernel(const __grid_constant__ RouterParams p) {
  extern __shared__ __align__(16) uint64_t block_shared[];
  BlockRow<T, kKind> router(p, block_shared);
  WaitForPrevious();
  AllowNext();
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) router.Route(row);
}

}  // namespace ort_moe
