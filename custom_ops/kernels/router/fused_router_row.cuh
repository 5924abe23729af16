// FusedRouter on the device: what its kernels share: parameters, logits, keys, and the weights of the chosen.
//
// A kernel ranks a row's experts in its own way and then hands a `Row` to WeighChosen:
//   ForEachChosen(f)    calls f(int32_t expert, float& value) for the chosen that this thread holds
//   MaxOfChosen()       collective; of the values
//   SumOfChosen()       collective; of the values, in the order of the contract
//   SumOfExperts(f)     collective; of f(expert, x) over all experts, in the order of the contract
//   Logit(expert)       its softcapped logit
//   Score(expert, ...)  its score
//   IsMasked(expert)    whether its group was left out
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/float_math.h"
#include "kernels/common/storage.cuh"
#include "kernels/maps/routing_maps_list.cuh"
#include "kernels/router/fused_router.h"

// A branch that hardly any model takes: its code is moved out of the way of the rest.
#define ORT_MOE_RARE(condition) __builtin_expect(static_cast<bool>(condition), 0)

namespace ort_moe {

constexpr int kChunk = 8;       // experts that share a partial sum, and 16 bytes of half-precision logits
constexpr int kPartials = 128;  // partial sums of the contract
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct RouterParams {
  const void* logits;
  const float* selection_bias;  // or null
  const float* expert_scale;    // or null
  float* weights;
  int32_t* indices;
  int64_t rows;
  int32_t experts;
  int32_t k;
  int32_t columns;  // from row to row of weights and indices
  int32_t num_groups;
  int32_t topk_groups;
  int32_t group_size;
  int32_t group_score_top;
  int32_t log2_group_chunks;  // where a group is a power of two of whole chunks within a warp, else -1
  float group_fill;
  float softcap;
  float mixer_threshold;
  float normalize_eps;
  float normalize_min;
  float scale;
  Score score;
  bool score_after_topk;
  bool from_selection;      // weights are the ranked keys
  bool normalize;           // divide by the sum of the chosen
  bool softmax_of_chosen;   // the weights are a softmax over the chosen
  bool softmax_of_experts;  // keys or weights need the softmax over all experts
  bool ranks_logits;        // the key is x, before bias and groups
  bool grouped;
  bool vector_loads;     // every chunk of every row is whole and 16-byte aligned
  bool few_reach_bound;  // that of the lanes' bests: the experts ranked have twice as many lanes as are chosen
  bool has_maps;
  MapsParams maps;
  int32_t row_warps;  // of a block that builds maps; its other warps do that

  __host__ __device__ bool plain_keys() const { return ranks_logits && selection_bias == nullptr && !grouped; }
};

// What most routers are has instantiations of its own: a row alone is bound by how fast one warp's instructions arrive,
// and branches over unused code slow that down.
enum class RouterKind {
  kAny,
  kSoftmaxOfChosen,  // of logits that rank as they are
  kSigmoid,          // of all experts, with or without a bias and groups of neighbouring lanes
};

__host__ __device__ inline bool IsSoftmaxOfChosen(const RouterParams& p) {
  return p.softmax_of_chosen && p.plain_keys() && !p.normalize && p.softcap == 0.0f && p.vector_loads;
}

__host__ __device__ inline bool IsSigmoid(const RouterParams& p) {
  return p.score == Score::kSigmoid && !p.score_after_topk && !p.from_selection && p.softcap == 0.0f &&
         p.vector_loads && (!p.grouped || (p.log2_group_chunks >= 0 && p.group_score_top <= 2));
}

// A row's parameters: a copy where the kind writes some out.
template <RouterKind kKind>
using ParamsOfKind = std::conditional_t<kKind == RouterKind::kAny, const RouterParams&, const RouterParams>;

// The same parameters with what the kind says written out, so that the compiler drops the other cases.
template <RouterKind kKind>
__device__ __forceinline__ ParamsOfKind<kKind> WrittenOut(const RouterParams& params) {
  if constexpr (kKind == RouterKind::kAny) {
    return params;
  } else {
    constexpr bool kSigmoid = kKind == RouterKind::kSigmoid;
    RouterParams p = params;
    p.softcap = 0.0f;
    p.score = kSigmoid ? Score::kSigmoid : Score::kSoftmax;
    p.score_after_topk = false;
    p.from_selection = false;
    p.softmax_of_chosen = !kSigmoid;
    p.softmax_of_experts = false;
    p.ranks_logits = !kSigmoid;
    p.vector_loads = true;
    if constexpr (!kSigmoid) {
      p.selection_bias = nullptr;
      p.normalize = false;
      p.grouped = false;
    }
    return p;
  }
}

__device__ __forceinline__ float Softcap(const RouterParams& p, float x) {
  return p.softcap > 0.0f ? Mul(p.softcap, Tanh(Div(x, p.softcap))) : x;
}

template <typename T>
__device__ __forceinline__ const Bits<T>* LogitsOfRow(const RouterParams& p, int64_t row) {
  return static_cast<const Bits<T>*>(p.logits) + row * p.experts;
}

template <typename T>
__device__ __forceinline__ float LoadLogit(const RouterParams& p, const Bits<T>* logits, int32_t expert) {
  __builtin_assume(__isGlobal(logits));
  return Softcap(p, Storage<T>::Widen(logits[expert]));
}

// Chunks of logits as they lie in memory, before the softcap.
template <typename T, int kChunks>
union LoadedChunks {
  static constexpr int kVectors = kChunk * sizeof(Bits<T>) / sizeof(uint4);  // of a chunk
  static constexpr int kOfWord = sizeof(uint32_t) / sizeof(Bits<T>);
  uint4 vectors[kChunks * kVectors];
  uint32_t words[kChunks * kVectors * 4];

  // Chunks first, first + stride, ... of a row with vector_loads; -inf past the last expert, which adds +0 to a
  // softmax's sums. All loads are issued before the first is used.
  __device__ __forceinline__ void Fetch(const RouterParams& p, const Bits<T>* logits, int32_t first, int32_t stride) {
    constexpr uint32_t kNones = std::is_same_v<T, float>      ? 0xff800000u
                                : std::is_same_v<T, BFloat16> ? 0xff80ff80u
                                                              : 0xfc00fc00u;
    __builtin_assume(__isGlobal(logits));
#pragma unroll
    for (int v = 0; v < kChunks * kVectors; ++v) {
      const int32_t chunk = first + v / kVectors * stride;
      vectors[v] = make_uint4(kNones, kNones, kNones, kNones);
      if (chunk * kChunk < p.experts) {
        vectors[v] = reinterpret_cast<const uint4*>(logits + chunk * kChunk)[v % kVectors];
      }
    }
  }

  __device__ __forceinline__ float operator[](int i) const {
    return Storage<T>::WidenOfWord(words[i / kOfWord], i % kOfWord);
  }
};

// The same of any row.
template <typename T, int kChunks>
__device__ __forceinline__ void LoadChunks(const RouterParams& p, const Bits<T>* logits, int32_t first, int32_t stride,
                                           float (&x)[kChunks * kChunk]) {
  if (!ORT_MOE_RARE(!p.vector_loads)) {
    LoadedChunks<T, kChunks> loaded;
    loaded.Fetch(p, logits, first, stride);
#pragma unroll
    for (int i = 0; i < kChunks * kChunk; ++i) x[i] = loaded[i];
  } else {
#pragma unroll
    for (int i = 0; i < kChunks * kChunk; ++i) {
      const int32_t expert = (first + i / kChunk * stride) * kChunk + i % kChunk;
      x[i] = expert < p.experts ? Storage<T>::Widen(logits[expert]) : -Infinity();
    }
  }
}

// OrderedKey, but NaN becomes 1, still below every number's key: 0 is left for "no expert".
__device__ __forceinline__ uint32_t RankKey(float key) {
  const uint32_t bits = FloatBits(Add(key, 0.0f));  // -0 + 0 = +0
  const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
  return IsNaN(key) ? 1u : bits ^ (sign | 0x80000000u);
}

// The float of a RankKey, but for the sign of zero and the payload of NaN.
__device__ __forceinline__ float KeyValue(uint32_t rank_key) {
  return BitsToFloat((rank_key & 0x80000000u) ? rank_key ^ 0x80000000u : ~rank_key);
}

// What the softmax over all experts needs to know of a row.
struct RowSoftmax {
  float max = 0.0f;
  float sum = 0.0f;
};

__device__ __forceinline__ float ScoreOf(const RouterParams& p, const RowSoftmax& softmax, float x) {
  if (p.score == Score::kSoftmax) return Div(Exp(Add(x, -softmax.max)), softmax.sum);
  if (p.score == Score::kSigmoid) return Sigmoid(x);
  if (p.score == Score::kSqrtSoftplus) return SqrtSoftplus(x);
  return x;
}

// Whether the expert with logit x takes part in the sparse mixer's softmax around `best`.
__device__ __forceinline__ bool SharesWith(const RouterParams& p, float best, float x) {
  const float magnitude = fabsf(x);
  return !(Div(Add(best, -x), magnitude < best ? best : magnitude) > p.mixer_threshold);
}

// Both weights of sparse_mixer; `first`, `second` are the chosen and known to every thread.
template <typename Row>
__device__ __forceinline__ void WeighSparseMixer(Row& row, const RouterParams& p, int32_t first, int32_t second) {
  for (int choice = 0; choice < 2; ++choice) {
    const int32_t best = choice == 0 ? first : second;
    const int32_t excluded = choice == 0 ? -1 : first;
    const float max = row.Logit(best);
    const float sum = row.SumOfExperts([&](int32_t expert, float x) {
      return expert != excluded && SharesWith(p, max, x) ? Exp(Add(x, -max)) : 0.0f;
    });
    row.ForEachChosen([&](int32_t expert, float& value) {
      if (expert == best) value = Div(Exp(Add(max, -max)), sum);
    });
  }
}

// Steps 4 and 5 of the contract, from the chosen to their final weights.
template <typename Row>
__device__ __forceinline__ void WeighChosen(Row& row, const RouterParams& p, const RowSoftmax& softmax, bool has_nan) {
  if (p.score != Score::kSparseMixer) {
    row.ForEachChosen([&](int32_t expert, float& value) {
      if (p.from_selection && row.IsMasked(expert)) {
        value = p.group_fill;
      } else {
        const bool as_it_is = p.softmax_of_chosen || p.score_after_topk || p.score == Score::kNone ||
                              (p.from_selection && p.ranks_logits);
        value = as_it_is ? row.Logit(expert) : row.Score(expert, softmax);
      }
    });
  }
  if (p.softmax_of_chosen) {
    const float max = row.MaxOfChosen();
    row.ForEachChosen([&](int32_t, float& value) { value = Exp(Add(value, -max)); });
    const float sum = row.SumOfChosen();
    row.ForEachChosen([&](int32_t, float& value) { value = Div(value, sum); });
  } else if (p.score_after_topk) {
    row.ForEachChosen([&](int32_t, float& value) { value = ScoreOf(p, softmax, value); });
  }
  if (p.normalize) {
    float divisor = Add(row.SumOfChosen(), p.normalize_eps);
    if (divisor < p.normalize_min) divisor = p.normalize_min;
    row.ForEachChosen([&](int32_t, float& value) { value = Div(value, divisor); });
  }
  row.ForEachChosen([&](int32_t expert, float& value) {
    value = Mul(value, p.scale);
    if (p.expert_scale != nullptr) value = Mul(value, p.expert_scale[expert]);
    if (has_nan) value = NaN();
  });
}

// The contract's butterfly over groups of kLanes lanes that hold the partial sums; every lane gets the total.
template <int kLanes>
__device__ __forceinline__ float SumOverLanes(float sum) {
#pragma unroll
  for (int stride = kLanes / 2; stride > 0; stride /= 2) sum = Add(sum, __shfl_xor_sync(kAllLanes, sum, stride));
  return sum;
}

// The same over a warp whose lane l holds partial sums l, l + 32, l + 64 and l + 96.
__device__ __forceinline__ float Butterfly(float p0, float p32, float p64, float p96) {
  return SumOverLanes<kWarp>(Add(Add(p0, p64), Add(p32, p96)));
}

__device__ __forceinline__ uint32_t WarpMax(uint32_t value) { return __reduce_max_sync(kAllLanes, value); }
__device__ __forceinline__ uint32_t WarpMin(uint32_t value) { return __reduce_min_sync(kAllLanes, value); }

// In shared memory; predicated, never a branch.
__device__ __forceinline__ void StoreIf(bool condition, int32_t* address, int32_t value) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.shared.b32 [%1], %2; }" ::"r"(uint32_t{condition}),
               "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))), "r"(value)
               : "memory");
}

// Of this thread, in a way that compilers know to be the same for the whole warp: what depends on it needs no care for
// lanes that part, and no registers of each lane.
__device__ __forceinline__ int WarpOfBlock() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0);
}

// count += key >= least, by the carry of a subtraction: compilers take three instructions where this takes one and a
// half.
__device__ __forceinline__ void CountIf(uint32_t key, uint32_t least, uint32_t* count) {
  asm("{ .reg .u32 rest; sub.cc.u32 rest, %1, %2; addc.u32 %0, %0, 0; }" : "+r"(*count) : "r"(key), "r"(least));
}

// The same of two words.
__device__ __forceinline__ void CountIf64(uint64_t key, uint64_t least, uint32_t* count) {
  asm("{ .reg .u64 rest; .reg .u32 a, b, c, d; mov.b64 {a, b}, %1; mov.b64 {c, d}, %2; sub.cc.u32 a, a, c;"
      " subc.cc.u32 b, b, d; addc.u32 %0, %0, 0; }"
      : "+r"(*count)
      : "l"(key), "l"(least));
}

// How many of a warp's words in shared memory are greater than `key`, which is not the greatest there is.
__device__ __forceinline__ uint32_t CountBetter(const uint32_t* words, uint32_t key) {
  uint32_t better[2] = {};
#pragma unroll
  for (int v = 0; v < kWarp / 4; ++v) {
    const uint4 four = reinterpret_cast<const uint4*>(words)[v];
    CountIf(four.x, key + 1u, &better[0]);
    CountIf(four.y, key + 1u, &better[1]);
    CountIf(four.z, key + 1u, &better[0]);
    CountIf(four.w, key + 1u, &better[1]);
  }
  return better[0] + better[1];
}

// A key that at least `lanes` lanes' bests reach. `shared` has 32 words, aligned to 16 bytes.
__device__ __forceinline__ uint32_t BoundFromBests(uint32_t best, int32_t lanes, uint32_t* shared) {
  __syncwarp();
  shared[threadIdx.x % kWarp] = best;
  __syncwarp();
  return WarpMin(CountBetter(shared, best) < static_cast<uint32_t>(lanes) ? best : 0xffffffffu);
}

}  // namespace ort_moe
