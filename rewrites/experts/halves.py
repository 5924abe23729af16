"""The halves of a gated layer's rows: all gates and then all values, or gate and value in turn."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.rewrites.fixed_lengths import fixed_integers
from ort_moe.rewrites.values import dim, integer, is_last_axis, producer

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
    if (split := producer(value, "Split")) is not None:
        return _read_split(split, value, width)
    if (cut := producer(value, "Slice")) is not None:
        return _read_slice(cut, width)
    return None


def _read_split(split: ir.Node, value: ir.Value, width: int) -> Half | None:
    source = split.inputs[0]
    if source is None or len(split.outputs) != 2 or not is_last_axis(integer(split, "axis", 0), source):
        return None
    if dim(source, -1) != width or width % 2:
        return None  # of a view (..., I, 2) the pieces are the even and the odd elements
    if len(split.inputs) > 1 and split.inputs[1] is not None and fixed_integers(split.inputs[1]) != [width // 2] * 2:
        return None
    return Half(source, "concat", split.outputs.index(value))


def _read_slice(cut: ir.Node, width: int) -> Half | None:
    source = cut.inputs[0]
    starts, ends, axes, steps = (
        None if each is None else fixed_integers(each) for each in (*cut.inputs, None, None)[1:5]
    )
    if source is None or starts is None or ends is None or len(starts) != 1 or dim(source, -1) != width or width % 2:
        return None
    if not is_last_axis((axes or [0])[0], source) or len(axes or [0]) != 1:
        return None
    start, end, step = starts[0], ends[0], (steps or [1])[0]
    if step == 2 and start in (0, 1) and (end >= width or end > _END):
        return Half(source, "interleaved", start)
    half = width // 2
    if step == 1 and start == 0 and end in (half, -half):
        return Half(source, "concat", 0)
    if step == 1 and start in (half, -half) and end >= width:
        return Half(source, "concat", 1)
    return None
