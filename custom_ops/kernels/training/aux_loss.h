// AuxLoss: what the launchers take. The semantics are docs/ops.md's; ort_moe/reference/aux_loss.py is the executable
// form, and every kernel returns its bits.
//
//   loss = C * sum_e (sum_t probs[t, e]) * tokens_per_expert[e],   C = E * coeff / (k * total^2)
// C in float64 as Div(Mul(E, coeff), Mul(Mul(k, total), total)), rounded to float32 once; 0 where total is 0. The rest
// in float32, probs widened, counts n rounded:
//   p[l][e], l < 512:  the sum from +0 of the rows t = l, l + 512, l + 1024, ... of column e in that order;
//   c[i][e], i < 128:  Add(Add(p[i][e], p[i + 256][e]), Add(p[i + 128][e], p[i + 384][e]));
//   s[i]:              the sum over e of Mul(c[i][e], n[e]) in FusedRouter's order of sums over experts;
//   loss:              Mul(C, S), S = the s[i] added by a butterfly with strides 64, 32, 16, 8, 4, 2, 1.
// So a block that owns an i reads whole rows with four independent sums a column, and hands on one number.
//
// Backward: grad_probs[t, e] = Mul(Mul(C, n[e]), grad_loss), rounded once. No gradient to the counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/dtype.h"

#if defined(ORT_MOE_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace ort_moe {

inline constexpr int kAuxLossRowLanes = 512;  // the l above
inline constexpr int kAuxLossParts = 128;     // the i above

enum class CountType : int { kInt32, kInt64, kFloat32 };

// The op's attributes, one field each.
struct AuxLossConfig {
  int64_t k = 1;
  float coeff = 0.0f;
  int64_t total = 0;  // where no scalar is given; 0: the rows of probs
};

// Pointers are aligned to their elements, no more; rows follow each other without a gap.
struct AuxLossArgs {
  const void* probs;              // (rows, experts) of dtype
  const void* tokens_per_expert;  // (experts) of count_type
  const void* total;              // one number of total_type, or null: config.total, or the rows
  float* loss;                    // one number
  void* scratch;                  // AuxLossScratchBytes; on the CPU kAuxLossParts floats
  DType dtype;
  CountType count_type;
  CountType total_type;
  int64_t rows;     // 0: the loss is 0; rows * experts may pass 2^31
  int64_t experts;  // at least 1, up to kMaxTrainingExperts of training_map.h
};

struct AuxLossGradArgs {
  const void* tokens_per_expert;  // (experts) of count_type
  const void* total;              // as above
  const float* grad_loss;         // one number
  void* grad_probs;               // (rows, experts) of dtype
  DType dtype;
  CountType count_type;
  CountType total_type;
  int64_t rows;
  int64_t experts;
};

// Empty where the configuration is valid for this many experts (-1: not known yet); else one clause that names the
// attribute, what was expected and what came.
std::string CheckAuxLossConfig(const AuxLossConfig& config, int64_t experts);

// Parts [begin, end) of kAuxLossParts, into the scratch, on the calling thread; then FinishAuxLossCpu.
void AuxLossCpu(const AuxLossConfig& config, const AuxLossArgs& args, int64_t begin, int64_t end);
void FinishAuxLossCpu(const AuxLossConfig& config, const AuxLossArgs& args);
// Rows [begin, end) on the calling thread.
void AuxLossGradCpu(const AuxLossConfig& config, const AuxLossGradArgs& args, int64_t begin, int64_t end);

#if defined(ORT_MOE_WITH_CUDA)
// From the shape and dtype alone; may be 0.
size_t AuxLossScratchBytes(const AuxLossArgs& args);

// On `stream`; rows = 0 writes a loss of 0, and no gradient. The configuration has been checked. The scratch is as it
// came from an allocator. The scalars are read on the device.
cudaError_t LaunchAuxLoss(const AuxLossConfig& config, const AuxLossArgs& args, cudaStream_t stream);
cudaError_t LaunchAuxLossGrad(const AuxLossConfig& config, const AuxLossGradArgs& args, cudaStream_t stream);
#endif

}  // namespace ort_moe
