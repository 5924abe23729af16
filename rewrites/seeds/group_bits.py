"""Read a tensor of zeros and ones, or of truths, that marks the experts of the groups kept.

Ones scattered to the groups kept, or a sum of one-hot rows, (..., groups); repeated for the experts of each group; and
turned, compared and cast on the way in any order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.rule import Refusal, require
from ort_moe.rewrites.values import (
    axes,
    constant,
    dim,
    filling,
    integer,
    is_last_axis,
    is_op,
    producer,
    rank,
    scalar,
    through,
)

_REPEATS = RESHAPING | {"Expand", "Tile"}
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
}


@dataclass(frozen=True)
class GroupBits:
    """A mask over experts that is the same for all experts of a group.

    Attributes:
        ids: Indices of the groups kept, (..., kept).
        groups: Number of groups.
        kept: Number of groups kept.
        inverted: Whether the groups to drop are marked.
        shapes: The last two dimensions of the mask, and of each tensor on the way to it from the bits of the groups,
            backwards.
    """

    ids: ir.Value
    groups: int
    kept: int
    inverted: bool
    shapes: tuple[tuple[int | None, int | None], ...]

    def are_repeated(self, experts: int) -> bool:
        """Whether each group's bit stands for each of its neighbouring experts."""
        # (..., G) -> (..., G, 1) -> (..., G, E/G) -> (..., E)
        if experts == self.groups:
            return self.shapes[0][1] == experts
        return self.shapes[0][1] == experts and self._has_block(experts // self.groups)

    def are_for_groups(self, members: int) -> bool:
        """Whether it masks keys in groups, (..., groups, members): repeated for them or left to be."""
        if self.shapes[0] == (self.groups, 1):
            return True
        return self.shapes[0] == (self.groups, members) and self._has_block(members)

    def _has_block(self, members: int) -> bool:
        """Whether a column of the groups is repeated to (..., groups, members), and not a row of them."""
        column, block = (self.groups, 1), (self.groups, members)
        steps = zip(self.shapes[:-1], self.shapes[1:], strict=True)
        return any(result == block and source == column for result, source in steps)


def read_bits(mask: ir.Value) -> GroupBits:
    """Follow a mask, of truths or of zeros and ones, back to the groups kept.

    Raises:
        Refusal: It is no group mask.
    """
    inverted, shapes, value = False, [(dim(mask, -2), dim(mask, -1))], mask
    while (node := value.producer()) is not None and (step := _step(node)) is not None:
        turns, value = step
        inverted ^= turns
        shapes.append((dim(value, -2), dim(value, -1)))
    if is_op(node, "ScatterElements") and node is not None:
        return _scattered(node, inverted, tuple(shapes))
    if is_op(node, "ReduceSum", "ReduceMax") and node is not None:
        return _summed(node, inverted, tuple(shapes))
    raise Refusal("the mask before the TopK is not made by scattering ones to the groups kept")


def _step(node: ir.Node) -> tuple[bool, ir.Value] | None:
    """Whether a step turns zeros to ones, and what it works on; None for a step that is none of the mask's."""
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    if is_op(node, "Cast", *_REPEATS):
        return False, source
    if is_op(node, "Not"):
        return True, source
    if not is_op(node, "Sub", *_COMPARISONS):
        return None
    first, second = scalar(source), scalar(node.inputs[1])
    if node.op_type == "Sub":
        other = node.inputs[1]
        return (True, other) if first == 1.0 and other is not None else None
    compare = _COMPARISONS[node.op_type]
    if second is not None:
        truths, value = (compare(0.0, second), compare(1.0, second)), source
    elif first is not None and node.inputs[1] is not None:
        truths, value = (compare(first, 0.0), compare(first, 1.0)), node.inputs[1]
    else:
        return None
    require(truths[0] != truths[1], "the group mask is compared with a number that tells nothing of it")
    return truths[0], value


def _scattered(node: ir.Node, inverted: bool, shapes: tuple[tuple[int | None, int | None], ...]) -> GroupBits:
    background, ids, marks = node.inputs[:3]
    assert background is not None
    require(
        is_last_axis(integer(node, "axis", 0), background)
        and node.attributes.get_string("reduction", "none") == "none",
        "the group mask is not scattered along its last axis",
    )
    colours = filling(background), filling(marks)
    require(colours in ((0.0, 1.0), (1.0, 0.0)), "the group mask is not made of ones among zeros")
    return _bits(ids, dim(background, -1), inverted ^ (colours[0] == 1.0), shapes)


def _summed(node: ir.Node, inverted: bool, shapes: tuple[tuple[int | None, int | None], ...]) -> GroupBits:
    source = None if node.inputs[0] is None else through(node.inputs[0], {"Cast"})
    hot = producer(source, "OneHot", "Equal")
    if hot is None:
        raise Refusal("the mask before the TopK is not made by scattering ones to the groups kept")
    ids, groups = _one_hot(hot) if hot.op_type == "OneHot" else _compared(hot)
    over, known = axes(node), rank(source)
    require(
        over is not None and known is not None and [axis % known for axis in over] == [known - 2],
        "the one-hot rows of the groups kept are not summed up",
    )
    return _bits(ids, groups, inverted, shapes)


def _one_hot(node: ir.Node) -> tuple[ir.Value | None, int | None]:
    """The indices and the number of groups, of one-hot rows."""
    known, values = rank(node.outputs[0]), constant(node.inputs[2], limit=2)
    require(
        integer(node, "axis", -1) in (-1, (known or 0) - 1)
        and values is not None
        and values.reshape(-1).tolist() == [0, 1],
        "the one-hot rows of the groups kept are not ones among zeros along the last axis",
    )
    groups = scalar(node.inputs[1])
    return node.inputs[0], None if groups is None else int(groups)


def _compared(node: ir.Node) -> tuple[ir.Value | None, int | None]:
    """The same, where the indices in a column, (..., kept, 1), are compared with the number of each group."""
    for column, numbers in (node.inputs, node.inputs[::-1]):
        array, view = constant(numbers), producer(column, *RESHAPING)
        if array is None or view is None or array.ndim == 0 or array.size != array.shape[-1]:
            continue
        ids = view.inputs[0]
        is_column = dim(column, -1) == 1 and rank(ids) is not None and rank(column) == (rank(ids) or 0) + 1
        if is_column and dim(ids, -1) == dim(column, -2) and array.reshape(-1).tolist() == list(range(array.size)):
            return ids, array.size
    raise Refusal("the groups kept are not compared with the numbers of all groups")


def _bits(
    ids: ir.Value | None,
    groups: int | None,
    inverted: bool,
    shapes: tuple[tuple[int | None, int | None], ...],
) -> GroupBits:
    kept = dim(ids, -1)
    if ids is None or groups is None or kept is None:
        raise Refusal("the number of groups is not fixed")
    return GroupBits(ids, groups, kept, inverted, shapes)
