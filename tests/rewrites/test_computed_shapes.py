"""Shapes that a model computes from the lengths of its inputs are fixed as far as they are."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ort_moe.rewrites import rewrite
from ort_moe.rewrites.canonicalize import canonicalize
from ort_moe.rewrites.values import integers
from tests.rewrites.blocks import EXPERTS, assert_same, block

GROUPED = """
    shape = Shape (x)
    tokens = Gather (shape, zero_0)
    row = Unsqueeze (tokens, zero)
    scores = Sigmoid (logits)
    keys = Add (scores, bias)
    by_group = Concat <axis = 0> (row, four, minus1)
    grouped = Reshape (keys, by_group)
    best, unused_1 = TopK (grouped, two)
    group_scores = ReduceSum <keepdims = 0> (best, minus1)
    unused_2, kept = TopK (group_scores, two)
    full = Shape (group_scores)
    none = ConstantOfShape <value = float[1] {0}> (full)
    few = Shape (kept)
    ones = Expand (one_f, few)
    groups = ScatterElements <axis = 1> (none, kept, ones)
    bits = Unsqueeze (groups, minus1)
    by_expert = Concat <axis = 0> (row, four, members)
    same = Reshape (by_expert, minus1)
    length = Shape (same)
    filled = ConstantOfShape <value = int64[1] {1}> (length)
    negative = Mul (filled, minus1_0)
    is_free = Equal (same, negative)
    spread = Where (is_free, filled, same)
    repeated = Expand (bits, spread)
    flat = Concat <axis = 0> (row, minus1)
    mask = Reshape (repeated, flat)
    keep = Cast <to = 9> (mask)
    masked = Where (keep, keys, minus_infinity)
    unused_3, ids = TopK (masked, k)
    weights = GatherElements <axis = 1> (scores, ids)"""
CONSTANTS = {
    "zero_0": np.array(0),
    "zero": np.array([0]),
    "four": np.array([4]),
    "members": np.array([EXPERTS // 4]),
    "one_f": 1.0,
    "minus1_0": np.array(-1),
    "minus_infinity": -np.inf,
    "bias": np.linspace(0, 0.5, EXPERTS, dtype=np.float32),
}


@pytest.mark.parametrize(
    "lookup",
    ["Gather (shape, zero_0)", "Slice (shape, zero, one, zero)"],
    ids=["gather", "slice"],
)
def test_groups_by_computed_shapes(lookup: str) -> None:
    """As tracing exporters write `view(x.shape[0], 4, -1)`, `expand(x.shape[0], 4, 2)` and `view(x.shape[0], -1)`."""
    text = GROUPED.replace("Gather (shape, zero_0)", lookup)
    if lookup.startswith("Slice"):
        text = text.replace("row = Unsqueeze (tokens, zero)", "row = Identity (tokens)")
    original, model = block(text, CONSTANTS), block(text, CONSTANTS)
    (site,) = rewrite(model).sites
    assert (site.status, set(site.absorbed)) == ("whole", {"gather-scores", "sigmoid"})
    assert_same(original, model)
    assert not rewrite(model).modified


def _target(view: str, lines: str = "", x: str = "float[B, S, 12] x", scores: str = "Softmax (x)") -> list[int] | None:
    """The fixed target of a reshape in front of a TopK; b and s are lengths of x, n is one of another value."""
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
        g ({x}, float[N, 12] other) => (y) {{
            shape = Shape (x)
            b = Gather (shape, i0)
            s = Gather (shape, i1)
            n = Shape <end = 1> (other)
            {lines}
            target = Concat <axis = 0> ({view})
            scores = {scores}
            grouped = Reshape (scores, target)
            y, ids = TopK (grouped, i1)
        }}"""
    proto = onnx.parser.parse_model(text)
    constants = {
        "i0": [0],
        "i1": [1],
        "three": [3],
        "four": [4],
        "five": [5],
        "twelve": [12],
        "minus1": [-1],
        "minus2": [-2],
    }
    for name, array in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.array(array), name))
    model = ir.from_proto(proto)
    canonicalize(model)
    return integers(next(node for node in model.graph if node.outputs[0].name == "grouped").inputs[1])


@pytest.mark.parametrize(
    ("view", "lines", "fixed"),
    [
        ("b, s, three, minus1", "", [0, 0, 3, 4]),
        ("front, minus1", "front = Slice (shape, i0, minus1, i0)", [0, 0, 12]),
        ("b, s, three, four", "", [0, 0, 3, 4]),
        ("b, minus1", "", None),  # what is left is no fixed number
        ("s, b, minus1", "", None),  # another order
        ("b, b, minus1", "", None),
        ("b, n, minus1", "", None),  # a length of something else
        ("b, s, five, minus1", "", None),  # for the runtime to refuse
        ("b, s, three, three", "", None),
        ("b, sum, three, minus1", "sum = Add (s, i0)", None),
    ],
)
def test_targets(view: str, lines: str, fixed: list[int] | None) -> None:
    assert _target(view, lines) == fixed


@pytest.mark.parametrize(("view", "fixed"), [("b, three, minus1", [-1, 3, 4]), ("b, three, four", [-1, 3, 4])])
def test_targets_with_one_free_length(view: str, fixed: list[int]) -> None:
    assert _target(view, x="float[B, 12] x") == fixed


@pytest.mark.parametrize(("second", "fixed"), [("Neg (rows)", [-1, 3, 4]), ("Reshape (other, flat)", None)])
def test_lengths_behind_a_product(second: str, fixed: list[int] | None) -> None:
    """Rows of one number of tokens, or of two, of which either may be 1."""
    lines = f"""
        flat = Concat <axis = 0> (minus1, twelve)
        rows = Reshape (x, flat)
        b_s = Shape <end = 1> (rows)
        second = {second}
        product = Mul (rows, second)"""
    assert _target("b_s, three, minus1", lines, scores="Softmax (product)") == fixed
