"""Integers that are computed of constants and fixed lengths."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from ort_moe.rewrites.fixed_lengths import cuts, fixed_entries, repeats
from ort_moe.rewrites.shape_inference import infer_shapes


def value(text: str, name: str = "out") -> ir.Value:
    """The value of that name in a graph whose x is (T, 4, 6)."""
    constants = ", ".join(f"int64[1] c{n} = {{{n}}}" for n in range(7))
    proto = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[T, 4, 6] x) => (int64[N] unread) <{constants}, int64[1] last = {{-1}}, int64 depth = {{3}}> {{
            {text}
            unread = Identity (c0)
        }}""")
    model = ir.from_proto(proto)
    infer_shapes(model)
    return next(each for node in model.graph for each in node.outputs if each.name == name)


ENTRIES = {
    "shape": ("out = Shape (x)", [None, 4, 6]),
    "part of a shape": ("out = Shape <start = -1> (x)", [6]),
    "picked": ("s = Shape (x)\n out = Gather (s, last)", [6]),
    "sliced": ("s = Shape (x)\n out = Slice (s, c1, c3, c0)", [4, 6]),
    "joined": ("s = Shape <end = 1> (x)\n out = Concat <axis = 0> (last, s, c5)", [-1, None, 5]),
    "arithmetic": ("s = Shape <start = 2> (x)\n m = Add (s, c1)\n d = Div (m, c2)\n out = Mul (d, c2)", [6]),
    "unknown in arithmetic": ("s = Shape (x)\n out = Sub (s, c1)", [None, 3, 5]),
    "one-hot": ("two = Concat <axis = 0> (c1, c2)\n h = OneHot (c1, depth, two)\n out = Reshape (h, last)", [1, 2, 1]),
    "filled": ("out = ConstantOfShape <value = int64[1] {7}> (c3)", [7, 7, 7]),
    "views": ("s = Shape <start = 2> (x)\n q = Squeeze (s)\n out = Unsqueeze (q, c0)", [6]),
    "negative quotient": ("n = Sub (c0, c5)\n out = Div (n, c2)", [None]),
    "of the data": ("k = Cast <to = 7> (x)\n out = Reshape (k, last)", None),
    "division by zero": ("out = Div (c5, c0)", [None]),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_entries(case: str) -> None:
    text, expected = ENTRIES[case]
    assert fixed_entries(value(text)) == expected


TOKENS = "s = Shape <end = 1> (x)"

CUTS = {
    "axes and steps left out": ("out = Slice (x, c1, c3)", [(1, 3, 0, 1)]),
    "an axis from the end": ("out = Slice (x, c1, c3, last, c2)", [(1, 3, 2, 2)]),
    "a step, no axes": ("out = Slice (x, c1, c3, , c2)", [(1, 3, 0, 2)]),
    "an end that is computed": ("s = Shape <start = 1, end = 2> (x)\n out = Slice (x, c1, s, c1)", [(1, 4, 1, 1)]),
    "an unknown end": (f"{TOKENS}\n out = Slice (x, c1, s, c0)", None),
    "unknown axes": (f"{TOKENS}\n out = Slice (x, c1, c3, s)", None),
    "unknown steps": (f"{TOKENS}\n out = Slice (x, c1, c3, c1, s)", None),
}


@pytest.mark.parametrize("case", CUTS)
def test_cuts(case: str) -> None:
    text, expected = CUTS[case]
    node = value(text).producer()
    assert node is not None
    assert cuts(node) == expected


REPEATS = {
    "tile": ("by = Concat <axis = 0> (c1, c2, c1)\n out = Tile (x, by)", [1, 2, 1]),
    "tile by an unknown number": (f"{TOKENS}\n by = Concat <axis = 0> (s, c2, c1)\n out = Tile (x, by)", None),
    "expand to lengths that are there": ("by = Concat <axis = 0> (c1, c4, c6)\n out = Expand (x, by)", [1, 1, 1]),
    "expand": (
        "u = Unsqueeze (x, c1)\n by = Concat <axis = 0> (c1, c3, c1, c6)\n out = Expand (u, by)",
        [1, 3, 1, 1],
    ),
    "expand to an unknown length": (f"{TOKENS}\n by = Concat <axis = 0> (s, c4, c6)\n out = Expand (x, by)", None),
    "expand to more axes": ("by = Concat <axis = 0> (c2, c1, c4, c6)\n out = Expand (x, by)", None),
    "neither": ("out = Neg (x)", None),
}  # fmt: skip


@pytest.mark.parametrize("case", REPEATS)
def test_repeats(case: str) -> None:
    text, expected = REPEATS[case]
    found = repeats(value(text))
    assert (None if found is None else found[1]) == expected
