// Gradients that every expert of a row has: of RouterScores, and of RouterProbs' softmax over all experts. A warp to a
// row; logits and gradients come into shared memory by bulk copies two rows ahead, what is computed from float logits
// takes their place there, the result the gradient's, and the lanes store it.
#pragma once

#include <type_traits>

#include "kernels/launch.cuh"
#include "kernels/router_grad_params.cuh"
#include "kernels/training_rows.cuh"

namespace ort_moe {

// softmax over all experts, or sigmoid; without a soft cap. A map and a normalisation do not meet.
template <typename T, bool kSoftmax>
class RowGrad {
 public:
  static constexpr bool kFloat = std::is_same_v<T, float>;

  // Barriers, then twice logits, gradients and map.
  static __host__ __device__ uint32_t StageBytes(const RouterGradParams& p) {
    return 2 * p.shared_row_bytes + (p.map == nullptr ? 0 : WholeVectors(p.map_bytes));
  }
  static __host__ uint32_t Bytes(const RouterGradParams& p) { return 2 * sizeof(uint64_t) + 2 * StageBytes(p); }

  __device__ RowGrad(const RouterGradParams& p, unsigned char* shared)
      : p_(p),
        lane_(threadIdx.x % kWarp),
        chunks_((p.experts + kChunk - 1) / kChunk),
        arrived_(reinterpret_cast<uint64_t*>(shared)),
        stages_(shared + 2 * sizeof(uint64_t)) {
    if (p.bulk && lane_ == 0) {
      InitRowBarrier(&arrived_[0]);
      InitRowBarrier(&arrived_[1]);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void Begin(int64_t row, int64_t step) {
    row_ = row;
    step_ = step;
    if (!p_.bulk || lane_ != 0) return;
    if (row < p_.rows) Load(row, 0);
    if (row + step < p_.rows) Load(row + step, 1);
  }

  __device__ __forceinline__ int64_t row() const { return row_; }

  __device__ __forceinline__ void Compute() {
    x_ = stages_ + load_ * StageBytes(p_);
    g_ = x_ + p_.shared_row_bytes;
    map_ = p_.map == nullptr ? nullptr : g_ + p_.shared_row_bytes;
    if (p_.bulk) {
      WaitForRow(&arrived_[load_], parity_);
    } else {
      const int64_t offset = row_ * p_.row_bytes;
      CopyRow<2>(x_, static_cast<const unsigned char*>(p_.logits) + offset, p_.row_bytes);
      CopyRow<2>(g_, static_cast<const unsigned char*>(p_.grad) + offset, p_.row_bytes);
      if (map_ != nullptr) CopyRow<1>(map_, p_.map + row_ * p_.map_bytes, p_.map_bytes);
      const int32_t e = p_.experts / kChunk * kChunk + lane_;
      if (lane_ < kChunk && e >= p_.experts && p_.experts % kChunk != 0) {
        reinterpret_cast<Bits<T>*>(x_)[e] = Storage<T>::Round(-Infinity());
        reinterpret_cast<Bits<T>*>(g_)[e] = 0;
      }
      __syncwarp();
    }
    ComputeHere();
    unsigned char* target = static_cast<unsigned char*>(p_.grad_logits) + row_ * p_.row_bytes;
    if (p_.bulk) {
      __syncwarp();
      CopyUnits<uint4>(target, g_, p_.row_bytes);
      __syncwarp();
      if (lane_ == 0 && row_ + 2 * step_ < p_.rows) {
        ShowToBulkCopies();
        Load(row_ + 2 * step_, load_);
      }
    } else {
      __syncwarp();
      CopyRow<2>(target, g_, p_.row_bytes);
      __syncwarp();
    }
    row_ += step_;
    load_ ^= 1;
    if (load_ == 0) parity_ ^= 1u;
  }

  __device__ __forceinline__ void Finish() {}

 private:
  __device__ __forceinline__ void Load(int64_t row, int stage) {
    unsigned char* x = stages_ + stage * StageBytes(p_);
    const int64_t offset = row * p_.row_bytes;
    ExpectBytes(&arrived_[stage], 2 * p_.row_bytes + (p_.map == nullptr ? 0 : p_.map_bytes));
    BulkLoadRow(x, static_cast<const unsigned char*>(p_.logits) + offset, p_.row_bytes, &arrived_[stage]);
    BulkLoadRow(x + p_.shared_row_bytes, static_cast<const unsigned char*>(p_.grad) + offset, p_.row_bytes,
                &arrived_[stage]);
    if (p_.map != nullptr) {
      BulkLoadRow(x + 2 * p_.shared_row_bytes, p_.map + row * p_.map_bytes, p_.map_bytes, &arrived_[stage]);
    }
  }

  // Calls f(chunk, a, b) for this lane's chunks and adds up what it leaves in a and b: their sums over the experts, in
  // the contract's order.
  template <typename F>
  __device__ __forceinline__ float2 Sums(F f) const {
    float a0 = 0.0f, a1 = 0.0f, a2 = 0.0f, a3 = 0.0f;  // the next lap's partial sums are a0, b0
    float b0 = 0.0f, b1 = 0.0f, b2 = 0.0f, b3 = 0.0f;
    int lap = 0;
#pragma unroll 1
    for (; lap * kWarp < chunks_ || lap % 4 != 0; ++lap) {
      const int32_t chunk = lane_ + lap * kWarp;
      float a_sum = a0, b_sum = b0;
      if (chunk < chunks_) {
        float a[kChunk], b[kChunk];
        f(chunk, a, b);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          a_sum = Add(a_sum, a[i]);
          b_sum = Add(b_sum, b[i]);
        }
      }
      a0 = a1, a1 = a2, a2 = a3, a3 = a_sum;
      b0 = b1, b1 = b2, b2 = b3, b3 = b_sum;
    }
    return {Butterfly(a0, a1, a2, a3), Butterfly(b0, b1, b2, b3)};
  }

  // What the score is made of, before the division by the softmax's sum.
  __device__ __forceinline__ void ReadTerms(int32_t chunk, float (&term)[kChunk]) const {
    ReadChunk<T>(x_, chunk, term);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) term[i] = kSoftmax ? Exp(Add(term[i], -max_)) : Sigmoid(term[i]);
  }

  // Computed before, where there was place for it.
  __device__ __forceinline__ void ReadScores(int32_t chunk, float (&v)[kChunk]) const {
    if constexpr (kFloat) {
      ReadChunk<T>(x_, chunk, v);
    } else {
      ReadTerms(chunk, v);
      if constexpr (kSoftmax) {
        divide_(v);
      }
    }
  }

  __device__ __forceinline__ void ReadGrads(int32_t chunk, float (&g)[kChunk]) const {
    ReadChunk<T>(g_, chunk, g);
    if (p_.map == nullptr) return;
    const uint32_t bits = MapBits(p_.map_format, map_, p_.experts, chunk);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) g[i] = bits >> i & 1u ? ScaledGrad(p_, g[i], chunk * kChunk + i) : 0.0f;
  }

  __device__ __forceinline__ void ComputeHere() {
    if constexpr (kSoftmax) {
      uint32_t best = 0u;
      float max = -Infinity();
      bool any = false;
#pragma unroll 1
      for (int32_t chunk = lane_; chunk < chunks_; chunk += kWarp) {
        float x[kChunk];
        ReadChunk<T>(x_, chunk, x);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          max = fmaxf(max, x[i]);
          any |= !IsNaN(x[i]);
        }
      }
      best = any ? RankKey(max) : 0u;
      best = WarpMax(best);
      max_ = best == 0u ? NaN() : KeyValue(best);
      const float2 sums = Sums([&](int32_t chunk, float (&term)[kChunk], float (&none)[kChunk]) {
        ReadTerms(chunk, term);
        if constexpr (kFloat) WriteChunk<T>(x_, chunk, term);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) none[i] = 0.0f;
      });
      divide_ = DivideTerms(sums.x);
    }
    // Scores, their sum, and that of their products with the gradient.
    const float2 sums = Sums([&](int32_t chunk, float (&v)[kChunk], float (&product)[kChunk]) {
      float g[kChunk];
      ReadGrads(chunk, g);
      if constexpr (kFloat && kSoftmax) {
        ReadChunk<T>(x_, chunk, v);
        divide_(v);
      } else if constexpr (kFloat) {
        ReadTerms(chunk, v);
      } else {
        ReadScores(chunk, v);
      }
      if constexpr (kFloat) WriteChunk<T>(x_, chunk, v);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        product[i] = Mul(g[i], v[i]);
        if ((chunk * kChunk + i) >= p_.experts) v[i] = product[i] = 0.0f;
      }
    });
    RouterGradParams::Normalization normalization;
    float q = sums.y;
    if (p_.normalize) {
      normalization = NormalizationOf(p_, sums.x, sums.y);
      if constexpr (kSoftmax) {
        q = Sums([&](int32_t chunk, float (&product)[kChunk], float (&none)[kChunk]) {
              float g[kChunk];
              ReadChunk<T>(g_, chunk, g);
              ReadScores(chunk, product);
#pragma unroll
              for (int i = 0; i < kChunk; ++i) {
                product[i] = Mul(Mul(Add(g[i], -normalization.q), normalization.r), product[i]);
                if ((chunk * kChunk + i) >= p_.experts) product[i] = 0.0f;
                none[i] = 0.0f;
              }
            }).x;
      }
    }
#pragma unroll 1
    for (int32_t chunk = lane_; chunk < chunks_; chunk += kWarp) {
      float g[kChunk], v[kChunk];
      ReadGrads(chunk, g);
      ReadScores(chunk, v);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (p_.normalize) g[i] = Mul(Add(g[i], -normalization.q), normalization.r);
        g[i] = kSoftmax ? Mul(v[i], Add(g[i], -q)) : ElementGrad(Score::kSigmoid, 0.0f, v[i], g[i]);
      }
      WriteChunk<T>(g_, chunk, g);
    }
  }

  const RouterGradParams& p_;
  const int lane_;
  const int32_t chunks_;
  uint64_t* const arrived_;
  unsigned char* const stages_;
  int64_t row_ = 0;
  int64_t step_ = 0;
  int load_ = 0;
  uint32_t parity_ = 0u;
  unsigned char* x_ = nullptr;  // the row's logits, or scores
  unsigned char* g_ = nullptr;
  unsigned char* map_ = nullptr;
  float max_ = 0.0f;
  DivideTerms divide_{1.0f};  // by a softmax's sum
};

}  // namespace ort_moe
