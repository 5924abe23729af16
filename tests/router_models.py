"""One-node FusedRouter models, and running them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from ort_moe.ops import DOMAIN, FUSED_ROUTER, VERSION, AttributeValue
from tests.router_cases import DTYPES, RouterCase


def router_model(
    attributes: Mapping[str, AttributeValue],
    *,
    onnx_type: str = "float",
    logits_shape: Sequence[int | str],
    selection_bias: npt.NDArray[np.float32] | None = None,
    expert_scale: npt.NDArray[np.float32] | None = None,
    complete: bool = True,
    name: str = "router",
) -> onnx.ModelProto:
    """A model `logits -> weights, indices` of one FusedRouter node, without a function body.

    Args:
        attributes: The node's attributes.
        onnx_type: Type of the logits: float, float16 or bfloat16.
        logits_shape: (..., E); names stay symbolic.
        selection_bias: (E), becomes an initializer.
        expert_scale: (E), becomes an initializer.
        complete: Add the neutral value of each attribute not given; False makes faulty nodes for tests of errors.
        name: The node's name.
    """
    vectors = {"selection_bias": selection_bias, "expert_scale": expert_scale}
    inputs = ["logits", *(key if value is not None else "" for key, value in vectors.items())]
    while not inputs[-1]:
        inputs.pop()
    outputs = [output.name for output in FUSED_ROUTER.outputs if not output.optional]
    node = helper.make_node("FusedRouter", inputs, outputs, name=name, domain=DOMAIN)
    for key, value in (FUSED_ROUTER.complete(attributes) if complete else attributes).items():
        node.attribute.append(helper.make_attribute(key, value))
    k = attributes.get("k")
    chosen_shape = [*logits_shape[:-1], k if isinstance(k, int) else "K"]
    element_type = TensorProto.DataType.Value(onnx_type.upper())
    graph = helper.make_graph(
        [node],
        "router",
        [helper.make_tensor_value_info("logits", element_type, logits_shape)],
        [
            helper.make_tensor_value_info("weights", TensorProto.FLOAT, chosen_shape),
            helper.make_tensor_value_info("indices", TensorProto.INT32, chosen_shape),
        ],
        [numpy_helper.from_array(value, key) for key, value in vectors.items() if value is not None],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def case_model(case: RouterCase, *, symbolic: bool = False) -> onnx.ModelProto:
    """The model of a case; `symbolic` leaves the leading dimensions open."""
    shape: list[int | str] = list(case.shape)
    if symbolic:
        shape[:-1] = [f"d{axis}" for axis in range(len(shape) - 1)]
    return router_model(
        case.attributes,
        onnx_type=case.onnx_type,
        logits_shape=shape,
        selection_bias=case.selection_bias,
        expert_scale=case.expert_scale,
    )


def run_router(session: Any, logits: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Runs a router session: weights and indices."""
    import onnxruntime

    if logits.dtype == DTYPES["bfloat16"]:  # NumPy has no bfloat16 of its own: pass the bits
        value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(logits.view(np.uint16), TensorProto.BFLOAT16)
    else:
        value = onnxruntime.OrtValue.ortvalue_from_numpy(logits)
    weights, indices = session.run_with_ort_values(["weights", "indices"], {"logits": value})
    return weights.numpy(), indices.numpy()
