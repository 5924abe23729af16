// PermuteTokens on the CPU: each row is copied by itself. Bound by memory.
#include <cstring>

#include "kernels/permute/permute_tokens.h"

namespace ort_moe {

void PermuteRowsCpu(const PermuteArgs& args, int64_t begin, int64_t end) {
  const size_t row_bytes = static_cast<size_t>(args.hidden) * SizeOf(args.dtype);
  const char* x = static_cast<const char*>(args.x);
  char* permuted = static_cast<char*>(args.permuted_x);
  const int64_t with_expert = args.maps.expert_first_token_offset[args.experts];
  for (int64_t row = begin; row < end; ++row) {
    char* target = permuted + row * row_bytes;
    if (row < with_expert) {
      const int64_t token = args.maps.permuted_to_unpermuted[row] % args.tokens;
      std::memcpy(target, x + token * row_bytes, row_bytes);
    } else {
      std::memset(target, 0, row_bytes);
    }
  }
}

}  // namespace ort_moe
