// Host code in two builds: with the vector and FMA instructions of AVX2 where the processor has them, else without. An
// fmaf call per step costs more than all the rest; the bits are the same either way.
#pragma once

#include "kernels/common/switches.h"

namespace ort_moe {

#if defined(__x86_64__) && defined(__GNUC__)

// A function for these instructions, to be called where the processor has them.
#define ORT_MOE_AVX2 __attribute__((target("avx2,fma")))
#define ORT_MOE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))

inline bool HasFma() {
  static const bool has_fma =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && IsSwitchedOn(Switch::kAvx2);
  return has_fma;
}

inline bool HasAvx512() {
  static const bool has_avx512 = HasFma() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                                 IsSwitchedOn(Switch::kAvx512);
  return has_avx512;
}

// `flatten` compiles all that `body` calls for the instructions named here.
template <typename Body>
__attribute__((target("avx2,fma"), flatten)) void CallWithFma(const Body& body) {
  body();
}

template <typename Body>
void WithFma(const Body& body) {
  HasFma() ? CallWithFma(body) : body();
}

#else

template <typename Body>
void WithFma(const Body& body) {
  body();
}

#endif

}  // namespace ort_moe
