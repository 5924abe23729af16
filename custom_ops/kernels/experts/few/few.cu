// FusedExperts for few tokens, in every format (few.h): which calls, and their launches.
#include "kernels/experts/few/few.h"

#include <type_traits>

#include "kernels/common/launch.cuh"
#include "kernels/experts/few/fc1.cuh"
#include "kernels/experts/few/fc2.cuh"

namespace ort_moe {
namespace {

// Calls f with a format in which `weight_format` is, of half-precision activations, as a value.
template <typename T, typename F>
auto WithFormat(WeightFormat weight_format, const F& f) {
  switch (weight_format) {
    case WeightFormat::kDense:
      break;
    case WeightFormat::kNvfp4:
      return f(Nvfp4Format<T>());
    case WeightFormat::kMxfp4:
      return f(Mxfp4Format<T>());
    case WeightFormat::kInt4:
      return f(Int4Format<T>());
    case WeightFormat::kInt8:
      return f(Int8Format<T>());
    case WeightFormat::kFp8:
      return f(Fp8Format<T>());
  }
  return f(DenseFormat<T>());
}

// Whether the kernels for one token take it.
bool IsAlone(int64_t tokens, int64_t slots) { return tokens == 1 && slots <= kLanes; }

// Whether rows and their blocks fit the kernels' loads: copies of 16 bytes of activations and weights, whole words of
// scales where a group has more than four, and blocks that hold a lane's part of a step.
bool FitsLoads(const ExpertsConfig& config, const ExpertsArgs& args) {
  const int64_t multiple = WidthMultiple(config.weight_format);
  if (args.hidden % multiple != 0 || args.inner % multiple != 0) return false;
  switch (config.weight_format) {
    case WeightFormat::kDense:
    case WeightFormat::kNvfp4:
    case WeightFormat::kMxfp4:
    case WeightFormat::kInt8:
      return true;
    case WeightFormat::kInt4:
    case WeightFormat::kFp8:
      return config.block_size >= 32;
  }
  return false;
}

// Columns of a tile of FC2: what the format takes, or more where a warp's rows would otherwise be those of more items
// than there are, and some of them read twice.
template <typename Format>
int Fc2TileColumns(int64_t slots) {
  return std::max(Format::kFc2Columns, slots <= 1 ? kSetRows : slots == 2 ? kTileRows : 0);
}

// Calls f with `columns` as a type. kSetRows are a single slot's, which is one token's.
template <typename Format, bool kShares, typename F>
cudaError_t WithFc2Columns(int columns, const F& f) {
  if constexpr (!kShares) {
    if (columns == kSetRows) return f(std::integral_constant<int, kSetRows>());
  }
  if (columns == kTileRows) return f(std::integral_constant<int, kTileRows>());
  return f(std::integral_constant<int, Format::kFc2Columns>());
}

template <typename Format, bool kShares>
cudaError_t LaunchLayers(const LayersPlan& plan, const ExpertsParams& p, cudaStream_t stream) {
  const int fc1_warps = kFc1Warps / p.fc1.slices * p.fc1.slices;
  if (cudaError_t error = LaunchClusters<Fc1Kernel<Format, kShares ? kFewChunk : 1>>(
          Switch::kFc1Pdl, 1, plan.fc1_blocks, fc1_warps * kLanes,
          Fc1Shared<Format>::Bytes(p.fc1.depth, p.tokens, p.slots, p.chunk), stream, p);
      error != cudaSuccess) {
    return error;
  }
  return WithFc2Columns<Format, kShares>(plan.fc2_tile_columns, [&](auto columns) {
    return Launch<Fc2FinalizeKernel<Format, kShares ? Format::kFc2Tokens : 1, decltype(columns)::value>>(
        plan.fc2_blocks, kFc2Warps * kLanes, Fc2Shared<Format>::Bytes(p.fc2, p.slots, plan.fc2_columns), stream, p);
  });
}

}  // namespace

bool PlanFew(const ExpertsConfig& config, const ExpertsArgs& args, int processors, size_t shared_limit,
             LayersPlan* plan) {
  const int64_t slots = args.tokens * args.k;
  if (args.dtype == DType::kFloat32 || slots > kMaxDirectSlots || !FitsLoads(config, args) ||
      !FitsOffsets(config, args)) {
    return false;
  }
  const auto fits = [&](auto format) {
    using Format = decltype(format);
    LayersPlan few;
    few.activated_stride = CeilDiv(args.inner, Format::kStep) * Format::kStep;
    CutInSlices<Format>(&few.fc1, args.hidden);
    CutInSlices<Format>(&few.fc2, args.inner);
    few.chunk = IsAlone(args.tokens, slots) ? 1 : kFewChunk;
    const int64_t fc1_units = slots * config.fc1_rows(args.inner) / kSetRows;
    few.fc2_tile_columns = Fc2TileColumns<Format>(slots);
    const int64_t fc2_tiles = args.hidden / few.fc2_tile_columns;
    few.fc1_blocks = static_cast<unsigned>(std::min<int64_t>(processors, fc1_units));
    few.fc2_blocks = static_cast<unsigned>(std::min<int64_t>(processors, fc2_tiles));
    few.fc2_columns = static_cast<int>(CeilDiv(fc2_tiles, few.fc2_blocks)) * few.fc2_tile_columns;
    const int tokens = static_cast<int>(args.tokens), count = static_cast<int>(slots);
    if (Fc1Shared<Format>::Bytes(few.fc1.depth, tokens, count, few.chunk) > shared_limit ||
        Fc2Shared<Format>::Bytes(few.fc2, count, few.fc2_columns) > shared_limit) {
      return false;
    }
    *plan = few;
    return true;
  };
  return args.dtype == DType::kFloat16 ? WithFormat<__half>(config.weight_format, fits)
                                       : WithFormat<__nv_bfloat16>(config.weight_format, fits);
}

cudaError_t LaunchFew(DType dtype, const LayersPlan& plan, const ExpertsParams& p, cudaStream_t stream) {
  const auto launch = [&](auto format) {
    using Format = decltype(format);
    return IsAlone(p.tokens, p.slots) ? LaunchLayers<Format, false>(plan, p, stream)
                                      : LaunchLayers<Format, true>(plan, p, stream);
  };
  return dtype == DType::kFloat16 ? WithFormat<__half>(p.weight_format, launch)
                                  : WithFormat<__nv_bfloat16>(p.weight_format, launch);
}

}  // namespace ort_moe
