"""Views of what a FusedRouter gives, out of the way."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ort_moe.rewrites.router_node import Router, is_router
from ort_moe.rewrites.rule import Mismatch, RouterRule, stand_in
from ort_moe.rewrites.values import FLOATS, INDICES, axes, producer, rank, through_casts


class UnsqueezeOfSqueeze(RouterRule):
    """Unsqueeze(Squeeze(w)) -> w.

    For the weights or the indices of a FusedRouter, of which a last dimension of length 1 is dropped and comes back.
    """

    title = "restore-dimension"
    root = "Unsqueeze"

    def pattern(self, op: Any, whole: Any) -> Any:
        dropped = op.Squeeze(whole, _allow_other_inputs=True, _allow_other_attributes=True, _outputs=["dropped"])
        return op.Unsqueeze(dropped, _allow_other_inputs=True, _allow_other_attributes=True, _outputs=["restored"])

    def read(self, whole: ir.Value, dropped: ir.Value, restored: ir.Value, **_: Any) -> None:
        last = (-1, (rank(whole) or 0) - 1)
        if not is_router(through_casts(whole, FLOATS | INDICES).producer()):
            raise Mismatch
        if any(_only_axis(value) not in last for value in (dropped, restored)):
            raise Mismatch

    def rewrite(self, op: Any, whole: ir.Value, restored: ir.Value, **_: Any) -> ir.Value:
        return stand_in(op, whole, restored)


class ShapeOfWeights(RouterRule):
    """Shape(weights(FusedRouter(x))) -> Shape(indices(FusedRouter(x))).

    With or without casts on the way: both have one shape, and the indices stay what they are when the weights grow.
    """

    title = "shape-of-weights"
    root = "Shape"

    def pattern(self, op: Any, value: Any) -> Any:
        return op.Shape(value, _allow_other_attributes=True, _outputs=["shape"])

    def read(self, value: ir.Value, **_: Any) -> Router:
        weights = through_casts(value, FLOATS)
        if not is_router(weights.producer()) or weights.index() != 0:
            raise Mismatch
        return Router.producing(weights)

    def rewrite(self, op: Any, value: ir.Value, shape: ir.Value, **_: Any) -> ir.Value:
        node = shape.producer()
        assert node is not None
        same: ir.Value = op.Shape(self.read(value=value).indices, **dict(node.attributes))
        return same


def _only_axis(value: ir.Value) -> int | None:
    node = producer(value, "Squeeze", "Unsqueeze")
    over = None if node is None else axes(node)
    return over[0] if over is not None and len(over) == 1 else None


VIEW_RULES = (UnsqueezeOfSqueeze(), ShapeOfWeights())
