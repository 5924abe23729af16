"""Which expert's part of a stack a value is."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ort_moe.rewrites.experts.layer import entry

EXPERTS = 100
"""More than are looked at where sizes are computed."""


def value(name: str, shape: list[int], array: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None) -> ir.Value:
    const_value = None if array is None else ir.tensor(array, name=name)
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT), const_value=const_value)


def split(sizes: ir.Value | None, outputs: int = EXPERTS, axis: int = 0) -> ir.Node:
    stack = value("stack", [EXPERTS, 4, 3])
    given = [stack] if sizes is None else [stack, sizes]
    return ir.node("Split", given, {"axis": axis}, num_outputs=outputs)


def sizes(numbers: list[int]) -> ir.Value:
    return value("sizes", [len(numbers)], np.array(numbers, np.int64))


@pytest.mark.parametrize("given", [None, sizes([1] * EXPERTS)], ids=["no sizes", "sizes"])
@pytest.mark.parametrize("axis", [0, -3])
def test_an_output_of_a_split(given: ir.Value | None, axis: int) -> None:
    node = split(given, axis=axis)
    assert entry(node.outputs[71], 3) == (node.inputs[0], 71)


def test_the_one_that_a_gather_picks() -> None:
    stack, place = value("stack", [EXPERTS, 4, 3]), value("place", [1], np.array([71]))
    picked = ir.node("Gather", [stack, place])
    viewed = ir.node("Squeeze", [picked.outputs[0]])
    assert entry(viewed.outputs[0], 3) == (stack, 71)


@pytest.mark.parametrize(
    "node",
    [
        split(sizes([2, 0] + [1] * (EXPERTS - 2))),
        split(value("sizes", [EXPERTS])),
        split(None, outputs=EXPERTS // 2),
        split(None, axis=1),
        ir.node("Gather", [value("stack", [EXPERTS, 4, 3]), value("place", [1], np.array([-1]))]),
        ir.node("Identity", [value("stack", [EXPERTS, 4, 3])]),
    ],
    ids=["other sizes", "sizes not known", "several to an output", "another axis", "from the end", "no part"],
)
def test_no_entry(node: ir.Node) -> None:
    assert entry(node.outputs[0], 3) is None
