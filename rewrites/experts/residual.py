"""What is done to what the experts return: a constant factor, and a sum such as that with shared experts' results.

FusedExperts(x, w, ids) * c -> FusedExperts(x, w * c, ids), where the router that makes w takes the factor over
FusedExperts(...) + r -> FusedExperts(..., residual = r), where the sum spreads neither side over the other

Between the experts and either may stand views, and casts to float32 that are taken back behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from ort_moe.graphs.node_kinds import experts_inputs
from ort_moe.graphs.operators import PRODUCTS, RESHAPING
from ort_moe.ops import FUSED_EXPERTS, SCALED
from ort_moe.rewrites.computed_shapes import Length, follow, looked_up, target_entries
from ort_moe.rewrites.experts.node import Writer
from ort_moe.rewrites.experts.sums import rounded_sum
from ort_moe.rewrites.experts.tokens import require_as_many
from ort_moe.rewrites.names import Names, take_over
from ort_moe.rewrites.router_node import is_router
from ort_moe.rewrites.rule import Refusal
from ort_moe.rewrites.tidy import discard
from ort_moe.rewrites.values import consumers, dim, is_op, is_widening, operands, producer, rank, scalar_beside, through

_RESIDUAL = FUSED_EXPERTS.input_index("residual")
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

Kind = Literal["none", "shared", "gated", "other"]
"""What a residual is: nothing, shared experts, shared experts behind a sigmoid of their own, or anything else."""


@dataclass(frozen=True)
class _Reader:
    """The one node that reads what the experts return.

    Attributes:
        node: An Add or a Mul.
        between: The views and casts before it.
        value: What it reads.
        other: Its other operand.
    """

    node: ir.Node
    between: tuple[ir.Node, ...]
    value: ir.Value
    other: ir.Value


def absorb_behind(node: ir.Node, names: Names) -> bool:
    """Let a FusedExperts do what is done to what it returns; whether anything changed.

    Args:
        node: Without a residual; the graph may be out of order behind.
        names: Of the model.
    """
    if kind_of_residual(node) != "none":
        return False
    is_changed = False
    while _absorb_factor(node, names):
        is_changed = True
    return _absorb_sum(node, names) or is_changed


def _absorb_factor(node: ir.Node, names: Names) -> bool:
    found = _reader_behind(node.outputs[0], "Mul")
    if found is None or node.attributes.get_string("weight_on") != "output":
        return False
    factor = scalar_beside(found.other, found.value)
    router = _router_alone(node)
    result = found.node.outputs[0]
    if factor is None or router is None or not math.isfinite(factor):
        return False
    scale = float(np.float32(float(router.attributes["scale"].value) * factor))
    if not _SMALLEST <= abs(scale) <= _LARGEST:
        return False
    router.attributes["scale"] = ir.AttrFloat32("scale", scale)
    weights = router.outputs[0]
    before, _, original = router.metadata_props.get(SCALED, "").partition(" ")
    if original:
        router.metadata_props[SCALED] = f"{factor * float(before)!r} {original}"
    else:
        router.metadata_props[SCALED] = f"{factor!r} {weights.name}"
        weights.name = names.unused(f"{weights.name}_scaled")
    _put_in_place(node.outputs[0], found, result, names, keeps_casts=True)
    return True


def _router_alone(node: ir.Node) -> ir.Node | None:
    """The FusedRouter that makes the weights of the experts, if nothing else reads them."""
    value = experts_inputs(node).get("weights")
    while value is not None and not value.is_graph_output() and len(value.uses()) == 1:
        made_by = value.producer()
        if is_router(made_by):
            return made_by
        value = made_by.inputs[0] if made_by is not None and is_op(made_by, *RESHAPING) else None
    return None


def _absorb_sum(node: ir.Node, names: Names) -> bool:
    y = node.outputs[0]
    found = _reader_behind(y, "Add")
    if found is None or y.dtype is None or not _is_alike(found.value, found.other):
        return False
    try:
        result = rounded_sum(found.node.outputs[0], y.dtype)
    except Refusal:
        return False
    residual = _as_rows(found.other, y, names, node)
    if residual is None:
        return False
    node.resize_inputs(max(len(node.inputs), _RESIDUAL + 1))
    node.replace_input_with(_RESIDUAL, residual)
    _put_in_place(y, found, result, names, keeps_casts=False)
    return True


def kind_of_residual(node: ir.Node) -> Kind:
    """What a FusedExperts adds to what its experts return."""
    value = experts_inputs(node).get("residual")
    if value is None:
        return "none"
    value = through(value, RESHAPING | {"Cast"})
    product = producer(value, "Mul")
    for share, rows in () if product is None else (operands(product), operands(product)[::-1]):
        sigmoid = through(share, RESHAPING | {"Cast"})
        if dim(share, -1) == 1 and producer(sigmoid, "Sigmoid") is not None and _is_layer(rows):
            return "gated"
    return "shared" if _is_layer(value) else "other"


def _is_layer(value: ir.Value) -> bool:
    """Whether a product of matrices makes a value, perhaps with a bias."""
    made_by = through(value, RESHAPING | {"Cast"}).producer()
    if is_op(made_by, "Add") and made_by is not None:
        made_by = through(operands(made_by)[0], RESHAPING | {"Cast"}).producer()
    return made_by is not None and made_by.op_type in PRODUCTS


def _reader_behind(value: ir.Value, op_type: str) -> _Reader | None:
    """The node of a type that alone reads a value, behind views and casts to wider types that are all that do."""
    between: list[ir.Node] = []
    while not value.is_graph_output() and len(value.uses()) == 1:
        (user,) = consumers(value)
        made_by = value.producer()
        if made_by is None or user.graph is not made_by.graph:
            return None
        if is_op(user, op_type):
            left, right = operands(user)
            return _Reader(user, tuple(between), value, right if left is value else left)
        result = user.outputs[0]
        if not is_op(user, "Cast", *RESHAPING) or user.inputs[0] is not value:
            return None
        if user.op_type == "Cast" and not is_widening(value.dtype, result.dtype):
            return None
        between.append(user)
        value = result
    return None


def _is_alike(value: ir.Value, other: ir.Value) -> bool:
    """Whether two values are known to be of one shape."""
    known = rank(value)
    if known is None or known != rank(other) or dim(value, -1) is None or dim(value, -1) != dim(other, -1):
        return False
    try:
        require_as_many(value, other, "the rows")
    except Refusal:
        return False
    return _have_same_axes(value, other)


def _have_same_axes(value: ir.Value, other: ir.Value) -> bool:
    """Whether two values of as many rows have them in the same axes: those of (1, T) and of (T, 1) would be spread."""
    if rank(value) != rank(other):
        return False
    pairs = list(zip(_lengths(value), _lengths(other), strict=True))
    return len(pairs) - sum(a == b for a, b in pairs) <= 1  # where one axis alone is unsure, it is as long


def _lengths(value: ir.Value) -> list[int | Length]:
    """What the lengths of a value's axes are, by numbers or where they come from."""
    value = through(value, {"Cast", "Identity"})
    view = producer(value, "Reshape")
    told = None if view is None else target_entries(view.inputs[1]) or looked_up(view.inputs[1])
    lengths: list[int | Length] = []
    for axis, length in enumerate(value.shape or ()):
        if isinstance(length, int):
            lengths.append(length)
        elif told is not None and axis < len(told) and told[axis] not in (-1, 0):
            lengths.append(told[axis])
        else:
            lengths.append(follow(value, axis))
    return lengths


def _as_rows(value: ir.Value, y: ir.Value, names: Names, before: ir.Node) -> ir.Value | None:
    """A value as it is added to y: of its type, and with its axes."""
    views = [view for view in _views(value) if view.dtype == y.dtype]
    x = before.inputs[0]
    for view in views:
        if dim(view, -1) != dim(y, -1) or rank(view) != rank(y):
            continue
        if _have_same_axes(view, y) or (x is not None and _have_same_axes(view, x)):
            return view
    width = dim(y, -1)
    if not views or width is None or rank(y) != 2 or not isinstance(before.graph, ir.Graph):
        return None
    rows = Writer(before.graph, before, names).rows(views[0], width)
    rows.shape = y.shape
    return rows


def _views(value: ir.Value) -> Iterator[ir.Value]:
    """A value, and what it is a view of, or a cast that keeps each number."""
    yield value
    while (node := producer(value, "Cast", *RESHAPING)) is not None and (source := node.inputs[0]) is not None:
        if node.op_type == "Cast" and not is_widening(source.dtype, value.dtype):
            return
        yield source
        value = source


def _put_in_place(y: ir.Value, found: _Reader, result: ir.Value, names: Names, *, keeps_casts: bool) -> None:
    """Let what the experts return, by its views, take the place and the name of a result."""
    views = [y]
    for node in found.between:
        if node.op_type == "Cast" and not keeps_casts:
            node.outputs[0].replace_all_uses_with(views[-1])
        else:
            views.append(node.outputs[0])
            if not keeps_casts and y.type is not None:
                views[-1].type = y.type
    last = views[-1]
    for view in views[:-1]:
        view.name = names.unused("val")  # what had these names was not added to, or not multiplied
    last.shape = result.shape if last.shape is None else last.shape
    take_over(result, last)
    discard(result.producer())
    for node in found.between:
        discard(node)
