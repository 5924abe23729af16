"""A tiny MoE block, and the same with its router fused by hand: right, or wrong in a chosen way.

hidden (tokens, 8) -> MatMul -> Softmax -> TopK over 16 experts -> one matrix per expert -> weighted sum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ort_moe.ops import DOMAIN, FUSED_ROUTER

HIDDEN, EXPERTS, CHOSEN = 8, 16, 2
SITE = "router"
TENSOR_TYPES = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16}


def original(dtype: Any = np.float32, *, tokens: int | str = "tokens", router: Any = None) -> onnx.ModelProto:
    """The block of standard operators; `router` (HIDDEN, EXPERTS) replaces its random routing matrix."""
    softmax = helper.make_node("Softmax", ["logits"], ["probabilities"], name="scores", axis=-1)
    topk = helper.make_node("TopK", ["probabilities", "k"], ["weights", "ids"], name="choice", axis=-1)
    constants = [numpy_helper.from_array(np.array([CHOSEN], np.int64), "k")]
    return _model([softmax, topk], constants, [], dtype, tokens, router)


def fused(
    dtype: Any = np.float32,
    *,
    tokens: int | str = "tokens",
    router: Any = None,
    wrong: str | None = None,
) -> onnx.ModelProto:
    """The block with a FusedRouter, and its function.

    Args:
        dtype: Type of activations and weights.
        tokens: First dimension.
        router: As for `original`.
        wrong: `weights`: the weights are halved; `choice`: the worst experts are chosen; `elsewhere`: the router is
            right, but the output is doubled. The attributes tell the same untruth, so that a kernel does it, too.
    """
    scale = 0.5 if wrong == "weights" else 1.0
    attributes = FUSED_ROUTER.complete({"k": CHOSEN, "score": "softmax", "scale": scale})
    logits = "logits"
    nodes = []
    if wrong == "choice":  # on negated logits, which no longer are a value of the original
        logits = "negated"
        nodes.append(helper.make_node("Neg", ["logits"], ["negated"], name="negate"))
    node = helper.make_node(
        "FusedRouter", [logits], ["router_weights", "router_ids"], SITE, domain=DOMAIN, overload="tiny", **attributes
    )
    casts = [
        helper.make_node("Cast", ["router_weights"], ["weights"], name="cast_weights", to=TENSOR_TYPES[dtype]),
        helper.make_node("Cast", ["router_ids"], ["ids"], name="cast_ids", to=TensorProto.INT64),
    ]
    body = [
        helper.make_node("Cast", ["l"], ["x"], to=TensorProto.FLOAT),
        helper.make_node("Softmax", ["x"], ["p"], axis=-1),
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.array([CHOSEN], np.int64))),
        helper.make_node("TopK", ["p", "k"], ["best", "i"], axis=-1),
        helper.make_node("Constant", [], ["scale"], value=numpy_helper.from_array(np.array([scale], np.float32))),
        helper.make_node("Mul", ["best", "scale"], ["w"]),
        helper.make_node("Cast", ["i"], ["n"], to=TensorProto.INT32),
    ]
    function = helper.make_function(
        DOMAIN, "FusedRouter", ["l"], ["w", "n"], body, [helper.make_opsetid("", 18)], list(attributes), overload="tiny"
    )
    return _model([*nodes, node, *casts], [], [function], dtype, tokens, router, doubled=wrong == "elsewhere")


def save(model: onnx.ModelProto, path: Path, *, data: str | None = None) -> Path:
    """Writes the model, with its weights in the file `data` beside it where one is named."""
    if data is None:
        onnx.save(model, path)
    else:
        onnx.save(model, path, save_as_external_data=True, location=data, size_threshold=256)
    return path


def _model(
    routing: list[onnx.NodeProto],
    constants: list[onnx.TensorProto],
    functions: list[onnx.FunctionProto],
    dtype: Any,
    tokens: int | str,
    router: Any,
    doubled: bool = False,
) -> onnx.ModelProto:
    rng = np.random.default_rng(7)
    random_router = rng.standard_normal((HIDDEN, EXPERTS))
    experts = rng.standard_normal((EXPERTS, HIDDEN, HIDDEN)) * (2 if doubled else 1)
    initializers = {
        "router_matrix": (random_router if router is None else router).astype(dtype),
        "expert_matrices": experts.astype(dtype),
        "axes_row": np.array([1, 2], np.int64),
        "axes_column": np.array([2], np.int64),
        "axes_weight": np.array([2, 3], np.int64),
        "axes_sum": np.array([1], np.int64),
    }
    nodes = [
        helper.make_node("MatMul", ["hidden", "router_matrix"], ["logits"], name="gate"),
        *routing,
        helper.make_node("Gather", ["expert_matrices", "ids"], ["chosen"], name="gather", axis=0),
        helper.make_node("Unsqueeze", ["hidden", "axes_row"], ["row"], name="row"),
        helper.make_node("MatMul", ["row", "chosen"], ["by_expert"], name="expert"),
        helper.make_node("Unsqueeze", ["weights", "axes_weight"], ["weight"], name="weight"),
        helper.make_node("Mul", ["by_expert", "weight"], ["weighted"], name="weigh"),
        helper.make_node("Squeeze", ["weighted", "axes_column"], ["flat"], name="flatten"),
        helper.make_node("ReduceSum", ["flat", "axes_sum"], ["output"], name="sum", keepdims=0),
    ]
    element = TENSOR_TYPES[dtype]
    graph = helper.make_graph(
        nodes,
        "tiny_moe",
        [helper.make_tensor_value_info("hidden", element, [tokens, HIDDEN])],
        [helper.make_tensor_value_info("output", element, [tokens, HIDDEN])],
        [*constants, *(numpy_helper.from_array(array, name) for name, array in initializers.items())],
    )
    opsets = [helper.make_opsetid("", 18)] + ([helper.make_opsetid(DOMAIN, 1)] if functions else [])
    return helper.make_model(graph, ir_version=10, opset_imports=opsets, functions=functions)
