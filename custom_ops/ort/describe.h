// The ops as JSON text, for tools that want to know what the library registers.
#pragma once

#include <string>
#include <vector>

#include "ort/op_spec.h"

namespace ort_moe {

inline constexpr const char* kDomain = "ort_moe";
inline constexpr int kDomainVersion = 1;

std::string DescribeOps(const std::vector<const OpSpec*>& specs, const std::vector<Device>& devices);

}  // namespace ort_moe
