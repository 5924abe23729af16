// From a C++ class to the OrtCustomOp that ORT takes.
//
// An op is a class with
//   static const OpSpec& Spec();
//   Op(const Node& node, Device device);           reads and checks attributes and what is known of the inputs
//   void Compute(Context& context) const;          one call; other threads may be inside another
//   static void InferShapes(ShapeInference& node);
// that throws Error with a clause; this header puts the op and the node's name in front and hands it to ORT.
//
// An output that may have several types has that of the first input. ORT derives such a type only from an input of one
// type: the op is registered once for each.
#pragma once

#include <onnxruntime_c_api.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "ort/context.h"
#include "ort/node.h"
#include "ort/op_spec.h"
#include "ort/shape_inference.h"
#include "ort/status.h"

namespace ort_moe {

template <typename Op>
class CustomOp : public OrtCustomOp {
 public:
  // `version` is that of `api`; `type` that of the first input, undefined: any.
  CustomOp(const OrtApi& api, uint32_t version, Device device, ONNXTensorElementDataType type)
      : OrtCustomOp{}, api_(api), device_(device), type_(type) {
    OrtCustomOp::version = version;
    GetName = [](const OrtCustomOp*) { return Op::Spec().name.c_str(); };
    GetExecutionProviderType = [](const OrtCustomOp* op) { return ExecutionProvider(Self(op).device_); };
    GetInputTypeCount = [](const OrtCustomOp*) { return Op::Spec().inputs.size(); };
    GetOutputTypeCount = [](const OrtCustomOp*) { return Op::Spec().outputs.size(); };
    // Undefined is any type: our checks name the input and what it may be, ORT's do not.
    GetInputType = [](const OrtCustomOp* op, size_t index) {
      return index == 0 ? Self(op).type_ : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    };
    GetOutputType = [](const OrtCustomOp* op, size_t index) {
      const TensorSpec& output = Op::Spec().outputs[index];
      return output.types.size() > 1 ? Self(op).type_ : output.types.front();
    };
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
  ONNXTensorElementDataType type_;
};

using OwnedOp = std::unique_ptr<OrtCustomOp, void (*)(OrtCustomOp*)>;

// An op in the library's list.
struct OpEntry {
  const OpSpec& (*spec)();
  // What ORT is to register for a device.
  std::vector<OwnedOp> (*make)(const OrtApi&, uint32_t version, Device);
};

template <typename Op>
OpEntry EntryOf() {
  return {Op::Spec, [](const OrtApi& api, uint32_t version, Device device) {
            const OpSpec& spec = Op::Spec();
            const bool follows = std::any_of(spec.outputs.begin(), spec.outputs.end(),
                                             [](const TensorSpec& output) { return output.types.size() > 1; });
            const std::vector<ONNXTensorElementDataType> any = {ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED};
            std::vector<OwnedOp> ops;
            for (const ONNXTensorElementDataType type : follows ? spec.inputs.front().types : any) {
              ops.push_back(OwnedOp(new CustomOp<Op>(api, version, device, type),
                                    [](OrtCustomOp* op) { delete static_cast<CustomOp<Op>*>(op); }));
            }
            return ops;
          }};
}

}  // namespace ort_moe
