"""A choice that a router in standard nodes has made, and hands to a contrib node that can but choose by a softmax.

onnxruntime-genai's builder writes routers so that MoE and QMoE do not know, such as a sigmoid with a bias: it scatters
the logarithms of the chosen scores into a tensor of numbers far below them. Of this the contrib node chooses the same
experts, and their softmax is each score by the sum of them. Behind the node each row is multiplied by
`sum / (sum + eps)`, and by a factor that the weights may have.

A score has a logarithm only above zero: the builder clips them at some `least`. With c = max(s, least), the weights
`c / sum(c) * sum(s) / (sum(s) + eps)` of K scores that are never negative and `s / (sum(s) + eps)` differ by
2 * K * least / eps at most. Where that is rounded away beside 1, the latter are the choice's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.signs import is_never_negative
from ort_moe.rewrites.values import (
    consumers,
    dim,
    filling,
    integer,
    is_last_axis,
    is_op,
    is_same_length,
    operands,
    producer,
    reduces_last_axis,
    scalar,
    through,
)

_ROUNDED_AWAY = 2.0**-24
"""Beside 1, in float32."""


@dataclass(frozen=True)
class MaskedChoice:
    """Such a choice.

    Attributes:
        indices: Of the chosen experts, int64 (T, K).
        scores: Of these, float32 (T, K).
        divisor: What they are divided by, (T, 1): their sum, and a constant.
        factor: A constant that the quotients are multiplied by, or None.
        product: The node behind the contrib node, whose output is that of the block.
    """

    indices: ir.Value
    scores: ir.Value
    divisor: ir.Value
    factor: ir.Value | None
    product: ir.Node


def read_masked_choice(contrib: ir.Node, logits: ir.Value, k: int) -> MaskedChoice | None:
    """The choice of a contrib node that normalises; None where it makes one of its own, or is written otherwise.

    Args:
        contrib: The node.
        logits: What it chooses by.
        k: How many it chooses.
    """
    scatter = producer(through(logits, {"Cast"}), "ScatterElements")
    if scatter is None or not is_last_axis(integer(scatter, "axis", 0), logits):
        return None
    if scatter.attributes.get_string("reduction", "none") != "none":
        return None
    base, indices, logarithms = scatter.inputs
    floor, least, scores = filling(base), None, None
    clip = producer(_only_operand(producer(logarithms, "Log")), "Clip")
    if clip is not None and _input(clip, 2) is None:
        least, scores = scalar(_input(clip, 1)), clip.inputs[0]
    if floor is None or least is None or not least > 0.0 or not math.log(least) > floor + 1.0:
        return None  # another expert could be among the largest
    gather = producer(scores, "GatherElements")
    if gather is None or scores is None or indices is None or gather.inputs[1] is not indices:
        return None
    if not is_op(indices.producer(), "TopK") or dim(indices, -1) != k or scores.dtype != ir.DataType.FLOAT:
        return None
    users = list(consumers(contrib.outputs[0]))
    if len(users) != 1 or not is_op(users[0], "Mul") or contrib.outputs[0].is_graph_output():
        return None
    share = _share(users[0], contrib.outputs[0], scores)
    if share is None or not 2 * k * least <= _ROUNDED_AWAY * share.eps or not is_never_negative(scores):
        return None  # scores that are clipped could be told from those that are not
    return MaskedChoice(indices, scores, share.divisor, share.factor, users[0])


class _Share(NamedTuple):
    """`sum / divisor * factor`, for a divisor that is `sum + eps`."""

    divisor: ir.Value
    factor: ir.Value | None
    eps: float


def _share(product: ir.Node, rows: ir.Value, scores: ir.Value) -> _Share | None:
    """What a product multiplies each row by."""
    others = [value for value in operands(product) if value is not rows]
    # A column beside the rows, that has an element for each of them in their order.
    if len(others) != 1 or dim(others[0], -1) != 1 or not _is_beside(others[0], rows):
        return None
    share, factor = through(others[0], RESHAPING | {"Cast"}), None
    if (scaled := producer(share, "Mul")) is not None:
        factors = [value for value in operands(scaled) if scalar(value) is not None]
        rest = [value for value in operands(scaled) if scalar(value) is None]
        if len(factors) != 1 or len(rest) != 1:
            return None
        factor, share = factors[0], rest[0]
    division = producer(share, "Div")
    total = None if division is None else producer(division.inputs[0], "ReduceSum")
    added = None if division is None else producer(division.inputs[1], "Add")
    if total is None or added is None or total.inputs[0] is not scores or not reduces_last_axis(total, keepdims=True):
        return None
    constants = [value for value in operands(added) if value is not total.outputs[0]]
    eps = scalar(constants[0]) if len(constants) == 1 else None
    return None if eps is None else _Share(added.outputs[0], factor, eps)


def _is_beside(column: ir.Value, rows: ir.Value) -> bool:
    """Whether both have the same axes, but for the last."""
    if column.shape is None or rows.shape is None or column.shape.rank() != rows.shape.rank():
        return False
    return all(map(is_same_length, column.shape[:-1], rows.shape[:-1]))


def _only_operand(node: ir.Node | None) -> ir.Value | None:
    return None if node is None else node.inputs[0]


def _input(node: ir.Node, position: int) -> ir.Value | None:
    return node.inputs[position] if position < len(node.inputs) else None
