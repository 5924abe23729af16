"""FusedRouter(f(x)) -> FusedRouter(x, score = f), for f a score over all experts."""

from __future__ import annotations

from typing import Any, ClassVar

import onnx_ir as ir

from ort_moe.rewrites.router_node import Router
from ort_moe.rewrites.rule import Mismatch, RouterRule, require, require_logits, require_only_consumers, router
from ort_moe.rewrites.values import (
    FLOATS,
    SCORES,
    integer,
    is_last_axis,
    is_widening,
    producer,
    reduces_last_axis,
    scalar_beside,
    through_casts,
    through_widening,
)


class _Score(RouterRule):
    root = "FusedRouter"
    score: ClassVar[str]

    def read(self, weights: ir.Value, x: ir.Value, **_: Any) -> None:
        found = Router.producing(weights)
        require(found.ranks_its_input, "the FusedRouter already has a score or a soft cap")
        require_logits(x)

    def rewrite(self, op: Any, weights: ir.Value, x: ir.Value, **matched: Any) -> tuple[ir.Value, ir.Value]:
        self.read(weights=weights, x=x, **matched)
        return Router.producing(weights).grow(op, self.title, logits=x, score=self.score)


class Softmax(_Score):
    """FusedRouter(Softmax(x)) -> FusedRouter(x, score = softmax).

    Over the last axis, before a score is set. Without bias and group mask x is ranked in place of its softmax, which
    orders the same and has no ties by underflow.
    """

    title = "softmax"
    score = "softmax"

    def pattern(self, op: Any, x: Any) -> Any:
        return router(op, op.Softmax(x, _allow_other_attributes=True, _outputs=["scored"]))

    def read(self, weights: ir.Value, x: ir.Value, **matched: Any) -> None:
        super().read(weights=weights, x=x)
        node = matched["scored"].producer()
        require(is_last_axis(integer(node, "axis", -1), x), "the softmax does not run over the experts")


class Sigmoid(_Score):
    """FusedRouter(Sigmoid(x)) -> FusedRouter(x, score = sigmoid).

    Before a score is set.
    """

    title = "sigmoid"
    score = "sigmoid"

    def pattern(self, op: Any, x: Any) -> Any:
        return router(op, op.Sigmoid(x))


class SqrtSoftplus(_Score):
    """FusedRouter(Sqrt(Softplus(x))) -> FusedRouter(x, score = sqrtsoftplus).

    Before a score is set. The score's linear branch above 20 is what Softplus rounds to in float32.
    """

    title = "sqrt-softplus"
    score = "sqrtsoftplus"

    def pattern(self, op: Any, x: Any) -> Any:
        return router(op, op.Sqrt(op.Softplus(x)))


class SqrtThresholdSoftplus(_Score):
    """FusedRouter(Sqrt(Where(x > 20, x, Softplus(x)))) -> FusedRouter(x, score = sqrtsoftplus).

    Before a score is set; how exporters write a softplus with its threshold.
    """

    title = "sqrt-softplus"
    score = "sqrtsoftplus"

    def pattern(self, op: Any, x: Any, threshold: Any) -> Any:
        above = op.Greater(x, threshold)
        return router(op, op.Sqrt(op.Where(above, x, op.Softplus(x))))

    def read(self, weights: ir.Value, x: ir.Value, **matched: Any) -> None:
        super().read(weights=weights, x=x)
        threshold = scalar_beside(matched["threshold"], x)
        require(threshold == 20.0, f"the softplus turns linear above {threshold}, expected 20")


class _RowShift(RouterRule):
    title = "row-shift"
    root = "FusedRouter"

    def read(self, weights: ir.Value, x: ir.Value, **_: Any) -> None:
        found = Router.producing(weights)
        if found.attributes["score"] != "softmax" or found.attributes["softcap"] != 0.0:
            raise Mismatch
        require(
            found.attributes["score_after_topk"] == 0 or not found.has_groups,
            "the chosen come from a group mask, whose fill is no logit",
        )
        require_logits(x)

    def rewrite(self, op: Any, weights: ir.Value, x: ir.Value, **matched: Any) -> tuple[ir.Value, ir.Value]:
        self.read(weights=weights, x=x, **matched)
        return Router.producing(weights).grow(op, self.title, logits=x)


class LogSoftmaxOfLogits(_RowShift):
    """FusedRouter(LogSoftmax(x), score = softmax) -> FusedRouter(x, score = softmax).

    Before or after the choice: the logarithm of a softmax is x less one number for each row, which neither the ranking
    nor a softmax shows.
    """

    def pattern(self, op: Any, x: Any) -> Any:
        return router(op, op.LogSoftmax(x, _allow_other_attributes=True, _outputs=["shifted"]))

    def read(self, weights: ir.Value, x: ir.Value, **matched: Any) -> None:
        super().read(weights=weights, x=x)
        node = matched["shifted"].producer()
        require(is_last_axis(integer(node, "axis", -1), x), "the softmax does not run over the experts")


class LessTheLargest(_RowShift):
    """FusedRouter(x - ReduceMax(x), score = softmax) -> FusedRouter(x, score = softmax).

    Over the last axis, before or after the choice: neither the ranking nor a softmax shows what is one number for each
    row.
    """

    def pattern(self, op: Any, x: Any, shift: Any) -> Any:
        return router(op, op.Sub(x, shift))

    def read(self, weights: ir.Value, x: ir.Value, **matched: Any) -> None:
        super().read(weights=weights, x=x)
        most = producer(through_casts(matched["shift"], FLOATS), "ReduceMax", "ReduceLogSumExp")
        if (
            most is None
            or most.inputs[0] is None
            or through_casts(most.inputs[0], FLOATS) is not through_casts(x, FLOATS)
        ):
            raise Mismatch
        require(reduces_last_axis(most, keepdims=True), "the largest logit is not that of each row")


class InputCast(RouterRule):
    """FusedRouter(Cast(x)) -> FusedRouter(x).

    For a widening cast, which the FusedRouter does itself, and for a cast that narrows the score before the choice,
    whose rounding is dropped. A score that is narrowed and widened again keeps its rounding: nothing says of float32
    weights that they are no better than half precision.
    """

    title = "input-cast"
    root = "FusedRouter"

    def pattern(self, op: Any, x: Any) -> Any:
        return router(op, op.Cast(x, _allow_other_attributes=True, _outputs=["cast"]))

    def read(self, x: ir.Value, cast: ir.Value, **_: Any) -> None:
        require(
            x.dtype in FLOATS and cast.dtype in FLOATS, f"the cast from {x.dtype} to {cast.dtype} changes the values"
        )
        source = through_casts(x, FLOATS)
        is_score = producer(source, *SCORES) is not None
        if is_widening(x.dtype, cast.dtype):
            is_narrowed = through_widening(x) is not source
            require(
                not (is_score and is_narrowed),
                f"the scores are rounded to {x.dtype} and then widened again before the choice",
            )
        else:
            require(is_score, f"the logits are rounded to {cast.dtype} before the choice")

    def rewrite(self, op: Any, weights: ir.Value, x: ir.Value, **matched: Any) -> tuple[ir.Value, ir.Value]:
        self.read(x=x, **matched)
        return Router.producing(weights).grow(op, self.title, logits=x)


class ExpOfLogSoftmax(RouterRule):
    """Exp(weights(FusedRouter(LogSoftmax(x)))) -> weights(FusedRouter(x, score = softmax)).

    Over the last axis, without a bias and groups: the logarithm changes no ranking.
    """

    title = "exp-of-log-softmax"
    root = "Exp"

    def pattern(self, op: Any, x: Any) -> Any:
        logarithm = op.LogSoftmax(x, _allow_other_attributes=True, _outputs=["logarithm"])
        weights, indices = router(op, logarithm)
        return op.Exp(weights, _outputs=["grown"]), indices

    def read(self, weights: ir.Value, x: ir.Value, logarithm: ir.Value, grown: ir.Value, **_: Any) -> None:
        found, node, softmax = Router.producing(weights), grown.producer(), logarithm.producer()
        assert node is not None
        assert softmax is not None
        require(found.is_bare, "the FusedRouter has already absorbed something")
        require(is_last_axis(integer(softmax, "axis", -1), x), "the softmax does not run over the experts")
        require_logits(x)
        require_only_consumers(weights, node)

    def rewrite(self, op: Any, weights: ir.Value, x: ir.Value, **matched: Any) -> tuple[ir.Value, ir.Value]:
        self.read(weights=weights, x=x, **matched)
        return Router.producing(weights).grow(op, self.title, logits=x, score="softmax")


SCORE_RULES = (
    Softmax(),
    Sigmoid(),
    SqrtSoftplus(),
    SqrtThresholdSoftplus(),
    ExpOfLogSoftmax(),
    LogSoftmaxOfLogits(),
    LessTheLargest(),
    InputCast(),
)
