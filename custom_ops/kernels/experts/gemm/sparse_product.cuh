// The products of the grouped product for few tokens (sparse.cuh), and what becomes of their sums.
#pragma once

#include "kernels/experts/activation.cuh"
#include "kernels/experts/gemm/finish.cuh"
#include "kernels/experts/gemm/silu.cuh"
#include "kernels/experts/gemm/slots.cuh"
#include "kernels/experts/gemm/sparse.cuh"
#include "kernels/experts/mma/product.cuh"

namespace ort_moe {

// Four matrices of 8 rows of 16 bytes; lane l names row l % 8 of matrix l / 8 and gets word l % 4 of row l / 4 of each.
__device__ __forceinline__ void LoadMatrices(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// From a warp's sums to memory: 16 weight rows, with gates 8 gates and their 8 values, of which a lane has rows g and
// g + 8 of tokens 2 q and 2 q + 1 of every 8.
template <typename Operand, bool kFirst>
class SparseFinish {
 public:
  // Asks for what it needs; `slab`: which 16 rows of the layer's.
  __device__ __forceinline__ SparseFinish(const GemmParams& p, const GemmTile& tile, int slab)
      : p_(p.experts), tile_(tile) {
    const LayerParams& layer = Layer();
    const int row = threadIdx.x % kLanes / 4;
    column_ = slab * (Paired() ? kTileRows : kSlabRows) + row;
    global_scale_ = layer.global_scale == nullptr ? 1.0f : layer.global_scale[tile.expert];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int weight_row = !Paired()        ? column_ + half * kTileRows
                             : p_.interleaved ? 2 * column_ + half
                                              : half * (layer.rows / 2) + column_;
      bias_[half] = T{};
      if (layer.bias != nullptr && weight_row < layer.rows) {
        bias_[half] = static_cast<const T*>(layer.bias)[int64_t{tile.expert} * layer.rows + weight_row];
      }
    }
  }

  // Sums of both rows by token, and what to multiply them with; changes them. One token after another, through the
  // first register of each: this code runs once a tile.
  template <int kItems>
  __device__ __forceinline__ void Run(float (&low)[kItems], float (&high)[kItems], float (&numbers)[kItems]) const {
    const float scale = Mul(Operand::Code::kFactor, global_scale_);
    const FastSilu silu(p_);
    const int columns = Paired() ? Layer().rows / 2 : Layer().rows;
#pragma unroll 1
    for (int item = 0; item < kItems; ++item) {
      const int token = item / 2 * 8 + threadIdx.x % 4 * 2 + item % 2;
      if (token < tile_.tokens) {
        float first = Output(low[0], scale, numbers[0], bias_[0]);
        float second = Output(high[0], scale, numbers[0], bias_[1]);
        const int64_t row = tile_.first + token;
        if constexpr (kFirst) {
          T* const target = static_cast<T*>(p_.activated) + row * p_.activated_stride;
          if (p_.activation == Activation::kSilu) {
            first = p_.gated ? silu(first, second) : silu(first);
            if (!p_.gated) second = silu(second);
          } else {
            const float gate = first;
            first = Activated(p_, gate, second);
            if (!p_.gated) second = Activated(p_, second, 0.0f);
          }
          if (column_ < columns) target[Operand::Position(column_)] = HalfTraits<T>::FromFloat(first);
          if (!p_.gated && column_ + kTileRows < columns) {
            target[Operand::Position(column_ + kTileRows)] = HalfTraits<T>::FromFloat(second);
          }
        } else {
          T* const target = static_cast<T*>(p_.output) + row * Layer().rows + column_;
          if (column_ < columns) target[0] = HalfTraits<T>::FromFloat(first);
          if (column_ + kTileRows < columns) target[kTileRows] = HalfTraits<T>::FromFloat(second);
        }
      }
#pragma unroll
      for (int i = 1; i < kItems; ++i) {
        low[i - 1] = low[i];
        high[i - 1] = high[i];
        numbers[i - 1] = numbers[i];
      }
    }
  }

 private:
  using T = typename Operand::Element;

  __device__ __forceinline__ const LayerParams& Layer() const { return kFirst ? p_.fc1 : p_.fc2; }
  __device__ __forceinline__ bool Paired() const { return kFirst && p_.gated; }
  static __device__ __forceinline__ float Output(float sum, float scale, float number, T bias) {
    return Rounded<T>(Add(Mul(Mul(sum, scale), number), HalfTraits<T>::ToFloat(bias)));
  }

  const ExpertsParams& p_;
  const GemmTile& tile_;
  int column_;
  float global_scale_;
  T bias_[2];
};

// Where rows g, g + 8, g + 16 and g + 24 of a lane have their scales and zero points within the slots' words.
template <typename Operand, bool kFirst>
struct WarpShifts {
  using Code = typename Operand::Code;
  SlotShifts of[4] = {};
  SlotShifts step{};  // from a stage to the next

  __device__ __forceinline__ WarpShifts(const GemmParams& p, const GemmTile& tile, int first_row) {
    if constexpr (Code::kShifts) {
      const LayerParams& layer = kFirst ? p.experts.fc1 : p.experts.fc2;
      step.scale = Code::ScaleAt(Operand::kDepth, layer.block_size);
      if constexpr (Code::kHasZeroPoints) step.zero = Code::ZeroAt(Operand::kDepth, layer.block_size);
      if (SlotSource::ScaleBytes<Code>(layer) % 4 == 0 && layer.zero_points == nullptr) return;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const SlotSource source = SlotSource::Of<Code, kFirst>(p, tile, first_row + i * kTileRows);
        of[i] = {static_cast<int>(source.scales % 4), static_cast<int>(source.zero_points % 4 * 2)};
      }
    }
  }

  __device__ __forceinline__ int Scale(int i) const { return of[i].scale % 4; }
  __device__ __forceinline__ int Zero(int i) const { return of[i].zero % 8; }
  __device__ __forceinline__ void Advance() {
    if constexpr (Code::kShifts) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of[i].scale += step.scale;
        of[i].zero += step.zero;
      }
    }
  }
};

// A value that is to stay in its register, and not to be computed again in each stage.
template <typename T>
__device__ __forceinline__ T Kept(T value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A tile of up to 8 * kTiles tokens, by a warp. `turn` counts exchanges of sums.
template <typename Operand, int kTiles, bool kFirst, bool kZeros>
__device__ __forceinline__ void MultiplySparseTile(const GemmParams& p, const GemmShared<Operand>& s,
                                                   const GemmTile& tile, GemmRing& ring, int* turn) {
  using Code = typename Operand::Code;
  using Slot = typename Code::template Slot<kZeros>;
  constexpr int kUnits = Operand::kDepth / 64, kUnitsOfCopy = kUnits / 2;  // of a half of a stage
  constexpr int kRowBytes = Operand::kRowBytes, kSlabBytes = kSlabRows * kRowBytes;
  const LayerParams& layer = kFirst ? p.experts.fc1 : p.experts.fc2;
  const int group = threadIdx.x / kGroupThreads - 1;
  const int warp = threadIdx.x / kLanes % 4, lane = threadIdx.x % kLanes, half = warp % 2;
  const int first_row = group * 64 + warp / 2 * 2 * kSlabRows;
  const SparseFinish<Operand, kFirst> finish(p, tile, tile.row_tile * (Operand::kRows / kSlabRows) + group * 4 + warp);
  const int matrix = lane / 8, row = lane % 8, q = Kept(lane % 4);
  const uint32_t weights =
      Kept((first_row + matrix % 2 * kTileRows + row) * kRowBytes + ((half * 4 + matrix / 2) ^ row) * 16);
  const uint32_t tokens =
      Kept(Operand::kTokensAt + row * Operand::kTokenPitch + half * (Operand::kTokenBytes / 2) + matrix * 16);
  const uint32_t slots = Kept(Operand::kBoxBytes + (first_row + lane / 4) * kScaleSlotBytes);
  WarpShifts<Operand, kFirst> shifts(p, tile, tile.row_tile * Operand::kRows + first_row + lane / 4);
  float sums[2][kTiles][4] = {};

  ring.WaitFull();
  float numbers[2 * kTiles];
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const float* const of_tile = s.mix + ring.at * 2 * p.max_tokens + i / 2 * 8 + lane % 4 * 2 + i % 2;
    numbers[i] = Operand::kConverts ? of_tile[0] : 1.0f;
    if (kFirst && p.experts.mix_input) numbers[i] = Mul(numbers[i], of_tile[p.max_tokens]);
  }

#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
    const uint32_t stage = s.stages + ring.at * s.stage_bytes;
    ring.WaitFull();
    if (step * Operand::kDepth + half * (Operand::kDepth / 2) < layer.depth) {
      const auto code = [&](int i) {
        const uint32_t zero_slot =
            Operand::kZeroSlotsAt + (first_row + lane / 4) * kZeroSlotBytes + i * kTileRows * kZeroSlotBytes;
        return Slot(stage + slots + i * kTileRows * kScaleSlotBytes, stage + zero_slot, half, shifts.Scale(i),
                    shifts.Zero(i), layer, q);
      };
      const Slot codes[4] = {code(0), code(1), code(2), code(3)};
#pragma unroll
      for (int copy = 0; copy < 2; ++copy) {
        uint32_t words[2][4];
#pragma unroll
        for (int slab = 0; slab < 2; ++slab) {
          LoadMatrices(stage + (weights ^ copy * 32) + slab * kSlabBytes, words[slab]);
        }
#pragma unroll
        for (int i = 0; i < kUnitsOfCopy; ++i) {
          const int unit = copy * kUnitsOfCopy + i;
          uint32_t b[kTiles][4];
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            LoadMatrices(stage + tokens + unit * 64 + t * 8 * Operand::kTokenPitch, b[t]);
          }
#pragma unroll
          for (int slab = 0; slab < 2; ++slab) {
            uint32_t low[4], high[4];
            if constexpr (Code::kBits == 4) {
              codes[2 * slab].Decode(unit, words[slab][2 * i], low);
              codes[2 * slab + 1].Decode(unit, words[slab][2 * i + 1], high);
            } else {
              codes[2 * slab].Decode(unit, words[slab][0], words[slab][2], low);
              codes[2 * slab + 1].Decode(unit, words[slab][1], words[slab][3], high);
            }
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
              float (&sum)[4] = sums[slab][t];
              if constexpr (Code::kOnSums) {
                float block[4] = {};
                MultiplyPairs(__half{}, block, low[0], high[0], low[1], high[1], b[t][0], b[t][1]);
                MultiplyPairs(__half{}, block, low[2], high[2], low[3], high[3], b[t][2], b[t][3]);
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[j] = Fma(block[j], codes[2 * slab + j / 2].Scale(unit), sum[j]);
              } else {
                MultiplyPairs(__half{}, sum, low[0], high[0], low[1], high[1], b[t][0], b[t][1]);
                MultiplyPairs(__half{}, sum, low[2], high[2], low[3], high[3], b[t][2], b[t][3]);
              }
            }
          }
        }
      }
    }
    ArriveAsWarp(ring.Empty());
    ring.Advance();
    shifts.Advance();
  }

  // The warp keeps its first or its second 16 rows, and hands the others' sums to its neighbour.
  float low[2 * kTiles], high[2 * kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    float* const shared =
        reinterpret_cast<float*>(s.results) + (group * 2 + *turn) * (Operand::kExchangeBytes / 2 / 4) + lane;
    *turn ^= 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) shared[(warp * 4 + i) * kLanes] = half == 0 ? sums[1][t][i] : sums[0][t][i];
    __syncwarp();
    BlockSync(kFinishBarrier + group * 2 + warp / 2, 2 * kLanes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float kept = half == 0 ? sums[0][t][i] : sums[1][t][i];
      (i < 2 ? low : high)[2 * t + i % 2] = Add(kept, shared[((warp ^ 1) * 4 + i) * kLanes]);
    }
  }
  finish.Run(low, high, numbers);
}

template <typename Operand, bool kFirst, bool kZeros>
__device__ __forceinline__ void MultiplySparseTiles(const GemmParams& p, const GemmShared<Operand>& s,
                                                    const GemmTileList& list) {
  GemmRing ring(s.barriers, p.stages);
  GemmTileWalk walk(list);
  GemmTile tile;
  int turn = 0;
  while (walk.Next(list, &tile)) {
    switch ((tile.tokens + 7) / 8) {
      case 1:
        MultiplySparseTile<Operand, 1, kFirst, kZeros>(p, s, tile, ring, &turn);
        break;
      case 2:
        MultiplySparseTile<Operand, 2, kFirst, kZeros>(p, s, tile, ring, &turn);
        break;
      case 3:
        MultiplySparseTile<Operand, 3, kFirst, kZeros>(p, s, tile, ring, &turn);
        break;
      default:
        MultiplySparseTile<Operand, 4, kFirst, kZeros>(p, s, tile, ring, &turn);
    }
  }
}

template <typename Operand, bool kFirst>
__device__ __forceinline__ void MultiplySparse(const GemmParams& p, const GemmShared<Operand>& s,
                                               const GemmTileList& list) {
  if constexpr (Operand::Code::kHasZeroPoints) {
    if ((kFirst ? p.experts.fc1 : p.experts.fc2).zero_points != nullptr) {
      MultiplySparseTiles<Operand, kFirst, true>(p, s, list);
      return;
    }
  }
  MultiplySparseTiles<Operand, kFirst, false>(p, s, list);
}

}  // namespace ort_moe
