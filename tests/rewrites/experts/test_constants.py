"""Weights that the graph moves, cuts, casts or joins before the experts take them: read as what they come to be."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from ort_moe.files.streamed_tensor import StreamedTensor
from ort_moe.rewrites.experts.constants import Constant, join
from tests.rewrites.blocks import EXPERTS, HIDDEN
from tests.rewrites.experts.experts_models import FC1, INNER, Experts, assert_fuses, fuse

RNG = np.random.default_rng(23)
ROWS = 2 * INNER
STACK = RNG.standard_normal((EXPERTS, ROWS, HIDDEN)).astype(np.float32)


def integers(*numbers: int) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.int64)


# Each reads other constants and writes `made`, (E, 2 I, H).
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "transposed": ("made = Transpose <perm = [0, 2, 1]> (lies)", {"lies": STACK.transpose(0, 2, 1)}),
    "transposed twice": (
        "once = Transpose <perm = [2, 0, 1]> (lies)\n made = Transpose <perm = [0, 2, 1]> (once)",
        {"lies": STACK.transpose(2, 1, 0)},
    ),
    "a view of two axes": (
        "made = Reshape (lies, shape)",
        {"lies": STACK.reshape(-1, HIDDEN), "shape": integers(EXPERTS, ROWS, HIDDEN)},
    ),
    "of half precision": ("made = Cast <to = 1> (lies)", {"lies": STACK.astype(np.float16)}),
    "of bfloat16": ("made = Cast <to = 1> (lies)", {"lies": STACK.astype(ml_dtypes.bfloat16)}),
    "one of several layers": (
        "made = Gather (lies, at)",
        {"lies": np.stack([STACK + 1, STACK, STACK - 1]), "at": np.array(1)},
    ),
    "one of several layers, from the end": (
        "one_layer = Gather (lies, at)\n made = Squeeze (one_layer, first)",
        {"lies": np.stack([STACK + 1, STACK, STACK - 1]), "at": integers(-2), "first": integers(0)},
    ),
    "some of more experts": (
        "made = Slice (lies, start, end, first)",
        {"lies": np.concatenate([STACK - 1, STACK]), "start": integers(EXPERTS), "end": integers(2**62),
         "first": integers(0)},
    ),
    "every other row": (
        "made = Slice (lies, start, end, axis, step)",
        {"lies": np.repeat(STACK, 2, axis=1), "start": integers(1), "end": integers(2**62), "axis": integers(1),
         "step": integers(2)},
    ),
    "in another order": (
        "made = Gather (lies, order)",
        {"lies": STACK[::-1].copy(), "order": np.arange(EXPERTS)[::-1].copy()},
    ),
    "columns in another order": (
        "made = Gather <axis = 2> (lies, order)",
        {"lies": STACK[:, :, ::-1].copy(), "order": np.arange(HIDDEN)[::-1].copy()},
    ),
    "joined of halves": (
        "made = Concat <axis = 1> (gates, values)",
        {"gates": STACK[:, :INNER].copy(), "values": STACK[:, INNER:].copy()},
    ),
    "joined of some experts": (
        "made = Concat <axis = 0> (some, others)",
        {"some": STACK[:3].copy(), "others": STACK[3:].copy()},
    ),
    "split and joined": (
        "some, others = Split <axis = 0> (lies, sizes)\n made = Concat <axis = 0> (others, some)",
        {"lies": np.concatenate([STACK[3:], STACK[:3]]), "sizes": integers(EXPERTS - 3, 3)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MADE)
def test_made_of_constants(case: str) -> None:
    text, constants = MADE[case]
    experts = Experts(fc1=f"\n {text}" + FC1.replace("(fc1,", "(made,"), constants=constants)
    assert_fuses(experts, {"activation": "silu"})
    model = experts.model()
    fuse(model)
    (node,) = [node for node in model.graph if node.op_type == "FusedExperts"]
    tensor = next(value.const_value for value in node.inputs[7:] if value is not None and value.const_value is not None)
    expected = STACK.astype(np.float16).astype(np.float32) if "half" in case else STACK
    np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-2 if "bfloat16" in case else 0)


def leaf(array: np.ndarray[Any, Any]) -> Constant:
    tensor = ir.tensor(array)
    return Constant("", (), (), array.shape, tensor.dtype, ir.Value(name="w", const_value=tensor))


def test_the_entries_of_one_stack_are_that_stack() -> None:
    stack = leaf(STACK)
    turned = [stack.entry(e).transposed((1, 0)).reshaped((1, HIDDEN, ROWS)) for e in range(EXPERTS)]
    assert join(turned, 0) == stack.transposed((0, 2, 1))
    assert join([stack.entry(e).reshaped((1, ROWS, HIDDEN)) for e in range(EXPERTS)], 0) is stack
    some = join([stack.entry(e).reshaped((1, ROWS, HIDDEN)) for e in range(1, EXPERTS)], 0)
    assert some.op == "join"


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_numbers_of_one_entry(axis: int) -> None:
    """Whatever is done to it, and along which axis."""
    first, second = leaf(STACK), leaf(STACK[:, ::-1].copy())
    length = STACK.shape[axis]
    made = join([first.cut(axis, 1, length, 2), second.taken(axis, [0, length - 1])], axis).cast(ir.DataType.FLOAT16)
    place = [slice(None)] * 3
    place[axis] = slice(1, length, 2)
    expected = np.concatenate(
        [STACK[tuple(place)], np.take(STACK[:, ::-1], [0, length - 1], axis=axis)], axis=axis
    ).astype(np.float16)
    for turned, there in (
        (made, expected),
        (made.transposed((2, 0, 1)), expected.transpose(2, 0, 1)),
        (made.transposed((0, 2, 1)), expected.transpose(0, 2, 1)),
        (made.reshaped((expected.size // 2, 2)), expected.reshape(-1, 2)),
    ):
        assert turned.shape == there.shape
        np.testing.assert_array_equal(np.stack([turned.numbers(place) for place in range(turned.shape[0])]), there)


def test_some_entries_are_made_one_by_one() -> None:
    """What they are cut from is not made as a whole."""
    asked: list[int] = []

    def entry(number: int) -> np.ndarray[Any, Any]:
        asked.append(number)
        return STACK[number]

    tensor = StreamedTensor(entry, ir.DataType.FLOAT, ir.Shape(STACK.shape), "w")
    whole = Constant("", (), (), STACK.shape, ir.DataType.FLOAT, ir.Value(name="w", const_value=tensor))
    some = whole.cast(ir.DataType.FLOAT16).cut(0, 1, EXPERTS, 2)
    np.testing.assert_array_equal(some.numbers(1), STACK[3].astype(np.float16))
    np.testing.assert_array_equal(whole.taken(0, [4, 2]).numbers(0), STACK[4])
    assert asked == [3, 4]
