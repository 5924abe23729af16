"""Sessions of ONNX Runtime that hold a stack of MoE layers: as our ops, and as the contrib ops MoE and QMoE.

All run as CUDA graphs on the stack's own buffers. Ours take the experts as inputs, bound where they lie; QMoE takes
them as initializers, which it repacks when the session is created.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

from benchmarks.expert_stack import ROUTER, SWIGLU, Stack
from ort_moe.library import register
from ort_moe.ops import DOMAIN, FUSED_EXPERTS, FUSED_ROUTER, VERSION

CONTRIB = "com.microsoft"


def our_runner(stack: Stack) -> Callable[[], None]:
    """Runs the stack as FusedRouter and FusedExperts."""
    shape = stack.shape
    nodes = []
    for n in range(stack.layers):
        nodes.append(
            helper.make_node(
                "FusedRouter",
                [f"logits{n}"],
                [f"mix{n}", f"indices{n}"],
                domain=DOMAIN,
                **FUSED_ROUTER.complete({"k": shape.k, **ROUTER}),
            )
        )
        given = {"x": f"x{n}", "weights": f"mix{n}", "indices": f"indices{n}"} | {name: name for name in stack.weights}
        inputs = [given.get(tensor.name, "") for tensor in FUSED_EXPERTS.inputs]
        while not inputs[-1]:
            inputs.pop()
        attributes = FUSED_EXPERTS.complete({"weight_format": shape.weight_format, **SWIGLU})
        nodes.append(helper.make_node("FusedExperts", inputs, [f"y{n}"], domain=DOMAIN, **attributes))
    options = _options()
    register(options)
    return _runner(stack, nodes, options, bound=stack.weights)


def contrib_runner(stack: Stack) -> Callable[[], None]:
    """Runs the stack as com.microsoft::QMoE (nvfp4) or MoE (dense)."""
    shape = stack.shape
    attributes: dict[str, Any] = {
        "k": shape.k,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
        "normalize_routing_weights": 1,
    }
    options = _options()
    if shape.weight_format == "dense":
        nodes = [
            helper.make_node(
                "MoE", [f"x{n}", f"logits{n}", "fc1_weights", "", "fc2_weights"], [f"y{n}"], domain=CONTRIB,
                **attributes,
            )
            for n in range(stack.layers)
        ]  # fmt: skip
        return _runner(stack, nodes, options, bound=stack.weights)
    inputs = ["fc1_weights", "fc1_scales", "", "fc2_weights", "fc2_scales", *[""] * 8, "fc1_global_scale"]
    attributes |= {"quant_type": "nvfp4", "expert_weight_bits": 4, "block_size": 16}
    nodes = [
        helper.make_node(
            "QMoE", [f"x{n}", f"logits{n}", *inputs, "fc2_global_scale"], [f"y{n}"], domain=CONTRIB,
            **attributes,
        )
        for n in range(stack.layers)
    ]  # fmt: skip
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(t.cpu().numpy(), _element_type(name, t))
        for name, t in stack.weights.items()
    }
    options.add_external_initializers(list(values), list(values.values()))
    return _runner(stack, nodes, options, bound={})


def _options() -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return options


def _element_type(name: str, tensor: torch.Tensor) -> int:
    if name.endswith("_scales"):
        return TensorProto.FLOAT8E4M3FN
    types = {
        torch.uint8: TensorProto.UINT8,
        torch.float32: TensorProto.FLOAT,
        torch.float16: TensorProto.FLOAT16,
        torch.bfloat16: TensorProto.BFLOAT16,
    }
    return types[tensor.dtype]


def _runner(
    stack: Stack, nodes: list[onnx.NodeProto], options: Any, *, bound: dict[str, torch.Tensor]
) -> Callable[[], None]:
    """A session of the nodes; weights that are not bound become initializers whose data the options hold."""
    inputs, outputs = dict(bound), {}
    for n in range(stack.layers):
        inputs |= {f"logits{n}": stack.logits[n], f"x{n}": stack.x[n]}
        outputs[f"y{n}"] = stack.y[n]
    initializers = []
    for name, tensor in stack.weights.items():
        if name not in bound:
            proto = TensorProto(name=name, data_type=_element_type(name, tensor), dims=tensor.shape)
            proto.data_location = TensorProto.EXTERNAL
            proto.external_data.add(key="location", value="held by the session options")
            initializers.append(proto)
    graph = helper.make_graph(
        nodes,
        "stack",
        *(
            [helper.make_tensor_value_info(name, _element_type(name, t), t.shape) for name, t in tensors.items()]
            for tensors in (inputs, outputs)
        ),
        initializers,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, VERSION), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    provider = ("CUDAExecutionProvider", {"enable_cuda_graph": "1"})
    session = onnxruntime.InferenceSession(model, options, providers=[provider])
    binding = session.io_binding()
    for name, tensor in inputs.items():
        binding.bind_input(name, "cuda", 0, _element_type(name, tensor), tensor.shape, tensor.data_ptr())
    for name, tensor in outputs.items():
        binding.bind_output(name, "cuda", 0, _element_type(name, tensor), tensor.shape, tensor.data_ptr())
    return lambda: session.run_with_iobinding(binding)
