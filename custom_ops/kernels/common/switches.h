// Switches in the environment that choose between ways to a result, for measuring and for finding faults: the same
// bits, but where it is said. Each Switch is on unless its variable is "0"; all are read once, when a kernel first
// asks.
#pragma once

namespace ort_moe {

enum class Switch : int {
  kPdl,         // ORT_MOE_PDL: overlap a kernel's start with its predecessor's end
  kFc1Pdl,      // ORT_MOE_FC1_PDL: the same for the experts' first layer alone
  kFusedRoute,  // ORT_MOE_FUSED_ROUTE: a router builds its maps in its own launch
  kAvx2,        // ORT_MOE_AVX2: code for AVX2 and FMA, and what needs them, on the CPU
  kAvx512,      // ORT_MOE_AVX512: code for AVX-512 on the CPU
};

bool IsSwitchedOn(Switch which);

// ORT_MOE_LISTED_CHOICES: up to how many choices of a row the training routers search in a list of candidates; beyond,
// among all experts. 128, which is the most, unless it is a number; 0 is never.
int ListedChoices();

// ORT_MOE_FEW_CHOICES: up to how many choices, tokens times K, FusedExperts takes its kernels for few tokens on Hopper,
// if they fit, which add in another order than the grouped product. -1, for what was measured to be faster, unless it
// is a number.
int FewChoices();

}  // namespace ort_moe
