"""The halves of a gated layer's rows: all gates and then all values, or gate and value in turn."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.rewrites.fixed_lengths import cuts, fixed_integers
from ort_moe.rewrites.values import dim, integer, is_last_axis, producer, rank

_END = 1 << 31
"""What exporters write for the end of an axis is larger."""


@dataclass(frozen=True)
class Half:
    """One half of each row.

    Attributes:
        rows: The whole rows.
        layout: `concat` or `interleaved`, as FusedExperts calls them.
        place: 0 for the first, or the even ones; 1 for the second, or the odd ones.
    """

    rows: ir.Value
    layout: str
    place: int


def read_half(value: ir.Value, width: int) -> Half | None:
    """Which half of rows of this width a value is; None if it is none."""
    node = producer(value, "Split", "Slice", "Gather")
    source = None if node is None else node.inputs[0]
    if node is None or source is None or width % 2:
        return None
    if dim(source, -1) == width:
        if node.op_type == "Split":
            return _read_split(node, value, source, width)
        return _read_slice(node, source, width) if node.op_type == "Slice" else None
    # Of a view (..., I, 2) the pieces are the even and the odd elements, of (..., 2, I) the halves.
    for layout, sizes, axis in (("interleaved", (width // 2, 2), -1), ("concat", (2, width // 2), -2)):
        if (dim(source, -2), dim(source, -1)) == sizes and _runs_along(node, axis, source):
            place = _place_of_two(node, value)
            return None if place is None else Half(source, layout, place)
    return None


def _runs_along(node: ir.Node, axis: int, source: ir.Value) -> bool:
    """Whether a node takes pieces along this axis, counted from the end, alone."""
    if node.op_type != "Slice":
        given = integer(node, "axis", 0)
    else:
        over = fixed_integers(node.inputs[3]) if len(node.inputs) > 3 else None
        if over is None or len(over) != 1:
            return False
        given = over[0]
    return given in (axis, (rank(source) or 0) + axis)


def _place_of_two(node: ir.Node, value: ir.Value) -> int | None:
    """Which of two entries a value is."""
    if node.op_type == "Split":
        sizes = None if len(node.inputs) < 2 or node.inputs[1] is None else fixed_integers(node.inputs[1])
        return node.outputs.index(value) if len(node.outputs) == 2 and sizes in (None, [1, 1]) else None
    places = fixed_integers(node.inputs[1]) if len(node.inputs) > 1 else None
    if places is None or len(places) != 1 or places[0] not in (0, 1, -1, -2):
        return None
    place = places[0] % 2
    if node.op_type == "Slice":
        ends, steps = fixed_integers(node.inputs[2]), fixed_integers(node.inputs[4]) if len(node.inputs) > 4 else [1]
        if ends is None or steps != [1] or not (ends[0] in (1, -1) if place == 0 else ends[0] >= 2):
            return None
    return place


def _read_split(split: ir.Node, value: ir.Value, source: ir.Value, width: int) -> Half | None:
    if len(split.outputs) != 2 or not is_last_axis(integer(split, "axis", 0), source):
        return None
    if len(split.inputs) > 1 and split.inputs[1] is not None and fixed_integers(split.inputs[1]) != [width // 2] * 2:
        return None
    return Half(source, "concat", split.outputs.index(value))


def _read_slice(cut: ir.Node, source: ir.Value, width: int) -> Half | None:
    known = cuts(cut)
    if known is None or len(known) != 1:
        return None
    ((start, end, axis, step),) = known
    if not is_last_axis(axis, source):
        return None
    if step == 2 and start in (0, 1) and (end >= width or end > _END):
        return Half(source, "interleaved", start)
    half = width // 2
    if step == 1 and start == 0 and end in (half, -half):
        return Half(source, "concat", 0)
    if step == 1 and start in (half, -half) and end >= width:
        return Half(source, "concat", 1)
    return None
