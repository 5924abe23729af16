// FC2 of FusedExperts with finalize taken in: y for 8 columns and all tokens a block, for few tokens.
//
// Mapping: a block owns 8 columns of y, that is 8 weight rows of every chosen expert; a warp takes a unit, one slice of
// the reduction of one group of tokens with their expert. All products meet in shared memory, where each is rounded as
// FC2 rounds alone, and a thread per element of y adds its k choices in rank order: the bits are FinalizeRouting's.
// Bytes: the chosen experts' weights once; no intermediate of k rows a token, and one launch less.
// Bound by: memory. Ahead of the wait for FC1 a block reads the routing (FC1 let it start only after its own wait, so
// that what wrote the routing has finished), starts its first weights' loads and prefetches the rest into the L2: FC2's
// weights arrive while FC1 still computes.
#pragma once

#include <cstdint>

#include "kernels/fused_experts_grouped.cuh"

namespace ort_moe {

constexpr int kMaxFc2Warps = 16;

__device__ __forceinline__ void PrefetchToL2(const void* address, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#endif
}

__device__ __forceinline__ void CopyToShared(void* target, const void* source) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(source) : "memory");
}

__device__ __forceinline__ void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <typename Format>
struct Fc2Shared {
  static __host__ __device__ __forceinline__ size_t Bytes(const LayerParams& layer, int slots) {
    return static_cast<size_t>(slots) *
               (GroupedShared<Format>::Stride(layer.depth) * sizeof(typename Format::Element) +
                layer.slices * kTileRows * sizeof(float) + sizeof(int32_t) + sizeof(float) + sizeof(int32_t)) +
           sizeof(int32_t);
  }
};

template <typename Format>
__global__ void __launch_bounds__(kMaxFc2Warps* kLanes, 2) Fc2FinalizeKernel(const ExpertsParams p) {
  using T = typename Format::Element;
  using Tile = WarpTile<Format, 1>;
  extern __shared__ uint4 shared[];
  const LayerParams& layer = p.fc2;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, warps = blockDim.x / kLanes;
  const int slots = p.slots, slices = layer.slices;
  const int stride = GroupedShared<Format>::Stride(layer.depth);
  T* const activations = reinterpret_cast<T*>(shared);
  float* const partial = reinterpret_cast<float*>(activations + slots * stride);  // (slots, slices, kTileRows)
  int32_t* const indices = reinterpret_cast<int32_t*>(partial + slots * slices * kTileRows);
  float* const mix = reinterpret_cast<float*>(indices + slots);
  int32_t* const items = reinterpret_cast<int32_t*>(mix + slots);  // slots that begin a group; then their number
  int32_t* const num_items = items + slots;
  const int column = blockIdx.x * kTileRows;

  for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
    indices[slot] = p.indices[slot];
    mix[slot] = p.mix_input ? 1.0f : p.mix[slot];
  }
  __syncthreads();
  if (warp == 0) {
    int count = 0;
    for (int first = 0; first < slots; first += kLanes) {
      const int slot = first + lane;
      bool begins = false;
      if (slot < slots && indices[slot] >= 0 && indices[slot] < p.experts) {
        int before = 0;
        for (int other = 0; other < slot; ++other) before += indices[other] == indices[slot];
        begins = before % p.chunk == 0;
      }
      const uint32_t mask = __ballot_sync(0xffffffffu, begins);
      if (begins) items[count + __popc(mask & ((1u << lane) - 1u))] = slot;
      count += __popc(mask);
    }
    if (lane == 0) *num_items = count;
  }
  __syncthreads();

  const int units = *num_items * slices;
  const int rows[1] = {column + lane / 4};
  Tile tile;
  if (warp < units) {
    const auto lane_rows = RowsOf<Format, 1>(layer, indices[items[warp / slices]], rows);
    const int2 steps = StepsOf<Format>(layer, warp % slices);
    tile.Load(lane_rows, layer.depth, steps.x, steps.y);
  }
  for (int item = threadIdx.x + warps / slices; item < min(*num_items, p.prefetched_items); item += blockDim.x) {
    const int64_t row = int64_t{indices[items[item]]} * layer.rows + column;
    const int64_t row_bytes = Format::RowBytes(layer.depth);
    PrefetchToL2(layer.weights + row * row_bytes, static_cast<uint32_t>(kTileRows * row_bytes));
    if constexpr (Format::kScaled) {
      const int row_scales = layer.depth / kNvfp4Block;
      PrefetchToL2(layer.scales + row * row_scales, kTileRows * row_scales);
    }
  }

  WaitForPrevious();
  AllowNext();

  const int vectors_per_row = stride / kVectorElements;
  for (int i = threadIdx.x; i < slots * vectors_per_row; i += blockDim.x) {
    const int slot = i / vectors_per_row, at = i % vectors_per_row * kVectorElements;
    const bool chosen = indices[slot] >= 0 && indices[slot] < p.experts;
    T* const target = activations + slot * stride + at;
    if (chosen && at < p.activated_stride && Format::VectorElement(at) < layer.depth) {
      CopyToShared(target, static_cast<const T*>(p.activated) + int64_t{slot} * p.activated_stride + at);
    } else {
      *reinterpret_cast<uint4*>(target) = make_uint4(0, 0, 0, 0);
    }
  }
  WaitForCopies();
  __syncthreads();

  for (int unit = warp; unit < units; unit += warps) {
    const Group group = GroupOfSlot(indices, slots, p.experts, p.chunk, items[unit / slices]);
    const int slice = unit % slices;
    const int2 steps = StepsOf<Format>(layer, slice);
    const int token_slot = __shfl_sync(0xffffffffu, group.member, min(lane / 4, group.count - 1));
    const uint4* vectors = reinterpret_cast<const uint4*>(activations + token_slot * stride) + lane % 4;
    float sum[4] = {};
    for (int first = steps.x; first < steps.y; first += Tile::kBatch) {
      if (unit != warp || first != steps.x) {
        tile.Load(RowsOf<Format, 1>(layer, Forgotten(group.expert), rows), layer.depth, first, steps.y);
      }
      tile.Accumulate(vectors, layer.depth, first, steps.y, sum);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of = lane % 4 * 2 + i;
      const int slot = __shfl_sync(0xffffffffu, group.member, of);
      if (of < group.count) partial[(slot * slices + slice) * kTileRows + lane / 4] = sum[i];
    }
  }
  __syncthreads();

  // FC2's rounded outputs, in place of the first slice.
  for (int i = threadIdx.x; i < slots * kTileRows; i += blockDim.x) {
    const int slot = i / kTileRows, row = i % kTileRows, expert = indices[slot];
    if (expert < 0 || expert >= p.experts) continue;
    float* const sums = partial + slot * slices * kTileRows + row;
    float value = 0.0f;
    for (int slice = 0; slice < slices; ++slice) value = Add(value, sums[slice * kTileRows]);
    float scale = Format::kFactor;
    if (layer.global_scale != nullptr) scale = Mul(scale, layer.global_scale[expert]);
    value = Mul(value, scale);
    if (layer.bias != nullptr) {
      const T* biases = static_cast<const T*>(layer.bias) + int64_t{expert} * layer.rows;
      value = Add(value, HalfTraits<T>::ToFloat(biases[column + row]));
    }
    sums[0] = Rounded<T>(value);
  }
  __syncthreads();

  for (int i = threadIdx.x; i < p.tokens * kTileRows; i += blockDim.x) {
    const int token = i / kTileRows, row = i % kTileRows;
    float y = 0.0f;
    for (int slot = token * p.k; slot < (token + 1) * p.k; ++slot) {
      if (indices[slot] < 0 || indices[slot] >= p.experts) continue;
      y = Fma(mix[slot], partial[slot * slices * kTileRows + row], y);
    }
    const int64_t at = int64_t{token} * layer.rows + column + row;
    if (p.residual != nullptr) y = Add(y, HalfTraits<T>::ToFloat(static_cast<const T*>(p.residual)[at]));
    static_cast<T*>(p.y)[at] = HalfTraits<T>::FromFloat(y);
  }
}

}  // namespace ort_moe
