"""com.microsoft::QMoE, ONNX Runtime's own op of quantised experts, with the weights of a case of FusedExperts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.experts_cases import ExpertsCase
from tests.op_models import element_type, op_session, run_op, run_session

_PARTS = ("weights", "scales", "bias")


def qmoe_model(
    case: ExpertsCase, layers: Mapping[str, Mapping[str, Any]], logits_shape: tuple[int, ...], **quantization: Any
) -> onnx.ModelProto:
    """A QMoE of float32 activations.

    Args:
        case: SwiGLU with interleaved rows and biases.
        layers: Of `fc1` and `fc2`, the parts as QMoE takes them, by the names of FusedExperts' inputs.
        logits_shape: (T, E).
        **quantization: The node's attributes that say how the weights are packed.
    """
    tensors = {f"{layer}_{part}": value for layer, parts in layers.items() for part, value in parts.items()}
    tensors |= {f"{layer}_bias": case.feeds[f"{layer}_bias"] for layer in layers}
    zero_points = [f"{layer}_zero_points" for layer in ("fc1", "fc2")]
    scales = [f"{layer}_global_scale" for layer in ("fc1", "fc2")]
    inputs = ["x", "logits", *(f"{layer}_{part}" for layer in ("fc1", "fc2") for part in _PARTS), "", "", ""]
    inputs += [name if name in tensors else "" for name in (*zero_points, "", "", *scales)]
    while not inputs[-1]:
        inputs.pop()
    node = helper.make_node(
        "QMoE",
        inputs,
        ["y"],
        domain="com.microsoft",
        k=case.k,
        activation_type="swiglu",
        swiglu_fusion=1,
        swiglu_limit=case.attributes["limit"],
        activation_alpha=case.attributes["alpha"],
        activation_beta=case.attributes["beta"],
        normalize_routing_weights=1,
        **quantization,
    )
    constants = [
        helper.make_tensor(name, element_type(value.dtype), value.shape, value.tobytes(), raw=True)
        for name, value in tensors.items()
    ]
    shapes = {"x": case.feeds["x"].shape, "logits": logits_shape}
    graph = helper.make_graph(
        [node],
        "qmoe",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        constants,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def error_beside_qmoe(case: ExpertsCase, layers: Mapping[str, Mapping[str, Any]], **quantization: Any) -> float:
    """How far FusedExperts behind a FusedRouter is from QMoE, by the norm of QMoE's result."""
    logits = np.random.default_rng(3).normal(0.0, 2.0, (*case.leading, case.experts)).astype(np.float32)
    model = qmoe_model(case, layers, logits.shape, **quantization)
    expected = run_session(op_session(model), {"x": case.feeds["x"], "logits": logits})["y"]
    routed = run_op("FusedRouter", {"logits": logits}, {"k": case.k, "score": "softmax", "normalize": 1})
    got = run_op("FusedExperts", case.feeds | routed, case.all_attributes)["y"]
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


SWIGLU: dict[str, Any] = {
    "activation": "silu",
    "gated": 1,
    "gate_layout": "interleaved",
    "alpha": 1.7,
    "beta": 1.0,
    "limit": 2.0,
}
"""The activation that both know; QMoE takes gate and value interleaved on the CPU."""


def qmoe_runs() -> bool:
    """Whether this ONNX Runtime's QMoE runs unpacked weights on the CPU."""
    import onnxruntime

    return tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 32)
