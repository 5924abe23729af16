// AuxLoss on the CPU: 128 parts that threads share, each over every 128th row, and their sum; the gradient row by row.
//
// Mapping: one thread owns a part and goes through its rows with four sums a column, which stay in the cache. Bound by
// memory: T * E elements read forward and written backward.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/common/half_float.h"
#include "kernels/common/with_fma.h"
#include "kernels/router/expert_sum.h"
#include "kernels/training/aux_loss.h"
#include "kernels/training/training_row_cpu.h"

namespace ort_moe {
namespace {

constexpr int kLanesOfPart = kAuxLossRowLanes / kAuxLossParts;

// Calls f with the counts as an array of their type.
template <typename F>
auto WithCounts(CountType type, const void* counts, F&& f) {
  switch (type) {
    case CountType::kInt32:
      return f(static_cast<const int32_t*>(counts));
    case CountType::kInt64:
      return f(static_cast<const int64_t*>(counts));
    default:
      return f(static_cast<const float*>(counts));
  }
}

std::vector<float> Counts(CountType type, const void* counts, int64_t experts) {
  return WithCounts(type, counts, [&](const auto* values) {
    std::vector<float> result(experts);
    for (int64_t e = 0; e < experts; ++e) result[e] = static_cast<float>(values[e]);
    return result;
  });
}

// C of aux_loss.h.
template <typename Args>
float Factor(const AuxLossConfig& config, const Args& args) {
  double total = static_cast<double>(config.total > 0 ? config.total : args.rows);
  if (args.total != nullptr) {
    total = WithCounts(args.total_type, args.total, [](const auto* value) { return static_cast<double>(*value); });
  }
  if (total == 0.0) return 0.0f;
  const double share = static_cast<double>(args.experts) * static_cast<double>(config.coeff);
  return static_cast<float>(share / (static_cast<double>(config.k) * total * total));
}

template <typename Type>
float Part(const AuxLossArgs& args, const std::vector<float>& counts, int64_t part) {
  const int64_t experts = args.experts;
  const auto* probs = static_cast<const typename Type::Storage*>(args.probs);
  std::vector<float> lanes(kLanesOfPart * experts);
  for (int lane = 0; lane < kLanesOfPart; ++lane) {
    float* sum = lanes.data() + lane * experts;
    for (int64_t row = part + lane * kAuxLossParts; row < args.rows; row += kAuxLossRowLanes) {
      const auto* of_row = probs + row * experts;
      for (int64_t e = 0; e < experts; ++e) sum[e] = Add(sum[e], Type::Load(of_row[e]));
    }
  }
  const float* lane[kLanesOfPart];
  for (int l = 0; l < kLanesOfPart; ++l) lane[l] = lanes.data() + l * experts;
  std::vector<float> products(experts);
  for (int64_t e = 0; e < experts; ++e) {
    const float column = Add(Add(lane[0][e], lane[2][e]), Add(lane[1][e], lane[3][e]));
    products[e] = Mul(column, counts[e]);
  }
  return SumAll(products);
}

}  // namespace

void AuxLossCpu(const AuxLossConfig&, const AuxLossArgs& args, int64_t begin, int64_t end) {
  const std::vector<float> counts = Counts(args.count_type, args.tokens_per_expert, args.experts);
  float* parts = static_cast<float*>(args.scratch);
  WithType(args.dtype, [&](auto type) {
    WithFma([&] {
      for (int64_t part = begin; part < end; ++part) parts[part] = Part<decltype(type)>(args, counts, part);
    });
  });
}

void FinishAuxLossCpu(const AuxLossConfig& config, const AuxLossArgs& args) {
  const float sum = ExpertSum::Butterfly(static_cast<float*>(args.scratch));
  *args.loss = args.rows == 0 ? 0.0f : Mul(Factor(config, args), sum);
}

void AuxLossGradCpu(const AuxLossConfig& config, const AuxLossGradArgs& args, int64_t begin, int64_t end) {
  if (begin == end) return;
  std::vector<float> slopes = Counts(args.count_type, args.tokens_per_expert, args.experts);
  const float factor = Factor(config, args);
  for (float& slope : slopes) slope = Mul(Mul(factor, slope), *args.grad_loss);
  const int64_t row_bytes = args.experts * static_cast<int64_t>(SizeOf(args.dtype));
  char* grad = static_cast<char*>(args.grad_probs);
  StoreRow(args.dtype, slopes.data(), grad, begin * args.experts, args.experts);
  for (int64_t row = begin + 1; row < end; ++row) {
    std::memcpy(grad + row * row_bytes, grad + begin * row_bytes, static_cast<size_t>(row_bytes));
  }
}

}  // namespace ort_moe
