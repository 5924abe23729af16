// FusedRouter, a warp to a row: up to 1024 experts and k up to 32.
//
// Lane l owns the chunks of 8 experts l, l + 32, l + 64, l + 96, so that partial sums need no exchange before the
// butterfly, and groups are neighbouring lanes; the keys stay in registers. A softmax of the chosen spreads up to 128
// experts over all lanes, 2 or 4 to each, for only the chosen are summed.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/router/fused_router_groups.cuh"
#include "kernels/router/fused_router_maps.cuh"
#include "kernels/router/fused_router_row.cuh"
#include "kernels/router/fused_router_selection.cuh"

namespace ort_moe {

constexpr int kMaxWarpExperts = kPartials * kChunk;
constexpr int kMaxWarpsPerBlock = 4;  // without maps

template <typename T, int kOwned, RouterKind kKind>
class WarpRow {
 public:
  static constexpr bool kPlain = kKind == RouterKind::kSoftmaxOfChosen;
  static constexpr bool kWholeChunks = kOwned >= kChunk;
  static constexpr int kChunks = kWholeChunks ? kOwned / kChunk : 1;  // of a lane
  static constexpr int kListed = kWarp * kOwned;                      // experts of a warp
  static constexpr int kListedChunks = kListed / kChunk;              // fewer than lanes: lanes repeat them
  static_assert(kWholeChunks || kPlain);

  // Shared memory of one warp.
  struct Shared {
    WarpSelection::Shared selection;
    float by_expert[kListed];            // zero but for the chosen while they are summed
    float scores[kPlain ? 4 : kListed];  // of all experts
  };
  static_assert(sizeof(Shared) % sizeof(uint4) == 0);

  static __host__ __device__ size_t SharedBytes(const RouterParams& p) {
    return sizeof(Shared) + 2 * GroupWords(p) * sizeof(uint32_t);
  }

  __device__ WarpRow(const RouterParams& p, unsigned char* shared, int64_t row)
      : p_(WrittenOut<kKind>(p)),
        lane_(threadIdx.x % kWarp),
        shared_(*reinterpret_cast<Shared*>(shared)),
        group_keys_(reinterpret_cast<uint32_t*>(shared + sizeof(Shared))),
        keep_(group_keys_ + GroupWords(p)),
        selection_(shared_.selection) {
    PointTo(row);
    ClearByExpert();
  }

  __device__ void PointTo(int64_t row) { logits_ = Settled(LogitsOfRow<T>(p_, row)); }

  // Finds the choices of the row pointed to, and whether a logit is NaN.
  __device__ __forceinline__ RowSoftmax Choose(bool* has_nan) {
    float x[kOwned];
    uint32_t key[kOwned];
    float bias[kOwned];
    Load(x);
    if constexpr (!kPlain) LoadBias(bias);
    RowSoftmax softmax;
    bool nan = false;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) nan |= IsNaN(x[i]);
    *has_nan = __any_sync(kAllLanes, nan);
    if constexpr (kPlain) {
      MakeKeys(x, key);
    } else {
      softmax = ScoreExperts(x, bias, key);
      if (p_.grouped) MaskGroups(key);
    }
    selection_.Choose(key, [this](int i) { return Expert(i); }, p_.k, &choice_);
    return softmax;
  }

  // Of this lane, after Choose.
  __device__ const Choice& choice() const { return choice_; }

  // The row pointed to. on_choice(Choice) is called by the whole warp as soon as the choices are known.
  template <typename OnChoice>
  __device__ void Route(int64_t row, OnChoice on_choice) {
    bool nan;
    const RowSoftmax softmax = Choose(&nan);
    on_choice(choice_);
    if constexpr (!kPlain) {
      if (ORT_MOE_RARE(p_.score == Score::kSparseMixer)) {
        WeighSparseMixer(*this, p_, ExpertOfRank(0), ExpertOfRank(1));
      }
    }
    WeighChosen(*this, p_, softmax, nan);
    Store(row);
  }

  __device__ __forceinline__ void Store(int64_t row) const {
    if (choice_.rank < p_.k) {
      p_.weights[row * p_.columns + choice_.rank] = value_;
      p_.indices[row * p_.columns + choice_.rank] = choice_.expert;
    }
  }

  template <typename F>
  __device__ void ForEachChosen(F f) {
    if (choice_.rank < p_.k) f(choice_.expert, value_);
  }

  __device__ float MaxOfChosen() const {
    return KeyValue(p_.plain_keys() ? selection_.best_key() : WarpMax(choice_.rank < p_.k ? RankKey(value_) : 0u));
  }

  __device__ float SumOfChosen() {
    __syncwarp();
    if (choice_.rank < p_.k) shared_.by_expert[choice_.expert] = value_;
    __syncwarp();
    const float sum = SumInOrder(shared_.by_expert);
    __syncwarp();
    if (choice_.rank < p_.k) shared_.by_expert[choice_.expert] = 0.0f;
    return sum;
  }

  template <typename F>
  __device__ float SumOfExperts(F f) {
    float x[kOwned];
    Load(x);
    __syncwarp();
    WriteChunks(shared_.scores, x);
    ForEachExpert<2>([&](int32_t expert, float v) { return f(expert, Softcap(p_, v)); });
    ClearScoresPastLast();
    return SumInOrder(shared_.scores);
  }

  __device__ float Logit(int32_t expert) const {
    // The key still holds it, but for the sign of zero, which the score `none` would show.
    if (p_.plain_keys() && p_.score != Score::kNone && p_.score != Score::kSparseMixer && !p_.from_selection) {
      return KeyValue(choice_.key);
    }
    return LoadLogit<T>(p_, logits_, expert);
  }

  __device__ float Score(int32_t expert, const RowSoftmax& softmax) const {
    const float score = shared_.scores[expert];
    return p_.softmax_of_experts && p_.ranks_logits ? Div(score, softmax.sum) : score;
  }

  __device__ bool IsMasked(int32_t expert) const { return p_.grouped && keep_[expert / p_.group_size] == 0u; }

 protected:
  __device__ int32_t Chunk(int c) const { return lane_ + c * kWarp; }
  __device__ int32_t Expert(int i) const {
    return kWholeChunks ? Chunk(i / kChunk) * kChunk + i % kChunk : lane_ * kOwned + i;
  }

  __device__ void Load(float (&x)[kOwned]) const {
    if constexpr (kWholeChunks) {
      LoadChunks<T, kChunks>(p_, logits_, lane_, kWarp, x);
    } else {
      struct alignas(kOwned * sizeof(Bits<T>)) Vector {
        Bits<T> bits[kOwned];
      };
      const bool inside = Expert(0) < p_.experts;  // all or none: E is a multiple of 8
      Vector loaded{};
      if (inside) loaded = *reinterpret_cast<const Vector*>(logits_ + Expert(0));
#pragma unroll
      for (int i = 0; i < kOwned; ++i) x[i] = inside ? Storage<T>::Widen(loaded.bits[i]) : -Infinity();
    }
  }

  __device__ int32_t ExpertOfRank(int32_t rank) const {
    return __shfl_sync(kAllLanes, choice_.expert, __ffs(__ballot_sync(kAllLanes, choice_.rank == rank)) - 1);
  }

  // This lane's chunks of an array by expert.
  __device__ void ReadChunks(const float* array, float (&x)[kChunks * kChunk]) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float4* chunk = reinterpret_cast<const float4*>(array + Chunk(c) % kListedChunks * kChunk);
      const float4 low = chunk[0], high = chunk[1];
      const float values[kChunk] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kChunk; ++i) x[c * kChunk + i] = values[i];
    }
  }

  __device__ void WriteChunks(float* array, const float (&x)[kChunks * kChunk]) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float4* chunk = reinterpret_cast<float4*>(array + Chunk(c) % kListedChunks * kChunk);
      const float* v = x + c * kChunk;
      chunk[0] = make_float4(v[0], v[1], v[2], v[3]);
      chunk[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
  }

  __device__ void ClearByExpert() {
    const float zeros[kChunks * kChunk] = {};
    WriteChunks(shared_.by_expert, zeros);
  }

  __device__ float SumInOrder(const float* array) const {
    float x[kChunks * kChunk];
    ReadChunks(array, x);
    float partial[4] = {};
#pragma unroll
    for (int i = 0; i < kChunks * kChunk; ++i) partial[i / kChunk] = Add(partial[i / kChunk], x[i]);
    if constexpr (!kWholeChunks) return SumOverLanes<kListedChunks>(partial[0]);
    return Butterfly(partial[0], partial[1], partial[2], partial[3]);
  }

  __device__ void MakeKeys(const float (&x)[kOwned], uint32_t (&key)[kOwned]) const {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) key[i] = Expert(i) < p_.experts ? RankKey(x[i]) : 0u;
  }

  // scores[e] = f(e, scores[e]) for all experts. Neighbouring lanes take neighbouring experts; kInterleaved calls run
  // side by side, the more the shorter f is.
  template <int kInterleaved, typename F>
  __device__ void ForEachExpert(F f) {
    static_assert(kOwned % kInterleaved == 0);
    __syncwarp();
#pragma unroll 1
    for (int32_t e = lane_; e < p_.experts; e += kInterleaved * kWarp) {
      float v[kInterleaved];
#pragma unroll
      for (int n = 0; n < kInterleaved; ++n) v[n] = shared_.scores[e + n * kWarp];
#pragma unroll
      for (int n = 0; n < kInterleaved; ++n) v[n] = f(e + n * kWarp, v[n]);
#pragma unroll
      for (int n = 0; n < kInterleaved; ++n) {
        if (e + n * kWarp < p_.experts) shared_.scores[e + n * kWarp] = v[n];
      }
    }
    __syncwarp();
  }

  // Scores where the router has them, and keys before the group mask. The loops go through shared memory: unrolled over
  // registers they would be most of this kernel's code.
  __device__ RowSoftmax ScoreExperts(float (&x)[kOwned], const float (&bias)[kOwned], uint32_t (&key)[kOwned]) {
    RowSoftmax softmax;
    __syncwarp();
    WriteChunks(shared_.scores, x);
    if (ORT_MOE_RARE(p_.softcap > 0.0f)) {
      ForEachExpert<2>([&](int32_t, float v) { return Softcap(p_, v); });
      ReadChunks(shared_.scores, x);
    }
    if (p_.softmax_of_experts) {
      uint32_t best = 0u;
#pragma unroll
      for (int i = 0; i < kOwned; ++i) best = max(best, Expert(i) < p_.experts ? RankKey(x[i]) : 0u);
      softmax.max = KeyValue(WarpMax(best));
      ForEachExpert<8>([&](int32_t, float v) { return Exp(Add(v, -softmax.max)); });
      ClearScoresPastLast();
      softmax.sum = SumInOrder(shared_.scores);
    }
    if (!p_.ranks_logits) {
      if (kOwned == 8 && p_.score == Score::kSigmoid) {  // short enough for registers
#pragma unroll
        for (int i = 0; i < kOwned; ++i) x[i] = Sigmoid(x[i]);
        WriteChunks(shared_.scores, x);
      } else if (p_.score == Score::kSigmoid) {
        ForEachExpert<8>([](int32_t, float v) { return Sigmoid(v); });
        ReadChunks(shared_.scores, x);
      } else if (p_.score == Score::kSqrtSoftplus) {
        ForEachExpert<4>([](int32_t, float v) { return SqrtSoftplus(v); });
        ReadChunks(shared_.scores, x);
      } else {
        ForEachExpert<4>([&](int32_t, float v) { return Div(v, softmax.sum); });
        ReadChunks(shared_.scores, x);
      }
    }
    if (p_.selection_bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) x[i] = Add(x[i], bias[i]);
    }
    MakeKeys(x, key);
    return softmax;
  }

  __device__ void LoadBias(float (&bias)[kOwned]) const {
    if (p_.selection_bias == nullptr) return;
    if (p_.vector_loads && reinterpret_cast<uintptr_t>(p_.selection_bias) % sizeof(float4) == 0) {
#pragma unroll
      for (int i = 0; i < kOwned; i += 4) {
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (Expert(i) < p_.experts) four = *reinterpret_cast<const float4*>(p_.selection_bias + Expert(i));
        bias[i] = four.x;
        bias[i + 1] = four.y;
        bias[i + 2] = four.z;
        bias[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) bias[i] = Expert(i) < p_.experts ? p_.selection_bias[Expert(i)] : 0.0f;
    }
  }

  __device__ void ClearScoresPastLast() {
#pragma unroll 1
    for (int32_t e = p_.experts + lane_; e < kListed; e += kWarp) shared_.scores[e] = 0.0f;
    __syncwarp();
  }

  // Keys in place of by_expert, for as long as nothing is summed; ClearByExpert ends it.
  __device__ void KeysToShared(const uint32_t (&key)[kOwned]) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOwned; ++i) shared_.by_expert[Expert(i)] = BitsToFloat(key[i]);
    __syncwarp();
  }

  __device__ const uint32_t* SharedKeys() const { return reinterpret_cast<const uint32_t*>(shared_.by_expert); }

  __device__ void MaskGroups(uint32_t (&key)[kOwned]) {
    if (kKind == RouterKind::kAny && ORT_MOE_RARE(p_.log2_group_chunks < 0 || p_.group_score_top > 2)) {
      return MaskAnyGroups(key);
    }
    bool masked[kChunks];
    MaskedInLanes<kChunks>(p_, key, masked);
    const uint32_t fill = RankKey(p_.group_fill);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (p_.from_selection && Chunk(c) * kChunk < p_.experts) keep_[Chunk(c) >> p_.log2_group_chunks] = !masked[c];
#pragma unroll
      for (int i = c * kChunk; i < (c + 1) * kChunk; ++i) key[i] = masked[c] ? fill : key[i];
    }
  }

  // Groups of any size, and sums of any number of keys.
  __device__ void MaskAnyGroups(uint32_t (&key)[kOwned]) {
    KeysToShared(key);
#pragma unroll 1
    for (int32_t g = 0; g < p_.num_groups; ++g) {
      const uint32_t group_key = GroupKey(SharedKeys(), g * p_.group_size, p_.group_size, p_.group_score_top);
      if (lane_ == 0) group_keys_[g] = group_key;
    }
    __syncwarp();
    ClearByExpert();
    KeepGroups(p_, group_keys_, keep_, lane_, kWarp);
    __syncwarp();
    const uint32_t fill = RankKey(p_.group_fill);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      if (Expert(i) < p_.experts && keep_[Expert(i) / p_.group_size] == 0u) key[i] = fill;
    }
  }

  ParamsOfKind<kKind> p_;
  const int lane_;
  Shared& shared_;
  uint32_t* group_keys_;
  uint32_t* keep_;
  const Bits<T>* logits_ = nullptr;  // of the row
  WarpSelection selection_;
  Choice choice_;
  float value_ = 0.0f;  // of the choice
};

// Rows of a block with maps, a warp each, as shared memory allows.
__host__ __device__ constexpr int MaxMapRows(int owned) { return owned < 32 ? 8 : 4; }

template <typename T, int kOwned, RouterKind kKind, bool kMaps>
__global__ void __launch_bounds__(kMaps ? MaxThreadsWithMaps(MaxMapRows(kOwned), kOwned* kWarp)
                                        : kMaxWarpsPerBlock * kWarp)
    FusedRouterWarpKernel(const __grid_constant__ RouterParams p) {
  using Router = WarpRow<T, kOwned, kKind>;
  extern __shared__ __align__(16) unsigned char shared[];
  RouterMaps<kMaps> maps(p, shared);
  if (maps.BuildsHere()) return maps.Build();
  const int warp = WarpOfBlock();
  const int warps = maps.row_warps();
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  int64_t row = static_cast<int64_t>(blockIdx.x) * warps + warp;
  Router router(p, shared + maps.shared_bytes() + warp * Router::SharedBytes(p), row);
  WaitForPrevious();
  AllowNext();
  maps.Open(row >= p.rows);
  while (row < p.rows) {
    router.Route(row, [&](const Choice& choice) {
      if (choice.rank < p.k) maps.Publish(row, choice.rank, choice.expert);
      if (kMaps && row + step >= p.rows) maps.Close();
    });
    row += step;
    router.PointTo(row);
  }
  maps.Finish();
}

}  // namespace ort_moe
