// FusedRouter, a warp to a row of sigmoids, most of which are only estimated: of the few experts that may be among the
// k best (fused_router_estimates.cuh) the sigmoids are computed, an expert to a lane, and rank them. Where estimates do
// not tell, the row is chosen from by the sigmoids of all (fused_router_warp.cuh).
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/router/fused_router_estimates.cuh"
#include "kernels/router/fused_router_warp.cuh"

namespace ort_moe {

template <typename T, int kOwned>
class EstimatedRow : public WarpRow<T, kOwned, RouterKind::kSigmoid> {
 public:
  using Base = WarpRow<T, kOwned, RouterKind::kSigmoid>;

  __device__ EstimatedRow(const RouterParams& p, unsigned char* shared, int64_t row)
      : Base(p, shared, row), params_(p), memory_(shared) {}

  // Asks for a row's logits.
  __device__ __forceinline__ void Fetch(int64_t row) {
    if (row < p_.rows) fetched_.Fetch(p_, LogitsOfRow<T>(p_, row), lane_, kWarp);
  }

  // What all rows need, behind WaitForPrevious.
  __device__ __forceinline__ void Begin() { estimates_.SetBias(p_, lane_); }

  // The row that was fetched and is pointed to; then fetches `next` and points to it.
  __device__ __forceinline__ void Route(int64_t row, int64_t next) {
    const LoadedChunks<T, Base::kChunks> logits = fetched_;
    Fetch(next);
    bool nan = false;
    if (ORT_MOE_RARE(!ChooseByEstimates(logits))) {
      const Apart apart = ChooseApart(params_, memory_, row);
      choice_ = apart.choice;
      score_ = apart.score;
      nan = apart.nan;
    }
    WeighChosen(*this, p_, RowSoftmax{}, nan);
    this->Store(row);
    this->PointTo(next);
  }

  __device__ float Score(int32_t, const RowSoftmax&) const { return score_; }

 private:
  using Base::choice_;
  using Base::lane_;
  using Base::logits_;
  using Base::p_;
  using Base::selection_;

  struct Apart {
    Choice choice;
    float score;
    bool nan;
  };

  __device__ __forceinline__ bool ChooseByEstimates(const LoadedChunks<T, Base::kChunks>& logits) {
    uint32_t reaching;
    if (ORT_MOE_RARE(!estimates_.Reaching(p_, logits, selection_.words(), &reaching))) return false;
    const auto key_of = [this](int32_t expert) {
      score_ = Sigmoid(LoadLogit<T>(p_, logits_, expert));
      return RankKey(p_.selection_bias == nullptr ? score_ : Add(score_, p_.selection_bias[expert]));
    };
    return selection_.ChooseOf(reaching, [this](int i) { return this->Expert(i); }, key_of, &choice_);
  }

  // Where that is rare: apart, so that the registers it takes are not those of all rows.
  static __device__ __noinline__ Apart ChooseApart(const RouterParams& p, unsigned char* shared, int64_t row) {
    Base all(p, shared, row);
    Apart apart{};
    all.Choose(&apart.nan);
    apart.choice = all.choice();
    if (apart.choice.rank < p.k) apart.score = all.Score(apart.choice.expert, RowSoftmax{});
    __syncwarp();  // the next row finds all that was read free
    return apart;
  }

  const RouterParams& params_;
  unsigned char* const memory_;
  LoadedChunks<T, Base::kChunks> fetched_;
  SigmoidEstimates<kOwned> estimates_;
  float score_ = 0.0f;  // of the choice
};

constexpr int kEstimatedBlocks = 8;  // of a multiprocessor, at once

template <typename T, int kOwned>
__global__ void __launch_bounds__(kMaxWarpsPerBlock* kWarp, kEstimatedBlocks)
    FusedRouterEstimatedKernel(const __grid_constant__ RouterParams p) {
  using Router = EstimatedRow<T, kOwned>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = WarpOfBlock();
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  int64_t row = static_cast<int64_t>(blockIdx.x) * warps + warp;
  Router router(p, shared + warp * Router::SharedBytes(p), row);
  WaitForPrevious();
  AllowNext();
  router.Fetch(row);
  router.Begin();
  for (; row < p.rows; row += step) router.Route(row, row + step);
}

}  // namespace ort_moe
