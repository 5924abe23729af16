// FusedExperts on the CPU: the chosen experts of each token.
//
// Mapping: choices are sorted by expert. A task is one expert and a tile of rows of its layer: it decodes a few rows of
// weights at a time and multiplies them with every token of the expert, so that tokens share the read and the decoding,
// and experts that nobody chose are not touched. Then a task is a token (FinalizeRoutingCpu).
// Bytes: the weights of the chosen experts once; activations and the rows between the layers mostly from caches.
// Bound by: decoding at one or two tokens an expert, multiplication beyond. Plain in that it blocks for one level of
// cache alone: with hundreds of tokens to an expert a matrix library would be some times faster.
// Long prompts are taken in slices of tokens, which bounds the memory between the layers; a token's result depends on
// no other.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/expert_layer_cpu.h"
#include "kernels/finalize_routing.h"
#include "kernels/float_math.h"
#include "kernels/fused_experts.h"
#include "kernels/with_fma.h"

namespace ort_moe {
namespace {

constexpr int64_t kTileRows = 32;                  // of a layer, a task
constexpr int64_t kSliceBytes = int64_t{1} << 27;  // between the layers
constexpr int64_t kRows = kRowsTogether;

float Round(DType dtype, float x) {
  WithType(dtype, [&](auto type) { x = decltype(type)::Load(decltype(type)::Store(x)); });
  return x;
}

float Activate(const ExpertsConfig& config, float x) {
  switch (config.activation) {
    case Activation::kSilu:
      return Mul(x, Sigmoid(Mul(config.alpha, x)));
    case Activation::kGelu: {
      constexpr float kSqrtHalf = 0.707106781f;
      return Mul(Mul(0.5f, x), std::erfc(Mul(-kSqrtHalf, x)));  // erfc keeps the digits of the far left
    }
    case Activation::kGeluTanh: {
      constexpr float kSqrt8OverPi = 1.59576912f;
      return Mul(x, Sigmoid(Mul(kSqrt8OverPi, Fma(Mul(0.044715f, Mul(x, x)), x, x))));  // (1 + tanh y) / 2
    }
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;
    case Activation::kRelu2:
      return x < 0.0f ? 0.0f : Mul(x, x);
    case Activation::kIdentity:
      return x;
  }
  return x;
}

float ActivateGated(const ExpertsConfig& config, float gate, float value) {
  const float limit = config.limit;
  if (limit > 0.0f) {
    if (gate > limit) gate = limit;
    if (value > limit) value = limit;
    if (value < -limit) value = -limit;
  }
  return Mul(Activate(config, gate), Add(value, config.beta));
}

class Slice {
 public:
  Slice(const ExpertsConfig& config, const ExpertsArgs& args, const ParallelFor& parallel_for)
      : config_(config),
        args_(args),
        parallel_for_(parallel_for),
        fc1_(args.fc1, config, args.dtype, config.fc1_rows(args.inner), args.hidden),
        fc2_(args.fc2, config, args.dtype, args.hidden, args.inner),
        rows_(args.tokens * args.k),
        to_unpermuted_(rows_),
        to_permuted_(rows_),
        to_expert_(rows_),
        offset_(args.experts + 1) {
    // Maps that came are not read: sorting again costs less than checking them.
    const RoutingMaps maps = {to_unpermuted_.data(), to_permuted_.data(), to_expert_.data(), offset_.data()};
    BuildRoutingMapsCpu(args.indices, args.tokens, args.k, args.experts, maps);
    for (int64_t e = 0; e < args.experts; ++e) {
      if (offset_[e] < offset_[e + 1]) chosen_.push_back(e);
    }
  }

  void Run() {
    LoadRows();
    MultiplyFc1();
    MultiplyFc2();
    Finalize();
  }

 private:
  void LoadRows() {
    x_.resize(args_.tokens * fc1_.stride());
    WithType(args_.dtype, [&](auto type) {
      using Type = decltype(type);
      const auto* x = static_cast<const typename Type::Storage*>(args_.x);
      for (int64_t t = 0; t < args_.tokens; ++t) {
        float* row = x_.data() + t * fc1_.stride();
        for (int64_t d = 0; d < args_.hidden; ++d) row[fc1_.Position(d)] = Type::Load(x[t * args_.hidden + d]);
      }
    });
  }

  void MultiplyFc1() {
    activated_.resize(offset_.back() * fc2_.stride());
    ForEachTile(fc1_, [this](int64_t expert, int64_t first, const float* weights) {
      const bool weighted = config_.weight_on == WeightOn::kInput;
      float bias[kRows];
      for (int64_t r = 0; r < kRows; ++r) bias[r] = fc1_.Bias(expert, Fc1Row(first + r));
      for (int64_t p = offset_[expert]; p < offset_[expert + 1]; ++p) {
        const int64_t token = to_unpermuted_[p] % args_.tokens;
        auto products = fc1_.Multiply(weights, x_.data() + token * fc1_.stride());
        const float scale = fc1_.GlobalScale(expert);
        const float weight = weighted ? args_.weights[token * args_.k + to_unpermuted_[p] / args_.tokens] : 1.0f;
        for (int64_t r = 0; r < kRows; ++r) {
          products[r] = Round(args_.dtype, Add(Mul(Mul(products[r], scale), weight), bias[r]));
        }
        StoreActivated(activated_.data() + p * fc2_.stride(), first, products.data());
      }
    });
  }

  // Rows of fc1 in the order in which they are taken: gate and value in turn, whatever the layout.
  int64_t Fc1Row(int64_t n) const {
    n = std::min(n, fc1_.rows() - 1);
    if (!config_.gated || config_.gate_layout == GateLayout::kInterleaved) return n;
    return n % 2 * args_.inner + n / 2;
  }

  void StoreActivated(float* row, int64_t first, const float* fc1) const {
    const int64_t width = config_.gated ? 2 : 1;
    for (int64_t r = 0; r < std::min(kRows, fc1_.rows() - first); r += width) {
      const float a = config_.gated ? ActivateGated(config_, fc1[r], fc1[r + 1]) : Activate(config_, fc1[r]);
      row[fc2_.Position((first + r) / width)] = Round(args_.dtype, a);
    }
  }

  void MultiplyFc2() {
    output_.resize(offset_.back() * args_.hidden * SizeOf(args_.dtype));
    ForEachTile(fc2_, [this](int64_t expert, int64_t first, const float* weights) {
      const int64_t count = std::min(kRows, args_.hidden - first);
      float bias[kRows] = {};
      for (int64_t r = 0; r < count; ++r) bias[r] = fc2_.Bias(expert, first + r);
      for (int64_t p = offset_[expert]; p < offset_[expert + 1]; ++p) {
        const auto products = fc2_.Multiply(weights, activated_.data() + p * fc2_.stride());
        const float scale = fc2_.GlobalScale(expert);
        WithType(args_.dtype, [&](auto type) {
          using Type = decltype(type);
          auto* output = reinterpret_cast<typename Type::Storage*>(output_.data()) + p * args_.hidden + first;
          for (int64_t r = 0; r < count; ++r) output[r] = Type::Store(Add(Mul(products[r], scale), bias[r]));
        });
      }
    });
  }

  // Calls multiply(expert, first, decoded rows first .. first + kRows) for all rows of the chosen experts, on many
  // threads. Past the last row the last is repeated.
  template <typename Multiply>
  void ForEachTile(const ExpertLayerCpu& layer, const Multiply& multiply) {
    const int64_t tiles = (layer.rows() + kTileRows - 1) / kTileRows;
    const bool is_fc1 = &layer == &fc1_;
    parallel_for_(static_cast<int64_t>(chosen_.size()) * tiles, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> weights(kRows * layer.stride());
      WithFma([&] {
        for (int64_t task = begin; task < end; ++task) {
          const int64_t expert = chosen_[task / tiles];
          const int64_t first = task % tiles * kTileRows;
          for (int64_t n = first; n < std::min(first + kTileRows, layer.rows()); n += kRows) {
            for (int64_t r = 0; r < kRows; ++r) {
              const int64_t row = is_fc1 ? Fc1Row(n + r) : std::min(n + r, layer.rows() - 1);
              layer.Decode(expert, row, weights.data() + r * layer.stride());
            }
            multiply(expert, n, weights.data());
          }
        }
      });
    });
  }

  void Finalize() {
    FinalizeArgs finalize{};
    std::vector<float> ones;
    finalize.weights = args_.weights;
    if (config_.weight_on == WeightOn::kInput) {
      ones.assign(rows_, 1.0f);
      finalize.weights = ones.data();
    }
    finalize.expert_output = output_.data();
    finalize.indices = args_.indices;
    finalize.unpermuted_to_permuted = to_permuted_.data();
    finalize.residual = args_.residual;
    finalize.y = args_.y;
    finalize.dtype = args_.dtype;
    finalize.tokens = args_.tokens;
    finalize.hidden = args_.hidden;
    finalize.k = static_cast<int32_t>(args_.k);
    parallel_for_(args_.tokens, 1, [&](int64_t begin, int64_t end) { FinalizeRoutingCpu(finalize, begin, end); });
  }

  const ExpertsConfig& config_;
  const ExpertsArgs& args_;
  const ParallelFor& parallel_for_;
  ExpertLayerCpu fc1_, fc2_;
  int64_t rows_;
  std::vector<int32_t> to_unpermuted_, to_permuted_, to_expert_;
  std::vector<int64_t> offset_;
  std::vector<int64_t> chosen_;   // experts with a token, ascending
  std::vector<float> x_;          // by token
  std::vector<float> activated_;  // by permuted row
  std::vector<char> output_;      // of fc2, by permuted row, in the type of x
};

const void* Advance(const void* data, int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + elements * SizeOf(dtype);
}

}  // namespace

void FusedExpertsCpu(const ExpertsConfig& config, const ExpertsArgs& args, const ParallelFor& parallel_for) {
  const int64_t token_bytes = args.k * (args.inner * sizeof(float) + args.hidden * SizeOf(args.dtype));
  const int64_t slice = std::max<int64_t>(1, kSliceBytes / std::max<int64_t>(1, token_bytes));
  for (int64_t first = 0; first < args.tokens; first += slice) {
    ExpertsArgs part = args;
    part.tokens = std::min(slice, args.tokens - first);
    part.x = Advance(args.x, first * args.hidden, args.dtype);
    part.weights += first * args.k;
    part.indices += first * args.k;
    part.residual = Advance(args.residual, first * args.hidden, args.dtype);
    part.y = const_cast<void*>(Advance(args.y, first * args.hidden, args.dtype));
    Slice(config, part, parallel_for).Run();
  }
}

}  // namespace ort_moe
