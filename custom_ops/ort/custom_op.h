// From a C++ class to the OrtCustomOp that ORT takes.
//
// An op is a class with
//   static const OpSpec& Spec();
//   Op(const Node& node, Device device);           reads and checks attributes and what is known of the inputs
//   void Compute(Context& context) const;          one call; other threads may be inside another
//   static void InferShapes(ShapeInference& node);
// that throws Error with a clause; this header puts the op and the node's name in front and hands it to ORT.
#pragma once

#include <onnxruntime_c_api.h>

#include <memory>
#include <string>

#include "ort/context.h"
#include "ort/node.h"
#include "ort/op_spec.h"
#include "ort/shape_inference.h"
#include "ort/status.h"

namespace ort_moe {

template <typename Op>
class CustomOp : public OrtCustomOp {
 public:
  // `version` is that of `api`.
  CustomOp(const OrtApi& api, uint32_t version, Device device) : OrtCustomOp{}, api_(api), device_(device) {
    OrtCustomOp::version = version;
    GetName = [](const OrtCustomOp*) { return Op::Spec().name.c_str(); };
    GetExecutionProviderType = [](const OrtCustomOp* op) { return ExecutionProvider(Self(op).device_); };
    GetInputTypeCount = [](const OrtCustomOp*) { return Op::Spec().inputs.size(); };
    GetOutputTypeCount = [](const OrtCustomOp*) { return Op::Spec().outputs.size(); };
    // Undefined is any type: our checks name the input and what it may be, ORT's do not.
    GetInputType = [](const OrtCustomOp*, size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED; };
    GetOutputType = [](const OrtCustomOp*, size_t index) { return Op::Spec().outputs[index].types.front(); };
    GetInputCharacteristic = [](const OrtCustomOp*, size_t i) { return Characteristic(Op::Spec().inputs[i]); };
    GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) { return Characteristic(Op::Spec().outputs[i]); };
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
    GetStartVersion = [](const OrtCustomOp*) { return 1; };
    GetEndVersion = [](const OrtCustomOp*) { return 1; };
    CreateKernelV2 = Create;
    KernelComputeV2 = Compute;
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    InferOutputShapeFn = InferShapes;
  }

 private:
  struct Kernel {
    const OrtApi& api;
    std::string title;
    Op op;
  };

  static const CustomOp& Self(const OrtCustomOp* op) { return *static_cast<const CustomOp*>(op); }

  static OrtCustomOpInputOutputCharacteristic Characteristic(const TensorSpec& tensor) {
    return tensor.optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }

  static OrtStatusPtr Create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    std::string title = Op::Spec().name;
    return Guard(*api, title, [&] {
      const Node node(*api, *info, Op::Spec());
      title = node.Title();
      *kernel = new Kernel{*api, title, Op(node, Self(op).device_)};
    });
  }

  static OrtStatusPtr Compute(void* kernel, OrtKernelContext* call) {
    const Kernel& self = *static_cast<const Kernel*>(kernel);
    return Guard(self.api, self.title, [&] {
      Context context(self.api, *call, Op::Spec());
      self.op.Compute(context);
    });
  }

  static OrtStatusPtr InferShapes(const OrtCustomOp* op, OrtShapeInferContext* context) {
    const OrtApi& api = Self(op).api_;
    return Guard(api, Op::Spec().name, [&] {
      ShapeInference node(api, *context);
      Op::InferShapes(node);
    });
  }

  const OrtApi& api_;
  Device device_;
};

// An op in the library's list.
struct OpEntry {
  const OpSpec& (*spec)();
  std::unique_ptr<OrtCustomOp, void (*)(OrtCustomOp*)> (*make)(const OrtApi&, uint32_t version, Device);
};

template <typename Op>
OpEntry EntryOf() {
  return {Op::Spec, [](const OrtApi& api, uint32_t version, Device device) {
            return std::unique_ptr<OrtCustomOp, void (*)(OrtCustomOp*)>(
                new CustomOp<Op>(api, version, device), [](OrtCustomOp* op) { delete static_cast<CustomOp<Op>*>(op); });
          }};
}

}  // namespace ort_moe
