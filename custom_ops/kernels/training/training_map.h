// The map of a training router's choices, and its limits.
#pragma once

#include <cstdint>

namespace ort_moe {

// kByte: one byte an expert, (rows, experts), 0 or 1; a bool tensor. kBit: (rows, MapBytes), expert e is bit e % 8 of
// byte e / 8, the bits past the last expert are 0.
enum class MapFormat : int { kByte, kBit };

// Bytes of a row of the map.
inline constexpr int64_t MapBytes(MapFormat format, int64_t experts) {
  return format == MapFormat::kByte ? experts : (experts + 7) / 8;
}

// The training ops are refused beyond: so many marks a block has room for (router_probs_block.cuh).
inline constexpr int64_t kMaxTrainingExperts = 8192;

}  // namespace ort_moe
