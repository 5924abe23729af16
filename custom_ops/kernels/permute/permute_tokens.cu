// PermuteTokens on CUDA: the routing maps, and each token's row written to its K places.
//
//   at once   one launch        up to 32768 choices, as far as a block can count their experts
//   in turn   two or four       the rest: the maps as routing_maps.cu builds them, then the rows
// Mapping: a thread owns 16 bytes of columns of a token, reads them once and writes them K times; 4 or 2 bytes where
// rows or addresses are no multiple of 16.
// Bytes: (K + 1) * H * sizeof(type) a token, and 4 * K read and 12 * K written for the maps. Bound by: latency up to
// some 64 tokens, then by writing: memory takes 3.3 TB/s in a plain fill where a copy moves 4.2.
#include "kernels/permute/permute_tokens.h"

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "kernels/permute/permute_tokens_at_once.cuh"
#include "kernels/permute/permute_tokens_in_turn.cuh"
#include "kernels/permute/permute_tokens_params.cuh"

namespace ort_moe {
namespace {

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
    return p.count() <= kFewCounted ? LaunchAtOnce<Vector, 256>(p, stream) : LaunchAtOnce<Vector, 1024>(p, stream);
  }
  const cudaError_t error =
      LaunchRoutingMaps(args.indices, args.tokens, args.k, args.experts, args.maps, scratch, stream);
  return error == cudaSuccess ? LaunchRows<Vector>(p, stream) : error;
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
