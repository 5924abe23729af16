// Element types of activations: every op takes logits, rows and biases in one of these.
#pragma once

#include <cstddef>

namespace ort_moe {

enum class DType : int { kFloat32, kFloat16, kBFloat16 };

inline constexpr size_t SizeOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace ort_moe
