// FusedRouter, a lane to an expert: up to 8 experts without groups, so 8 lanes to a row and 4 rows to a warp.
//
// Every lane sees all keys of its row by 8 shuffles and counts those that rank before its own: that is its rank, for
// every k at once. A row's experts are one chunk of the contract's sums, added in ascending order.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/router/fused_router_maps.cuh"
#include "kernels/router/fused_router_row.cuh"

namespace ort_moe {

constexpr int kMaxLaneWarpsPerBlock = 4;

template <typename T>
class LaneRow {
 public:
  __device__ LaneRow(const RouterParams& p, int64_t row) : p_(p), expert_(threadIdx.x % kChunk) { PointTo(row); }

  __device__ void PointTo(int64_t row) {
    logits_ = Settled(LogitsOfRow<T>(p_, row));
    weights_ = Settled(p_.weights + row * p_.columns);
    indices_ = Settled(p_.indices + row * p_.columns);
  }

  // The row pointed to. Called by whole warps; a row past the end is computed on nothing and not stored.
  // on_choice(chosen, rank, expert) is called by all lanes as soon as the choices are known.
  template <typename OnChoice>
  __device__ void Route(int64_t row, OnChoice on_choice) {
    const bool owns = row < p_.rows && expert_ < p_.experts;
    x_ = owns ? LoadLogit<T>(p_, logits_, expert_) : -Infinity();
    const unsigned nans = __ballot_sync(kAllLanes, IsNaN(x_));
    const bool has_nan = ((nans >> (threadIdx.x % kWarp & ~(kChunk - 1))) & 0xffu) != 0;
    RowSoftmax softmax;
    if (p_.softmax_of_experts) {
      softmax.max = MaxOf(RankKey(x_));
      softmax.sum = SumOf(Exp(Add(x_, -softmax.max)));
    }
    float key = p_.ranks_logits ? x_ : ScoreOf(p_, softmax, x_);
    if (p_.selection_bias != nullptr && owns) key = Add(key, p_.selection_bias[expert_]);
    const int32_t rank = RankOf(owns ? RankKey(key) : 0u);
    chosen_ = owns && rank < p_.k;
    on_choice(chosen_, rank, expert_);
    WeighChosen(*this, p_, softmax, has_nan);
    if (chosen_) {
      weights_[rank] = value_;
      indices_[rank] = expert_;
    }
  }

  // For every lane, so that no branch keeps its arithmetic from overlapping with the ranking; values of those that are
  // not chosen go nowhere.
  template <typename F>
  __device__ void ForEachChosen(F f) {
    f(min(expert_, p_.experts - 1), value_);
  }

  __device__ float MaxOfChosen() const {
    return p_.plain_keys() ? KeyValue(best_key_) : MaxOf(chosen_ ? RankKey(value_) : 0u);
  }
  __device__ float SumOfChosen() const { return SumOf(chosen_ ? value_ : 0.0f); }
  __device__ float Logit(int32_t) const { return x_; }
  __device__ float Score(int32_t, const RowSoftmax& softmax) const { return ScoreOf(p_, softmax, x_); }
  __device__ bool IsMasked(int32_t) const { return false; }

 private:
  __device__ int32_t RankOf(uint32_t key) {
    int32_t before[kChunk];
    best_key_ = 0u;
#pragma unroll
    for (int other = 0; other < kChunk; ++other) {
      const uint32_t other_key = __shfl_sync(kAllLanes, key, other, kChunk);
      before[other] = other_key > key || (other_key == key && other < expert_);
      best_key_ = max(best_key_, other_key);
    }
#pragma unroll
    for (int step = 1; step < kChunk; step *= 2) {
#pragma unroll
      for (int i = 0; i < kChunk; i += 2 * step) before[i] += before[i + step];
    }
    return before[0];
  }

  __device__ float MaxOf(uint32_t rank_key) const {
    uint32_t best[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) best[i] = __shfl_sync(kAllLanes, rank_key, i, kChunk);
#pragma unroll
    for (int step = 1; step < kChunk; step *= 2) {
#pragma unroll
      for (int i = 0; i < kChunk; i += 2 * step) best[i] = max(best[i], best[i + step]);
    }
    return KeyValue(best[0]);
  }

  __device__ float SumOf(float value) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum = Add(sum, __shfl_sync(kAllLanes, value, i, kChunk));
    return sum;
  }

  const RouterParams& p_;
  const int32_t expert_;
  const Bits<T>* logits_ = nullptr;  // of the row, as are the next two
  float* weights_ = nullptr;
  int32_t* indices_ = nullptr;
  float x_ = 0.0f;
  float value_ = 0.0f;
  uint32_t best_key_ = 0u;
  bool chosen_ = false;
};

template <typename T, RouterKind kKind, bool kMaps>
__global__ void __launch_bounds__(kMaxLaneWarpsPerBlock* kWarp + (kMaps ? kMapThreads : 0))
    FusedRouterLaneKernel(const __grid_constant__ RouterParams params) {
  ParamsOfKind<kKind> p = WrittenOut<kKind>(params);
  constexpr int kRowsPerWarp = kWarp / kChunk;
  extern __shared__ __align__(16) unsigned char lane_shared[];
  RouterMaps<kMaps> maps(params, lane_shared);
  if (maps.BuildsHere()) return maps.Build();
  const int row_threads = maps.row_warps() * kWarp;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * row_threads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * row_threads / kChunk;
  const auto whole_warp_past_last = [&](int64_t row) { return row / kRowsPerWarp * kRowsPerWarp >= p.rows; };
  int64_t row = thread / kChunk;
  LaneRow<T> router(p, row);
  WaitForPrevious();
  AllowNext();
  maps.Open(whole_warp_past_last(row));
  while (!whole_warp_past_last(row)) {
    router.Route(row, [&](bool chosen, int32_t rank, int32_t expert) {
      if (chosen) maps.Publish(row, rank, expert);
      if (kMaps && whole_warp_past_last(row + step)) maps.Close();
    });
    row += step;
    router.PointTo(row);
  }
  maps.Finish();
}

}  // namespace ort_moe
