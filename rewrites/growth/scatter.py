"""f(ScatterElements(-inf, ids, w)) -> ScatterElements(0, ids, f(w)), for w the weights of a FusedRouter and f a score.

How a dense layer over all experts is fed: the chosen logits among -inf, and their score among zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.router_node import is_router
from ort_moe.rewrites.rule import Mismatch, Refusal, RouterRule, require, stand_in
from ort_moe.rewrites.values import (
    FLOATS,
    INDICES,
    constant,
    dim,
    filling,
    integer,
    is_last_axis,
    producer,
    through,
    through_casts,
)


@dataclass(frozen=True)
class _Scatter:
    """A scatter of weights into -inf: its operands, and where the shape of the result is from."""

    node: ir.Node
    ids: ir.Value
    weights: ir.Value
    shape: ir.Value | tuple[int, ...]


class _ScoreOfScatter(RouterRule):
    attributes: ClassVar[dict[str, int]] = {}
    """Of the score over the chosen."""

    def pattern(self, op: Any, scattered: Any) -> Any:
        return getattr(op, self.root)(scattered, _allow_other_attributes=True, _outputs=["scored"])

    def read(self, scattered: ir.Value, **_: Any) -> _Scatter:
        scatter = producer(through_casts(scattered, FLOATS), "ScatterElements")
        if scatter is None:
            raise Mismatch
        data, ids, weights = scatter.inputs[:3]
        assert data is not None
        assert ids is not None
        assert weights is not None
        require(
            is_router(through_casts(weights, FLOATS).producer()),
            f"'{weights.name}' is not the weights of a FusedRouter",
        )
        require(filling(data) == -math.inf, f"the weights are not scattered into -inf but into '{data.name}'")
        require(scatter.attributes.get_string("reduction", "none") == "none", "the scattered weights are accumulated")
        require(scattered.dtype in FLOATS, f"the scattered weights are {scattered.dtype}")
        shaper = producer(data, "Expand", "ConstantOfShape")
        if shaper is not None and (shape := shaper.inputs[-1]) is not None:
            if shaper.op_type == "Expand":
                # Of anything larger, the shape that comes is not the shape asked for.
                filler = constant(shaper.inputs[0], limit=1)
                require(
                    filler is not None and filler.ndim <= (dim(shape, 0) or 0),
                    f"'{data.name}' is not expanded from one number",
                )
            return _Scatter(scatter, ids, weights, shape)
        if data.shape is None or not data.shape.is_static():
            raise Refusal(f"the shape of '{data.name}' is not known")
        return _Scatter(scatter, ids, weights, tuple(data.shape.numpy()))

    def rewrite(self, op: Any, scattered: ir.Value, **matched: Any) -> ir.Value:
        read = self.read(scattered=scattered, **matched)
        dtype = scattered.dtype
        assert dtype is not None
        static = isinstance(read.shape, tuple)
        array = np.zeros(read.shape if isinstance(read.shape, tuple) else (), dtype.numpy())
        zeros = op.initializer(ir.tensor(array), name=f"{scattered.name}_zero")
        if not static:
            zeros = op.Expand(zeros, read.shape)
        weights = read.weights
        if weights.dtype != dtype:
            weights = op.Cast(weights, to=dtype)
            weights.dtype, weights.shape = dtype, read.weights.shape
        scored = getattr(op, self.root)(weights, **self.attributes)
        zeros.dtype, zeros.shape = dtype, scattered.shape
        scored.dtype, scored.shape = dtype, weights.shape
        result: ir.Value = op.ScatterElements(zeros, read.ids, scored, **dict(read.node.attributes))
        return result


class SigmoidOfScatter(_ScoreOfScatter):
    """Sigmoid(ScatterElements(-inf, ids, w)) -> ScatterElements(0, ids, Sigmoid(w)).

    For a tensor that is -inf throughout and w the weights of a FusedRouter, with or without casts on the way; the
    sigmoid of -inf is 0.
    """

    title = "sigmoid-of-scatter"
    root = "Sigmoid"


class SoftmaxOfScatter(_ScoreOfScatter):
    """Softmax(ScatterElements(-inf, ids, w)) -> ScatterElements(0, ids, Softmax(w)).

    For a tensor that is -inf throughout, w the weights and ids the indices of one FusedRouter, with or without casts on
    the way, and scatter and softmax over the last axis. A row with a NaN or without a finite w is NaN where it was
    chosen, and no longer elsewhere.
    """

    title = "softmax-of-scatter"
    root = "Softmax"
    attributes: ClassVar[dict[str, int]] = {"axis": -1}

    def read(self, scattered: ir.Value, **matched: Any) -> _Scatter:
        read = super().read(scattered, **matched)
        softmax, router = matched["scored"].producer(), through_casts(read.weights, FLOATS).producer()
        require(
            is_last_axis(integer(softmax, "axis", -1), scattered)
            and is_last_axis(integer(read.node, "axis", 0), scattered),
            "scatter and softmax do not both run over the experts",
        )
        # Of one router: each expert once, so that no weight is overwritten and the sum is over all of them.
        require(through(read.ids, {"Cast"}).producer() is router, f"'{read.ids.name}' is not the indices of the router")
        return read


class GatherOfScatter(RouterRule):
    """GatherElements(ScatterElements(t, ids, u), ids) -> u.

    For ids the indices of a FusedRouter, each expert once, and both over the last axis, with or without casts between.
    """

    title = "gather-of-scatter"
    root = "GatherElements"

    def pattern(self, op: Any, scattered: Any, ids: Any) -> Any:
        return op.GatherElements(scattered, ids, _allow_other_attributes=True, _outputs=["gathered"])

    def read(self, scattered: ir.Value, ids: ir.Value, gathered: ir.Value, **_: Any) -> ir.Value:
        scatter, gather = producer(through_casts(scattered, FLOATS), "ScatterElements"), gathered.producer()
        if scatter is None or gather is None or scatter.inputs[1] is None or scatter.inputs[2] is None:
            raise Mismatch
        indices = through_casts(ids, INDICES)
        if not is_router(indices.producer()) or through_casts(scatter.inputs[1], INDICES) is not indices:
            raise Mismatch
        require(
            is_last_axis(integer(scatter, "axis", 0), scattered)
            and is_last_axis(integer(gather, "axis", 0), scattered),
            "scatter and gather do not both run over the experts",
        )
        require(scatter.attributes.get_string("reduction", "none") == "none", "the scattered weights are accumulated")
        return scatter.inputs[2]

    def rewrite(self, op: Any, scattered: ir.Value, gathered: ir.Value, **matched: Any) -> ir.Value:
        updates = self.read(scattered=scattered, gathered=gathered, **matched)
        if updates.dtype == scattered.dtype:
            return stand_in(op, updates, gathered)
        cast: ir.Value = op.Cast(updates, to=scattered.dtype)
        return cast


SCATTER_RULES = (SigmoidOfScatter(), SoftmaxOfScatter(), GatherOfScatter())
