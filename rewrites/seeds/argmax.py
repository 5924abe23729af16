"""ArgMax(x) -> indices(FusedRouter(x, k = 1)) and ReduceMax(x) -> weights(FusedRouter(x, k = 1)): a choice of one."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.router_node import Router, is_router
from ort_moe.rewrites.routing import router_width
from ort_moe.rewrites.rule import Mismatch, RouterRule, require, stand_in
from ort_moe.rewrites.seeds.plain_topk import seed
from ort_moe.rewrites.values import FLOATS, consumers, integer, is_op, label, producer, reduces_last_axis, through_casts

_SCORES = ("Softmax", "Sigmoid", "Sqrt", "Add", "LogSoftmax")


class SeedArgMax(RouterRule):
    """ArgMax(x) -> Cast(indices(FusedRouter(x, k = 1))).

    Both take the first of equal x. Only an ArgMax whose index selects an expert is seeded, and of these one whose
    choice is all: not the first of two. There must be a score for the FusedRouter to absorb, before the choice or of
    what is gathered by it; without, an ArgMax is as good.
    """

    title = "seed-argmax"
    root = "ArgMax"

    def pattern(self, op: Any, x: Any) -> Any:
        return op.ArgMax(x, _allow_other_attributes=True, _outputs=["ids"])

    def read(self, x: ir.Value, ids: ir.Value, **_: Any) -> None:
        choice = ids.producer()
        assert choice is not None
        router_width(choice)
        readers = [user for value in _views(ids) for user in consumers(value)]
        joined = [label(user) for user in readers if is_op(user, "Concat", "ScatterElements")]
        require(not joined, f"{' and '.join(joined)} makes its choice one of several")
        require(
            producer(through_casts(x, FLOATS), *_SCORES) is not None
            or any(is_op(user, "GatherElements") for user in readers),
            "neither is what it ranks a score, nor is one gathered by its choice",
        )

    def rewrite(self, op: Any, x: ir.Value, ids: ir.Value, **_: Any) -> ir.Value:
        choice = ids.producer()
        assert choice is not None
        indices = seed(op, choice, x, {})[1]
        return indices if integer(choice, "keepdims", 1) else _without_last(op, indices)


class MaxOfChoice(RouterRule):
    """ReduceMax(x) -> Cast(weights(FusedRouter(x, k = 1))).

    Over the last axis, where x is also what a FusedRouter without a score chooses among.
    """

    title = "seed-argmax"
    root = "ReduceMax"
    anchor = "ArgMax"

    def pattern(self, op: Any, x: Any) -> Any:
        return op.ReduceMax(x, _allow_other_inputs=True, _allow_other_attributes=True, _outputs=["largest"])

    def read(self, x: ir.Value, largest: ir.Value, **_: Any) -> Router:
        node = largest.producer()
        assert node is not None
        for user in consumers(x):
            if is_router(user) and user.graph is node.graph:
                router = Router.read(user)
                keeps = bool(integer(node, "keepdims", 1))
                if router.k == 1 and router.is_bare and reduces_last_axis(node, keepdims=keeps):
                    return router
        raise Mismatch

    def rewrite(self, op: Any, x: ir.Value, largest: ir.Value, **_: Any) -> ir.Value:
        node = largest.producer()
        assert node is not None
        weights = self.read(x=x, largest=largest).weights
        keeps = integer(node, "keepdims", 1)
        if x.dtype == ir.DataType.FLOAT:
            return stand_in(op, weights, largest) if keeps else _without_last(op, weights)
        cast = op.Cast(weights, to=x.dtype)
        cast.dtype, cast.shape = x.dtype, weights.shape
        return cast if keeps else _without_last(op, cast)


def _without_last(op: Any, value: ir.Value) -> ir.Value:
    """The value (..., 1) without its last dimension."""
    axis = op.initializer(ir.tensor([-1], dtype=ir.DataType.INT64), name="last_axis")
    result: ir.Value = op.Squeeze(value, axis)
    return result


def _views(ids: ir.Value) -> list[ir.Value]:
    """The index, and what casts and views make of it."""
    found = [ids]
    for value in found:
        views = (user for user in consumers(value) if is_op(user, "Cast", *RESHAPING) and user.inputs[0] is value)
        found.extend(user.outputs[0] for user in views)
    return found


ARGMAX_RULES = (SeedArgMax(),)
MAX_RULES = (MaxOfChoice(),)
