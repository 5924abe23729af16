// What the nodes of every router have: attributes, their configuration, and vectors with a value per expert.
#pragma once

#include <vector>

#include "kernels/router/fused_router.h"
#include "kernels/training/training_map.h"
#include "ort/context.h"
#include "ort/cuda_status.h"
#include "ort/node.h"
#include "ort/op_spec.h"

namespace ort_moe {

// FusedRouter's. The order of choices is that of the enumerations in kernels/router/fused_router.h.
const std::vector<AttributeSpec>& RouterAttributes();

// Those of a router in training: no sparse mixer, and weights from the scores.
const std::vector<AttributeSpec>& TrainingRouterAttributes();

// The configuration of a node with the first or the second of these.
RouterConfig ReadRouterConfig(const Node& node);
RouterConfig ReadTrainingRouterConfig(const Node& node);

// The logits. Throws where they are a scalar.
InputTensor Logits(const Context& context, size_t index);

// One value per expert, or null where the node leaves it out.
const float* ExpertVector(const Context& context, const OpSpec& spec, size_t index, int64_t experts);

// What is known when the session is created of an input with one value per expert (-1: not known), if the node has it.
void CheckExpertVector(const Node& node, const OpSpec& spec, size_t index, int64_t experts);

#if defined(ORT_MOE_WITH_CUDA)
// Throws unless a launch succeeded, and says so where a row's choice does not fit into shared memory.
void CheckRouterLaunch(cudaError_t status, int64_t experts, int64_t k);
#endif

// The map of a router in training as outputs, bytes or bits or, computed twice, both.
TensorSpec TrainingMapSpec(MapFormat format);

class TrainingMaps {
 public:
  // The outputs that would be the map. Throws unless the node has one of them.
  TrainingMaps(const Node& node, size_t byte_output, size_t bit_output);

  // Calls launch(format, map) for each that the node has; `shape` is that of the logits.
  template <typename Launch>
  void ForEach(Context& context, std::vector<int64_t> shape, const Launch& launch) const {
    const int64_t experts = shape.back();
    for (const MapFormat format : {MapFormat::kByte, MapFormat::kBit}) {
      if (!has_[static_cast<size_t>(format)]) continue;
      shape.back() = MapBytes(format, experts);
      launch(format, static_cast<uint8_t*>(context.Output(outputs_[static_cast<size_t>(format)], shape)));
    }
  }

 private:
  size_t outputs_[2];  // by format
  bool has_[2];
};

// Logits of one task on the CPU: some 50 us of work, so that handing it to a thread costs little beside it.
inline constexpr int64_t kLogitsPerTask = 8192;

}  // namespace ort_moe
