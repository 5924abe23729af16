// The ops as JSON text, for tools that want to know what the library registers.
#pragma once

#include <string>
#include <vector>

#include "ort/op_spec.h"

namespace ort_moe {

inline constexpr const char* kDomain = "ort_moe";
inline constexpr int kDomainVersion = 1;

// An op and where it runs.
struct DescribedOp {
  const OpSpec& spec;
  const std::vector<Device>& devices;
};

std::string DescribeOps(const std::vector<DescribedOp>& ops);

}  // namespace ort_moe
