"""A small decode graph: attention over a key-value cache of fixed length, then a FusedRouter with FusedExperts.

Its state are the cache, the number of tokens so far and a running mean of the hidden states. Writing the cache again
changes nothing; the other two move at every run, and so tell how often one took place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper, parser

from ort_moe.ops import DOMAIN, FUSED_EXPERTS, FUSED_ROUTER
from tests.op_models import element_type

Array = npt.NDArray[Any]

BATCH, LENGTH, HEADS, SIZE = 2, 256, 2, 8
HIDDEN, EXPERTS, K, INNER, VOCABULARY = HEADS * SIZE, 8, 2, 16, 40

STATE = {
    "past_key_values.0.key": "present.0.key",
    "past_key_values.0.value": "present.0.value",
    "past_length": "present_length",
    "past_mean": "present_mean",
}

_GRAPH = """
<ir_version: 10, opset_import: ["": 20, "ort_moe": 1]>
decode (int64[B, 1] input_ids, T[B, 1, H] nudge, int64[B, 1] past_length, T[B, 1, H] past_mean) =>
    (T[B, 1, V] logits, int32[B, 1, K] chosen, int64[B, 1] present_length, T[B, 1, H] present_mean)
{
    embedded = Gather (table, input_ids)
    nudged = Add (embedded, nudge)
    x = Add (nudged, past_mean)
    query_flat = MatMul (x, wq)
    key_flat = MatMul (x, wk)
    value_flat = MatMul (x, wv)
    query_rows = Reshape (query_flat, by_head)
    key_rows = Reshape (key_flat, by_head)
    value_rows = Reshape (value_flat, by_head)
    query = Transpose <perm = [0, 2, 1, 3]> (query_rows)
    key = Transpose <perm = [0, 2, 1, 3]> (key_rows)
    value = Transpose <perm = [0, 2, 1, 3]> (value_rows)
    place = Reshape (past_length, per_sequence)
    slots = Expand (place, new_rows)
    present_key = ScatterElements <axis = 2> (past_key, slots, key)
    present_value = ScatterElements <axis = 2> (past_value, slots, value)
    turned = Transpose <perm = [0, 1, 3, 2]> (present_key)
    scores = MatMul (query, turned)
    seen = LessOrEqual (positions, place)
    masked = Where (seen, scores, lowest)
    attention = Softmax <axis = -1> (masked)
    mixed = MatMul (attention, present_value)
    tokens = Transpose <perm = [0, 2, 1, 3]> (mixed)
    flat = Reshape (tokens, together)
    projected = MatMul (flat, wo)
    hidden = Add (x, projected)
    gated = MatMul (hidden, gate)
    weights, chosen = ort_moe.FusedRouter (gated)
    y = ort_moe.FusedExperts (hidden, weights, chosen, "", "", "", "", fc1, "", "", "", "", fc2, "", "", "", "", hidden)
    logits = MatMul (y, head)
    old = Mul (past_mean, keep)
    new = Mul (y, take)
    present_mean = Add (old, new)
    present_length = Add (past_length, one)
}
"""


def decode_model(dtype: Any = np.float32, *, blocker: str = "", batch: int | str = BATCH) -> onnx.ModelProto:
    """The graph.

    Args:
        dtype: Type of its activations.
        blocker: "If": a node of control flow doubles the logits; "NonZero": the size of a value depends on data.
        batch: The first dimension of `input_ids`.
    """
    constants = _constants(np.dtype(dtype))
    model = parser.parse_model(_sized(_GRAPH, np.dtype(dtype)))
    cache = (BATCH, HEADS, LENGTH, SIZE)
    number = element_type(np.dtype(dtype))
    graph = model.graph
    for name, output in list(STATE.items())[:2]:
        graph.input.append(helper.make_tensor_value_info(name, number, cache))
        graph.output.append(helper.make_tensor_value_info(output, number, cache))
    renamed = {"past_key": "past_key_values.0.key", "past_value": "past_key_values.0.value"}
    renamed |= {"present_key": "present.0.key", "present_value": "present.0.value"}  # the parser knows no dots
    for node in graph.node:
        node.name = node.output[0]
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
        if node.domain == DOMAIN:
            op, given = (
                (FUSED_ROUTER, {"k": K, "score": "softmax", "normalize": 1})
                if node.op_type == FUSED_ROUTER.name
                else (FUSED_EXPERTS, {"weight_format": "dense", "activation": "silu", "gated": 1})
            )
            node.attribute.extend(helper.make_attribute(*pair) for pair in op.complete(given).items())
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    if isinstance(batch, str):
        graph.input[0].type.tensor_type.shape.dim[0].dim_param = batch
    if blocker == "If":
        _add_if(graph)
    elif blocker:
        graph.node.append(helper.make_node("NonZero", ["input_ids"], ["where"], name="find"))
        graph.output.append(helper.make_tensor_value_info("where", 7, (2, BATCH)))
    return model


def step_inputs(step: int, dtype: Any = np.float32) -> dict[str, Array]:
    """Other ones at each step."""
    rng = np.random.default_rng(step)
    return {
        "input_ids": rng.integers(0, VOCABULARY, (BATCH, 1)),
        "nudge": rng.normal(0.0, 0.1, (BATCH, 1, HIDDEN)).astype(dtype),
    }


def empty_state(dtype: Any = np.float32) -> dict[str, Array]:
    """Zeros."""
    cache = np.zeros((BATCH, HEADS, LENGTH, SIZE), dtype)
    mean = np.zeros((BATCH, 1, HIDDEN), dtype)
    return dict(zip(STATE, (cache, cache.copy(), np.zeros((BATCH, 1), np.int64), mean), strict=True))


def plain_step(session: Any, inputs: Mapping[str, Array], state: dict[str, Array]) -> dict[str, Array]:
    """One run of a session as ONNX Runtime has it; the state is replaced by what follows it."""
    names = [output.name for output in session.get_outputs()]
    results = dict(zip(names, session.run(names, {**inputs, **state}), strict=True))
    for past, present in STATE.items():
        state[past] = results.pop(present)
    return results


def _sized(text: str, dtype: np.dtype[Any]) -> str:
    names = {"float32": "float", "float16": "float16"}
    text = text.replace("T[", f"{names[dtype.name]}[")
    for letter, size in (("B", BATCH), ("H", HIDDEN), ("V", VOCABULARY), ("K", K)):
        text = text.replace(f"[{letter}, 1", f"[{size}, 1").replace(f"1, {letter}]", f"1, {size}]")
    return text


def _constants(dtype: np.dtype[Any]) -> dict[str, Array]:
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Array:
        return rng.normal(0.0, shape[-2] ** -0.5, shape).astype(dtype)

    square = (HIDDEN, HIDDEN)
    return {
        "table": random(VOCABULARY, HIDDEN) * dtype.type(4),
        "head": random(HIDDEN, VOCABULARY),
        **{name: random(*square) for name in ("wq", "wk", "wv", "wo")},
        "gate": random(HIDDEN, EXPERTS),
        "fc1": random(EXPERTS, 2 * INNER, HIDDEN),
        "fc2": random(EXPERTS, HIDDEN, INNER),
        "by_head": np.array([BATCH, 1, HEADS, SIZE]),
        "per_sequence": np.array([BATCH, 1, 1, 1]),
        "new_rows": np.array([BATCH, HEADS, 1, SIZE]),
        "together": np.array([BATCH, 1, HIDDEN]),
        "positions": np.arange(LENGTH)[None, None, None],
        "lowest": np.array(np.finfo(dtype).min, dtype),
        "keep": np.array(0.5, dtype),
        "take": np.array(0.05, dtype),
        "one": np.array(1),
    }


def _add_if(graph: onnx.GraphProto) -> None:
    """Between the logits and their output: doubles them after the first token."""
    number = graph.output[0].type.tensor_type.elem_type
    for node in graph.node:
        node.output[:] = ["single" if name == "logits" else name for name in node.output]
    branches = {
        name: helper.make_graph(
            [helper.make_node(op, inputs, [name], name=name)],
            name,
            [],
            [helper.make_tensor_value_info(name, number, (BATCH, 1, VOCABULARY))],
        )
        for name, op, inputs in (("twice", "Add", ["single", "single"]), ("once", "Identity", ["single"]))
    }
    graph.node.extend(
        [
            helper.make_node("ReduceMax", ["past_length"], ["longest"], name="longest", keepdims=0),
            helper.make_node("GreaterOrEqual", ["longest", "one"], ["late"], name="late"),
            helper.make_node(
                "If", ["late"], ["logits"], name="doubling", then_branch=branches["twice"], else_branch=branches["once"]
            ),
        ]
    )
