// SharedGateRouter on CUDA: a router's K columns and the gates of its S shared experts, in one launch.
//
// Mapping: every other block routes rows, as FusedRouter has it, a warp to a row (fused_router_warp.cuh); the blocks
// between them take gates, a warp to a row and one or two of its gates (shared_gate.cuh). So both kinds run side by
// side on every multiprocessor: routing waits for instructions, gates for memory. More than 512 experts, or k beyond
// 32, have the gates in a launch of their own, and FusedRouter's behind it; that is no other arithmetic.
// Bytes: rows * (E + H) * sizeof(logit), each once, and 8 * (K + S) a row; gate weights stay in the caches.
// Bound by: latency up to some hundred rows, as a router is; then by memory, for the hidden rows are most of the bytes.
// Why so: two launches would cost a launch, and then the time of the shorter one; routing and gates of a row by one
// warp would have one wait for the other.
#include "kernels/router/shared_gate_router.h"

#include <algorithm>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/router/fused_router_params.cuh"
#include "kernels/router/fused_router_warp.cuh"
#include "kernels/router/shared_gate.cuh"

namespace ort_moe {
namespace {

constexpr int64_t kMaxBlocks = 1 << 20;  // of a kind; they walk over the rows beyond
constexpr int64_t kManyWarps = 512;      // with fewer, a warp to a block spreads them over all multiprocessors
constexpr int64_t kManyGates = 4096;     // a warp takes several of a row: beyond, the bytes of the rows count
constexpr int32_t kOneLaunchExperts = 512;

uint32_t Blocks(int64_t warps, int warps_per_block) {
  return static_cast<uint32_t>(std::min((warps + warps_per_block - 1) / warps_per_block, kMaxBlocks));
}

template <typename T, int kOwned, RouterKind kKind>
__global__ void __launch_bounds__(kMaxWarpsPerBlock* kWarp)
    SharedGateRouterKernel(const __grid_constant__ RouterParams p, const __grid_constant__ GateParams g) {
  using Router = WarpRow<T, kOwned, kKind>;
  extern __shared__ __align__(16) unsigned char shared[];
  // Gates and rows in turn, for as long as there are both.
  const uint32_t pairs = min(g.blocks, g.route_blocks);
  const bool paired = blockIdx.x < 2 * pairs;
  const uint32_t block = paired ? blockIdx.x / 2 : blockIdx.x - pairs;
  if (paired ? blockIdx.x % 2 == 0 : g.blocks > pairs) return TakeGates<T>(g, block);
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  int64_t row = static_cast<int64_t>(block) * warps + warp;
  Router router(p, shared + warp * Router::SharedBytes(p), row);
  WaitForPrevious();
  AllowNext();
  while (row < p.rows) {
    router.Route(row, [](const Choice&) {});
    row += static_cast<int64_t>(g.route_blocks) * warps;
    router.PointTo(row);
  }
}

template <typename T>
__global__ void __launch_bounds__(kMaxWarpsPerBlock* kWarp) SharedGatesKernel(const __grid_constant__ GateParams g) {
  TakeGates<T>(g, blockIdx.x);
}

template <typename T, int kOwned, RouterKind kKind>
cudaError_t LaunchOnce(const RouterParams& p, GateParams g, cudaStream_t stream) {
  const int warps = std::max(g.warps(), p.rows) < kManyWarps ? 1 : kMaxWarpsPerBlock;
  g.blocks = Blocks(g.warps(), warps);
  g.route_blocks = Blocks(p.rows, warps);
  const size_t shared_bytes = warps * WarpRow<T, kOwned, kKind>::SharedBytes(p);
  return Launch<SharedGateRouterKernel<T, kOwned, kKind>>(g.blocks + g.route_blocks, warps * kWarp, shared_bytes,
                                                          stream, p, g);
}

template <typename T>
cudaError_t LaunchOnce(const RouterParams& p, const GateParams& g, cudaStream_t stream) {
  constexpr RouterKind kAny = RouterKind::kAny, kSoftmax = RouterKind::kSoftmaxOfChosen;
  if (IsSoftmaxOfChosen(p)) {
    return p.experts <= 8 * kWarp ? LaunchOnce<T, 8, kSoftmax>(p, g, stream)
                                  : LaunchOnce<T, 16, kSoftmax>(p, g, stream);
  }
  return p.experts <= 8 * kWarp ? LaunchOnce<T, 8, kAny>(p, g, stream) : LaunchOnce<T, 16, kAny>(p, g, stream);
}

template <typename T>
cudaError_t LaunchGates(GateParams g, cudaStream_t stream) {
  const int warps = g.warps() < kManyWarps ? 1 : kMaxWarpsPerBlock;
  g.blocks = Blocks(g.warps(), warps);
  return Launch<SharedGatesKernel<T>>(g.blocks, warps * kWarp, 0, stream, g);
}

template <typename T>
cudaError_t LaunchOfType(const RouterConfig& config, const RouterArgs& router, GateParams g, cudaStream_t stream) {
  constexpr int64_t kVector = sizeof(uint4) / sizeof(Bits<T>);
  static_assert(kChunk % kVector == 0);
  const uintptr_t addresses =
      reinterpret_cast<uintptr_t>(g.gates.hidden) | reinterpret_cast<uintptr_t>(g.gates.gate_weight);
  g.vector_loads = g.gates.size % kChunk == 0 && addresses % sizeof(uint4) == 0;
  if (router.experts <= kOneLaunchExperts && config.k <= kMaxWarpChosen) {
    return LaunchOnce<T>(MakeRouterParams(config, router), g, stream);
  }
  if (cudaError_t error = LaunchGates<T>(g, stream); error != cudaSuccess) return error;
  RouterArgs without_maps = router;
  without_maps.maps = RoutingMaps{};
  return LaunchFusedRouter(config, without_maps, stream);
}

cudaError_t LaunchOfDType(const RouterConfig& config, const RouterArgs& router, const GateParams& g,
                          cudaStream_t stream) {
  switch (router.dtype) {
    case DType::kFloat32:
      return LaunchOfType<float>(config, router, g, stream);
    case DType::kFloat16:
      return LaunchOfType<Float16>(config, router, g, stream);
    case DType::kBFloat16:
      return LaunchOfType<BFloat16>(config, router, g, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

size_t SharedGateRouterScratchBytes(const RouterConfig& config, const RouterArgs& router, const SharedGates& gates) {
  if (!router.maps || router.rows == 0) return 0;
  return RoutingMapsScratchBytes(router.rows, config.k + gates.count, router.experts + gates.count);
}

cudaError_t LaunchSharedGateRouter(const RouterConfig& config, const RouterArgs& router, const SharedGates& gates,
                                   cudaStream_t stream) {
  if (router.rows < 0) return cudaErrorInvalidValue;
  if (router.rows > 0) {
    GateParams g{};
    g.gates = gates;
    g.weights = router.weights + config.k;
    g.indices = router.indices + config.k;
    g.rows = router.rows;
    g.columns = static_cast<int32_t>(config.k + gates.count);
    g.several_a_warp = gates.count >= kGatesAtOnce && router.rows * gates.count >= kManyGates;
    if (cudaError_t error = LaunchOfDType(config, router, g, stream); error != cudaSuccess) return error;
  }
  if (!router.maps) return cudaSuccess;
  return LaunchRoutingMaps(router.indices, router.rows, config.k + gates.count, router.experts + gates.count,
                           router.maps, router.scratch, stream);
}

}  // namespace ort_moe
