// Gradient of RouterProbs where only the marked experts have one: a warp to a row reads the map, then the few logits
// and gradients that it names, and nothing else of them. The row that is written is zeros but for those, and goes out
// by a bulk copy from shared memory, where it is cleared afterwards.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/training/router_grad_in_turn.cuh"
#include "kernels/training/router_probs_select.cuh"

namespace ort_moe {

constexpr int kMaxMarked = 4 * kWarp;  // beyond, the row is computed in turn

// Shared memory of one warp. A row of the output and two rows of the map follow.
struct MarkedShared {
  uint64_t arrived[2];  // barriers of the rows of the map
  float values[kMaxMarked];
  uint16_t experts[kMaxMarked];
};
static_assert(sizeof(MarkedShared) % 16 == 0);

template <typename T>
class MarkedGrad {
 public:
  static __host__ uint32_t Bytes(const RouterGradParams& p) {
    return sizeof(MarkedShared) + p.shared_row_bytes + 2 * WholeVectors(p.map_bytes);
  }

  __device__ MarkedGrad(const RouterGradParams& p, unsigned char* shared)
      : p_(p),
        lane_(threadIdx.x % kWarp),
        s_(*reinterpret_cast<MarkedShared*>(shared)),
        out_(shared + sizeof(MarkedShared)),
        maps_(out_ + p.shared_row_bytes) {
    ZeroShared(out_, p.shared_row_bytes);
    if (p.bulk && lane_ == 0) {
      InitBarrier(SharedAddress(&s_.arrived[0]), 1);
      InitBarrier(SharedAddress(&s_.arrived[1]), 1);
      FenceBarrierInit();
    }
    FenceForAsyncProxy();
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
    uint8_t* map = maps_ + load_ * WholeVectors(p_.map_bytes);
    if (p_.bulk) {
      WaitBarrier(SharedAddress(&s_.arrived[load_]), parity_);
    } else {
      CopyRow<1>(map, p_.map + row_ * p_.map_bytes, p_.map_bytes);
      __syncwarp();
    }
    int32_t mine = 0, marked;
    const int32_t chunks = (p_.experts + kChunk - 1) / kChunk;
#pragma unroll 2
    for (int32_t chunk = lane_; chunk < chunks; chunk += kWarp) {
      mine += __popc(MapBits(p_.map_format, map, p_.experts, chunk));
    }
    const int32_t first = SumBefore(mine, &marked);
    if (ORT_MOE_RARE(marked > kMaxMarked)) {
      LoadNext();
      ComputeGradInTurn<T>(p_, row_);
    } else {
      int32_t position = first;
#pragma unroll 1
      for (int32_t chunk = lane_; chunk < chunks; chunk += kWarp) {
        uint32_t bits = MapBits(p_.map_format, map, p_.experts, chunk);
#pragma unroll 1
        for (; bits != 0u; bits &= bits - 1u) {
          s_.experts[position++] = static_cast<uint16_t>(chunk * kChunk + __clz(__brev(bits)));
        }
      }
      LoadNext();
      if (marked <= kWarp) {
        ComputeListed<1>(marked, first, mine);
      } else if (marked <= 2 * kWarp) {
        ComputeListed<2>(marked, first, mine);
      } else {
        ComputeListed<kMaxMarked / kWarp>(marked, first, mine);
      }
    }
    row_ += step_;
    load_ ^= 1;
    if (load_ == 0) parity_ ^= 1u;
  }

  __device__ __forceinline__ void Finish() {
    if (p_.bulk && lane_ == 0) WaitForBulkReads();
  }

 private:
  __device__ __forceinline__ void Load(int64_t row, int stage) {
    const uint32_t barrier = SharedAddress(&s_.arrived[stage]);
    ArriveExpecting(barrier, p_.map_bytes);
    CopyBulk(SharedAddress(maps_ + stage * WholeVectors(p_.map_bytes)), p_.map + row * p_.map_bytes, p_.map_bytes,
             barrier);
  }

  // Once nobody needs the map any more; the list is visible behind it.
  __device__ __forceinline__ void LoadNext() {
    __syncwarp();
    if (p_.bulk && lane_ == 0 && row_ + 2 * step_ < p_.rows) Load(row_ + 2 * step_, load_);
  }

  template <int kSlots>
  __device__ __forceinline__ float SumOfListed(const float (&value)[kSlots], int32_t marked, int32_t first,
                                               int32_t mine) {
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kSlots; ++s) s_.values[lane_ + s * kWarp] = value[s];
    __syncwarp();
    float partial[4] = {};
#pragma unroll 1
    for (int32_t j = first; j < first + mine; ++j) {
      const int q = s_.experts[j] / (kChunk * kWarp) % 4;
      const float term = s_.values[j];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n == q) partial[n] = Add(partial[n], term);
      }
    }
    return Butterfly(partial[0], partial[1], partial[2], partial[3]);
  }

  template <int kSlots>
  __device__ __forceinline__ void ComputeListed(int32_t marked, int32_t first, int32_t mine) {
    const Bits<T>* logits = static_cast<const Bits<T>*>(p_.logits) + row_ * p_.experts;
    const Bits<T>* grad = static_cast<const Bits<T>*>(p_.grad) + row_ * p_.experts;
    int32_t expert[kSlots];
    Bits<T> logit_bits[kSlots], grad_bits[kSlots];
    bool holds[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      holds[s] = lane_ + s * kWarp < marked;
      expert[s] = holds[s] ? s_.experts[lane_ + s * kWarp] : 0;
      logit_bits[s] = grad_bits[s] = 0;
      if (holds[s]) {
        logit_bits[s] = logits[expert[s]];
        grad_bits[s] = grad[expert[s]];
      }
    }
    float x[kSlots], t[kSlots], v[kSlots], g[kSlots], product[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      x[s] = Storage<T>::Widen(logit_bits[s]);
      g[s] = ScaledGrad(p_, Storage<T>::Widen(grad_bits[s]), expert[s]);
    }
    if (ORT_MOE_RARE(p_.softcap > 0.0f)) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        t[s] = Tanh(Div(x[s], p_.softcap));
        x[s] = Mul(p_.softcap, t[s]);
      }
    }
    if (p_.score == Score::kSoftmax) {
      uint32_t best = 0u;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) best = max(best, holds[s] ? RankKey(x[s]) : 0u);
      const float max = KeyValue(WarpMax(best));
#pragma unroll
      for (int s = 0; s < kSlots; ++s) v[s] = Exp(Add(x[s], -max));
      const float sum = SumOfListed<kSlots>(v, marked, first, mine);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) v[s] = Div(v[s], sum);
    } else {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) v[s] = ElementScore(p_.score, x[s]);
    }
    const auto sum_of_products = [&] {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) product[s] = Mul(g[s], v[s]);
      return SumOfListed<kSlots>(product, marked, first, mine);
    };
    if (p_.normalize) {
      const float sum = SumOfListed<kSlots>(v, marked, first, mine);
      const auto normalization = NormalizationOf(p_, sum, sum_of_products());
#pragma unroll
      for (int s = 0; s < kSlots; ++s) g[s] = Mul(Add(g[s], -normalization.q), normalization.r);
    }
    if (p_.score == Score::kSoftmax) {
      const float q = sum_of_products();
#pragma unroll
      for (int s = 0; s < kSlots; ++s) g[s] = Mul(v[s], Add(g[s], -q));
    } else {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) g[s] = ElementGrad(p_.score, x[s], v[s], g[s]);
    }
    if (ORT_MOE_RARE(p_.softcap > 0.0f)) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) g[s] = Mul(g[s], Add(1.0f, -Mul(t[s], t[s])));
    }
    Store<kSlots>(g, expert, holds);
  }

  template <int kSlots>
  __device__ __forceinline__ void Store(const float (&d)[kSlots], const int32_t (&expert)[kSlots],
                                        const bool (&holds)[kSlots]) {
    Bits<T>* out = reinterpret_cast<Bits<T>*>(out_);
    if (p_.bulk && lane_ == 0) WaitForBulkReads();
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kMaxMarked / kWarp; ++s) {
      if (written_bits_ >> s & 1u) out[written_[s]] = 0;
    }
    written_bits_ = 0u;
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (!holds[s]) continue;
      out[expert[s]] = Storage<T>::Round(d[s]);
      written_[s] = expert[s];
      written_bits_ |= 1u << s;
    }
    unsigned char* target = static_cast<unsigned char*>(p_.grad_logits) + row_ * p_.row_bytes;
    if (p_.bulk) {
      FenceForAsyncProxy();
      __syncwarp();
      if (lane_ == 0) {
        StoreBulk(target, SharedAddress(out_), p_.row_bytes);
        CommitBulkStores();
      }
    } else {
      __syncwarp();
      CopyRow<2>(target, out_, p_.row_bytes);
      __syncwarp();
    }
  }

  const RouterGradParams& p_;
  const int lane_;
  MarkedShared& s_;
  unsigned char* const out_;
  uint8_t* const maps_;
  int64_t row_ = 0;
  int64_t step_ = 0;
  int load_ = 0;          // which row of the map
  uint32_t parity_ = 0u;  // of its barrier
  int32_t written_[kMaxMarked / kWarp] = {};
  uint32_t written_bits_ = 0u;  // of the output, by this lane
};

}  // namespace ort_moe
