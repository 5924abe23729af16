// FusedExperts on the CPU: the chosen experts of each token.
//
// Mapping: choices are sorted by expert. A task is one expert and a tile of rows of its layer, which takes 8 rows at a
// time. With few tokens, four-bit weights are multiplied in the registers in which they are decoded; else a piece of
// each row is decoded into the first-level cache and multiplied with every token of the expert. So tokens share the
// read and the decoding, and experts that nobody chose are not touched. Then a task is a token (FinalizeRoutingCpu).
// Bytes: the weights of the chosen experts once; activations and the rows between the layers mostly from caches.
// Bound by: memory or decoding up to some five tokens an expert, multiplication beyond.
// Long prompts are taken in slices of tokens, which bounds the memory between the layers; a token's result depends on
// no other.
#include <algorithm>
#include <vector>

#include "kernels/common/cache_lines.h"
#include "kernels/common/float_math.h"
#include "kernels/common/with_fma.h"
#include "kernels/experts/cpu/activation.h"
#include "kernels/experts/cpu/layer.h"
#include "kernels/experts/fused_experts.h"
#include "kernels/finalize/finalize_routing.h"

namespace ort_moe {
namespace {

constexpr int64_t kTileRows = 32;                  // of a layer, a task
constexpr int64_t kLoadedFloats = 1 << 14;         // of x, a task
constexpr int64_t kSliceBytes = int64_t{1} << 27;  // between the layers

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
    const int64_t grain = std::max<int64_t>(1, kLoadedFloats / fc1_.stride());
    parallel_for_(args_.tokens, grain, [&](int64_t begin, int64_t end) {
      WithType(args_.dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* x = static_cast<const typename Type::Storage*>(args_.x);
        for (int64_t t = begin; t < end; ++t) {
          float* row = x_.data() + t * fc1_.stride();
          for (int64_t d = 0; d < args_.hidden; ++d) row[fc1_.Position(d)] = Type::Load(x[t * args_.hidden + d]);
        }
      });
    });
  }

  int64_t TokenOf(int64_t p) const { return to_unpermuted_[p] % args_.tokens; }

  void MultiplyFc1() {
    activated_.resize(offset_.back() * fc2_.stride());
    const auto row_of = [this](int64_t n) { return Fc1Row(n); };
    const auto activations_of = [this](int64_t p) { return x_.data() + TokenOf(p) * fc1_.stride(); };
    ForEachTile(fc1_, row_of, activations_of, [this](int64_t expert, int64_t first, int64_t count, float* products) {
      const bool weighted = config_.weight_on == WeightOn::kInput;
      const float scale = fc1_.GlobalScale(expert);
      float bias[kTileRows];
      for (int64_t r = 0; r < count; ++r) bias[r] = fc1_.Bias(expert, Fc1Row(first + r));
      WithType(args_.dtype, [&](auto type) {
        using Type = decltype(type);
        for (int64_t p = offset_[expert]; p < offset_[expert + 1]; ++p, products += kTileRows) {
          const int64_t choice = TokenOf(p) * args_.k + to_unpermuted_[p] / args_.tokens;
          const float weight = weighted ? args_.weights[choice] : 1.0f;
          for (int64_t r = 0; r < count; ++r) {
            products[r] = Type::Load(Type::Store(Add(Mul(Mul(products[r], scale), weight), bias[r])));
          }
          StoreActivated<Type>(activated_.data() + p * fc2_.stride(), first, count, products);
        }
      });
    });
  }

  // Rows of fc1 in the order in which they are taken: gate and value in turn, whatever the layout. Past the last row it
  // is repeated.
  int64_t Fc1Row(int64_t n) const {
    n = std::min(n, fc1_.rows() - 1);
    if (!config_.gated || config_.gate_layout == GateLayout::kInterleaved) return n;
    return n % 2 * args_.inner + n / 2;
  }

  template <typename Type>
  void StoreActivated(float* row, int64_t first, int64_t count, const float* fc1) const {
    float x[kTileRows], values[kTileRows];
    if (config_.gated) {
      first /= 2;
      count /= 2;
      for (int64_t i = 0; i < count; ++i) {
        x[i] = fc1[2 * i];
        values[i] = fc1[2 * i + 1];
      }
    } else {
      std::copy(fc1, fc1 + count, x);
    }
    ActivateCpu(config_, count, x, config_.gated ? values : nullptr);
    for (int64_t i = 0; i < count; ++i) row[fc2_.Position(first + i)] = Type::Load(Type::Store(x[i]));
  }

  void MultiplyFc2() {
    output_.resize(offset_.back() * args_.hidden * SizeOf(args_.dtype));
    const auto row_of = [this](int64_t n) { return std::min(n, fc2_.rows() - 1); };
    const auto activations_of = [this](int64_t p) { return activated_.data() + p * fc2_.stride(); };
    ForEachTile(fc2_, row_of, activations_of, [this](int64_t expert, int64_t first, int64_t count, float* products) {
      const float scale = fc2_.GlobalScale(expert);
      float bias[kTileRows];
      for (int64_t r = 0; r < count; ++r) bias[r] = fc2_.Bias(expert, first + r);
      WithType(args_.dtype, [&](auto type) {
        using Type = decltype(type);
        auto* output = reinterpret_cast<typename Type::Storage*>(output_.data()) + first;
        for (int64_t p = offset_[expert]; p < offset_[expert + 1]; ++p, products += kTileRows) {
          for (int64_t r = 0; r < count; ++r) {
            output[p * args_.hidden + r] = Type::Store(Add(Mul(products[r], scale), bias[r]));
          }
        }
      });
    });
  }

  // Calls use(expert, first, count, products) with the products of `count` rows of a chosen expert and all its tokens,
  // kTileRows to a token, for all rows of the chosen experts, on many threads.
  template <typename RowOf, typename ActivationsOf, typename Use>
  void ForEachTile(const ExpertLayerCpu& layer, const RowOf& row_of, const ActivationsOf& activations_of,
                   const Use& use) {
    const int64_t tiles = (layer.rows() + kTileRows - 1) / kTileRows;
    parallel_for_(static_cast<int64_t>(chosen_.size()) * tiles, 1, [&](int64_t begin, int64_t end) {
      PanelMultiplier multiplier(layer);
      std::vector<const float*> activations;
      std::vector<float> products;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t expert = chosen_[task / tiles];
        activations.clear();
        for (int64_t p = offset_[expert]; p < offset_[expert + 1]; ++p) activations.push_back(activations_of(p));
        products.resize(activations.size() * kTileRows);
        const int64_t first = task % tiles * kTileRows, count = std::min(kTileRows, layer.rows() - first);
        for (int64_t n = 0; n < count; n += kPanelRows) {
          int64_t rows[kPanelRows], next[kPanelRows];
          for (int64_t r = 0; r < kPanelRows; ++r) {
            rows[r] = row_of(first + n + r);
            next[r] = row_of(first + n + kPanelRows + r);
          }
          multiplier.Multiply(expert, rows, next, activations, products.data() + n, kTileRows);
        }
        WithFma([&] { use(expert, first, count, products.data()); });
      }
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
  std::vector<int64_t> chosen_;       // experts with a token, ascending
  CacheLineVector<float> x_;          // by token
  CacheLineVector<float> activated_;  // by permuted row
  std::vector<char> output_;          // of fc2, by permuted row, in the type of x
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
