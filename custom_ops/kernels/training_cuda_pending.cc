// Stands in for the training ops' CUDA kernels until they are there: each launch says that it is not supported.
#include "kernels/aux_loss.h"
#include "kernels/router_probs.h"
#include "kernels/router_scores.h"

namespace ort_moe {

cudaError_t LaunchRouterProbs(const RouterProbsConfig&, const RouterProbsArgs&, cudaStream_t) {
  return cudaErrorNotSupported;
}

cudaError_t LaunchRouterProbsGrad(const RouterProbsConfig&, const RouterProbsGradArgs&, cudaStream_t) {
  return cudaErrorNotSupported;
}

cudaError_t LaunchRouterScores(const RouterScoresConfig&, const RouterScoresArgs&, cudaStream_t) {
  return cudaErrorNotSupported;
}

cudaError_t LaunchRouterScoresGrad(const RouterScoresConfig&, const RouterScoresGradArgs&, cudaStream_t) {
  return cudaErrorNotSupported;
}

size_t AuxLossScratchBytes(const AuxLossArgs&) { return 0; }

cudaError_t LaunchAuxLoss(const AuxLossConfig&, const AuxLossArgs&, cudaStream_t) { return cudaErrorNotSupported; }

cudaError_t LaunchAuxLossGrad(const AuxLossConfig&, const AuxLossGradArgs&, cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // namespace ort_moe
