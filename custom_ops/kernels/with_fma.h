// Host code in two builds: with the vector and FMA instructions of AVX2 where the processor has them, else without. An
// fmaf call per step costs more than all the rest; the bits are the same either way.
#pragma once

namespace ort_moe {

#if defined(__x86_64__) && defined(__GNUC__)

inline bool HasFma() {
  static const bool has_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has_fma;
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
