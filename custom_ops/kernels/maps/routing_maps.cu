// Routing maps of choices that came from anywhere, on CUDA.
//
//   list      one block, in shared memory     up to 1024 choices, as far as the masks of all experts are small
//   counted   one launch over all SMs         up to 32768 choices, as far as a block can count their experts
//   tiles     three launches over all SMs     the rest
// Bytes: 4 * R read, twice by tiles and by every block of counted, and 12 * R + 8 * E written. Bound by: latency, of
// one launch or of three; from some 100000 choices on by scattered writes of 4 bytes. They agree bit for bit: the maps
// are integers.
#include "kernels/maps/routing_maps.h"

#include "kernels/common/launch.cuh"
#include "kernels/maps/routing_maps_counted.cuh"
#include "kernels/maps/routing_maps_list.cuh"
#include "kernels/maps/routing_maps_tiles.cuh"

namespace ort_moe {
namespace {

constexpr int kListThreads = 512;
constexpr size_t kMaxListBytes = 64 << 10;

MapsParams MakeListParams(int64_t tokens, int64_t k, int64_t experts) {
  MapsParams p{};
  p.experts = static_cast<int32_t>(experts);
  p.choices = static_cast<int32_t>(tokens * k);
  p.bits = p.choices;  // a token may name an expert twice
  return p;
}

using List = MapsFromList<kListThreads>;

bool FitsList(int64_t tokens, int64_t k, int64_t experts) {
  return tokens * k <= kMaxListedChoices && experts <= List::kMaxExperts &&
         MakeListParams(tokens, k, experts).SharedBytes() <= kMaxListBytes;
}

constexpr int kCountingThreads = 1024;
constexpr int32_t kCountingBlocks = 128;  // about as many as there are multiprocessors

int32_t ChoicesOfBlock(const Choices& p) { return (p.count() + kCountingBlocks - 1) / kCountingBlocks; }

__global__ void __launch_bounds__(kCountingThreads)
    CountedMapsKernel(const __grid_constant__ Choices p, int32_t block_choices) {
  extern __shared__ int32_t counted[];
  const int32_t begin = static_cast<int32_t>(blockIdx.x) * block_choices;
  const int32_t end = min(begin + block_choices, p.count());
  Places<kCountingThreads> places(p, block_choices, counted, static_cast<int>(threadIdx.x));
  places.Clear();
  __syncthreads();
  WaitForPrevious();
  AllowNext();
  places.Count(begin, end);
  __syncthreads();
  places.Sum(blockIdx.x == 0);
  __syncthreads();
  places.Find(begin, end, true);
}

cudaError_t LaunchCountedMaps(const Choices& p, cudaStream_t stream) {
  const int32_t block_choices = ChoicesOfBlock(p);
  const unsigned blocks = static_cast<unsigned>((p.count() + block_choices - 1) / block_choices);
  return Launch<CountedMapsKernel>(blocks, kCountingThreads, CountingBytes(p, block_choices), stream, p, block_choices);
}

Choices MakeChoices(int64_t tokens, int64_t k, int64_t experts) {
  Choices p{};
  p.tokens = static_cast<int32_t>(tokens);
  p.k = static_cast<int32_t>(k);
  p.experts = static_cast<int32_t>(experts);
  return p;
}

bool FitsCounted(int64_t tokens, int64_t k, int64_t experts) {
  if (tokens * k > kMaxCounted) return false;
  const Choices p = MakeChoices(tokens, k, experts);
  return FitsCounting(p, ChoicesOfBlock(p));
}

__global__ void __launch_bounds__(kListThreads)
    ListMapsKernel(const __grid_constant__ MapsParams p, const int32_t* indices, int32_t tokens, int32_t k) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kBarrier = 1;
  const int thread = static_cast<int>(threadIdx.x);
  List maps(p, shared, thread, kBarrier);
  maps.Prepare();
  WaitForPrevious();
  AllowNext();
#pragma unroll 1
  for (int32_t slot = thread; slot < p.choices; slot += kListThreads) {
    const int32_t index = indices[slot];
    const int32_t token = slot / k;
    const int32_t row = (slot - token * k) * tokens + token;
    maps.list()[slot] = ListedChoice(index >= 0 && index < p.experts ? index : p.experts, slot, row);
  }
  __syncthreads();
  maps.Build();
}

}  // namespace

size_t RoutingMapsScratchBytes(int64_t tokens, int64_t k, int64_t experts) {
  if (tokens * k == 0 || FitsList(tokens, k, experts) || FitsCounted(tokens, k, experts)) return 0;
  return TileScratchBytes(MakeTileParams(tokens, k, experts));
}

cudaError_t LaunchRoutingMaps(const int32_t* indices, int64_t tokens, int64_t k, int64_t experts,
                              const RoutingMaps& maps, void* scratch, cudaStream_t stream) {
  if (tokens * k == 0) {
    return cudaMemsetAsync(maps.expert_first_token_offset, 0, (experts + 1) * sizeof(int64_t), stream);
  }
  if (FitsList(tokens, k, experts)) {
    MapsParams p = MakeListParams(tokens, k, experts);
    p.maps = maps;
    return Launch<ListMapsKernel>(1, kListThreads, p.SharedBytes(), stream, p, indices, static_cast<int32_t>(tokens),
                                  static_cast<int32_t>(k));
  }
  if (FitsCounted(tokens, k, experts)) {
    Choices p = MakeChoices(tokens, k, experts);
    p.maps = maps;
    p.indices = indices;
    return LaunchCountedMaps(p, stream);
  }
  TileParams p = MakeTileParams(tokens, k, experts);
  p.maps = maps;
  p.indices = indices;
  p.counts = static_cast<int32_t*>(scratch);
  const size_t count_bytes = p.stride * sizeof(int32_t);
  cudaError_t error = Launch<CountChoicesKernel>(p.tiles, kTileThreads, count_bytes, stream, p);
  if (error == cudaSuccess) error = Launch<SumCountsKernel>((p.stride + 31) / 32, kSumWarps * 32, 0, stream, p);
  if (error == cudaSuccess) error = Launch<DealRowsKernel>(p.tiles, kTileThreads, DealBytes(p), stream, p);
  return error;
}

}  // namespace ort_moe
