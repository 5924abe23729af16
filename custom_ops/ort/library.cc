// The library's C exports: registration with ORT, and its description of itself.
#include <onnxruntime_c_api.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "build_info.h"
#include "ort/aux_loss_op.h"
#include "ort/custom_op.h"
#include "ort/describe.h"
#include "ort/finalize_routing_op.h"
#include "ort/fused_experts_op.h"
#include "ort/fused_router_op.h"
#include "ort/gather_finalize_op.h"
#include "ort/permute_tokens_op.h"
#include "ort/router_probs_op.h"
#include "ort/router_scores_op.h"
#include "ort/shared_gate_router_op.h"
#include "ort/status.h"

#define ORT_MOE_EXPORT extern "C" __attribute__((visibility("default")))

namespace ort_moe {
namespace {

// Every op. The one line to add for a new one.
const std::vector<OpEntry>& Ops() {
  static const std::vector<OpEntry> ops = {
      EntryOf<FusedRouterOp>(),     EntryOf<SharedGateRouterOp>(), EntryOf<PermuteTokensOp>(),
      EntryOf<FinalizeRoutingOp>(), EntryOf<GatherFinalizeOp>(),   EntryOf<FusedExpertsOp>(),
      EntryOf<RouterProbsOp>(),     EntryOf<RouterScoresOp>(),     EntryOf<AuxLossOp>(),
  };
  return ops;
}

const std::vector<Device>& Devices() {
#if defined(ORT_MOE_WITH_CUDA)
  static const std::vector<Device> devices = {Device::kCpu, Device::kCuda};
#else
  static const std::vector<Device> devices = {Device::kCpu};
#endif
  return devices;
}

// The oldest C API that has all we call (scratch and threads of a kernel's context).
constexpr uint32_t kOldestApi = 18;

// Marks session options that have the ops: ORT fails on a domain that is registered twice.
constexpr const char* kRegisteredKey = "ort_moe.registered";

// The API of the running ORT and its version: the newest that both it and our headers know.
struct Runtime {
  const OrtApi* api;
  uint32_t version;
};

Runtime RuntimeOf(const OrtApiBase& base) {
  uint32_t major = 0;
  uint32_t minor = 0;
  std::sscanf(base.GetVersionString(), "%u.%u", &major, &minor);
  const uint32_t version = major > 1 ? ORT_API_VERSION : std::min<uint32_t>(ORT_API_VERSION, minor);
  return {version < kOldestApi ? nullptr : base.GetApi(version), version};
}

// The domain and its ops. Sessions point into it and may end at any time, so it is never destroyed; one per ONNX
// Runtime in the process, however many sessions register.
class Domain {
 public:
  static OrtCustomOpDomain* Of(const OrtApiBase& base, const Runtime& runtime) {
    static std::mutex mutex;
    static auto& domains = *new std::map<const OrtApiBase*, std::unique_ptr<Domain>>;
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Domain>& domain = domains[&base];
    if (!domain) domain = std::make_unique<Domain>(runtime);
    return domain->domain_;
  }

  explicit Domain(const Runtime& runtime) {
    Check(*runtime.api, runtime.api->CreateCustomOpDomain(kDomain, &domain_));
    for (const OpEntry& entry : Ops()) {
      for (const Device device : Devices()) {
        for (OwnedOp& op : entry.make(*runtime.api, runtime.version, device)) {
          Check(*runtime.api, runtime.api->CustomOpDomain_Add(domain_, op.get()));
          ops_.push_back(std::move(op));
        }
      }
    }
  }

 private:
  OrtCustomOpDomain* domain_ = nullptr;
  std::vector<OwnedOp> ops_;
};

void Register(OrtSessionOptions& options, const OrtApiBase& base, const Runtime& runtime) {
  const OrtApi& api = *runtime.api;
  int registered = 0;
  Check(api, api.HasSessionConfigEntry(&options, kRegisteredKey, &registered));
  if (registered) return;
  Check(api, api.AddCustomOpDomain(&options, Domain::Of(base, runtime)));
  Check(api, api.AddSessionConfigEntry(&options, kRegisteredKey, ORT_MOE_VERSION));
}

// A status from an ORT whose API does not reach kOldestApi. CreateStatus is in every API.
OrtStatus* TooOld(const OrtApiBase& base) {
  const OrtApi* api = base.GetApi(1);
  char sentence[160];
  std::snprintf(sentence, sizeof sentence, "ort_moe needs the C API of ONNX Runtime 1.%u, which ONNX Runtime %s lacks",
                kOldestApi, base.GetVersionString());
  if (api != nullptr) return api->CreateStatus(ORT_FAIL, sentence);
  std::fprintf(stderr, "%s\n", sentence);  // no API, no status: the session will miss the ops
  return nullptr;
}

}  // namespace
}  // namespace ort_moe

ORT_MOE_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace ort_moe;
  const Runtime runtime = RuntimeOf(*base);
  if (runtime.api == nullptr) return TooOld(*base);
  return Guard(*runtime.api, "ort_moe", [&] { Register(*options, *base, runtime); });
}

// JSON, for as long as the library is loaded: version, toolkits, architectures.
ORT_MOE_EXPORT const char* ort_moe_build_info() { return ORT_MOE_BUILD_INFO; }

// JSON, for as long as the library is loaded: every op with its inputs, outputs, attributes and execution providers.
// Null without memory for it.
ORT_MOE_EXPORT const char* ort_moe_describe_ops() {
  using namespace ort_moe;
  try {
    static const std::string text = [] {
      std::vector<const OpSpec*> specs;
      for (const OpEntry& entry : Ops()) specs.push_back(&entry.spec());
      return DescribeOps(specs, Devices());
    }();
    return text.c_str();
  } catch (...) {
    return nullptr;
  }
}
