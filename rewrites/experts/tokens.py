"""Rows of tokens and of their choices: which values they are, and that they belong together.

Rows are told by the order of their elements, which views leave as it is: row t * K + j is choice j of token t.
"""

from __future__ import annotations

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.computed_shapes import follow
from ort_moe.rewrites.fixed_lengths import repeats
from ort_moe.rewrites.router_node import Router, is_router
from ort_moe.rewrites.rule import Refusal
from ort_moe.rewrites.tabulate import tabulate
from ort_moe.rewrites.values import (
    INDICES,
    dim,
    integer,
    is_op,
    is_same_length,
    label,
    producer,
    rank,
    through,
    through_casts,
)

_MOST_STEPS = 16
"""Nodes between the indices that experts are taken by and the choice; the longest seen is 4."""


def matrix(value: ir.Value, width: int) -> ir.Value:
    """The nearest view of a value that is a matrix of rows of this width, else what it is a view of."""
    while True:
        if rank(value) == 2 and dim(value, 1) == width:
            return value
        node = producer(value, *RESHAPING)
        if node is None or node.inputs[0] is None:
            return value
        value = node.inputs[0]


def repeated(value: ir.Value, k: int, width: int) -> ir.Value | None:
    """The rows of tokens of which each is repeated k times in a row; None where that is not what makes the value.

    Reshape(Tile(Unsqueeze(x, 1), (1, k, 1))), and the same with Expand.
    """
    value = through(value, RESHAPING)
    found = repeats(value)
    if found is None:
        return matrix(value, width) if k == 1 else None
    source, times = found
    if len(times) < 2 or times[-2:] != [k, 1] or any(each != 1 for each in times[:-2]):
        return None
    if dim(source, -2) != 1 or dim(source, -1) not in (width, None):
        return None
    return matrix(source, width)


def chosen(value: ir.Value) -> ir.Value:
    """The choices (..., K) that a list of indices is a view of."""
    return through_casts(value, INDICES, RESHAPING)


def plain(value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """The value before views, and casts between the experts' type and float32."""
    return through_casts(value, {dtype, ir.DataType.FLOAT}, RESHAPING)


def require_choices(indices: ir.Value, weights: ir.Value, k: int) -> None:
    """Refuse choices and weights of which there are not k for each token, or none.

    Raises:
        Refusal: There are others.
    """
    if k < 1:
        raise Refusal(f"{named(indices)} chooses no expert for any token", "experts-form")
    for value, what in ((indices, "chosen"), (weights, "weighed")):
        if dim(value, -1) != k:
            told = "an unknown number" if dim(value, -1) is None else dim(value, -1)
            sentence = f"{k} results are summed for each token, {what} are {told} in {named(value)}"
            raise Refusal(sentence, "experts-mismatch")


def require_range(indices: ir.Value, experts: int, *, distinct: bool = False) -> None:
    """Refuse indices that may lie outside the experts: a gather counts those below 0 from the end.

    Args:
        indices: (..., K).
        experts: E.
        distinct: Whether two of a token must not be the same, either.

    Raises:
        Refusal: They may.
    """
    made = choice_behind(indices)
    if made is None:
        raise Refusal(f"the indices '{indices.name}' come from no choice of experts", "experts-form")
    choice, width = made
    if width is None:
        raise Refusal(f"the number that {named(choice)} is chosen among is not fixed", "experts-form")
    table = tabulate(indices, choice, width)
    if table is None:
        raise Refusal(f"the indices '{indices.name}' are not made of '{choice.name}' alone", "experts-form")
    if distinct and len(set(table.tolist())) < width:
        raise Refusal(f"'{indices.name}' may hold an expert twice", "experts-form")
    least, most = int(table.min()), int(table.max())
    if least < 0 or most >= experts:
        told = f"is chosen among {width}" if (least, most) == (0, width - 1) else f"may be from {least} to {most}"
        raise Refusal(f"there are {experts} experts, but {named(indices)} {told}", "experts-mismatch")


def choice_behind(value: ir.Value) -> tuple[ir.Value, int | None] | None:
    """The indices of the choice that a value is made of, and among how many."""
    queue, seen = [value], {value}
    while queue and len(seen) <= _MOST_STEPS:
        current = queue.pop(0)
        node = current.producer()
        if node is None:
            continue
        if is_router(node):
            router = Router.read(node)
            return (current, router.experts) if current is router.indices else None
        if is_op(node, "TopK") and current is node.outputs[1]:
            return current, dim(node.inputs[0], integer(node, "axis", -1))
        if is_op(node, "ArgMax"):
            return current, dim(node.inputs[0], integer(node, "axis", 0))
        fresh = [each for each in node.inputs if each is not None and each not in seen]
        seen.update(fresh)
        queue += fresh
    return None


def require_as_many(value: ir.Value, other: ir.Value, what: str) -> None:
    """Refuse unless two values (T, ...), whose last axes may differ, are known to have as many rows.

    Raises:
        Refusal: They may not.
    """
    if value is other or (value.producer() is not None and value.producer() is other.producer()):
        return
    if any(_has_as_many(a, b) for a in _views(value) for b in _views(other)):
        return
    raise Refusal(f"{what} {named(value)} may be others than the tokens of {named(other)}", "experts-form")


def _views(value: ir.Value) -> list[ir.Value]:
    """The value and what it is a view of, as long as the rows stay."""
    found, width = [value], dim(value, -1)
    while (node := producer(value, *RESHAPING)) is not None and node.inputs[0] is not None:
        value = node.inputs[0]
        if width is not None and dim(value, -1) == width:
            found.append(value)
    return found


def _has_as_many(value: ir.Value, other: ir.Value) -> bool:
    if value.shape is None or other.shape is None or value.shape.rank() != other.shape.rank():
        return False
    return all(
        is_same_length(value.shape[axis], other.shape[axis]) or _length(value, axis) == _length(other, axis)
        for axis in range(value.shape.rank() - 1)
    )


def _length(value: ir.Value, axis: int) -> object:
    """What a length is known by: equal answers are equal lengths."""
    length = None if value.shape is None else value.shape[axis]
    return length if isinstance(length, int) else follow(value, axis)


def named(value: ir.Value) -> str:
    """A value in a sentence, by what makes it."""
    node = value.producer()
    return f"'{value.name}'" if node is None else f"'{value.name}' of {label(node)}"
