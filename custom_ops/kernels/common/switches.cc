#include "kernels/common/switches.h"

#include <cstdlib>
#include <cstring>

namespace ort_moe {
namespace {

bool Read(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr || std::strcmp(value, "0") != 0;
}

int ReadNumber(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  if (value == nullptr || *value == '\0') return otherwise;
  char* end = nullptr;
  const long number = std::strtol(value, &end, 10);
  return *end == '\0' && number >= 0 && number <= 1 << 20 ? static_cast<int>(number) : otherwise;
}

}  // namespace

bool IsSwitchedOn(Switch which) {
  static const bool pdl = Read("ORT_MOE_PDL");
  static const bool fc1_pdl = Read("ORT_MOE_FC1_PDL");
  static const bool fused_route = Read("ORT_MOE_FUSED_ROUTE");
  static const bool avx2 = Read("ORT_MOE_AVX2");
  static const bool avx512 = Read("ORT_MOE_AVX512");
  switch (which) {
    case Switch::kPdl:
      return pdl;
    case Switch::kFc1Pdl:
      return fc1_pdl;
    case Switch::kFusedRoute:
      return fused_route;
    case Switch::kAvx2:
      return avx2;
    case Switch::kAvx512:
      return avx512;
  }
  return true;
}

int ListedChoices() {
  static const int choices = ReadNumber("ORT_MOE_LISTED_CHOICES", 128);
  return choices;
}

int FewChoices() {
  static const int choices = ReadNumber("ORT_MOE_FEW_CHOICES", -1);
  return choices;
}

}  // namespace ort_moe
