"""Runs each operator once, small, and holds it against its NumPy reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ort_moe.ops import DOMAIN, OPS, VERSION, AttributeValue
from ort_moe.verification.runnable_model import CPU, open_session

if TYPE_CHECKING:
    import onnx

_TOKENS, _EXPERTS, _CHOSEN = 5, 16, 4


def smoke(op_name: str, providers: Sequence[str] = CPU) -> str | None:
    """What is wrong with an operator on the given execution providers; None where it is right, bit for bit.

    Raises:
        ModelError: ONNX Runtime cannot load or run it.
        KeyError: There is no such operator.
    """
    return _CASES[op_name](providers)


def _fused_router(providers: Sequence[str]) -> str | None:
    import numpy as np

    from ort_moe.reference.fused_router import fused_router

    # A router with a bias and groups: it goes through every step of the kernel.
    attributes: dict[str, AttributeValue] = {"k": _CHOSEN, "score": "sigmoid", "normalize": 1, "scale": 2.5}
    attributes |= {"num_groups": 4, "topk_groups": 2, "group_score_top": 2}
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((_TOKENS, _EXPERTS), dtype=np.float32)
    bias = rng.standard_normal(_EXPERTS, dtype=np.float32)
    run = open_session(
        _model("FusedRouter", {"logits": logits, "selection_bias": bias}, attributes),
        "a FusedRouter",
        with_library=True,
        providers=providers,
    )
    got = run({"logits": logits, "selection_bias": bias})
    weights, indices = fused_router(logits, bias, None, **attributes)
    if not np.array_equal(got["indices"], indices):
        return "it chooses other experts than the reference"
    if not np.array_equal(got["weights"], weights):
        return f"its weights differ from the reference by up to {np.abs(got['weights'] - weights).max():.1e}"
    return None


_CASES: Mapping[str, Callable[[Sequence[str]], str | None]] = {"FusedRouter": _fused_router}


def _model(op_name: str, feeds: Mapping[str, Any], attributes: Mapping[str, AttributeValue]) -> onnx.ModelProto:
    """A model of one node whose inputs are fed."""
    from onnx import TensorProto, helper

    op = OPS[op_name]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    types = {"float": TensorProto.FLOAT, "int32": TensorProto.INT32}
    outputs = [helper.make_tensor_value_info(t.name, types[t.types[0]], None) for t in op.outputs]
    node = helper.make_node(op_name, list(feeds), [t.name for t in op.outputs], name="smoke", domain=DOMAIN)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in op.complete(attributes).items())
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(helper.make_graph([node], "smoke", inputs, outputs), ir_version=10, opset_imports=opsets)
