// FusedExperts on CUDA: FC1 with its activation, then FC2 with finalize taken in, or FC2 and FinalizeRouting.
//
//   few     at most 128 slots (tokens * k), if they fit into shared memory: FC1 (fused_experts_grouped.cuh) and FC2 with
//           finalize (fused_experts_fc2.cuh), two launches; tokens of an expert are found in the indices
//   many    FC1, FC2 (both grouped) and FinalizeRouting, with the maps, which are built first where none are given
//   plain   float32, and what does not fit 16-byte loads (fused_experts_plain.cuh)
// The order of every sum comes from the layer's depth alone, so few and many give the same bits.
//
// ORT_MOE_FC1_PDL=0 in the environment launches FC1 plainly, after the router has ended; ORT_MOE_PDL=0 does so with all
// kernels.
#include <algorithm>
#include <cstdint>

#include "kernels/finalize_routing.h"
#include "kernels/fused_experts.h"
#include "kernels/fused_experts_fc2.cuh"
#include "kernels/fused_experts_grouped.cuh"
#include "kernels/fused_experts_plain.cuh"
#include "kernels/launch.cuh"

namespace ort_moe {
namespace {

constexpr int kAlignment = 32;                 // elements that H and I must divide by for the fast kernels
constexpr int64_t kPrefetchBytes = 24 << 20;   // of FC2's weights, ahead of its wait: what an L2 holds besides
constexpr int64_t kMaxGridY = 65535;
constexpr size_t kScratchAlignment = 256;

size_t Aligned(size_t bytes) { return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment; }

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class Path { kFew, kMany, kPlain };

// How a call is computed: from shapes and attributes alone.
struct Plan {
  Path path = Path::kPlain;
  int chunk = 1;
  int fc1_slices = 1, fc2_slices = 1;
  int64_t activated_stride = 0;  // elements
};

template <typename Format>
Plan PlanOf(const ExpertsConfig& config, const ExpertsArgs& args, size_t shared_limit) {
  constexpr int64_t kFc1Batch = WarpTile<Format, 2>::kBatch, kFc2Batch = WarpTile<Format, 1>::kBatch;
  Plan plan;
  const int64_t fc1_steps = CeilDiv(args.hidden, Format::kStep), fc2_steps = CeilDiv(args.inner, Format::kStep);
  plan.fc1_slices = static_cast<int>(std::clamp<int64_t>(CeilDiv(fc1_steps, kFc1Batch), 1, kMaxGroupedWarps));
  plan.fc2_slices = static_cast<int>(std::clamp<int64_t>(CeilDiv(fc2_steps, kFc2Batch), 1, kMaxGroupedWarps));
  plan.activated_stride = fc2_steps * Format::kStep;
  LayerParams fc1{}, fc2{};
  fc1.depth = static_cast<int32_t>(args.hidden), fc1.slices = plan.fc1_slices;
  fc2.depth = static_cast<int32_t>(args.inner), fc2.slices = plan.fc2_slices;
  for (plan.chunk = static_cast<int>(std::clamp<int64_t>(args.tokens, 1, kMaxChunk)); plan.chunk > 0; plan.chunk /= 2) {
    if (GroupedShared<Format>::Bytes(fc1, plan.chunk) <= shared_limit &&
        GroupedShared<Format>::Bytes(fc2, plan.chunk) <= shared_limit) {
      break;
    }
  }
  if (plan.chunk == 0) return Plan{Path::kPlain, 1, 1, 1, args.inner};
  const int64_t slots = args.tokens * args.k;
  const bool few =
      slots <= kMaxDirectSlots && Fc2Shared<Format>::Bytes(fc2, static_cast<int>(slots)) <= shared_limit;
  plan.path = few ? Path::kFew : Path::kMany;
  return plan;
}

Plan MakePlan(const ExpertsConfig& config, const ExpertsArgs& args) {
  Plan plain{Path::kPlain, 1, 1, 1, args.inner};
  if (args.dtype == DType::kFloat32 || args.hidden % kAlignment != 0 || args.inner % kAlignment != 0) return plain;
  int device = 0, shared_limit = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    return plain;
  }
  return config.weight_format == WeightFormat::kNvfp4
             ? PlanOf<Nvfp4Format<__half>>(config, args, static_cast<size_t>(shared_limit))
             : PlanOf<DenseFormat<__half>>(config, args, static_cast<size_t>(shared_limit));
}

// Parts of the scratch, in order.
struct Scratch {
  size_t activated, output, maps[4], maps_scratch, end;
};

Scratch LayOut(const ExpertsArgs& args, const Plan& plan) {
  const size_t slots = static_cast<size_t>(args.tokens * args.k), element = SizeOf(args.dtype);
  const bool many = plan.path == Path::kMany;
  const bool builds = many && !args.maps;
  Scratch s{};
  s.output = s.activated + Aligned(slots * plan.activated_stride * element);
  s.maps[0] = s.output + (many ? Aligned(slots * args.hidden * element) : 0);
  s.maps[1] = s.maps[0] + (builds ? Aligned(slots * sizeof(int32_t)) : 0);
  s.maps[2] = s.maps[1] + (builds ? Aligned(slots * sizeof(int32_t)) : 0);
  s.maps[3] = s.maps[2] + (builds ? Aligned(slots * sizeof(int32_t)) : 0);
  s.maps_scratch = s.maps[3] + (builds ? Aligned((args.experts + 1) * sizeof(int64_t)) : 0);
  s.end = s.maps_scratch + (builds ? Aligned(RoutingMapsScratchBytes(args.tokens, args.k, args.experts)) : 0);
  return s;
}

LayerParams MakeLayer(const ExpertLayer& layer, int64_t rows, int64_t depth, int slices) {
  LayerParams p{};
  p.weights = static_cast<const uint8_t*>(layer.weights);
  p.scales = static_cast<const uint8_t*>(layer.scales);
  p.global_scale = layer.global_scale;
  p.bias = layer.bias;
  p.rows = static_cast<int32_t>(rows);
  p.depth = static_cast<int32_t>(depth);
  p.slices = slices;
  return p;
}

ExpertsParams MakeParams(const ExpertsConfig& config, const ExpertsArgs& args, const Plan& plan) {
  ExpertsParams p{};
  p.x = args.x;
  p.mix = args.weights;
  p.indices = args.indices;
  p.maps = args.maps;
  p.fc1 = MakeLayer(args.fc1, config.fc1_rows(args.inner), args.hidden, plan.fc1_slices);
  p.fc2 = MakeLayer(args.fc2, args.hidden, args.inner, plan.fc2_slices);
  p.residual = args.residual;
  p.y = args.y;
  const Scratch scratch = LayOut(args, plan);
  char* const base = static_cast<char*>(args.scratch);
  p.activated = base + scratch.activated;
  p.output = base + scratch.output;
  if (plan.path == Path::kMany && !args.maps) {
    p.maps.permuted_to_unpermuted = reinterpret_cast<int32_t*>(base + scratch.maps[0]);
    p.maps.unpermuted_to_permuted = reinterpret_cast<int32_t*>(base + scratch.maps[1]);
    p.maps.permuted_to_expert = reinterpret_cast<int32_t*>(base + scratch.maps[2]);
    p.maps.expert_first_token_offset = reinterpret_cast<int64_t*>(base + scratch.maps[3]);
  }
  p.tokens = static_cast<int32_t>(args.tokens);
  p.k = static_cast<int32_t>(args.k);
  p.slots = p.tokens * p.k;
  p.experts = static_cast<int32_t>(args.experts);
  p.activated_stride = static_cast<int32_t>(plan.activated_stride);
  p.chunk = plan.chunk;
  p.by_expert = p.slots > 2 * args.experts || p.slots > kMaxGridY;
  p.activation = config.activation;
  p.gated = config.gated;
  p.interleaved = config.gate_layout == GateLayout::kInterleaved;
  p.mix_input = config.weight_on == WeightOn::kInput;
  p.alpha = config.alpha;
  p.beta = config.beta;
  p.limit = config.limit;
  return p;
}

template <typename Format, bool kFirst, bool kMaps>
cudaError_t LaunchGrouped(const ExpertsParams& p, cudaStream_t stream) {
  const LayerParams& layer = kFirst ? p.fc1 : p.fc2;
  const int64_t tiles = kFirst && p.gated ? layer.rows / (2 * kTileRows) : CeilDiv(layer.rows, 2 * kTileRows);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(kMaps && p.by_expert ? p.experts : p.slots));
  const size_t shared_bytes = GroupedShared<Format>::Bytes(layer, p.chunk);
  const Switch overlap = kFirst ? Switch::kFc1Pdl : Switch::kPdl;
  return LaunchClusters<GroupedKernel<Format, kFirst, kMaps>>(overlap, 1, grid, dim3(layer.slices * kLanes), shared_bytes,
                                                              stream, p);
}

template <typename Format>
cudaError_t LaunchFew(ExpertsParams p, cudaStream_t stream) {
  if (cudaError_t error = LaunchGrouped<Format, true, false>(p, stream); error != cudaSuccess) return error;
  p.prefetched_items = static_cast<int32_t>(kPrefetchBytes / (p.fc2.rows * Format::RowBytes(p.fc2.depth)));
  const int64_t units = int64_t{p.slots} * p.fc2.slices;
  const int64_t warps = CeilDiv(units, CeilDiv(units, kMaxFc2Warps));
  return Launch<Fc2FinalizeKernel<Format>>(dim3(p.fc2.rows / kTileRows), dim3(static_cast<unsigned>(warps * kLanes)),
                                           Fc2Shared<Format>::Bytes(p.fc2, p.slots), stream, p);
}

template <typename Format>
cudaError_t LaunchMany(const ExpertsArgs& args, const Plan& plan, const ExpertsParams& p, cudaStream_t stream) {
  if (!args.maps) {
    void* const scratch = static_cast<char*>(args.scratch) + LayOut(args, plan).maps_scratch;
    if (cudaError_t error =
            LaunchRoutingMaps(args.indices, args.tokens, args.k, args.experts, p.maps, scratch, stream);
        error != cudaSuccess) {
      return error;
    }
  }
  if (cudaError_t error = LaunchGrouped<Format, true, true>(p, stream); error != cudaSuccess) return error;
  if (cudaError_t error = LaunchGrouped<Format, false, true>(p, stream); error != cudaSuccess) return error;
  FinalizeArgs finalize{};
  finalize.expert_output = p.output;
  finalize.weights = args.weights;
  finalize.indices = args.indices;
  finalize.unpermuted_to_permuted = p.maps.unpermuted_to_permuted;
  finalize.residual = args.residual;
  finalize.y = args.y;
  finalize.dtype = args.dtype;
  finalize.tokens = args.tokens;
  finalize.hidden = args.hidden;
  finalize.k = p.k;
  finalize.experts = p.experts;
  return LaunchFinalizeRouting(finalize, /*routing_settled=*/true, stream);
}

template <typename T, bool kNvfp4>
cudaError_t LaunchPlain(const ExpertsParams& p, cudaStream_t stream) {
  const dim3 block(kPlainWarps * kLanes);
  const dim3 fc1_grid(static_cast<unsigned>(CeilDiv(p.fc2.depth, kPlainWarps)),
                      static_cast<unsigned>(std::min<int64_t>(p.slots, kMaxGridY)));
  if (cudaError_t error = LaunchClusters<PlainFc1Kernel<T, kNvfp4>>(Switch::kFc1Pdl, 1, fc1_grid, block, 0, stream, p);
      error != cudaSuccess) {
    return error;
  }
  const dim3 fc2_grid(static_cast<unsigned>(CeilDiv(p.fc2.rows, kPlainWarps)),
                      static_cast<unsigned>(std::min<int64_t>(p.tokens, kMaxGridY)));
  return Launch<PlainFc2Kernel<T, kNvfp4>>(fc2_grid, block, 0, stream, p);
}

bool IsAligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % sizeof(uint4) == 0; }

template <typename T, template <typename> class Format>
cudaError_t LaunchOfFormat(const ExpertsArgs& args, Plan plan, ExpertsParams p, cudaStream_t stream) {
  constexpr bool kNvfp4 = Format<__half>::kScaled;
  if constexpr (!std::is_same_v<T, float>) {
    const bool aligned = IsAligned(args.x) && IsAligned(args.fc1.weights) && IsAligned(args.fc1.scales) &&
                         IsAligned(args.fc2.weights) && IsAligned(args.fc2.scales);
    if (plan.path == Path::kFew && aligned) return LaunchFew<Format<T>>(p, stream);
    if (plan.path == Path::kMany && aligned) return LaunchMany<Format<T>>(args, plan, p, stream);
  }
  return LaunchPlain<T, kNvfp4>(p, stream);
}

template <typename T>
cudaError_t LaunchOfType(const ExpertsConfig& config, const ExpertsArgs& args, cudaStream_t stream) {
  const Plan plan = MakePlan(config, args);
  const ExpertsParams p = MakeParams(config, args, plan);
  return config.weight_format == WeightFormat::kNvfp4 ? LaunchOfFormat<T, Nvfp4Format>(args, plan, p, stream)
                                                      : LaunchOfFormat<T, DenseFormat>(args, plan, p, stream);
}

}  // namespace

size_t ExpertsScratchBytes(const ExpertsConfig& config, const ExpertsArgs& args) {
  return LayOut(args, MakePlan(config, args)).end;
}

cudaError_t LaunchFusedExperts(const ExpertsConfig& config, const ExpertsArgs& args, cudaStream_t stream) {
  if (args.tokens == 0 || args.hidden == 0) return cudaSuccess;
  switch (args.dtype) {
    case DType::kFloat32:
      return LaunchOfType<float>(config, args, stream);
    case DType::kFloat16:
      return LaunchOfType<__half>(config, args, stream);
    case DType::kBFloat16:
      return LaunchOfType<__nv_bfloat16>(config, args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ort_moe
