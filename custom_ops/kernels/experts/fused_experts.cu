// FusedExperts on CUDA: FC1 with its activation, then FC2 with finalize taken in, or FC2 and FinalizeRouting.
//
//   few     few slots (tokens * k; IsFew), if they fit into shared memory, in every format: FC1, and FC2 with finalize
//           (few/few.cu), two launches; tokens of an expert are found in the indices
//   gemm    on Hopper the rest, in every format and for any number of tokens: FC1, FC2 (both gemm/gemm.cu, or
//           gemm/sparse.cu where experts have few rows each) and FinalizeRouting, with the maps, which are built first
//           where none are given
//   many    dense and nvfp4 that go neither way: the same with FC1 and FC2 of grouped.cuh
//   plain   what is left: float32, the other formats of many tokens elsewhere, and what does not fit 16-byte loads
//           (plain.cuh)
// The order of every sum comes from the layer's depth and the way alone, so a token's bits do not depend on the others
// that go the same way; few and many give the same.
//
// ORT_MOE_FC1_PDL=0 in the environment launches FC1 plainly, after the router has ended; ORT_MOE_PDL=0 does so with all
// kernels. ORT_MOE_FEW_CHOICES chooses between few and gemm.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/common/launch.cuh"
#include "kernels/common/switches.h"
#include "kernels/experts/few/few.h"
#include "kernels/experts/fused_experts.h"
#include "kernels/experts/gemm/gemm.h"
#include "kernels/experts/grouped.cuh"
#include "kernels/experts/plain.cuh"
#include "kernels/finalize/finalize_routing.h"

namespace ort_moe {
namespace {

constexpr int64_t kMaxGridY = 65535;
constexpr size_t kScratchAlignment = 256;

size_t Aligned(size_t bytes) { return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment; }

enum class Path { kFew, kMany, kGemm, kPlain };

bool NeedsMaps(Path path) { return path == Path::kMany || path == Path::kGemm; }

// How a call is computed: from shapes, attributes and the device alone.
struct Plan : LayersPlan {
  Path path = Path::kPlain;
};

Plan PlainPlan(const ExpertsArgs& args) {
  Plan plan;
  plan.fc1.depth = static_cast<int32_t>(args.hidden);
  plan.fc2.depth = static_cast<int32_t>(args.inner);
  plan.activated_stride = args.inner;
  return plan;
}

template <typename Format>
Plan ManyPlan(const ExpertsArgs& args, size_t shared_limit) {
  Plan plan;
  plan.activated_stride = CeilDiv(args.inner, Format::kStep) * Format::kStep;
  CutInSlices<Format>(&plan.fc1, args.hidden);
  CutInSlices<Format>(&plan.fc2, args.inner);
  for (plan.chunk = kMaxChunk; plan.chunk > 0; plan.chunk /= 2) {
    if (GroupedShared<Format>::Bytes(plan.fc1, plan.chunk) <= shared_limit &&
        GroupedShared<Format>::Bytes(plan.fc2, plan.chunk) <= shared_limit) {
      plan.path = Path::kMany;
      return plan;
    }
  }
  return PlainPlan(args);
}

Plan GemmPlan(const ExpertsArgs& args) {
  Plan plan = PlainPlan(args);
  plan.path = Path::kGemm;
  plan.activated_stride = CeilDiv(args.inner, kGemmRowElements) * kGemmRowElements;
  return plan;
}

bool IsEmpty(const ExpertsArgs& args) { return args.hidden < 1 || args.inner < 1 || args.k < 1; }

// Where the kernels for few tokens are faster than the grouped product. Tokens of few experts soon meet, and only the
// grouped product decodes a weight once for all of them.
struct FewLimits {
  int64_t slots, slots_by_four_experts;
};

// As measured on an H200 (python -m benchmarks.expert_crossings; benchmarks/results/expert_crossings.json, from before
// products of two tokens had code of their own).
FewLimits LimitsOfFew(WeightFormat format) {
  switch (format) {
    case WeightFormat::kNvfp4:
      return {60, 5};
    case WeightFormat::kMxfp4:
      return {72, 6};
    case WeightFormat::kInt4:
      return {80, 6};
    case WeightFormat::kInt8:
      return {80, 8};
    case WeightFormat::kFp8:
      return {40, 4};
    case WeightFormat::kDense:
      break;
  }
  return {64, 8};
}

bool IsFew(WeightFormat format, const ExpertsArgs& args) {
  const int64_t slots = args.tokens * args.k;
  if (FewChoices() >= 0) return slots <= FewChoices();
  const FewLimits limits = LimitsOfFew(format);
  return slots <= limits.slots && 4 * slots <= limits.slots_by_four_experts * args.experts;
}

// Whether the kernels for many tokens take the call.
bool HasMany(const ExpertsConfig& config, const ExpertsArgs& args) {
  const bool known = config.weight_format == WeightFormat::kDense || config.weight_format == WeightFormat::kNvfp4;
  const int64_t multiple = WidthMultiple(config.weight_format);
  return known && args.dtype != DType::kFloat32 && args.hidden % multiple == 0 && args.inner % multiple == 0 &&
         args.experts <= kMaxGridY && FitsOffsets(config, args);
}

Plan MakePlan(const ExpertsConfig& config, const ExpertsArgs& args) {
  if (IsEmpty(args)) return PlainPlan(args);
  int device = 0, processors = 0, shared_limit = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    return PlainPlan(args);
  }
  const size_t limit = static_cast<size_t>(shared_limit);
  const bool many = HasMany(config, args), dense = config.weight_format == WeightFormat::kDense;
  const bool gemm = HasExpertsGemm(config, args);
  Plan plan;
  if ((!gemm || IsFew(config.weight_format, args)) && PlanFew(config, args, processors, limit, &plan)) {
    plan.path = Path::kFew;
    return plan;
  }
  if (gemm) return GemmPlan(args);
  if (!many) return PlainPlan(args);
  if (dense) return ManyPlan<DenseFormat<__half>>(args, limit);
  return args.dtype == DType::kBFloat16 ? ManyPlan<Nvfp4Format<__nv_bfloat16>>(args, limit)
                                        : ManyPlan<Nvfp4Format<__half>>(args, limit);
}

// Parts of the scratch, in order.
struct Scratch {
  size_t activated, output, ones, prepared, maps[4], maps_scratch, end;
};

Scratch LayOut(const ExpertsConfig& config, const ExpertsArgs& args, const Plan& plan) {
  const size_t slots = static_cast<size_t>(args.tokens * args.k), element = SizeOf(args.dtype);
  const bool many = NeedsMaps(plan.path);
  const bool builds = many && !args.maps;
  Scratch s{};
  s.output = s.activated + Aligned(slots * plan.activated_stride * element);
  s.ones = s.output + (many ? Aligned(slots * args.hidden * element) : 0);
  s.prepared = s.ones + (many && config.weight_on == WeightOn::kInput ? Aligned(slots * sizeof(float)) : 0);
  s.maps[0] = s.prepared + (plan.path == Path::kGemm ? Aligned(PreparedBytes(config, args)) : 0);
  s.maps[1] = s.maps[0] + (builds ? Aligned(slots * sizeof(int32_t)) : 0);
  s.maps[2] = s.maps[1] + (builds ? Aligned(slots * sizeof(int32_t)) : 0);
  s.maps[3] = s.maps[2] + (builds ? Aligned(slots * sizeof(int32_t)) : 0);
  s.maps_scratch = s.maps[3] + (builds ? Aligned((args.experts + 1) * sizeof(int64_t)) : 0);
  s.end = s.maps_scratch + (builds ? Aligned(RoutingMapsScratchBytes(args.tokens, args.k, args.experts)) : 0);
  return s;
}

LayerParams MakeLayer(LayerParams p, const ExpertsConfig& config, const ExpertLayer& layer, int64_t rows) {
  p.weights = static_cast<const uint8_t*>(layer.weights);
  p.scales = static_cast<const uint8_t*>(layer.scales);
  p.global_scale = layer.global_scale;
  p.zero_points = static_cast<const uint8_t*>(layer.zero_points);
  p.block_size = static_cast<int32_t>(config.scale_block());
  p.bias = layer.bias;
  p.rows = static_cast<int32_t>(rows);
  return p;
}

ExpertsParams MakeParams(const ExpertsConfig& config, const ExpertsArgs& args, const Plan& plan) {
  ExpertsParams p{};
  p.x = args.x;
  p.mix = args.weights;
  p.indices = args.indices;
  p.maps = args.maps;
  p.fc1 = MakeLayer(plan.fc1, config, args.fc1, config.fc1_rows(args.inner));
  p.fc2 = MakeLayer(plan.fc2, config, args.fc2, args.hidden);
  p.residual = args.residual;
  p.y = args.y;
  const Scratch scratch = LayOut(config, args, plan);
  char* const base = static_cast<char*>(args.scratch);
  p.activated = base + scratch.activated;
  p.output = base + scratch.output;
  if (NeedsMaps(plan.path) && config.weight_on == WeightOn::kInput) {
    p.ones = reinterpret_cast<float*>(base + scratch.ones);
  }
  if (NeedsMaps(plan.path) && !args.maps) {
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
  p.weight_format = config.weight_format;
  p.activation = config.activation;
  p.gated = config.gated;
  p.interleaved = config.gate_layout == GateLayout::kInterleaved;
  p.mix_input = config.weight_on == WeightOn::kInput;
  p.alpha = config.alpha;
  p.beta = config.beta;
  p.limit = config.limit;
  return p;
}

template <typename Format, bool kFirst>
cudaError_t LaunchGrouped(const ExpertsParams& p, cudaStream_t stream) {
  const LayerParams& layer = kFirst ? p.fc1 : p.fc2;
  const int columns = kSets * (kFirst && p.gated ? kTileRows : kSetRows);  // of a block's results
  const int tiles = (kFirst && p.gated ? layer.rows / 2 : layer.rows) / columns;
  const dim3 grid(tiles, p.by_expert ? p.experts : p.slots);
  return LaunchClusters<GroupedKernel<Format, kFirst>>(kFirst ? Switch::kFc1Pdl : Switch::kPdl, 1, grid,
                                                       kSets * layer.slices * kLanes,
                                                       GroupedShared<Format>::Bytes(layer, p.chunk), stream, p);
}

template <typename Format>
cudaError_t LaunchMany(const ExpertsConfig& config, const ExpertsArgs& args, const Plan& plan, const ExpertsParams& p,
                       cudaStream_t stream) {
  if (!args.maps) {
    void* const scratch = static_cast<char*>(args.scratch) + LayOut(config, args, plan).maps_scratch;
    if (cudaError_t error = LaunchRoutingMaps(args.indices, args.tokens, args.k, args.experts, p.maps, scratch, stream);
        error != cudaSuccess) {
      return error;
    }
  }
  cudaError_t error = cudaSuccess;
  if (plan.path == Path::kGemm) {
    void* const prepared = static_cast<char*>(args.scratch) + LayOut(config, args, plan).prepared;
    error = LaunchExpertsGemm(args.dtype, p, prepared, stream);
  } else {
    error = LaunchGrouped<Format, true>(p, stream);
    if (error == cudaSuccess) error = LaunchGrouped<Format, false>(p, stream);
  }
  if (error != cudaSuccess) return error;
  FinalizeArgs finalize{};
  finalize.expert_output = p.output;
  finalize.weights = p.ones == nullptr ? args.weights : p.ones;
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

template <typename T>
cudaError_t LaunchPlain(const ExpertsParams& p, cudaStream_t stream) {
  const dim3 block(kPlainWarps * kLanes);
  const dim3 fc1_grid(static_cast<unsigned>(CeilDiv(p.fc2.depth, kPlainWarps)),
                      static_cast<unsigned>(std::min<int64_t>(p.slots, kMaxGridY)));
  if (cudaError_t error = LaunchClusters<PlainFc1Kernel<T>>(Switch::kFc1Pdl, 1, fc1_grid, block, 0, stream, p);
      error != cudaSuccess) {
    return error;
  }
  const dim3 fc2_grid(static_cast<unsigned>(CeilDiv(p.fc2.rows, kPlainWarps)),
                      static_cast<unsigned>(std::min<int64_t>(p.tokens, kMaxGridY)));
  return Launch<PlainFc2Kernel<T>>(fc2_grid, block, 0, stream, p);
}

bool IsAligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % sizeof(uint4) == 0; }

template <typename T, template <typename> class Format>
cudaError_t LaunchOfFormat(const ExpertsConfig& config, const ExpertsArgs& args, cudaStream_t stream) {
  const Plan plan = MakePlan(config, args);
  const ExpertsParams p = MakeParams(config, args, plan);
  if constexpr (!std::is_same_v<T, float>) {
    const bool aligned = IsAligned(args.x) && IsAligned(args.fc1.weights) && IsAligned(args.fc1.scales) &&
                         IsAligned(args.fc2.weights) && IsAligned(args.fc2.scales) && IsAligned(args.fc1.zero_points) &&
                         IsAligned(args.fc2.zero_points);
    if (plan.path == Path::kFew && aligned) return LaunchFew(args.dtype, plan, p, stream);
    if (NeedsMaps(plan.path) && aligned) return LaunchMany<Format<T>>(config, args, plan, p, stream);
  }
  return LaunchPlain<T>(p, stream);
}

template <typename T>
cudaError_t LaunchOfType(const ExpertsConfig& config, const ExpertsArgs& args, cudaStream_t stream) {
  return config.weight_format == WeightFormat::kNvfp4 ? LaunchOfFormat<T, Nvfp4Format>(config, args, stream)
                                                      : LaunchOfFormat<T, DenseFormat>(config, args, stream);
}

}  // namespace

size_t ExpertsScratchBytes(const ExpertsConfig& config, const ExpertsArgs& args) {
  return LayOut(config, args, MakePlan(config, args)).end;
}

cudaError_t LaunchFusedExperts(const ExpertsConfig& config, const ExpertsArgs& args, cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  if (IsEmpty(args)) return cudaErrorInvalidValue;
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
