// FC2 of FusedExperts with finalize taken in: y for 8 columns and all tokens a block, for few tokens.
//
// Mapping: a block owns 8 columns of y, that is 8 weight rows of every chosen expert; a warp takes units, each one
// slice of the reduction of one expert with up to 8 of its tokens. All products meet in shared memory, where each is
// rounded as FC2 rounds alone, and a thread per element of y adds its k choices in rank order: the bits are
// FinalizeRouting's. Bytes: the chosen experts' weights once; no intermediate of k rows a token, and one launch less.
// Bound by: memory. Ahead of the wait for FC1 a block reads the routing (FC1 let it start only after its own wait, so
// that what wrote the routing, and all other inputs, have finished), fills its rings and prefetches the rest into the
// L2: FC2's weights arrive while FC1 still computes.
#pragma once

#include <cstdint>

#include "kernels/fused_experts_grouped.cuh"

namespace ort_moe {

constexpr int kMaxFc2Warps = 8;  // three blocks to a multiprocessor's registers
constexpr int kFc2Chunk = 4;     // tokens of an expert: two experts share the tensor core's 8 columns
constexpr int kFc2Ring = 3;      // groups of steps ahead

__device__ __forceinline__ void PrefetchToL2(const void* address, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#endif
}

// The block's shared memory, in order.
template <typename Format>
struct Fc2Shared {
  static __host__ __device__ __forceinline__ size_t Bytes(const LayerParams& layer, int slots, int chunk, int warps) {
    const size_t slot_bytes = ActivationStride<Format>(layer.depth) * sizeof(typename Format::Element) +
                              layer.slices * kTileRows * sizeof(float) + (5 + chunk) * sizeof(int32_t);
    return static_cast<size_t>(warps) * WeightRing<Format, kFc2Ring>::kBytes + (slots + 3) / 4 * 4 * slot_bytes +
           sizeof(int32_t);
  }

  __device__ __forceinline__ Fc2Shared(uint4* memory, const ExpertsParams& p) {
    const int slots = (p.slots + 3) / 4 * 4;
    rings = reinterpret_cast<char*>(memory);
    activations =
        reinterpret_cast<typename Format::Element*>(rings + blockDim.x / kLanes * WeightRing<Format, kFc2Ring>::kBytes);
    indices = reinterpret_cast<int32_t*>(activations + slots * ActivationStride<Format>(p.fc2.depth));
    mix = reinterpret_cast<float*>(indices + slots);
    partial = mix + slots;
    item_of = reinterpret_cast<int32_t*>(partial + slots * p.fc2.slices * kTileRows);
    item_slot = item_of + slots;
    item_count = item_slot + slots;
    members = item_count + slots;
    num_items = members + slots * p.chunk;
  }

  char* rings;                            // of each warp
  typename Format::Element* activations;  // (slots, ActivationStride)
  int32_t* indices;                       // (slots), -1 where there is no expert
  float* mix;                             // (slots)
  float* partial;                         // (slots, slices, kTileRows)
  int32_t* item_of;                       // (slots) of a slot that begins an item: which
  int32_t* item_slot;                     // (items) one of the item's slots
  int32_t* item_count;                    // (items) tokens
  int32_t* members;                       // (items, chunk) their slots
  int32_t* num_items;
};

// Items: one expert and up to `chunk` of its slots, in ascending order. Their own order may vary: no result depends on
// it.
template <typename Format>
__device__ __forceinline__ void FindItems(const ExpertsParams& p, const Fc2Shared<Format>& s) {
  for (int slot = threadIdx.x; slot < p.slots; slot += blockDim.x) {
    const int expert = p.indices[slot];
    s.indices[slot] = expert < p.experts ? max(expert, -1) : -1;
    s.mix[slot] = p.mix_input ? 1.0f : p.mix[slot];
    s.item_count[slot] = 0;
  }
  if (threadIdx.x == 0) *s.num_items = 0;
  __syncthreads();
  int leader = -1, rank = 0;
  const int slot = threadIdx.x;  // a block has kMaxDirectSlots threads at least, or as many as slots
  const int expert = slot < p.slots ? s.indices[slot] : -1;
  if (expert >= 0) {
    if (p.chunk > 1) {
      for (int other = 0; other < slot; ++other) {
        if (s.indices[other] == expert) {
          if (rank % p.chunk == 0) leader = other;
          ++rank;
        }
      }
    }
    if (rank % p.chunk == 0) {
      leader = slot;
      const int item = atomicAdd(s.num_items, 1);
      s.item_of[slot] = item;
      s.item_slot[item] = slot;
    }
  }
  __syncthreads();
  if (expert >= 0) {
    const int item = s.item_of[leader];
    s.members[item * p.chunk + rank % p.chunk] = slot;
    atomicMax(&s.item_count[item], rank % p.chunk + 1);
  }
  __syncthreads();
}

template <typename Format>
__global__ void __launch_bounds__(kMaxFc2Warps* kLanes, 3) Fc2FinalizeKernel(const ExpertsParams p) {
  using T = typename Format::Element;
  using Ring = WeightRing<Format, kFc2Ring>;
  extern __shared__ uint4 shared[];
  const LayerParams& layer = p.fc2;
  const Fc2Shared<Format> s(shared, p);
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, warps = blockDim.x / kLanes;
  const int slots = p.slots, slices = layer.slices;
  const int stride = ActivationStride<Format>(layer.depth);
  const int column = blockIdx.x * kTileRows;

  FindItems(p, s);
  const int items = *s.num_items, units = (items + 1) / 2 * slices;
  Ring ring(s.rings + warp * Ring::kBytes);

  // The ring runs through all units of the warp.
  int next_unit = warp;
  LaneRows next_rows;
  int2 next_steps = make_int2(0, 0);
  const auto begin_unit = [&] {
    const int pair = slices == 1 ? next_unit : next_unit / slices;
    next_steps = StepsOf<Format>(layer, slices == 1 ? 0 : next_unit % slices);
    next_rows = Ring::RowsOf(layer, [&](int tile, int row) {
      const int item = 2 * pair + tile;
      return item < items ? int64_t{s.indices[s.item_slot[item]]} * layer.rows + column + row : int64_t{-1};
    });
  };
  const auto fill = [&](int group) {
    if (next_unit >= units) return CommitCopies();
    ring.Fill(group, next_rows, layer.depth, next_steps.x, next_steps.y);
    next_steps.x += Ring::kGroupSteps;
    if (next_steps.x >= next_steps.y) {
      next_unit += warps;
      if (next_unit < units) begin_unit();
    }
  };
  if (next_unit < units) begin_unit();
#pragma unroll 1
  for (int group = 0; group < Ring::kGroups; ++group) fill(group);

  for (int item = threadIdx.x; item < min(items, p.prefetched_items); item += blockDim.x) {
    const int64_t row = int64_t{s.indices[s.item_slot[item]]} * layer.rows + column;
    const int64_t row_bytes = Format::RowBytes(layer.depth);
    PrefetchToL2(layer.weights + row * row_bytes, static_cast<uint32_t>(kTileRows * row_bytes));
    if constexpr (Format::kScaled) {
      const int row_scales = layer.depth / kNvfp4Block;
      PrefetchToL2(layer.scales + row * row_scales, kTileRows * row_scales);
    }
  }
  // What a product is scaled by, and its bias.
  const auto scale_and_bias = [&](int i) {
    const int slot = i / kTileRows, expert = slot < slots ? s.indices[slot] : -1;
    float2 result = make_float2(Format::kFactor, 0.0f);
    if (expert < 0) return result;
    if (layer.global_scale != nullptr) result.x = Mul(result.x, layer.global_scale[expert]);
    if (layer.bias != nullptr) {
      const int64_t row = int64_t{expert} * layer.rows + column + i % kTileRows;
      result.y = HalfTraits<T>::ToFloat(static_cast<const T*>(layer.bias)[row]);
    }
    return result;
  };
  const float2 own = scale_and_bias(threadIdx.x);

  WaitForPrevious();
  AllowNext();

  for (int slot = warp; slot < slots; slot += warps) {
    if (s.indices[slot] < 0) continue;
    const T* const source = static_cast<const T*>(p.activated) + int64_t{slot} * p.activated_stride;
    for (int at = lane * kVectorElements; at < p.activated_stride; at += kLanes * kVectorElements) {
      CopyAsync(s.activations + slot * stride + at, source + at, Format::VectorElement(at) < layer.depth);
    }
  }
  CommitCopies();
  WaitForCopies<0>();
  __syncthreads();

  int group = 0;
  for (int unit = warp; unit < units; unit += warps) {
    const int pair = slices == 1 ? unit : unit / slices, slice = slices == 1 ? 0 : unit % slices;
    const int counts[2] = {s.item_count[2 * pair], 2 * pair + 1 < items ? s.item_count[2 * pair + 1] : 0};
    const int32_t* const members[2] = {s.members + 2 * pair * p.chunk, s.members + (2 * pair + 1) * p.chunk};
    // Columns 0 to 3 of the tensor core are the first expert's tokens, the others the second's; missing ones repeat
    // one.
    const int side = lane / 16 < 1 || counts[1] == 0 ? 0 : 1;
    const int token_slot = members[side][min(lane / 4 % kFc2Chunk, counts[side] - 1)];
    const int2 steps = StepsOf<Format>(layer, slice);
    const uint4* const vectors = reinterpret_cast<const uint4*>(s.activations + token_slot * stride) + lane % 4;
    float sum[4] = {};
#pragma unroll 1
    for (int first = steps.x; first < steps.y; first += Ring::kGroupSteps) {
      WaitForCopies<Ring::kGroups - 1>();
      __syncwarp();
      ring.Accumulate(group, vectors + first * (Format::kStep / kVectorElements), steps.y - first, sum);
      __syncwarp();
      fill(group);
      group = group + 1 == Ring::kGroups ? 0 : group + 1;
    }
    const int own_side = lane % 4 / 2;  // the expert of this lane's columns
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = lane % 2 * 2 + i;
      if (token < counts[own_side]) {
        const int slot = members[own_side][token];
        s.partial[(slot * slices + slice) * kTileRows + lane / 4] = own_side == 0 ? sum[i] : sum[2 + i];
      }
    }
  }
  __syncthreads();

  // FC2's rounded outputs, in place of the first slice.
  for (int i = threadIdx.x; i < slots * kTileRows; i += blockDim.x) {
    const int slot = i / kTileRows;
    if (s.indices[slot] < 0) continue;
    float* const sums = s.partial + slot * slices * kTileRows + i % kTileRows;
    float value = 0.0f;
    for (int slice = 0; slice < slices; ++slice) value = Add(value, sums[slice * kTileRows]);
    const float2 post = i == threadIdx.x ? own : scale_and_bias(i);
    sums[0] = Rounded<T>(Add(Mul(value, post.x), post.y));
  }
  __syncthreads();

  for (int i = threadIdx.x; i < p.tokens * kTileRows; i += blockDim.x) {
    const int token = i / kTileRows, row = i % kTileRows;
    float y = 0.0f;
    for (int slot = token * p.k; slot < (token + 1) * p.k; ++slot) {
      if (s.indices[slot] >= 0) y = Fma(s.mix[slot], s.partial[slot * slices * kTileRows + row], y);
    }
    const int64_t at = int64_t{token} * layer.rows + column + row;
    if (p.residual != nullptr) y = Add(y, HalfTraits<T>::ToFloat(static_cast<const T*>(p.residual)[at]));
    static_cast<T*>(p.y)[at] = HalfTraits<T>::FromFloat(y);
  }
}

}  // namespace ort_moe
