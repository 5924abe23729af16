// RouterScores on the CPU: the scores of full rows and their map, and the gradient of the logits.
//
// Mapping: one thread owns a row; the caller spreads ranges of rows over its threads. The map is the router's own
// choice, its weights unused; the scores are a second pass over a row. Bound by the exponentials.
#include <vector>

#include "kernels/common/with_fma.h"
#include "kernels/training/router_probs.h"
#include "kernels/training/router_scores.h"
#include "kernels/training/training_row_cpu.h"

namespace ort_moe {
namespace {

class RowScores {
 public:
  RowScores(const RouterScoresConfig& config, DType dtype, const void* logits, int64_t experts)
      : config_(config),
        dtype_(dtype),
        logits_(logits),
        row_(config.score, config.softcap, experts),
        all_(experts, 1) {}

  void Forward(int64_t row, void* scores) {
    Score(row);
    std::vector<float>& v = row_.v();
    if (config_.normalize) {
      const float divisor = Divisor();
      for (float& value : v) value = Div(value, divisor);
    }
    StoreRow(dtype_, v.data(), scores, row * row_.experts(), row_.experts());
  }

  void Backward(int64_t row, const void* grad_scores, void* grad_logits) {
    Score(row);
    g_.resize(row_.experts());
    LoadRow(dtype_, grad_scores, row * row_.experts(), row_.experts(), g_.data());
    if (config_.normalize) row_.ThroughNormalization(Divisor(), g_);
    row_.ThroughScore(row_.v(), g_);
    StoreRow(dtype_, g_.data(), grad_logits, row * row_.experts(), row_.experts());
  }

 private:
  void Score(int64_t row) {
    row_.Load(dtype_, logits_, row);
    row_.ScoreExperts(all_);
  }

  float Divisor() { return Add(SumAll(row_.v()), config_.normalize_eps); }

  const RouterScoresConfig& config_;
  DType dtype_;
  const void* logits_;
  TrainingRow row_;
  std::vector<uint8_t> all_;
  std::vector<float> g_;
};

}  // namespace

void RouterScoresCpu(const RouterScoresConfig& config, const RouterScoresArgs& args, int64_t begin, int64_t end) {
  RouterProbsConfig choice;
  choice.router.k = config.k;
  choice.router.score = config.score;
  choice.router.softcap = config.softcap;
  choice.map_format = config.map_format;
  RouterProbsArgs map{};
  map.logits = args.logits;
  map.probs = args.scores;  // overwritten below
  map.map = args.map;
  map.dtype = args.dtype;
  map.rows = args.rows;
  map.experts = args.experts;
  RouterProbsCpu(choice, map, begin, end);
  RowScores scores(config, args.dtype, args.logits, args.experts);
  WithFma([&] {
    for (int64_t row = begin; row < end; ++row) scores.Forward(row, args.scores);
  });
}

void RouterScoresGradCpu(const RouterScoresConfig& config, const RouterScoresGradArgs& args, int64_t begin,
                         int64_t end) {
  RowScores scores(config, args.dtype, args.logits, args.experts);
  WithFma([&] {
    for (int64_t row = begin; row < end; ++row) scores.Backward(row, args.grad_scores, args.grad_logits);
  });
}

}  // namespace ort_moe
