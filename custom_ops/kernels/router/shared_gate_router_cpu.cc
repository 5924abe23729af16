// SharedGateRouter on the CPU: FusedRouter's rows, and the gates of the shared experts.
//
// Mapping: one thread owns a token. Its hidden row is widened into the order of the sums, step by step 128 elements of
// as many partial sums, so that a step is a loop that vectorises; the gates' weights are once for all rows.
// Bytes: (E + H) * sizeof(type) a token. Bound by arithmetic.
#include <cstdint>
#include <vector>

#include "kernels/common/half_float.h"
#include "kernels/common/with_fma.h"
#include "kernels/router/shared_gate_router.h"

namespace ort_moe {
namespace {

constexpr int64_t kPartials = 128;
constexpr int64_t kTogether = 8;  // neighbouring elements of a partial sum
constexpr int64_t kLap = kPartials * kTogether;

// Elements in the order of the steps, and zero where there is none, which adds nothing.
class Steps {
 public:
  explicit Steps(int64_t size) : size_(size), values_((size + kLap - 1) / kLap * kLap) {}

  template <typename Type>
  void Load(const void* row) {
    const auto* elements = static_cast<const typename Type::Storage*>(row);
    const int64_t chunks = size_ / kTogether;
    for (int64_t c = 0; c < chunks; ++c) {
      float* first = Place(c);
      for (int64_t i = 0; i < kTogether; ++i) first[i * kPartials] = Type::Load(elements[c * kTogether + i]);
    }
    for (int64_t e = chunks * kTogether; e < size_; ++e)
      Place(chunks)[e % kTogether * kPartials] = Type::Load(elements[e]);
  }

  float Dot(const Steps& other) const {
    float partial[kPartials] = {};
    for (size_t first = 0; first < values_.size(); first += kPartials) {
      const float *a = values_.data() + first, *b = other.values_.data() + first;
      for (int64_t p = 0; p < kPartials; ++p) partial[p] = Fma(a[p], b[p], partial[p]);
    }
    for (int64_t stride = kPartials / 2; stride > 0; stride /= 2) {
      for (int64_t p = 0; p < stride; ++p) partial[p] = Add(partial[p], partial[p + stride]);
    }
    return partial[0];
  }

 private:
  // Of the first of the neighbouring elements of a partial sum; the others follow at the next steps.
  float* Place(int64_t chunk) { return values_.data() + chunk / kPartials * kLap + chunk % kPartials; }

  int64_t size_;
  std::vector<float> values_;
};

template <typename Type>
void TakeGates(const RouterConfig& config, const RouterArgs& router, const SharedGates& gates, int64_t begin,
               int64_t end) {
  using Storage = typename Type::Storage;
  std::vector<Steps> weights(gates.count, Steps(gates.size));
  for (int32_t s = 0; s < gates.count; ++s) {
    weights[s].template Load<Type>(static_cast<const Storage*>(gates.gate_weight) + s * gates.size);
  }
  Steps hidden(gates.size);
  const int64_t columns = config.k + gates.count;
  for (int64_t row = begin; row < end; ++row) {
    hidden.template Load<Type>(static_cast<const Storage*>(gates.hidden) + row * gates.size);
    for (int32_t s = 0; s < gates.count; ++s) {
      const int64_t place = row * columns + config.k + s;
      router.weights[place] = Mul(Sigmoid(hidden.Dot(weights[s])), gates.scale);
      router.indices[place] = gates.base + s;
    }
  }
}

}  // namespace

void SharedGateRouterCpu(const RouterConfig& config, const RouterArgs& router, const SharedGates& gates, int64_t begin,
                         int64_t end) {
  FusedRouterCpu(config, router, begin, end);
  WithType(router.dtype,
           [&](auto type) { WithFma([&] { TakeGates<decltype(type)>(config, router, gates, begin, end); }); });
}

}  // namespace ort_moe
