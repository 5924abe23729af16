// From a warpgroup's sums to rows in memory: scale, routing weight, bias and activation, 32 tokens at a time.
//
// The sums lie with a weight row and two tokens to a thread; memory wants a token's columns together. So rounded
// results pass through shared memory, two to a word: rows g and g + 8 of a warp's 16, which with gates are a gate and
// its value.
#pragma once

#include "kernels/cluster.cuh"
#include "kernels/fused_experts_activation.cuh"
#include "kernels/fused_experts_gemm_params.cuh"
#include "kernels/fused_experts_gemm_silu.cuh"

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
    results_ = s.results + group * kChunkTokens * GemmShared<Operand>::kPitch;
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
      mix_ = s.mix + group * p.max_tokens;
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
    constexpr int kChunks = Operand::kMaxTokens / kChunkTokens;
#pragma unroll 1
    for (int chunk = 0; chunk * kChunkTokens < tile_.tokens; ++chunk) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (c == chunk) Stage(sums, c);
      }
      Sync();
      if constexpr (kFirst && Operand::kPermutes) {
        StorePermuted(chunk * kChunkTokens);
      } else {
        Store(chunk * kChunkTokens);
      }
      Sync();
    }
  }

 private:
  static constexpr int kSlabs = Operand::kBlocks * 4;  // of a warpgroup
  static constexpr int kPitch = GemmShared<Operand>::kPitch;

  __device__ __forceinline__ const LayerParams& Layer() const { return kFirst ? p_.fc1 : p_.fc2; }
  __device__ __forceinline__ bool Paired() const { return kFirst && p_.gated; }
  __device__ __forceinline__ void Sync() const {
    __syncwarp();
    BlockSync(kFinishBarrier + group_, kGroupThreads);
  }

  __device__ __forceinline__ void Stage(const float (&sums)[Operand::kBlocks][Operand::kSums], int chunk) {
    const int lane = thread_ % kLanes;
    uint32_t* const column = results_ + thread_ / kLanes * kTileRows + lane / 4;
#pragma unroll
    for (int j = 0; j < kChunkTokens / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = j * 8 + lane % 4 * 2 + i;
        const float mix = mix_ != nullptr ? mix_[min(chunk * kChunkTokens + token, tile_.tokens - 1)] : 1.0f;
#pragma unroll
        for (int block = 0; block < Operand::kBlocks; ++block) {
          const float* const both = &sums[block][(chunk * (kChunkTokens / 8) + j) * 4 + i];
          column[token * kPitch + block * 32] =
              PairOf<T>(Output(both[0], mix, bias_[block][0]), Output(both[2], mix, bias_[block][1]));
        }
      }
    }
  }

  __device__ __forceinline__ float Output(float sum, float mix, float bias) const {
    if constexpr (Operand::kScaled) sum = Mul(sum, scale_);
    if constexpr (kFirst) sum = Mul(sum, mix);
    return Add(sum, bias);
  }

  // A thread takes 4 words of a token.
  __device__ __forceinline__ void Store(int first_token) const {
    constexpr int kWords = 4, kItems = kSlabs * kTileRows / kWords;  // of a token
    const bool silu = kFirst && p_.activation == Activation::kSilu;
#pragma unroll 1
    for (int item = thread_; item < kChunkTokens * kItems; item += kGroupThreads) {
      const int token = item / kItems, word = item % kItems * kWords;
      if (first_token + token >= tile_.tokens) continue;
      uint32_t* const shared = results_ + token * kPitch + word;
      if (kFirst && !silu) {
#pragma unroll 1
        for (int i = 0; i < kWords; ++i) shared[i] = ActivatedWord(shared[i]);
      }
      uint4 words = *reinterpret_cast<const uint4*>(shared);
      if (silu) words = SiluWords(words);
      const int slab = first_slab_ + word / kTileRows, within = word % kTileRows;
      const int column = slab * (Paired() ? kTileRows : kSlabRows) + within;
      const int64_t row = tile_.first + first_token + token;
      T* const target = kFirst ? static_cast<T*>(p_.activated) + row * p_.activated_stride + column
                               : static_cast<T*>(p_.output) + row * Layer().rows + column;
      const int rows = Paired() ? Layer().rows / 2 : Layer().rows;
      if (column < rows) StoreHalf(target, words, 0x5410);
      if (!Paired() && column + kTileRows < rows) StoreHalf(target + kTileRows, words, 0x7632);
    }
  }

  // A thread takes 8 neighbouring columns of a token in the order in which FC2 reads them.
  __device__ __forceinline__ void StorePermuted(int first_token) const {
    constexpr int kVector = 8;
    const int columns = kSlabs * (Paired() ? kTileRows : kSlabRows), items = columns / kVector;  // of a token
    const int rows = Paired() ? Layer().rows / 2 : Layer().rows;
    const int first_column = first_slab_ * (Paired() ? kTileRows : kSlabRows);
#pragma unroll 1
    for (int item = thread_; item < kChunkTokens * items; item += kGroupThreads) {
      const int token = item / items, vector = item % items, column = first_column + vector * kVector;
      if (first_token + token >= tile_.tokens || column >= rows) continue;
      const uint32_t* const shared = results_ + token * kPitch;
      uint32_t words[kVector];  // each with the column's result, or its gate and value
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const int from = Operand::SourceColumn(vector * kVector + j);
        if (Paired()) {
          words[j] = shared[from];
        } else {
          const uint32_t word = shared[from / kSlabRows * kTileRows + from % kTileRows];
          words[j] = from % kSlabRows < kTileRows ? word : word >> 16;
        }
      }
      uint4 out;
      if (p_.activation == Activation::kSilu) {
        const uint4 front = SiluWords(make_uint4(words[0], words[1], words[2], words[3]));
        const uint4 back = SiluWords(make_uint4(words[4], words[5], words[6], words[7]));
        out = make_uint4(__byte_perm(front.x, front.y, 0x5410), __byte_perm(front.z, front.w, 0x5410),
                         __byte_perm(back.x, back.y, 0x5410), __byte_perm(back.z, back.w, 0x5410));
      } else {
        out = make_uint4(0, 0, 0, 0);
#pragma unroll 1
        for (int j = 0; j < kVector; ++j) {  // through the registers, last first
          const uint32_t next = ActivatedWord(words[kVector - 1]) & 0xffffu;
          out = make_uint4(out.x << 16 | next, out.y << 16 | out.x >> 16, out.z << 16 | out.y >> 16,
                           out.w << 16 | out.z >> 16);
#pragma unroll
          for (int i = kVector - 1; i > 0; --i) words[i] = words[i - 1];
        }
      }
      const int64_t row = tile_.first + first_token + token;
      *reinterpret_cast<uint4*>(static_cast<T*>(p_.activated) + row * p_.activated_stride + column) = out;
    }
  }

  __device__ __forceinline__ static void StoreHalf(T* target, uint4 words, unsigned half) {
    *reinterpret_cast<uint2*>(target) =
        make_uint2(__byte_perm(words.x, words.y, half), __byte_perm(words.z, words.w, half));
  }

  // A gate and its value, of which one result comes, or two results without gates.
  __device__ __forceinline__ uint32_t ActivatedWord(uint32_t word) const {
    const float low = LowOf<T>(word), high = HighOf<T>(word);
    return p_.gated ? PairOf<T>(Activated(p_, low, high), 0.0f) : PairOf<T>(Activated(p_, low), Activated(p_, high));
  }

  // The same, computed side by side, without branches between words.
  __device__ __forceinline__ uint4 SiluWords(uint4 words) const {
    if (!p_.gated) {
      return make_uint4(SiluPair(words.x), SiluPair(words.y), SiluPair(words.z), SiluPair(words.w));
    }
    return make_uint4(GatedWord(words.x), GatedWord(words.y), GatedWord(words.z), GatedWord(words.w));
  }
  __device__ __forceinline__ uint32_t SiluPair(uint32_t word) const {
    return PairOf<T>(silu_(LowOf<T>(word)), silu_(HighOf<T>(word)));
  }
  __device__ __forceinline__ uint32_t GatedWord(uint32_t word) const {
    return PairOf<T>(silu_(LowOf<T>(word), HighOf<T>(word)), 0.0f);
  }

  const ExpertsParams& p_;
  const GemmTile& tile_;
  uint32_t* results_;
  float* mix_;  // of the tile's tokens, or null
  int group_, thread_, first_slab_;
  float scale_;
  FastSilu silu_;
  float bias_[Operand::kBlocks][2];
};

}  // namespace ort_moe
