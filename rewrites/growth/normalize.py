"""w / max(ReduceSum(w) + eps, min) -> FusedRouter(normalize = 1), for w the weights of a FusedRouter."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.router_node import NON_NEGATIVE_SCORES, Router, is_router
from ort_moe.rewrites.rule import Refusal, RouterRule, require, require_only_consumers, router
from ort_moe.rewrites.values import (
    FLOATS,
    has_same_shape,
    producer,
    reduces_last_axis,
    scalar_beside,
    through_casts,
)


@dataclass(frozen=True)
class _Divisor:
    """The limits of a divisor and the nodes that compute it, the sum first."""

    eps: float
    least: float
    nodes: tuple[ir.Node, ...]


class Normalize(RouterRule):
    """Div(w, max(ReduceSum(w) + eps, min)) -> FusedRouter(normalize = 1).

    Either limit may be missing; a missing `min` becomes -inf, which is right for weights of any sign, and 0 once the
    score is known not to be negative. ReduceL1 is the same sum there. A positive factor that w was scaled with cancels;
    the limits are divided by it.
    """

    title = "normalize"
    root = "Div"

    def pattern(self, op: Any, logits: Any, divisor: Any) -> Any:
        weights, indices = router(op, logits)
        return op.Div(weights, divisor, _outputs=["quotient"]), indices

    def read(self, weights: ir.Value, divisor: ir.Value, quotient: ir.Value, **_: Any) -> _Divisor:
        found = Router.producing(weights)
        read = _read_divisor(divisor, weights, found)
        require(found.attributes["normalize"] == 0, "the weights have already been normalised")
        require(
            found.expert_scale is None, "the weights were scaled per expert before they are normalised, not afterwards"
        )
        scale = float(found.attributes["scale"])
        if scale != 1.0:
            require(scale > 0.0, f"the weights that are normalised were scaled by {scale}")
            eps, least = (float(np.float32(limit / scale)) for limit in (read.eps, read.least))
            require(math.isfinite(eps) and least < math.inf, f"the limits of the divisor over {scale} are too large")
            read = replace(read, eps=eps, least=least)
        division = quotient.producer()
        assert division is not None
        require_only_consumers(weights, division, read.nodes[0])
        for node, follower in zip(read.nodes, (*read.nodes[1:], division), strict=True):
            require_only_consumers(node.outputs[0], follower)
        return read

    def rewrite(self, op: Any, weights: ir.Value, **matched: Any) -> tuple[ir.Value, ir.Value]:
        read = self.read(weights=weights, **matched)
        return Router.producing(weights).grow(
            op, self.title, normalize=1, normalize_eps=read.eps, normalize_min=read.least, scale=1.0
        )


def _read_divisor(divisor: ir.Value, weights: ir.Value, found: Router) -> _Divisor:
    nodes: list[ir.Node] = []
    eps, least, value = 0.0, -math.inf, divisor
    if (limit := producer(value, "Clip", "Max")) is not None:
        value, least = _read_limit(limit)
        nodes.append(limit)
    if (add := producer(value, "Add")) is not None:
        value, eps = _with_scalar(add)
        nodes.append(add)
    require(not (math.isnan(eps) or math.isnan(least)), "a limit of the divisor is NaN")
    total = producer(value, "ReduceSum", "ReduceL1")
    if producer(value, "ReduceL2") is not None:
        raise Refusal("the weights are divided by their Euclidean norm; FusedRouter divides by their sum alone")
    if total is None or total.inputs[0] is not weights:
        raise Refusal("the divisor is not the sum of the weights, with an optional epsilon and lower limit")
    require(reduces_last_axis(total, keepdims=True), "the sum of the weights does not run over the chosen experts")
    if total.op_type == "ReduceL1":
        require(found.attributes["score"] in NON_NEGATIVE_SCORES, "ReduceL1 is a sum only of weights of one sign")
    return _Divisor(eps, least, (total, *reversed(nodes)))


def _read_limit(limit: ir.Node) -> tuple[ir.Value, float]:
    if limit.op_type == "Max":
        return _with_scalar(limit)
    inputs = (*limit.inputs, None, None)
    value = inputs[0]
    assert value is not None
    least = scalar_beside(inputs[1], value)
    require(inputs[2] is None, "the divisor has an upper limit")
    if least is None:
        raise Refusal("the lower limit of the divisor is not a constant")
    return value, least


def _with_scalar(node: ir.Node) -> tuple[ir.Value, float]:
    """The operand of a commutative node that is not a constant, and the constant."""
    require(len(node.inputs) == 2, f"the divisor's {node.op_type} has {len(node.inputs)} operands, expected 2")
    for position in (0, 1):
        value, other = node.inputs[position], node.inputs[1 - position]
        number = scalar_beside(other, value)
        if value is not None and number is not None:
            return value, number
    raise Refusal(f"the divisor's {node.op_type} has no constant operand")


class UnexpandDivisor(RouterRule):
    """Div(w, Expand(d)) -> Div(w, d).

    For w the weights of a FusedRouter, with or without casts on the way, and an expansion to just their shape, which
    the division does by itself.
    """

    title = "unexpand-divisor"
    root = "Div"

    def pattern(self, op: Any, weights: Any, divisor: Any, shape: Any) -> Any:
        return op.Div(weights, op.Expand(divisor, shape, _outputs=["expanded"]))

    def read(self, weights: ir.Value, expanded: ir.Value, **_: Any) -> None:
        require(is_router(through_casts(weights, FLOATS).producer()), f"'{weights.name}' is not a router's weights")
        require(has_same_shape(expanded, weights), f"'{expanded.name}' has not the shape of the weights")

    def rewrite(self, op: Any, weights: ir.Value, divisor: ir.Value, **matched: Any) -> ir.Value:
        self.read(weights=weights, **matched)
        quotient: ir.Value = op.Div(weights, divisor)
        return quotient


NORMALIZE_RULES = (UnexpandDivisor(), Normalize())
