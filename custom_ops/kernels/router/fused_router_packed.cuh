// FusedRouter, some lanes to a row: half-precision logits whose softmax over the chosen is wanted, up to 512 experts.
//
// A logit of 16 bits and its expert make one 32-bit key, whose order is the ranking of the contract, so that keys need
// no companions, are never equal, and one instruction compares two. A lane has 16 of them, in two chunks of 8 experts
// as the contract sums them: 64 experts take 4 lanes, 8 rows to a warp, or 8 lanes where there are few rows.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/router/fused_router_packed_selection.cuh"
#include "kernels/router/fused_router_row.cuh"

namespace ort_moe {

constexpr int kPackedWarpsPerBlock = 4;

// Two halves in a word: the sum with +0, which makes -0 +0 and a NaN the canonical one.
template <typename T>
__device__ __forceinline__ uint32_t Canonical(uint32_t halves);

template <>
__device__ __forceinline__ uint32_t Canonical<Float16>(uint32_t halves) {
  const __half2 zeros = __half2half2(__ushort_as_half(0));
  const __half2 sum = __hadd2_rn(reinterpret_cast<const __half2&>(halves), zeros);
  return reinterpret_cast<const uint32_t&>(sum);
}

template <>
__device__ __forceinline__ uint32_t Canonical<BFloat16>(uint32_t halves) {
  const __nv_bfloat162 zeros = __bfloat162bfloat162(__ushort_as_bfloat16(0));
  const __nv_bfloat162 sum = __hadd2_rn(reinterpret_cast<const __nv_bfloat162&>(halves), zeros);
  return reinterpret_cast<const uint32_t&>(sum);
}

// 16 bits each that are ordered as the numbers, NaN above all; 0 is no number's.
__device__ __forceinline__ uint32_t OrderedHalves(uint32_t canonical) {
  uint32_t signs;
  asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(signs) : "r"(canonical));  // a half's sign in all of its bits
  return canonical ^ (signs | 0x80008000u);
}

template <typename T, int kLanes>
class PackedRow {
 public:
  static constexpr int kRowsPerWarp = kWarp / kLanes;
  static constexpr int kListed = kLanes * kPackedKeys;
  using Selection =
      std::conditional_t<kLanes == kWarp, BoundedSelection,
                         std::conditional_t<kLanes == 4, SortedSelection<kLanes>, SpreadSelection<kLanes>>>;
  static constexpr int kChoices = Selection::kChoices;                              // of a lane
  static constexpr bool kStaysClear = std::is_empty_v<typename Selection::Shared>;  // by_expert has its memory alone

  // Shared memory of one row.
  struct Shared {
    union {
      float by_expert[kListed];  // zero but for the chosen
      typename Selection::Shared selection;
    };
  };

  static bool Fits(const RouterParams& p) { return p.experts <= kListed && Selection::Fits(p.experts, p.k); }

  __device__ PackedRow(const RouterParams& p, Shared& shared)
      : p_(p), shared_(shared), lane_(static_cast<int>(threadIdx.x) % kLanes) {
    if constexpr (kStaysClear) ClearByExpert();
  }

  // Rows past the last are computed on another and not stored.
  __device__ void PointTo(int64_t row) {
    row_ = row;
    logits_ = Settled(LogitsOfRow<T>(p_, row < p_.rows ? row : 0) + Chunk(0) * kChunk);
  }

  // The row pointed to, by whole warps.
  __device__ void Route() {
    uint4 loaded[2];
    Load(loaded);
    uint32_t ordered[kPackedKeys / 2];
    OrderHalves(loaded, ordered);
    uint32_t key[kPackedKeys];
    MakeKeys(ordered, key);
    Selection selection(shared_.selection, lane_);
    bool has_nan = false;
#pragma unroll 1
    while (true) {
      selection.Choose(key, p_.experts, p_.k);
      // A NaN ranked before all numbers, but its place is behind them.
      const bool nan_leads = selection.best() >= kPackedNaN;
      has_nan |= nan_leads;
      if (!ORT_MOE_RARE(__any_sync(kAllLanes, nan_leads))) break;
      PutNaNsLast(key);
    }
    Weigh(selection, has_nan);
  }

 private:
  __device__ int32_t Chunk(int c) const { return lane_ + c * kLanes; }
  __device__ bool Owns(int c) const { return Chunk(c) * kChunk < p_.experts; }

  __device__ void Load(uint4 (&loaded)[2]) const {
    __builtin_assume(__isGlobal(logits_));
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      loaded[c] = make_uint4(0u, 0u, 0u, 0u);
      if (Owns(c)) loaded[c] = *reinterpret_cast<const uint4*>(logits_ + c * kLanes * kChunk);
    }
  }

  static __device__ void OrderHalves(const uint4 (&loaded)[2], uint32_t (&ordered)[kPackedKeys / 2]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      ordered[4 * c] = OrderedHalves(Canonical<T>(loaded[c].x));
      ordered[4 * c + 1] = OrderedHalves(Canonical<T>(loaded[c].y));
      ordered[4 * c + 2] = OrderedHalves(Canonical<T>(loaded[c].z));
      ordered[4 * c + 3] = OrderedHalves(Canonical<T>(loaded[c].w));
    }
  }

  // The ordered half above the complement of the expert, but for the bits of the lane: of equal ones the lower expert's
  // is greater. Past the last expert the half is 0, and the key below those of all experts.
  __device__ void MakeKeys(const uint32_t (&ordered)[kPackedKeys / 2], uint32_t (&key)[kPackedKeys]) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t high = Owns(c) ? ~kExpertMask : 0u;
      const uint32_t shift = Owns(c) ? kExpertMask + 1u : 0u;  // a product takes another pipe than the rest
#pragma unroll
      for (int i = 0; i < kChunk; i += 2) {
        const uint32_t word = ordered[(c * kChunk + i) / 2];
        const uint32_t last = kExpertMask - (c * kLanes * kChunk + i);
        key[c * kChunk + i] = word * shift + last;
        key[c * kChunk + i + 1] = (word & high) | (last - 1u);
      }
    }
  }

  static __device__ void PutNaNsLast(uint32_t (&key)[kPackedKeys]) {
#pragma unroll
    for (int i = 0; i < kPackedKeys; ++i) key[i] = key[i] >= kPackedNaN ? key[i] & kExpertMask : key[i];
  }

  static __device__ int32_t ExpertOf(uint32_t key) { return static_cast<int32_t>(~key & kExpertMask); }

  static __device__ float LogitOf(uint32_t key) {
    const uint32_t half = key >> 16;
    return Storage<T>::Widen(static_cast<Bits<T>>(half & 0x8000u ? half ^ 0x8000u : ~half));
  }

  // Steps 4 and 5 of the contract.
  __device__ void Weigh(const Selection& selection, bool has_nan) {
    const float max = LogitOf(selection.best());
    uint32_t key[kChoices];
    int32_t rank[kChoices];
    float value[kChoices];
    if constexpr (!kStaysClear) ClearByExpert();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kChoices; ++n) {
      selection.Hold(n, &key[n], &rank[n]);
      value[n] = Exp(Add(LogitOf(key[n]), -max));
      if (rank[n] < p_.k) shared_.by_expert[Place(ExpertOf(key[n]))] = value[n];
    }
    __syncwarp();
    const float sum = SumInOrder();
    if constexpr (kStaysClear) __syncwarp();
#pragma unroll
    for (int n = 0; n < kChoices; ++n) {
      if (rank[n] >= p_.k) continue;
      const int32_t expert = ExpertOf(key[n]);
      if constexpr (kStaysClear) shared_.by_expert[Place(expert)] = 0.0f;
      if (row_ >= p_.rows) continue;
      float weight = Mul(Div(value[n], sum), p_.scale);
      if (p_.expert_scale != nullptr) weight = Mul(weight, p_.expert_scale[expert]);
      p_.weights[row_ * p_.columns + rank[n]] = has_nan ? NaN() : weight;
      p_.indices[row_ * p_.columns + rank[n]] = expert;
    }
  }

  // Halves of chunks lie kListed / 2 apart, so that lanes read 16 neighbouring bytes each.
  static __device__ int32_t Place(int32_t expert) {
    return (expert & 4) * (kListed / kChunk) + expert / kChunk * 4 + (expert & 3);
  }

  __device__ float4* Quarter(int c, int half) const {
    return reinterpret_cast<float4*>(shared_.by_expert + half * (kListed / 2)) + Chunk(c);
  }

  __device__ void ClearByExpert() {
    __syncwarp();  // other lanes have read what lies there
#pragma unroll
    for (int n = 0; n < 4; ++n) *Quarter(n / 2, n % 2) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  __device__ float SumInOrder() const {
    float partial[2] = {};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float4 four = *Quarter(n / 2, n % 2);
      partial[n / 2] = Add(Add(Add(Add(partial[n / 2], four.x), four.y), four.z), four.w);
    }
    return SumOverLanes<kLanes>(Add(partial[0], partial[1]));
  }

  const RouterParams& p_;
  Shared& shared_;
  const int lane_;
  int64_t row_ = 0;
  const Bits<T>* logits_ = nullptr;  // this lane's
};

template <typename T, int kLanes>
__global__ void __launch_bounds__(kPackedWarpsPerBlock* kWarp)
    FusedRouterPackedKernel(const __grid_constant__ RouterParams params) {
  using Row = PackedRow<T, kLanes>;
  ParamsOfKind<RouterKind::kSoftmaxOfChosen> p = WrittenOut<RouterKind::kSoftmaxOfChosen>(params);
  __shared__ __align__(16) typename Row::Shared shared[kPackedWarpsPerBlock * Row::kRowsPerWarp];
  const int of_block = static_cast<int>(threadIdx.x) / kLanes;
  constexpr int kRows = kPackedWarpsPerBlock * Row::kRowsPerWarp;
  Row router(p, shared[of_block]);
  int64_t base = static_cast<int64_t>(blockIdx.x) * kRows;
  router.PointTo(base + of_block);
  WaitForPrevious();
  AllowNext();
  while (true) {
    router.Route();
    base += static_cast<int64_t>(gridDim.x) * kRows;
    if (base >= p.rows) break;
    router.PointTo(base + of_block);
  }
}

}  // namespace ort_moe
