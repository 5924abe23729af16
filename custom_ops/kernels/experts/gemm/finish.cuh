// From a warpgroup's sums to rows in memory: scale, routing weight, bias and activation, 32 tokens at a time.
//
// The sums lie with a weight row and two tokens to a thread; memory wants a token's columns together. So rounded
// results pass through shared memory, transposed on their way in 8 by 8: rows g of a warp's 16, then rows g + 8, which
// with gates are gates and their values. Silu of a gate times its value is computed ahead of that, where it takes half
// the room; other activations behind it, one after another.
#pragma once

#include "kernels/common/cluster.cuh"
#include "kernels/experts/activation.cuh"
#include "kernels/experts/gemm/params.cuh"
#include "kernels/experts/gemm/silu.cuh"

namespace ort_moe {

constexpr int kTokenBarrier = 1, kFinishBarrier = 2;  // named barriers; one of the latter for each warpgroup

template <typename Operand, bool kFirst>
class GemmFinish {
 public:
  using T = typename Operand::Element;

  // Ahead of the products: what they need not wait for.
  __device__ __forceinline__ GemmFinish(const GemmParams& p, const GemmShared<Operand>& s, const GemmTile& tile,
                                        int group)
      : p_(p.experts), tile_(tile), group_(group), thread_(threadIdx.x % kGroupThreads), silu_(p.experts) {
    const LayerParams& layer = Layer();
    results_ = SharedAddress(s.results) + group * GemmShared<Operand>::kResultBytes;
    first_slab_ = (tile.row_tile * Operand::kGroups + group) * kSlabs;
    scale_ = 1.0f;
    if constexpr (Operand::kScaled) {
      scale_ = Mul(Operand::kFactor, layer.global_scale == nullptr ? 1.0f : layer.global_scale[tile.expert]);
    }
#pragma unroll
    for (int block = 0; block < Operand::kBlocks; ++block) {
      const int slab = first_slab_ + block * 4 + thread_ / kLanes, row = thread_ % kLanes / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int weight_row = slab * kSlabRows + half * kTileRows + row;
        bool within = weight_row < layer.rows;
        if (Paired()) {
          const int column = slab * kTileRows + row;
          within = column < layer.rows / 2;
          weight_row = p_.interleaved ? 2 * column + half : half * (layer.rows / 2) + column;
        }
        bias_[block][half] = layer.bias != nullptr && within
                                 ? HalfTraits<T>::ToFloat(static_cast<const T*>(
                                       layer.bias)[int64_t{tile.expert} * layer.rows + weight_row])
                                 : 0.0f;
      }
    }
    mix_ = nullptr;
    if (kFirst && p_.mix_input) {
      mix_ = s.mix + group * GemmShared<Operand>::kMixStride;
      for (int token = thread_; token < tile.tokens; token += kGroupThreads) {
        const int expanded = min(max(p_.maps.permuted_to_unpermuted[tile.first + token], 0), p_.slots - 1);
        const int slot = expanded % p_.tokens * p_.k + expanded / p_.tokens;
        mix_[token] = p_.mix[slot];
        if (tile.row_tile == 0 && group == 0) p_.ones[slot] = 1.0f;
      }
      Sync();
    }
  }

  __device__ __forceinline__ void Run(const float (&sums)[Operand::kBlocks][Operand::kSums]) {
    constexpr int kChunks = (Operand::kMaxTokens + kChunkTokens - 1) / kChunkTokens;
    const bool gates = kFirst && p_.gated && p_.activation == Activation::kSilu;
#pragma unroll 1
    for (int chunk = 0; chunk * kChunkTokens < tile_.tokens; ++chunk) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (c != chunk) continue;
        if (gates) {
          StageGates(sums, c);
        } else {
          Stage(sums, c);
        }
      }
      Sync();
      Store(chunk * kChunkTokens, gates);
      Sync();
    }
  }

 private:
  static constexpr int kSlabs = Operand::kBlocks * 4;  // of a warpgroup
  static constexpr int kVector = 16;                   // bytes of 8 columns
  static constexpr int kPitch = GemmShared<Operand>::kPitch * 4;
  static constexpr int kPairsOfChunk = kChunkTokens / 16;  // of 8 tokens

  __device__ __forceinline__ const LayerParams& Layer() const { return kFirst ? p_.fc1 : p_.fc2; }
  __device__ __forceinline__ bool Paired() const { return kFirst && p_.gated; }
  __device__ __forceinline__ void Sync() const {
    __syncwarp();
    BlockSync(kFinishBarrier + group_, kGroupThreads);
  }

  // Whether a chunk's pair of 8 tokens has sums.
  static __device__ constexpr bool Has(int chunk, int pair) {
    return chunk * kChunkTokens + pair * 16 < Operand::kMaxTokens;
  }

  // What sums of both tokens of a thread in every 8 are multiplied with.
  __device__ __forceinline__ void Mixes(int first_token, float (&mixes)[2]) const {
    mixes[0] = mixes[1] = scale_;
    if (kFirst && mix_ != nullptr) {  // behind the tile's end: not used
      const float2 both = *reinterpret_cast<const float2*>(mix_ + first_token + thread_ % 4 * 2);
      mixes[0] = Mul(scale_, both.x);
      mixes[1] = Mul(scale_, both.y);
    }
  }

  // A token's vectors are a slab's rows g, then its rows g + 8.
  __device__ __forceinline__ void Stage(const float (&sums)[Operand::kBlocks][Operand::kSums], int chunk) const {
    const int lane = thread_ % kLanes;
    const uint32_t place =
        results_ + (lane / 16 * 8 + lane % 8) * kPitch + thread_ / kLanes * 2 * kVector + lane / 8 % 2 * kVector;
#pragma unroll
    for (int pair = 0; pair < kPairsOfChunk; ++pair) {
      if (!Has(chunk, pair)) continue;
#pragma unroll
      for (int block = 0; block < Operand::kBlocks; ++block) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int eight = chunk * (kChunkTokens / 8) + pair * 2 + i;
          float mixes[2];
          Mixes(eight * 8, mixes);
          const float* const both = &sums[block][eight * 4];
          words[2 * i] =
              PairOf<T>(Output(both[0], mixes[0], bias_[block][0]), Output(both[1], mixes[1], bias_[block][0]));
          words[2 * i + 1] =
              PairOf<T>(Output(both[2], mixes[0], bias_[block][1]), Output(both[3], mixes[1], bias_[block][1]));
        }
        StoreTransposed(place + pair * 16 * kPitch + block * 8 * kVector, words);
      }
    }
  }

  // A token's vectors are a slab's results.
  __device__ __forceinline__ void StageGates(const float (&sums)[Operand::kBlocks][Operand::kSums], int chunk) const {
    const int lane = thread_ % kLanes;
    const uint32_t place =
        results_ + (lane / 16 * 8 + lane % 8) * kPitch + (lane / 8 % 2 * 4 + thread_ / kLanes) * kVector;
    static_assert(Operand::kBlocks == 2);
#pragma unroll
    for (int pair = 0; pair < kPairsOfChunk; ++pair) {
      if (!Has(chunk, pair)) continue;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int eight = chunk * (kChunkTokens / 8) + pair * 2 + i;
        float mixes[2];
        Mixes(eight * 8, mixes);
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          const float* const both = &sums[block][eight * 4];
          float results[2];
#pragma unroll
          for (int token = 0; token < 2; ++token) {
            const uint32_t rounded = PairOf<T>(Output(both[token], mixes[token], bias_[block][0]),
                                               Output(both[2 + token], mixes[token], bias_[block][1]));
            results[token] = silu_(LowOf<T>(rounded), HighOf<T>(rounded));
          }
          words[2 * i + block] = PairOf<T>(results[0], results[1]);
        }
      }
      StoreTransposed(place + pair * 16 * kPitch, words);
    }
  }

  // Four matrices of 8 by 8, of which lane l has column l / 4 of rows 2 (l % 4) and one more, and names row l % 8 of
  // matrix l / 8.
  static __device__ __forceinline__ void StoreTransposed(uint32_t address, const uint32_t (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }

  __device__ __forceinline__ float Output(float sum, float mix, float bias) const {
    return kFirst || Operand::kScaled ? Fma(sum, mix, bias) : Add(sum, bias);
  }

  // A thread takes 8 columns of a token. `activated`: by StageGates.
  __device__ __forceinline__ void Store(int first_token, bool activated) const {
    const int vectors = Paired() ? kSlabs : 2 * kSlabs, rows = Paired() ? Layer().rows / 2 : Layer().rows;
    const int first_column = first_slab_ * (Paired() ? kTileRows : kSlabRows);
    const int apart = Paired() && !activated ? 2 * kVector : kVector;
#pragma unroll 2
    for (int item = thread_; item < kChunkTokens * vectors; item += kGroupThreads) {
      const int token = item / vectors, vector = item % vectors, column = first_column + vector * 8;
      if (first_token + token >= tile_.tokens || column >= rows) continue;
      const uint32_t shared = results_ + token * kPitch + vector * apart;
      if (kFirst && !activated) {
#pragma unroll 1
        for (int i = 0; i < 8; ++i) Activate(shared + i * 2);
      }
      uint4 words;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "r"(shared)
                   : "memory");
      const int64_t row = tile_.first + first_token + token;
      T* const target = kFirst ? static_cast<T*>(p_.activated) + row * p_.activated_stride
                               : static_cast<T*>(p_.output) + row * Layer().rows;
      *reinterpret_cast<uint4*>(target + column) = words;
    }
  }

  // A result in place, or of a gate and the value behind it.
  __device__ __forceinline__ void Activate(uint32_t shared) const {
    uint16_t gate, value = 0;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(gate) : "r"(shared) : "memory");
    if (p_.gated) asm volatile("ld.shared.b16 %0, [%1];" : "=h"(value) : "r"(shared + kVector) : "memory");
    const float x = LowOf<T>(gate);
    float result;
    if (p_.activation == Activation::kSilu) {
      result = silu_(x);
    } else {
      result = p_.gated ? Activated(p_, x, LowOf<T>(value)) : Activated(p_, x);
    }
    const auto rounded = static_cast<uint16_t>(PairOf<T>(result, 0.0f));
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(shared), "h"(rounded) : "memory");
  }

  const ExpertsParams& p_;
  const GemmTile& tile_;
  uint32_t results_;
  float* mix_;  // of the tile's tokens, or null
  int group_, thread_, first_slab_;
  float scale_;
  FastSilu silu_;
  float bias_[Operand::kBlocks][2];
};

}  // namespace ort_moe
