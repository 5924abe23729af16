"""com.microsoft::QMoE, ONNX Runtime's own op of quantised experts, with the weights of a case of FusedExperts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from ort_moe.packing import nvfp4
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


def error_beside(got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """How far a result is from the expected one, by the norm of that."""
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def logits_of(case: ExpertsCase) -> npt.NDArray[np.float32]:
    """(T, E): what chooses the case's experts."""
    return np.random.default_rng(3).normal(0.0, 2.0, (*case.leading, case.experts)).astype(np.float32)


def routed(case: ExpertsCase) -> dict[str, Any]:
    """The weights and indices that FusedRouter gives for logits_of."""
    return run_op("FusedRouter", {"logits": logits_of(case)}, {"k": case.k, "score": "softmax", "normalize": 1})


def qmoe_answer(case: ExpertsCase, layers: Mapping[str, Mapping[str, Any]], **quantization: Any) -> npt.NDArray[Any]:
    """What QMoE makes of the case behind logits_of, (T, H)."""
    logits = logits_of(case)
    session = op_session(qmoe_model(case, layers, logits.shape, **quantization))
    return run_session(session, {"x": case.feeds["x"], "logits": logits})["y"]


def error_beside_qmoe(case: ExpertsCase, layers: Mapping[str, Mapping[str, Any]], **quantization: Any) -> float:
    """How far FusedExperts behind a FusedRouter is from QMoE, by the norm of QMoE's result."""
    got = run_op("FusedExperts", case.feeds | routed(case), case.all_attributes)["y"]
    return error_beside(got, qmoe_answer(case, layers, **quantization))


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


# --- Its recorded answers to nvfp4, for where no such QMoE runs ---

ANSWERS = Path(__file__).with_name("qmoe_nvfp4.npz")
"""Of ONNX Runtime 1.32's CPU kernel to nvfp4_case, by the number of tokens; `python -m tests.qmoe_models` records."""

ANSWERED_TOKENS = (1, 4, 40, 200)


def nvfp4_case(tokens: int) -> ExpertsCase:
    """A call whose activations and biases any type holds exactly, with global scales that are powers of two.

    QMoE rounds the product of the two scales to fewer digits, which these survive.
    """
    case = ExpertsCase((tokens,), 12, 3, 256, 192, "float", "nvfp4", SWIGLU, has_bias=True, seed=tokens)
    for name in ("x", "fc1_bias", "fc2_bias"):
        case.feeds[name] = np.clip(np.rint(case.feeds[name] * 64), -255, 255).astype(np.float32) / 64
    for name in ("fc1_global_scale", "fc2_global_scale"):
        case.feeds[name] = np.exp2(np.round(np.log2(case.feeds[name])))
    return case


def nvfp4_answer(case: ExpertsCase) -> npt.NDArray[Any]:
    """QMoE's answer to nvfp4_case, (T, H)."""
    layers = {}
    for layer in ("fc1", "fc2"):
        parts = (case.feeds[f"{layer}_{part}"] for part in ("weights", "scales", "global_scale"))
        layers[layer] = nvfp4.to_qmoe(nvfp4.Nvfp4(*parts), "K")._asdict()
    return qmoe_answer(case, layers, quant_type="nvfp4", weights_prepacked=1, block_size=16)


if __name__ == "__main__":
    np.savez_compressed(ANSWERS, **{str(tokens): nvfp4_answer(nvfp4_case(tokens)) for tokens in ANSWERED_TOKENS})
