"""Integers that a graph computes of constants and of lengths that are fixed: repeats, ends of slices, targets of views.

Tracing exporters write `x.chunk(2, -1)` as slices whose ends are made from the length of the axis, and the repeats of a
tile as a one-hot vector. What depends on a length that is not fixed is unknown, and only that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.values import constant, integer, integers, is_op, producer, rank

Entries = list[int | None]
"""The elements in their order; None: not known."""

_MOST_ELEMENTS = 64
_DEEPEST = 32
"""Steps from a target to the constants it is made of; the longest seen is 12."""


def fixed_integers(value: ir.Value | None) -> list[int] | None:
    """The elements of a tensor of integers, where each is known before the model runs."""
    entries = fixed_entries(value)
    if entries is None or None in entries:
        return None
    return [entry for entry in entries if entry is not None]


def fixed_entries(value: ir.Value | None) -> Entries | None:
    """The elements of a tensor of integers of rank 0 or 1, or of a view of one; None where not even their number is."""
    return _entries(value, _DEEPEST)


def _entries(value: ir.Value | None, depth: int) -> Entries | None:
    known = integers(value)
    if known is not None:
        return list(known)
    node = None if value is None else value.producer()
    if node is None or node.domain or depth == 0 or constant(value) is not None:
        return None
    reader = _READERS.get(node.op_type)
    entries = None if reader is None else reader(node, depth - 1)
    return entries if entries is not None and len(entries) <= _MOST_ELEMENTS else None


def _shape(node: ir.Node, depth: int) -> Entries | None:
    del depth
    source = node.inputs[0]
    if source is None or source.shape is None:
        return None
    lengths = [length if isinstance(length, int) else None for length in source.shape]
    return lengths[integer(node, "start", 0) : integer(node, "end", len(lengths))]


def _same(node: ir.Node, depth: int) -> Entries | None:
    """A view, or a cast to another type of integers."""
    target = node.outputs[0].dtype
    if is_op(node, "Cast") and target not in (ir.DataType.INT32, ir.DataType.INT64):
        return None
    return _entries(node.inputs[0], depth)


def _gather(node: ir.Node, depth: int) -> Entries | None:
    data, places = _entries(node.inputs[0], depth), integers(node.inputs[1])
    if data is None or places is None or rank(node.inputs[0]) != 1:
        return None
    if any(not -len(data) <= place < len(data) for place in places):
        return None
    return [data[place] for place in places]


def _slice(node: ir.Node, depth: int) -> Entries | None:
    data = _entries(node.inputs[0], depth)
    known = cuts(node)
    if data is None or known is None or len(known) != 1 or rank(node.inputs[0]) != 1:
        return None
    ((start, end, _, step),) = known
    return data[start:end] if step == 1 else None


def _concat(node: ir.Node, depth: int) -> Entries | None:
    joined: Entries = []
    for value in node.inputs:
        entries = _entries(value, depth)
        if entries is None or rank(value) != 1:
            return None
        joined += entries
    return joined


def _one_hot(node: ir.Node, depth: int) -> Entries | None:
    """Of one index."""
    index, size, values = (_entries(value, depth) for value in node.inputs)
    if index is None or size is None or values is None or len(index) != 1 or len(size) != 1 or len(values) != 2:
        return None
    (place,), (length,) = index, size
    if place is None or length is None or not -length <= place < length <= _MOST_ELEMENTS:
        return None
    return [values[1] if each == place % length else values[0] for each in range(length)]


def _constant_of_shape(node: ir.Node, depth: int) -> Entries | None:
    shape = _entries(node.inputs[0], depth)
    filler = node.attributes.get_tensor("value")
    if shape is None or len(shape) != 1 or shape[0] is None or filler is None or filler.numpy().dtype.kind not in "iu":
        return None
    return [int(filler.numpy().reshape(-1)[0])] * min(shape[0], _MOST_ELEMENTS + 1)


def _arithmetic(node: ir.Node, depth: int) -> Entries | None:
    function = _ARITHMETIC[node.op_type]
    left, right = (_entries(value, depth) for value in node.inputs)
    if not left or not right or (len(left) != len(right) and 1 not in (len(left), len(right))):
        return None
    length = max(len(left), len(right))
    pairs = zip(left * (length // len(left)), right * (length // len(right)), strict=True)
    return [None if a is None or b is None else function(a, b) for a, b in pairs]


def _quotient(a: int, b: int) -> int | None:
    """As ONNX divides, towards zero; None where signs would make that another number than rounding down."""
    return a // b if a >= 0 and b > 0 else None


_ARITHMETIC: Mapping[str, Callable[[int, int], int | None]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": _quotient,
}

_READERS: Mapping[str, Callable[[ir.Node, int], Entries | None]] = {
    "Shape": _shape,
    "Cast": _same,
    **dict.fromkeys(RESHAPING, _same),
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "OneHot": _one_hot,
    "ConstantOfShape": _constant_of_shape,
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
}


def cuts(node: ir.Node) -> list[tuple[int, int, int, int]] | None:
    """Start, end, axis from the front, and step of each cut that a Slice makes; None where one is not fixed."""
    known = rank(node.inputs[0])
    starts, ends = (fixed_integers(each) for each in node.inputs[1:3])
    axes, steps = (*node.inputs, None, None)[3:5]
    if known is None or starts is None or ends is None:
        return None
    over = list(range(len(starts))) if axes is None else fixed_integers(axes)
    by = [1] * len(starts) if steps is None else fixed_integers(steps)
    if over is None or by is None or not len(starts) == len(ends) == len(over) == len(by):
        return None
    return [(start, end, axis % known, step) for start, end, axis, step in zip(starts, ends, over, by, strict=True)]


def repeats(value: ir.Value | None) -> tuple[ir.Value, list[int]] | None:
    """What is repeated whole along which axes how many times, of a Tile or an Expand; the rank stays.

    Expand repeats an axis of length 1 alone; one that it names with the length that the axis has is not repeated.
    """
    node = producer(value, "Tile", "Expand")
    if node is None or (source := node.inputs[0]) is None or (known := rank(source)) is None:
        return None
    entries = fixed_entries(node.inputs[1])
    if entries is None or len(entries) != known or source.shape is None:
        return None
    times: list[int] = []
    for entry, length in zip(entries, source.shape, strict=True):
        if node.op_type == "Expand" and entry is not None and entry != 1 and entry == length:
            entry = 1
        if entry is None or (node.op_type == "Expand" and entry != 1 and length != 1):
            return None
        times.append(entry)
    return source, times
