// FusedRouter on CUDA: weights, indices and maps of the best k experts of each row, in one launch; maps of many rows
// take a launcher of their own behind it.
//
// Mapping: who owns a row depends on the configuration alone, never on its values or on other rows.
//   lane       8 lanes a row, 4 rows a warp   E <= 8, no groups
//   packed     4 to 32 lanes a row            E <= 512, k <= 8 or 16, a softmax of the chosen of half-precision logits,
//                                             without maps: a key and its expert in a word
//   estimated  a warp a row                   sigmoids of 128 < E <= 512, in groups up to 256, k <= 16, without maps:
//                                             few of them are computed
//   warp       a warp a row                   E <= 1024, k <= 32: keys in registers
//   block      128 threads a row              the rest, as far as shared memory goes (E about 16384), where keys lie
// Bytes: rows * (E * sizeof(logit) + 8 * k), each once; 1.1 KB for a row of E = 512 in half precision.
// Bound by: at few rows latency: the launch, one load from memory, and how fast one warp's instructions arrive, most of
// them executed once; at many rows instruction issue: packed takes 100 warp instructions a row of 128 experts, warp
// 400, and 1000 with sigmoids, a bias and groups, for which estimated takes 500.
// Why so: sums have one order on all paths (128 partial sums by chunks of 8 experts), which fits lanes that own chunks
// of 16 bytes; then a row needs no exchange but the final butterfly. Selection counts instead of taking a round per
// choice. What most routers are, a softmax over the chosen or a sigmoid, has instantiations of its own without the
// branches over everything else; further templates would multiply the library's size. PDL hides the launch behind the
// previous kernel. With maps the rows go to one block, or to the blocks of one cluster, where other warps build the
// maps while the weights are computed: a launch of its own would cost more than all of that.
#include <algorithm>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/switches.h"
#include "kernels/router/fused_router.h"
#include "kernels/router/fused_router_block.cuh"
#include "kernels/router/fused_router_estimated.cuh"
#include "kernels/router/fused_router_lane.cuh"
#include "kernels/router/fused_router_packed.cuh"
#include "kernels/router/fused_router_params.cuh"
#include "kernels/router/fused_router_row.cuh"
#include "kernels/router/fused_router_warp.cuh"

namespace ort_moe {
namespace {

constexpr int64_t kMaxGrid = 1 << 20;      // blocks walk over the rows beyond it
constexpr int64_t kManyRows = 512;         // with fewer, a warp to a block spreads them over all multiprocessors
constexpr int64_t kSpreadRows = 2048;      // up to which 8 lanes for 64 experts, whose lists end sooner, beat 4
constexpr size_t kMaxMapBytes = 32 << 10;  // of the list that maps are built from; leaves room for the rows' own

dim3 Grid(int64_t rows, int64_t rows_per_block) {
  return dim3(static_cast<unsigned>(std::min((rows + rows_per_block - 1) / rows_per_block, kMaxGrid)));
}

// One launch of kKernel, which builds maps: by one cluster, each of its blocks with as many warps for rows as are asked
// for and useful; a warp takes rows_per_warp rows at a time.
template <auto kKernel>
cudaError_t LaunchWithMaps(RouterParams p, int row_warps, int rows_per_warp, size_t warp_bytes, cudaStream_t stream) {
  KernelTraits traits;
  if (cudaError_t error = QueryKernel<kKernel>(&traits); error != cudaSuccess) return error;
  p.row_warps = static_cast<int>(std::min<int64_t>(row_warps, (p.rows + rows_per_warp - 1) / rows_per_warp));
  const int64_t rows_per_block = p.row_warps * rows_per_warp;
  unsigned cluster = 1;
  while (traits.hopper && cluster < kMaxClusterBlocks && cluster * rows_per_block < p.rows) cluster *= 2;
  const int threads = p.row_warps * kWarp + MapThreads(p);
  const size_t shared_bytes = MapBytes(p) + p.row_warps * warp_bytes;
  return LaunchClusters<kKernel>(cluster, cluster, threads, shared_bytes, stream, p);
}

template <typename T, int kOwned, RouterKind kKind>
cudaError_t LaunchWarp(const RouterParams& p, cudaStream_t stream) {
  const size_t warp_bytes = WarpRow<T, kOwned, kKind>::SharedBytes(p);
  if (p.has_maps) {
    return LaunchWithMaps<FusedRouterWarpKernel<T, kOwned, kKind, true>>(p, MaxMapRows(kOwned), 1, warp_bytes, stream);
  }
  const int warps = p.rows < kManyRows ? 1 : kMaxWarpsPerBlock;
  return Launch<FusedRouterWarpKernel<T, kOwned, kKind, false>>(Grid(p.rows, warps), warps * kWarp, warps * warp_bytes,
                                                                stream, p);
}

template <typename T, int kOwned>
cudaError_t LaunchEstimated(const RouterParams& p, cudaStream_t stream) {
  int device = 0, multiprocessors = 1;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  const int warps = p.rows < kManyRows ? 1 : kMaxWarpsPerBlock;
  dim3 grid = Grid(p.rows, warps);
  const unsigned at_once = multiprocessors * kEstimatedBlocks, rows_of_warp = (grid.x + at_once - 1) / at_once;
  if (warps > 1) grid.x = (grid.x + rows_of_warp - 1) / rows_of_warp;
  return Launch<FusedRouterEstimatedKernel<T, kOwned>>(grid, warps * kWarp,
                                                       warps * EstimatedRow<T, kOwned>::SharedBytes(p), stream, p);
}

// Few experts take less time without estimates.
template <typename T, int kOwned>
cudaError_t LaunchSigmoid(const RouterParams& p, cudaStream_t stream) {
  const bool estimated = !p.has_maps && p.experts > 4 * kWarp && SigmoidEstimates<kOwned>::Fits(p);
  return estimated ? LaunchEstimated<T, kOwned>(p, stream) : LaunchWarp<T, kOwned, RouterKind::kSigmoid>(p, stream);
}

template <typename T, RouterKind kKind>
cudaError_t LaunchLanes(const RouterParams& p, cudaStream_t stream) {
  constexpr int kRowsPerWarp = kWarp / kChunk;
  if (p.has_maps) {
    return LaunchWithMaps<FusedRouterLaneKernel<T, kKind, true>>(p, kMaxLaneWarpsPerBlock, kRowsPerWarp, 0, stream);
  }
  const int warps = p.rows <= kManyRows ? 1 : kMaxLaneWarpsPerBlock;
  return Launch<FusedRouterLaneKernel<T, kKind, false>>(Grid(p.rows, warps * kRowsPerWarp), warps * kWarp, 0, stream,
                                                        p);
}

template <typename T, RouterKind kKind>
cudaError_t LaunchBlock(const RouterParams& p, cudaStream_t stream) {
  const size_t shared_bytes = BlockRow<T, kKind>::SharedBytes(p);
  return Launch<FusedRouterBlockKernel<T, kKind>>(Grid(p.rows, 1), kBlock, shared_bytes, stream, p);
}

template <typename T, int kLanes>
cudaError_t LaunchPacked(const RouterParams& p, cudaStream_t stream) {
  constexpr int64_t kRows = kPackedWarpsPerBlock * PackedRow<T, kLanes>::kRowsPerWarp;
  return Launch<FusedRouterPackedKernel<T, kLanes>>(Grid(p.rows, kRows), kPackedWarpsPerBlock * kWarp, 0, stream, p);
}

template <typename T>
cudaError_t LaunchSoftmaxOfChosen(const RouterParams& p, cudaStream_t stream) {
  constexpr RouterKind kKind = RouterKind::kSoftmaxOfChosen;
  if constexpr (sizeof(Bits<T>) == sizeof(uint16_t)) {
    if (!p.has_maps && p.experts > kChunk) {
      if (p.rows > kSpreadRows && PackedRow<T, 4>::Fits(p)) return LaunchPacked<T, 4>(p, stream);
      if (PackedRow<T, 8>::Fits(p)) return LaunchPacked<T, 8>(p, stream);
      if (PackedRow<T, 16>::Fits(p)) return LaunchPacked<T, 16>(p, stream);
      if (PackedRow<T, kWarp>::Fits(p)) return LaunchPacked<T, kWarp>(p, stream);
    }
  }
  if (p.experts > kMaxWarpExperts || p.k > kMaxWarpChosen) return LaunchBlock<T, kKind>(p, stream);
  if (p.experts <= kChunk) return LaunchLanes<T, kKind>(p, stream);
  if (p.experts <= 2 * kWarp) return LaunchWarp<T, 2, kKind>(p, stream);
  if (p.experts <= 4 * kWarp) return LaunchWarp<T, 4, kKind>(p, stream);
  if (p.experts <= 8 * kWarp) return LaunchWarp<T, 8, kKind>(p, stream);
  if (p.experts <= 16 * kWarp) return LaunchWarp<T, 16, kKind>(p, stream);
  return LaunchWarp<T, 32, kKind>(p, stream);
}

template <typename T>
cudaError_t LaunchOfType(const RouterParams& p, cudaStream_t stream) {
  if (IsSoftmaxOfChosen(p)) return LaunchSoftmaxOfChosen<T>(p, stream);
  constexpr RouterKind kAny = RouterKind::kAny;
  if (p.experts > kMaxWarpExperts || p.k > kMaxWarpChosen) return LaunchBlock<T, kAny>(p, stream);
  if (p.experts <= kChunk && !p.grouped && p.score != Score::kSparseMixer) return LaunchLanes<T, kAny>(p, stream);
  const bool sigmoid = IsSigmoid(p);
  if (p.experts <= 8 * kWarp) return sigmoid ? LaunchSigmoid<T, 8>(p, stream) : LaunchWarp<T, 8, kAny>(p, stream);
  if (p.experts <= 16 * kWarp) {
    return sigmoid ? LaunchSigmoid<T, 16>(p, stream) : LaunchWarp<T, 16, kAny>(p, stream);
  }
  return LaunchWarp<T, 32, kAny>(p, stream);
}

cudaError_t LaunchOfDType(DType dtype, const RouterParams& p, cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat32:
      return LaunchOfType<float>(p, stream);
    case DType::kFloat16:
      return LaunchOfType<Float16>(p, stream);
    case DType::kBFloat16:
      return LaunchOfType<BFloat16>(p, stream);
  }
  return cudaErrorInvalidValue;
}

MapsParams MakeMapsParams(const RouterConfig& config, const RouterArgs& args) {
  MapsParams p{};
  p.maps = args.maps;
  p.experts = static_cast<int32_t>(args.experts);
  p.choices = static_cast<int32_t>(args.rows * config.k);
  p.bits = static_cast<int32_t>(args.rows);
  return p;
}

// Whether the router's own launch builds the maps; also on what its kernels for few rows take.
bool FusesMaps(const RouterConfig& config, const RouterArgs& args) {
  return args.maps && IsSwitchedOn(Switch::kFusedRoute) && args.experts <= kMaxWarpExperts &&
         config.k <= kMaxWarpChosen && args.rows * config.k <= kMaxListedChoices &&
         MakeMapsParams(config, args).SharedBytes() <= kMaxMapBytes;
}

}  // namespace

size_t RouterScratchBytes(const RouterConfig& config, const RouterArgs& args) {
  if (!args.maps || args.rows == 0 || FusesMaps(config, args)) return 0;
  return RoutingMapsScratchBytes(args.rows, config.k, args.experts);
}

cudaError_t LaunchFusedRouter(const RouterConfig& config, const RouterArgs& args, cudaStream_t stream) {
  const auto build_maps = [&] {
    return LaunchRoutingMaps(args.indices, args.rows, config.k, args.experts, args.maps, args.scratch, stream);
  };
  if (args.rows == 0) return args.maps ? build_maps() : cudaSuccess;
  constexpr int64_t kMaxSortable = 1 << 20;  // keeps 32-bit arithmetic safe; shared memory ends far below
  if (args.rows < 0 || args.experts > kMaxSortable) return cudaErrorInvalidValue;
  RouterParams p = MakeRouterParams(config, args);
  p.has_maps = FusesMaps(config, args);
  if (p.has_maps) p.maps = MakeMapsParams(config, args);
  const cudaError_t error = LaunchOfDType(args.dtype, p, stream);
  return error == cudaSuccess && args.maps && !p.has_maps ? build_maps() : error;
}

}  // namespace ort_moe
