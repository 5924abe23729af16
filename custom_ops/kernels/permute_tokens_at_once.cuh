// PermuteTokens of up to 32768 choices in one launch: every block counts all choices by expert, and so finds the places
// of its own tokens' rows without waiting for another block.
//
// Counting is one shared-memory atomic a choice; 10240 choices take 1024 threads some 2 us, where three launches of
// maps take 8. A block has neighbouring tokens, or with few tokens some columns of one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/group_scan.cuh"
#include "kernels/launch.cuh"
#include "kernels/permute_tokens_params.cuh"

namespace ort_moe {

constexpr int64_t kMaxCounted = 1 << 15;  // choices
constexpr int64_t kFewCounted = 1 << 10;  // choices up to which a block is small
constexpr int64_t kBlocks = 128;          // about as many as there are multiprocessors
constexpr int64_t kMinBlockVectors = 64;  // of a row, before its columns are shared by blocks
constexpr int64_t kMaxBlockVectors = 1 << 20;
constexpr int64_t kMaxBlockChoices = 1 << 9;  // whose order is found pair by pair
constexpr size_t kMaxCountBytes = 64 << 10;

// Where the rows of a block's choices go, from counts of all choices by expert.
template <int kThreads>
struct Places {
  const PermuteParams& p;
  const int thread;
  int32_t* before;     // (E + 1) choices ahead of the block's; then the place of the block's first
  int32_t* after;      // (E + 1) the block's and those behind
  int32_t* expert_of;  // (block_choices)
  int32_t* place_of;   // (block_choices) the place; its complement where there is no expert

  __device__ Places(const PermuteParams& p, int32_t* shared, int thread)
      : p(p),
        thread(thread),
        before(shared),
        after(before + p.experts + 1),
        expert_of(after + p.experts + 1),
        place_of(expert_of + p.block_choices()) {}

  __device__ void Clear() {
    for (int32_t e = thread; e < 2 * (p.experts + 1); e += kThreads) before[e] = 0;
  }

  __device__ void Count(int32_t begin, int32_t end) {
    const auto count = [&](int32_t slot, int32_t index) {
      const int32_t expert = p.ExpertOf(index);
      atomicAdd((slot < begin ? before : after) + expert, 1);
      if (slot >= begin && slot < end) expert_of[slot - begin] = expert;
    };
    const int32_t vectors = reinterpret_cast<uintptr_t>(p.indices) % sizeof(int4) == 0 ? p.choices() / 4 : 0;
#pragma unroll 2
    for (int32_t i = thread; i < vectors; i += kThreads) {
      const int4 four = reinterpret_cast<const int4*>(p.indices)[i];
      count(4 * i, four.x);
      count(4 * i + 1, four.y);
      count(4 * i + 2, four.z);
      count(4 * i + 3, four.w);
    }
    for (int32_t slot = 4 * vectors + thread; slot < p.choices(); slot += kThreads) count(slot, p.indices[slot]);
  }

  // A thread's experts are neighbours.
  __device__ void Sum(bool writes_offsets) {
    constexpr int kBarrier = 1;
    __shared__ int32_t of_warps[kThreads / 32];
    const int32_t per_thread = (p.experts + kThreads) / kThreads;
    const int32_t first = min(thread * per_thread, p.experts + 1), last = min(first + per_thread, p.experts + 1);
    int32_t count = 0;
    for (int32_t e = first; e < last; ++e) count += before[e] + after[e];
    int32_t start = ExclusiveSum<kThreads>(count, thread, kBarrier, of_warps);
    for (int32_t e = first; e < last; ++e) {
      if (writes_offsets) p.maps.expert_first_token_offset[e] = start;
      const int32_t ahead = before[e];
      before[e] = start + ahead;
      start += ahead + after[e];
    }
  }

  // A warp takes a choice: behind the block's earlier ones of its expert.
  __device__ void Find(int32_t begin, int32_t end, bool writes_maps) {
    const int lane = thread % 32;
    for (int32_t i = thread / 32; i < end - begin; i += kThreads / 32) {
      const int32_t expert = expert_of[i];
      int32_t place = before[expert];
      for (int32_t base = 0; base < i; base += 32) {
        const int32_t other = base + lane;
        place += __popc(__ballot_sync(0xffffffffu, other < i && expert_of[other] == expert));
      }
      if (lane != 0) continue;
      const bool has_expert = expert < p.experts;
      place_of[i] = has_expert ? place : ~place;
      if (!writes_maps) continue;
      const int32_t slot = begin + i, token = slot / p.k;
      const int32_t row = (slot - token * p.k) * p.tokens + token;
      p.maps.permuted_to_unpermuted[place] = row;
      p.maps.unpermuted_to_permuted[row] = has_expert ? place : -1;
      p.maps.permuted_to_expert[place] = expert;
    }
  }
};

// A block has neighbouring tokens and neighbouring columns of them.
template <typename Vector, int kThreads>
__global__ void __launch_bounds__(kThreads) PermuteAtOnceKernel(const __grid_constant__ PermuteParams p) {
  extern __shared__ int32_t shared[];
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t first_token = static_cast<int32_t>(blockIdx.y) * p.block_tokens;
  const int32_t tokens = min(p.block_tokens, p.tokens - first_token);
  const int32_t begin = first_token * p.k, end = begin + tokens * p.k;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * p.block_vectors;
  const int32_t columns = static_cast<int32_t>(min(static_cast<int64_t>(p.block_vectors), p.vectors - first_column));
  const int64_t start = first_token * p.vectors + first_column;

  Places<kThreads> places(p, shared, thread);
  places.Clear();
  // A thread's vectors are kThreads apart in the block's tokens, one after another.
  const int32_t token_step = kThreads / columns, column_step = kThreads % columns;
  const int32_t my_token = thread / columns, my_column = thread % columns;
  const auto for_mine = [&](const auto& visit) {
    int32_t column = my_column;
#pragma unroll 1
    for (int32_t token = my_token; token < tokens; token += token_step) {
      visit(token, column);
      column += column_step;
      if (column >= columns) {
        column -= columns;
        ++token;
      }
    }
  };
  constexpr int kLineBytes = 128;
  for_mine([&](int32_t token, int32_t column) {
    const Vector* address = static_cast<const Vector*>(p.x) + start + token * p.vectors + column;
    if (reinterpret_cast<uintptr_t>(address) % kLineBytes < sizeof(Vector)) PrefetchIntoL2(address);
  });
  __syncthreads();
  WaitForPrevious();
  AllowNext();

  places.Count(begin, end);
  __syncthreads();
  places.Sum(blockIdx.x == 0 && blockIdx.y == 0);
  __syncthreads();
  places.Find(begin, end, blockIdx.x == 0);
  __syncthreads();

  for_mine([&](int32_t token, int32_t column) {
    const Vector value = LoadOnce<Vector>(p.x, start + token * p.vectors + column);
    const int32_t* place_of = places.place_of + token * p.k;
#pragma unroll 2
    for (int32_t j = 0; j < p.k; ++j) {
      const int32_t place = place_of[j];
      const int64_t row = place < 0 ? ~place : place;
      StoreOnce(p.permuted_x, row * p.vectors + first_column + column, place < 0 ? Vector{} : value);
    }
  });
}

// Among blocks.
inline void Divide(PermuteParams* p) {
  p->block_tokens = static_cast<int32_t>((p->tokens + kBlocks - 1) / kBlocks);
  const int64_t rows = (p->tokens + p->block_tokens - 1) / p->block_tokens;
  const int64_t most = std::max<int64_t>(1, p->vectors / kMinBlockVectors);
  const int64_t parts = std::clamp<int64_t>(kBlocks / rows, 1, most);
  p->block_vectors = static_cast<int32_t>(std::min((p->vectors + parts - 1) / parts, kMaxBlockVectors));
}

// `p` is divided.
inline bool FitsAtOnce(const PermuteParams& p) {
  return p.choices() <= kMaxCounted && p.block_choices() <= kMaxBlockChoices && p.SharedBytes() <= kMaxCountBytes;
}

template <typename Vector, int kThreads>
cudaError_t LaunchAtOnce(const PermuteParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.vectors + p.block_vectors - 1) / p.block_vectors),
                  static_cast<unsigned>((p.tokens + p.block_tokens - 1) / p.block_tokens));
  return Launch<PermuteAtOnceKernel<Vector, kThreads>>(grid, kThreads, p.SharedBytes(), stream, p);
}

}  // namespace ort_moe
