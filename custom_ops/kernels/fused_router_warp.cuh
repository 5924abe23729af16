// FusedRouter, a warp to a row: up to 1024 experts and k up to 32.
//
// Lane l owns the chunks of 8 experts l, l + 32, l + 64, l + 96, so partial sums need no exchange before the butterfly,
// and the keys stay in registers. Selection in three steps of fixed cost, none of which is a round per choice: the k-th
// best of the lanes' own bests bounds the k-th best of the row from below; the keys that reach it, little more than k,
// go to a list, one to a lane; each counts those before it. Where floods of equal keys overflow the list, k
// rounds over the keys follow instead. A plain router (see IsPlain) has its own instantiation.
#pragma once

#include <type_traits>

#include "kernels/fused_router_groups.cuh"
#include "kernels/fused_router_row.cuh"
#include "kernels/launch.cuh"

namespace ort_moe {

constexpr int kMaxWarpExperts = kPartials * kChunk;
constexpr int kMaxWarpsPerBlock = 4;

template <typename T, int kChunks, bool kPlain>
class WarpRow {
 public:
  static constexpr int kOwned = kChunks * kChunk;  // experts of a lane
  static constexpr int kListed = kWarp * kOwned;   // experts of a warp

  // Shared memory of one warp.
  struct Shared {
    uint64_t candidates[kWarp];  // key over the complement of the expert: its order is the ranking; 0: none
    uint32_t bests[kWarp];       // of the lanes
    uint32_t count;              // of candidates
    uint32_t padding[3];
    float by_expert[kListed];  // logits or scores on their way, else zero but for the chosen while they are summed
  };
  static_assert(sizeof(Shared) % sizeof(uint4) == 0);

  static __host__ __device__ size_t SharedBytes(const RouterParams& p) {
    return sizeof(Shared) + (p.grouped ? (2 * p.num_groups + 3) / 4 * sizeof(uint4) : 0);
  }

  __device__ WarpRow(const RouterParams& p, unsigned char* shared)
      : p_(kPlain ? WithPlainWrittenOut(p) : p),
        lane_(threadIdx.x % kWarp),
        shared_(*reinterpret_cast<Shared*>(shared)),
        group_keys_(reinterpret_cast<uint32_t*>(shared + sizeof(Shared))),
        keep_(group_keys_ + p.num_groups) {
    ClearByExpert();
  }

  __device__ void Route(int64_t row) {
    row_ = row;
    float x[kOwned];
    uint32_t key[kOwned];
    LoadChunks<T, kChunks>(p_, row, lane_, kWarp, x);
    RowSoftmax softmax;
    bool nan = false;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) nan |= IsNaN(x[i]);
    nan = __any_sync(kAllLanes, nan);
    if constexpr (kPlain) {
      MakeKeys(x, key);
    } else {
      softmax = ScoreExperts(x, key);
      if (p_.grouped) MaskGroups(key);
    }
    Choose(key);
    if (p_.score == Score::kSparseMixer) WeighSparseMixer(*this, p_, ExpertOfRank(0), ExpertOfRank(1));
    WeighChosen(*this, p_, softmax, nan);
    if (rank_ < p_.k) {
      p_.weights[row * p_.k + rank_] = value_;
      p_.indices[row * p_.k + rank_] = expert_;
    }
  }

  template <typename F>
  __device__ void ForEachChosen(F f) {
    if (rank_ < p_.k) f(expert_, value_);
  }

  __device__ float MaxOfChosen() const { return KeyValue(WarpMax(rank_ < p_.k ? RankKey(value_) : 0u)); }

  __device__ float SumOfChosen() {
    __syncwarp();
    if (rank_ < p_.k) shared_.by_expert[expert_] = value_;
    __syncwarp();
    const float sum = SumByExpert();
    __syncwarp();
    if (rank_ < p_.k) shared_.by_expert[expert_] = 0.0f;
    return sum;
  }

  template <typename F>
  __device__ float SumOfExperts(F f) {
    float x[kOwned];
    LoadChunks<T, kChunks>(p_, row_, lane_, kWarp, x);
    __syncwarp();
    WriteChunks(x);
    ForEachExpert<2>([&](int32_t expert, float v) { return f(expert, Softcap(p_, v)); });
    ClearPastLast();
    const float sum = SumByExpert();
    __syncwarp();
    ClearByExpert();
    return sum;
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

  __device__ int32_t ExpertOfRank(int32_t rank) const {
    return __shfl_sync(kAllLanes, expert_, __ffs(__ballot_sync(kAllLanes, rank_ == rank)) - 1);
  }

  // This lane's chunks of by_expert.
  __device__ void ReadChunks(float (&x)[kOwned]) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float4* chunk = reinterpret_cast<const float4*>(shared_.by_expert + Chunk(c) * kChunk);
      const float4 low = chunk[0], high = chunk[1];
      const float values[kChunk] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kChunk; ++i) x[c * kChunk + i] = values[i];
    }
  }

  __device__ void WriteChunks(const float (&x)[kOwned]) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float4* chunk = reinterpret_cast<float4*>(shared_.by_expert + Chunk(c) * kChunk);
      const float* v = x + c * kChunk;
      chunk[0] = make_float4(v[0], v[1], v[2], v[3]);
      chunk[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
  }

  __device__ void ClearByExpert() {
    const float zeros[kOwned] = {};
    WriteChunks(zeros);
  }

  __device__ float SumByExpert() const {
    float x[kOwned];
    ReadChunks(x);
    float partial[4] = {};
#pragma unroll
    for (int i = 0; i < kOwned; ++i) partial[i / kChunk] = Add(partial[i / kChunk], x[i]);
    return Butterfly(partial[0], partial[1], partial[2], partial[3]);
  }

  __device__ void MakeKeys(const float (&x)[kOwned], uint32_t (&key)[kOwned]) const {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) key[i] = Expert(i) < p_.experts ? RankKey(x[i]) : 0u;
  }

  // by_expert[e] = f(e, by_expert[e]) for all experts. Neighbouring lanes take neighbouring experts; kInterleaved calls
  // run side by side, the more the shorter f is.
  template <int kInterleaved, typename F>
  __device__ void ForEachExpert(F f) {
    static_assert(kOwned % kInterleaved == 0);
    __syncwarp();
#pragma unroll 1
    for (int32_t e = lane_; e < p_.experts; e += kInterleaved * kWarp) {
      float v[kInterleaved];
#pragma unroll
      for (int n = 0; n < kInterleaved; ++n) v[n] = shared_.by_expert[e + n * kWarp];
#pragma unroll
      for (int n = 0; n < kInterleaved; ++n) v[n] = f(e + n * kWarp, v[n]);
#pragma unroll
      for (int n = 0; n < kInterleaved; ++n) {
        if (e + n * kWarp < p_.experts) shared_.by_expert[e + n * kWarp] = v[n];
      }
    }
    __syncwarp();
  }

  // Keys before the group mask. Scores are computed in loops through shared memory: unrolled over registers they would
  // be most of this kernel's code. by_expert is zero again at the end.
  __device__ RowSoftmax ScoreExperts(const float (&logits)[kOwned], uint32_t (&key)[kOwned]) {
    float bias[kOwned];
    if (p_.selection_bias != nullptr) {  // on its way early
#pragma unroll
      for (int i = 0; i < kOwned; ++i) bias[i] = Expert(i) < p_.experts ? p_.selection_bias[Expert(i)] : 0.0f;
    }
    RowSoftmax softmax;
    float x[kOwned];
    __syncwarp();
    WriteChunks(logits);
    if (p_.softcap > 0.0f) ForEachExpert<2>([&](int32_t, float v) { return Softcap(p_, v); });
    __syncwarp();
    if (p_.ranks_logits) ReadChunks(x);
    if (p_.softmax_of_experts) {
      uint32_t best = 0u;
#pragma unroll 4
      for (int32_t e = lane_; e < p_.experts; e += kWarp) best = max(best, RankKey(shared_.by_expert[e]));
      softmax.max = KeyValue(WarpMax(best));
      ForEachExpert<8>([&](int32_t, float v) { return Exp(Add(v, -softmax.max)); });
      ClearPastLast();
      softmax.sum = SumByExpert();
    }
    if (!p_.ranks_logits) {
      if (p_.score == Score::kSoftmax) {
        ForEachExpert<4>([&](int32_t, float v) { return Div(v, softmax.sum); });
      } else if (p_.score == Score::kSigmoid) {
        ForEachExpert<8>([](int32_t, float v) { return Sigmoid(v); });
      } else {
        ForEachExpert<2>([](int32_t, float v) { return SqrtSoftplus(v); });
      }
      ReadChunks(x);
    }
    if (p_.selection_bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) x[i] = Add(x[i], bias[i]);
    }
    MakeKeys(x, key);
    __syncwarp();
    ClearByExpert();
    return softmax;
  }

  __device__ void ClearPastLast() {
#pragma unroll 1
    for (int32_t e = p_.experts + lane_; e < kListed; e += kWarp) shared_.by_expert[e] = 0.0f;
    __syncwarp();
  }

  __device__ void KeysToShared(const uint32_t (&key)[kOwned]) {
    float as_floats[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) as_floats[i] = BitsToFloat(key[i]);
    __syncwarp();
    WriteChunks(as_floats);
    __syncwarp();
  }

  __device__ const uint32_t* SharedKeys() const { return reinterpret_cast<const uint32_t*>(shared_.by_expert); }

  // Finds the chosen: a lane holds one of rank_, or rank_ >= k.
  __device__ void Choose(const uint32_t (&key)[kOwned]) {
    uint32_t best = 0u;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) best = max(best, key[i]);
    __syncwarp();
    shared_.bests[lane_] = best;
    shared_.candidates[lane_] = 0u;
    if (lane_ == 0) shared_.count = 0u;
    __syncwarp();
    int32_t better = 0;  // lanes with a better best
#pragma unroll
    for (int v = 0; v < kWarp / 4; ++v) {
      const uint4 bests = reinterpret_cast<const uint4*>(shared_.bests)[v];
      better += (bests.x > best) + (bests.y > best) + (bests.z > best) + (bests.w > best);
    }
    const uint32_t bound = max(WarpMin(better < p_.k ? best : 0xffffffffu), 1u);

    uint32_t mine = 0u;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) mine += key[i] >= bound;
    uint32_t position = mine > 0u ? atomicAdd(&shared_.count, mine) : 0u;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      if (key[i] >= bound) {
        if (position < kWarp) shared_.candidates[position] = Candidate(key[i], Expert(i));
        ++position;
      }
    }
    __syncwarp();
    const uint32_t count = shared_.count;
    if (count <= kWarp) {
      RankCandidates(count);
    } else {
      ChooseInRounds(key);
    }
  }

  static __device__ uint64_t Candidate(uint32_t key, int32_t expert) {
    return static_cast<uint64_t>(key) << 32 | (0xffffffffu - static_cast<uint32_t>(expert));
  }

  __device__ void RankCandidates(uint32_t count) {
    const uint64_t mine = shared_.candidates[lane_];
    int32_t rank = mine == 0u ? kWarp : 0;
#pragma unroll 1
    for (uint32_t other = 0; other < count; other += 4) {  // those past the last are 0 and count nothing
      const ulonglong2 a = reinterpret_cast<const ulonglong2*>(shared_.candidates)[other / 2];
      const ulonglong2 b = reinterpret_cast<const ulonglong2*>(shared_.candidates)[other / 2 + 1];
      rank += (a.x > mine) + (a.y > mine) + (b.x > mine) + (b.y > mine);
    }
    rank_ = rank;
    expert_ = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(mine));
    x_ = KeyValue(static_cast<uint32_t>(mine >> 32));
  }

  __device__ void ChooseInRounds(const uint32_t (&key)[kOwned]) {
    KeysToShared(key);
    Ranked last;
    rank_ = kWarp;
#pragma unroll 1
    for (int32_t j = 0; j < p_.k; ++j) {
      last = BestBelow(SharedKeys(), 0, p_.experts, last);
      if (lane_ == j) {
        rank_ = j;
        expert_ = last.expert;
        x_ = KeyValue(last.key);
      }
    }
    __syncwarp();
    ClearByExpert();
  }

  __device__ void MaskGroups(uint32_t (&key)[kOwned]) {
    const int32_t chunks = p_.group_size / kChunk;  // of a group
    const bool in_lanes = p_.group_size % kChunk == 0 && chunks <= kWarp && (chunks & (chunks - 1)) == 0;
    if (in_lanes && p_.group_score_top <= 2) {
      GroupKeysFromLanes(key, chunks);
    } else {
      KeysToShared(key);
#pragma unroll 1
      for (int32_t g = 0; g < p_.num_groups; ++g) {
        const uint32_t group_key = GroupKey(SharedKeys(), g * p_.group_size, p_.group_size, p_.group_score_top);
        if (lane_ == 0) group_keys_[g] = group_key;
      }
      __syncwarp();
      ClearByExpert();
    }
    __syncwarp();
    KeepGroups(p_, group_keys_, keep_, lane_, kWarp);
    __syncwarp();
    const uint32_t fill = RankKey(p_.group_fill);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      int32_t group = Chunk(c) * kChunk / p_.group_size;
      int32_t end = (group + 1) * p_.group_size;
#pragma unroll
      for (int i = c * kChunk; i < (c + 1) * kChunk; ++i) {
        if (Expert(i) == end) {
          ++group;
          end += p_.group_size;
        }
        if (Expert(i) < p_.experts && keep_[group] == 0u) key[i] = fill;
      }
    }
  }

  // A group is `chunks` neighbouring lanes: the two best of each chunk, merged over the lanes.
  __device__ void GroupKeysFromLanes(const uint32_t (&key)[kOwned], int32_t chunks) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint32_t first = 0u, second = 0u;
#pragma unroll
      for (int i = c * kChunk; i < (c + 1) * kChunk; ++i) {
        second = max(second, min(first, key[i]));
        first = max(first, key[i]);
      }
      for (int stride = 1; stride < chunks; stride *= 2) {
        const uint32_t other_first = __shfl_xor_sync(kAllLanes, first, stride);
        const uint32_t other_second = __shfl_xor_sync(kAllLanes, second, stride);
        second = max(min(first, other_first), max(second, other_second));
        first = max(first, other_first);
      }
      const int32_t chunk = Chunk(c);
      if ((chunk & (chunks - 1)) == 0 && chunk * kChunk < p_.experts) {
        float sum = Add(0.0f, KeyValue(first));
        if (p_.group_score_top == 2) sum = Add(sum, KeyValue(second));
        group_keys_[chunk / chunks] = RankKey(sum);
      }
    }
  }

  std::conditional_t<kPlain, const RouterParams, const RouterParams&> p_;
  const int lane_;
  Shared& shared_;
  uint32_t* group_keys_;
  uint32_t* keep_;
  int64_t row_ = 0;
  int32_t rank_ = kWarp;  // of the choice that this lane holds, its expert, value and, where the key has it, its logit
  int32_t expert_ = 0;
  float value_ = 0.0f;
  float x_ = 0.0f;
};

template <typename T, int kChunks, bool kPlain>
__global__ void __launch_bounds__(kMaxWarpsPerBlock* kWarp)
    FusedRouterWarpKernel(const __grid_constant__ RouterParams p) {
  using Router = WarpRow<T, kChunks, kPlain>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
  Router router(p, shared + warp * Router::SharedBytes(p));
  WaitForPrevious();
  AllowNext();
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * warps + warp; row < p.rows;
       row += static_cast<int64_t>(gridDim.x) * warps) {
    router.Route(row);
  }
}

}  // namespace ort_moe
