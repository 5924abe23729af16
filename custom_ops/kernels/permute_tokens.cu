// PermuteTokens on CUDA: the routing maps, and each token's row written to its K places.
//
//   at once   one launch      up to 32768 choices: every block counts all of them and so finds its tokens' places
//   itself in turn   two to four     the rest: the maps as routing_maps.cu builds them, then the rows
// Mapping: a thread owns 16 bytes of columns of a token, reads them once and writes them K times; 4 or 2 bytes where
// rows or addresses are no multiple of 16.
// Bytes: (K + 1) * H * sizeof(type) a token, and 4 * K read and 12 * K written for the maps. Bound by: latency up to
// some 64 tokens, then by memory: writes, for the most part. Why so: three launches of maps take 8 us before the first
// row can be written. Counting 10240 choices again in every block takes one, and nothing waits for other blocks.
#include "kernels/permute_tokens.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/group_scan.cuh"
#include "kernels/launch.cuh"

namespace ort_moe {
namespace {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct PermuteParams {
  const void* x;
  const int32_t* indices;
  void* permuted_x;
  RoutingMaps maps;
  int64_t vectors;  // of a row
  int32_t tokens;
  int32_t k;
  int32_t experts;
  // Of a block that does all at once.
  int32_t block_tokens;
  int32_t block_vectors;

  __host__ __device__ int32_t choices() const { return tokens * k; }
  __host__ __device__ int32_t block_choices() const { return block_tokens * k; }
  __host__ __device__ size_t SharedBytes() const {
    return (2 * (static_cast<size_t>(experts) + 1) + 2 * static_cast<size_t>(block_choices())) * sizeof(int32_t);
  }
  __device__ int32_t ExpertOf(int32_t index) const { return index >= 0 && index < experts ? index : experts; }
};

// A row's vectors, read once and past the first-level cache.
template <typename Vector>
__device__ __forceinline__ Vector LoadOnce(const void* rows, int64_t at) {
  return __ldcg(static_cast<const Vector*>(rows) + at);
}

template <typename Vector>
__device__ __forceinline__ void Store(void* rows, int64_t at, const Vector& value) {
  static_cast<Vector*>(rows)[at] = value;
}

// --- At once ---

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
    __shared__ int32_t of_warps[kThreads / kLanes];
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
    const int lane = thread % kLanes;
    for (int32_t i = thread / kLanes; i < end - begin; i += kThreads / kLanes) {
      const int32_t expert = expert_of[i];
      int32_t place = before[expert];
      for (int32_t base = 0; base < i; base += kLanes) {
        const int32_t other = base + lane;
        place += __popc(__ballot_sync(kAllLanes, other < i && expert_of[other] == expert));
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
      Store(p.permuted_x, row * p.vectors + first_column + column, place < 0 ? Vector{} : value);
    }
  });
}

void Divide(PermuteParams* p) {
  p->block_tokens = static_cast<int32_t>((p->tokens + kBlocks - 1) / kBlocks);
  const int64_t rows = (p->tokens + p->block_tokens - 1) / p->block_tokens;
  const int64_t most = std::max<int64_t>(1, p->vectors / kMinBlockVectors);
  const int64_t parts = std::clamp<int64_t>(kBlocks / rows, 1, most);
  p->block_vectors = static_cast<int32_t>(std::min((p->vectors + parts - 1) / parts, kMaxBlockVectors));
}

// `p` is divided.
bool FitsAtOnce(const PermuteParams& p) {
  return p.choices() <= kMaxCounted && p.block_choices() <= kMaxBlockChoices && p.SharedBytes() <= kMaxCountBytes;
}

template <typename Vector, int kThreads>
cudaError_t LaunchAtOnce(const PermuteParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.vectors + p.block_vectors - 1) / p.block_vectors),
                  static_cast<unsigned>((p.tokens + p.block_tokens - 1) / p.block_tokens));
  return Launch<PermuteAtOnceKernel<Vector, kThreads>>(grid, kThreads, p.SharedBytes(), stream, p);
}

// --- In turn ---

constexpr int64_t kMaxThreads = 256;
constexpr int64_t kMaxGridRows = 65535;  // the device's

// Behind the kernels of the maps. They wait before they let this one start, so x is there from the first instruction.
template <typename Vector>
__global__ void __launch_bounds__(kMaxThreads) WriteRowsKernel(const __grid_constant__ PermuteParams p) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool inside = column < p.vectors;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  int64_t token = blockIdx.y;
  Vector value{};
  if (inside) value = LoadOnce<Vector>(p.x, token * p.vectors + column);
  WaitForPrevious();
  AllowNext();
  while (true) {
    for (int32_t first = 0; first < p.k; first += kLanes) {
      const int32_t count = min(kLanes, p.k - first);
      const int32_t mine =
          lane < count ? p.maps.unpermuted_to_permuted[(first + lane) * int64_t{p.tokens} + token] : -1;
#pragma unroll 2
      for (int32_t n = 0; n < count; ++n) {
        const int64_t place = __shfl_sync(kAllLanes, mine, n);
        if (place >= 0 && inside) Store(p.permuted_x, place * p.vectors + column, value);
      }
    }
    token += gridDim.y;
    if (token >= p.tokens) break;
    if (inside) value = LoadOnce<Vector>(p.x, token * p.vectors + column);
  }
  if (!inside) return;
  const int64_t rows = p.choices();
  for (int64_t row = p.maps.expert_first_token_offset[p.experts] + blockIdx.y; row < rows; row += gridDim.y) {
    Store(p.permuted_x, row * p.vectors + column, Vector{});
  }
}

template <typename Vector>
cudaError_t LaunchWriteRows(const PermuteParams& p, cudaStream_t stream) {
  const int64_t blocks = (p.vectors + kMaxThreads - 1) / kMaxThreads;
  const int64_t threads = ((p.vectors + blocks - 1) / blocks + kLanes - 1) / kLanes * kLanes;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(std::min<int64_t>(p.tokens, kMaxGridRows)));
  return Launch<WriteRowsKernel<Vector>>(grid, static_cast<unsigned>(threads), 0, stream, p);
}

// --- Either ---

// The bytes of the largest vector that divides rows and addresses.
size_t VectorBytes(const PermuteArgs& args) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.permuted_x) |
                        static_cast<uintptr_t>(args.hidden) * SizeOf(args.dtype);
  for (const size_t bytes : {sizeof(uint4), sizeof(uint32_t)}) {
    if (all % bytes == 0) return bytes;
  }
  return sizeof(uint16_t);
}

PermuteParams MakeParams(const PermuteArgs& args) {
  PermuteParams p{};
  p.x = args.x;
  p.indices = args.indices;
  p.permuted_x = args.permuted_x;
  p.maps = args.maps;
  p.vectors = args.hidden * static_cast<int64_t>(SizeOf(args.dtype)) / static_cast<int64_t>(VectorBytes(args));
  p.tokens = static_cast<int32_t>(args.tokens);
  p.k = static_cast<int32_t>(args.k);
  p.experts = static_cast<int32_t>(args.experts);
  Divide(&p);
  return p;
}

template <typename Vector>
cudaError_t LaunchOfVector(const PermuteArgs& args, void* scratch, cudaStream_t stream) {
  const PermuteParams p = MakeParams(args);
  if (FitsAtOnce(p)) {
    return p.choices() <= kFewCounted ? LaunchAtOnce<Vector, 256>(p, stream) : LaunchAtOnce<Vector, 1024>(p, stream);
  }
  const cudaError_t error =
      LaunchRoutingMaps(args.indices, args.tokens, args.k, args.experts, args.maps, scratch, stream);
  return error == cudaSuccess ? LaunchWriteRows<Vector>(p, stream) : error;
}

bool HasRows(const PermuteArgs& args) { return args.tokens > 0 && args.k > 0 && args.hidden > 0; }

}  // namespace

size_t PermuteTokensScratchBytes(const PermuteArgs& args) {
  if (HasRows(args) && FitsAtOnce(MakeParams(args))) return 0;
  return RoutingMapsScratchBytes(args.tokens, args.k, args.experts);
}

cudaError_t LaunchPermuteTokens(const PermuteArgs& args, void* scratch, cudaStream_t stream) {
  if (!HasRows(args)) {
    return LaunchRoutingMaps(args.indices, args.tokens, args.k, args.experts, args.maps, scratch, stream);
  }
  switch (VectorBytes(args)) {
    case sizeof(uint4):
      return LaunchOfVector<uint4>(args, scratch, stream);
    case sizeof(uint32_t):
      return LaunchOfVector<uint32_t>(args, scratch, stream);
    default:
      return LaunchOfVector<uint16_t>(args, scratch, stream);
  }
}

}  // namespace ort_moe
