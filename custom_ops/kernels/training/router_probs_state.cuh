// RouterProbs, a warp to a row: what a row's steps share (router_probs_row.cuh): the warp's shared memory, how logits
// come into it, and how the output leaves it.
#pragma once

#include <type_traits>

#include "kernels/training/router_probs_params.cuh"
#include "kernels/training/router_probs_select.cuh"
#include "kernels/training/training_rows.cuh"

namespace ort_moe {

constexpr int kMaxListed = 4 * kWarp;

// Shared memory of one warp. Logits, probs, map, choice and, of half-precision logits where scores rank, keys follow;
// all scores take the place of their logits instead.
struct ProbsShared {
  uint64_t arrived[2];  // barriers of the rows of logits
  uint32_t bests[kWarp];
  float values[kMaxListed];
  uint32_t keys[kMaxListed];
  uint16_t experts[kMaxListed];
};
static_assert(sizeof(ProbsShared) % 16 == 0);

template <typename T, ProbsKind kKind, bool kAllScores>
class ProbsState {
 public:
  static constexpr bool kRanksLogits = kKind != ProbsKind::kSigmoid;
  static constexpr bool kFloat = std::is_same_v<T, float>;
  static constexpr bool kEstimates = !kRanksLogits && !kAllScores;
  using Key = std::conditional_t<kRanksLogits, T, float>;
  // Half-precision logits and their expert share a word, so that no two keys of the list are equal.
  static constexpr bool kUnique = kRanksLogits && !kFloat;

  static __host__ __device__ uint32_t ProbsBytes(const ProbsParams& p) { return kAllScores ? 0 : p.shared_row_bytes; }
  static __host__ uint32_t Bytes(const ProbsParams& p) {
    return sizeof(ProbsShared) + p.stages * p.shared_row_bytes + ProbsBytes(p) + WholeVectors(p.map_bytes) +
           RowChoice<Key>::Words(p.experts) * sizeof(uint32_t) + (kRanksLogits || kFloat ? 0 : 2 * p.shared_row_bytes);
  }

  __device__ ProbsState(const ProbsParams& p, unsigned char* shared)
      : p_(p),
        lane_(threadIdx.x % kWarp),
        s_(*reinterpret_cast<ProbsShared*>(shared)),
        logits_(shared + sizeof(ProbsShared)),
        probs_(logits_ + p.stages * p.shared_row_bytes),
        map_(probs_ + ProbsBytes(p)),
        choice_(p.experts, reinterpret_cast<uint32_t*>(map_ + WholeVectors(p.map_bytes))) {
    ZeroShared(probs_, ProbsBytes(p) + WholeVectors(p.map_bytes));
    if (p.bulk && lane_ == 0) {
      InitBarrier(SharedAddress(&s_.arrived[0]), 1);
      InitBarrier(SharedAddress(&s_.arrived[1]), 1);
      FenceBarrierInit();
    }
    FenceForAsyncProxy();
    __syncwarp();
  }

  // Starts on the logits of the warp's first rows, `step` apart.
  __device__ __forceinline__ void Begin(int64_t row, int64_t step) {
    row_ = row;
    step_ = step;
    if (!p_.bulk || lane_ != 0) return;
    for (int n = 0; n < p_.stages && row + n * step < p_.rows; ++n) {
      Load(row + n * step, n);
    }
  }

  __device__ __forceinline__ int64_t row() const { return row_; }

  // Before the warp's shared memory goes.
  __device__ __forceinline__ void Finish() {
    if (p_.bulk && lane_ == 0) WaitForBulkReads();
  }

 protected:
  __device__ const unsigned char* Source(int64_t row) const {
    return static_cast<const unsigned char*>(p_.logits) + row * p_.row_bytes;
  }

  // Once nobody needs the row of logits any more.
  __device__ __forceinline__ void LoadNext() {
    if (!p_.bulk) return;
    __syncwarp();
    const int64_t row = row_ + p_.stages * step_;
    if (lane_ == 0 && row < p_.rows) Load(row, load_);
  }

  // The same of the row before, whose scores have been on their way out of there since.
  __device__ __forceinline__ void LoadBehindLastRow() {
    const int64_t next = row_ + (p_.stages - 1) * step_;
    if (!p_.bulk || lane_ != 0 || row_ < step_ || next >= p_.rows) return;
    WaitForBulkReads();
    Load(next, p_.stages - 1 - load_);
  }

  // By one lane.
  __device__ __forceinline__ void Load(int64_t row, int stage) {
    if constexpr (kFloat && (!kRanksLogits || kAllScores)) FenceForAsyncProxy();  // keys or terms were written there
    const uint32_t barrier = SharedAddress(&s_.arrived[stage]);
    ArriveExpecting(barrier, p_.row_bytes);
    CopyBulk(SharedAddress(logits_ + stage * p_.shared_row_bytes), Source(row), p_.row_bytes, barrier);
  }

  // f(chunk) for this lane's chunks in ascending order.
  template <typename F>
  __device__ __forceinline__ void ForEachChunk(F f) const {
#pragma unroll 1
    for (int32_t chunk = lane_; chunk < choice_.chunks(); chunk += kWarp) f(chunk);
  }

  // --- The output ---

  // Until the last row has left shared memory.
  __device__ __forceinline__ void WaitForStores() {
    if (p_.bulk && lane_ == 0) WaitForBulkReads();
    __syncwarp();
  }

  // What the last row has written becomes zero again.
  __device__ __forceinline__ void ClearOutput() {
    if (written_bits_ != 0u) {
#pragma unroll
      for (int s = 0; s < kMaxListed / kWarp; ++s) {
        if (written_bits_ >> s & 1u) {
          if constexpr (!kAllScores) reinterpret_cast<Bits<T>*>(probs_)[written_[s]] = 0;
          Unmark(written_[s]);
        }
      }
      written_bits_ = 0u;
    }
    __syncwarp();
  }

  __device__ __forceinline__ void Mark(int32_t expert) {
    if (p_.map_format == MapFormat::kByte) {
      map_[expert] = 1;
    } else {
      atomicOr(reinterpret_cast<uint32_t*>(map_) + expert / 32, 1u << (expert % 32));
    }
  }

  __device__ __forceinline__ void Unmark(int32_t expert) {
    if (p_.map_format == MapFormat::kByte) {
      map_[expert] = 0;
    } else {
      atomicAnd(reinterpret_cast<uint32_t*>(map_) + expert / 32, 0u);
    }
  }

  __device__ __forceinline__ void Store() {
    unsigned char* probs = static_cast<unsigned char*>(p_.probs) + row_ * p_.row_bytes;
    uint8_t* map = p_.map + row_ * p_.map_bytes;
    if (p_.bulk) {
      FenceForAsyncProxy();
      __syncwarp();
      if (lane_ == 0) {
        StoreBulk(probs, SharedAddress(kAllScores ? x_ : probs_), p_.row_bytes);
        StoreBulk(map, SharedAddress(map_), p_.map_bytes);
        CommitBulkStores();
      }
    } else {
      __syncwarp();
      CopyRow<2>(probs, kAllScores ? x_ : probs_, p_.row_bytes);
      CopyRow<1>(map, map_, p_.map_bytes);
      __syncwarp();
    }
  }

  const ProbsParams& p_;
  const int lane_;
  ProbsShared& s_;
  unsigned char* const logits_;
  unsigned char* const probs_;
  uint8_t* const map_;
  RowChoice<Key> choice_;
  int64_t row_ = 0;
  int64_t step_ = 0;
  int load_ = 0;                              // stage of the row
  uint32_t parity_ = 0u;                      // of its barrier
  unsigned char* x_ = nullptr;                // the row's logits, or all its scores at last
  unsigned char* keys_ = nullptr;             // and what ranks it
  float best_ = 0.0f;                         // its best key
  bool has_nan_ = false;                      // among its logits
  bool has_keys_ = true;                      // all experts' keys have been computed
  int32_t written_[kMaxListed / kWarp] = {};  // what this lane has marked in the output
  uint32_t written_bits_ = 0u;
};

}  // namespace ort_moe
