// Routing maps on the CPU: a counting sort of the choices by expert, on one thread, O(R + E); its few nanoseconds per
// choice are nothing beside the router before it or the experts after it.
#include <algorithm>

#include "kernels/maps/routing_maps.h"

namespace ort_moe {

void BuildRoutingMapsCpu(const int32_t* indices, int64_t tokens, int64_t k, int64_t experts, const RoutingMaps& maps) {
  const auto expert_of = [&](int64_t choice) -> int64_t {
    const int32_t index = indices[choice];
    return index >= 0 && index < experts ? index : experts;
  };
  const int64_t rows = tokens * k;
  int64_t* offset = maps.expert_first_token_offset;
  std::fill(offset, offset + experts + 1, int64_t{0});
  for (int64_t choice = 0; choice < rows; ++choice) {
    const int64_t expert = expert_of(choice);
    if (expert < experts) ++offset[expert + 1];
  }
  for (int64_t e = 0; e < experts; ++e) offset[e + 1] += offset[e];

  // While rows are dealt out, offset[e] runs from the first row of e to that of e + 1; then all are moved up by one.
  int64_t without_expert = offset[experts];
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t j = 0; j < k; ++j) {
      const int64_t expert = expert_of(t * k + j);
      const bool has_expert = expert < experts;
      const int64_t position = has_expert ? offset[expert]++ : without_expert++;
      const int64_t row = j * tokens + t;
      maps.permuted_to_unpermuted[position] = static_cast<int32_t>(row);
      maps.permuted_to_expert[position] = static_cast<int32_t>(expert);
      maps.unpermuted_to_permuted[row] = has_expert ? static_cast<int32_t>(position) : -1;
    }
  }
  std::copy_backward(offset, offset + experts, offset + experts + 1);
  offset[0] = 0;
}

}  // namespace ort_moe
