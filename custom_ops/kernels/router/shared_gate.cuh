// The gates of shared experts on the device: a warp to a token and one or two of its gates.
//
// Lane l owns the chunks of 8 elements l, l + 32, l + 64 and l + 96 of every 128, so that partial sums need no exchange
// before the butterfly, and a chunk is 16 bytes in half precision.
#pragma once

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/router/fused_router_row.cuh"
#include "kernels/router/shared_gate_router.h"

namespace ort_moe {

constexpr int kGatesAtOnce = 2;  // of a warp that reads a token once for several; more take registers from routing

struct GateParams {
  SharedGates gates;
  float* weights;    // of row 0 and gate 0
  int32_t* indices;  // the same
  int64_t rows;
  int32_t columns;      // from row to row of both
  bool vector_loads;    // every row is whole chunks at 16-byte addresses
  bool several_a_warp;  // kGatesAtOnce instead of one
  uint32_t blocks;      // of the grid, that take gates
  uint32_t route_blocks;

  __host__ __device__ int64_t warps() const {
    return rows * (several_a_warp ? (gates.count + kGatesAtOnce - 1) / kGatesAtOnce : gates.count);
  }
};

template <typename T, int kGates>
class GateDots {
 public:
  __device__ GateDots(const GateParams& p, int64_t row, int32_t gate)
      : p_(p),
        lane_(threadIdx.x % kWarp),
        hidden_(static_cast<const Bits<T>*>(p.gates.hidden) + row * p.gates.size),
        weights_(static_cast<const Bits<T>*>(p.gates.gate_weight) + gate * p.gates.size) {}

  // Sums of all gates from `gate` on, each in every lane.
  __device__ __forceinline__ void Sum(int32_t gates, float (&total)[kGates]) const {
    float partial[kGates][kLaneChunks] = {};
    const int32_t chunks = static_cast<int32_t>((p_.gates.size + kChunk - 1) / kChunk);
    int32_t first = lane_;
    if (!ORT_MOE_RARE(!p_.vector_loads)) {
#pragma unroll 2
      for (; first + (kLaneChunks - 1) * kWarp < chunks; first += kLaneChunks * kWarp) {
        AddChunks<true>(first, chunks, gates, partial);
      }
      if (first < chunks) AddChunks<false>(first, chunks, gates, partial);
    } else {
#pragma unroll 1
      for (; first < chunks; first += kLaneChunks * kWarp) AddElements(first, gates, partial);
    }
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kGates; ++s) {
      total[s] = Butterfly(partial[s][0], partial[s][1], partial[s][2], partial[s][3]);
    }
  }

 private:
  static constexpr int kLaneChunks = kPartials / kWarp;
  static constexpr int kVectors = kChunk * sizeof(Bits<T>) / sizeof(uint4);

  union Chunk {
    uint4 vectors[kVectors];
    Bits<T> bits[kChunk];
  };

  static __device__ __forceinline__ int64_t Element(int32_t first, int c) {
    return static_cast<int64_t>(first) * kChunk + c * (kWarp * kChunk);
  }

  static __device__ __forceinline__ Chunk Load(const Bits<T>* address, bool inside) {
    Chunk chunk{};
    if (!inside) return chunk;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) chunk.vectors[v] = reinterpret_cast<const uint4*>(address)[v];
    return chunk;
  }

  template <bool kWhole>
  __device__ __forceinline__ void AddChunks(int32_t first, int32_t chunks, int32_t gates,
                                            float (&partial)[kGates][kLaneChunks]) const {
    Chunk hidden[kLaneChunks];
#pragma unroll
    for (int c = 0; c < kLaneChunks; ++c) {
      hidden[c] = Load(hidden_ + Element(first, c), kWhole || first + c * kWarp < chunks);
    }
#pragma unroll
    for (int s = 0; s < kGates; ++s) {
      Chunk weight[kLaneChunks];
#pragma unroll
      for (int c = 0; c < kLaneChunks; ++c) {
        const bool inside = (kGates == 1 || s < gates) && (kWhole || first + c * kWarp < chunks);
        weight[c] = Load(weights_ + s * p_.gates.size + Element(first, c), inside);
      }
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
#pragma unroll
        for (int c = 0; c < kLaneChunks; ++c) {
          partial[s][c] =
              Fma(Storage<T>::Widen(hidden[c].bits[i]), Storage<T>::Widen(weight[c].bits[i]), partial[s][c]);
        }
      }
    }
  }

  // Rows of any size at any address.
  __device__ __forceinline__ void AddElements(int32_t first, int32_t gates,
                                              float (&partial)[kGates][kLaneChunks]) const {
#pragma unroll
    for (int c = 0; c < kLaneChunks; ++c) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const int64_t e = Element(first, c) + i;
        if (e >= p_.gates.size) continue;
        const float x = Storage<T>::Widen(hidden_[e]);
#pragma unroll
        for (int s = 0; s < kGates; ++s) {
          if (kGates > 1 && s >= gates) continue;
          partial[s][c] = Fma(x, Storage<T>::Widen(weights_[s * p_.gates.size + e]), partial[s][c]);
        }
      }
    }
  }

  const GateParams& p_;
  const int lane_;
  const Bits<T>* hidden_;
  const Bits<T>* weights_;
};

// A warp's share of the gates, of `warps` that there are; called ahead of the wait.
template <typename T, int kGates>
__device__ __forceinline__ void TakeGates(const GateParams& p, int64_t warp, int64_t warps) {
  const int lane = threadIdx.x % kWarp;
  const int32_t of_row = (p.gates.count + kGates - 1) / kGates;
  const int64_t items = p.rows * of_row;
  if (warp < items) {  // into the second-level cache: nothing is read, so whoever still writes it is not missed
    constexpr int kLine = 128 / sizeof(Bits<T>);
    const Bits<T>* row = static_cast<const Bits<T>*>(p.gates.hidden) + warp / of_row * p.gates.size;
#pragma unroll 1
    for (int64_t e = lane * kLine; e < p.gates.size; e += kWarp * kLine) PrefetchIntoL2(row + e);
  }
  WaitForPrevious();
  AllowNext();
#pragma unroll 1
  for (int64_t item = warp; item < items; item += warps) {
    const int64_t row = item / of_row;
    const int32_t first = static_cast<int32_t>(item - row * of_row) * kGates, left = p.gates.count - first;
    float total[kGates];
    GateDots<T, kGates>(p, row, first).Sum(left, total);
    float mine = total[0];
#pragma unroll
    for (int s = 1; s < kGates; ++s) mine = lane == s ? total[s] : mine;
    if (lane < kGates && lane < left) {
      p.weights[row * p.columns + first + lane] = Mul(Sigmoid(mine), p.gates.scale);
      p.indices[row * p.columns + first + lane] = p.gates.base + first + lane;
    }
  }
}

template <typename T>
__device__ __forceinline__ void TakeGates(const GateParams& p, uint32_t block) {
  const int64_t warps = blockDim.x / kWarp, warp = block * warps + threadIdx.x / kWarp;
  if (p.several_a_warp) return TakeGates<T, kGatesAtOnce>(p, warp, p.blocks * warps);
  TakeGates<T, 1>(p, warp, p.blocks * warps);
}

}  // namespace ort_moe
