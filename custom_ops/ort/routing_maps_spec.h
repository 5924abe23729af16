// The four routing maps as outputs of one op and inputs of another: all of them or none.
#pragma once

#include <string>
#include <vector>

#include "kernels/maps/routing_maps.h"
#include "ort/context.h"
#include "ort/op_spec.h"
#include "ort/status.h"

namespace ort_moe {

inline constexpr size_t kRoutingMaps = 4;

// In the order of the op table.
const std::vector<TensorSpec>& RoutingMapSpecs();

// R = tokens * k for a router of `tokens` rows. Throws where it does not fit into int32.
int64_t MapRows(int64_t tokens, int64_t k);

// Memory for them, the outputs from number `first` on.
RoutingMaps OutputRoutingMaps(Context& context, size_t first, int64_t rows, int64_t experts);

// Whether they are there. Throws where some are and some are not; has(i) asks for map i.
template <typename Has>
bool HasRoutingMaps(const char* kind, const Has& has) {
  size_t count = 0;
  size_t missing = 0;
  for (size_t i = 0; i < kRoutingMaps; ++i) {
    if (has(i)) {
      ++count;
    } else {
      missing = i;
    }
  }
  if (count != 0 && count != kRoutingMaps) {
    throw Error(std::string(kind) + " '" + RoutingMapSpecs()[missing].name +
                "' must be there, as the other routing maps are: all four or none");
  }
  return count != 0;
}

}  // namespace ort_moe
