"""f(weights(FusedRouter(x))) -> FusedRouter(x, score = f, score_after_topk = 1), for f a score over the chosen."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.router_node import Router, float32_initializer
from ort_moe.rewrites.rule import RouterRule, require, require_only_consumers, router
from ort_moe.rewrites.values import integer, is_last_axis


class _ScoreAfterTopK(RouterRule):
    score: ClassVar[str]

    def pattern(self, op: Any, logits: Any) -> Any:
        weights, indices = router(op, logits)
        score = getattr(op, self.root)(weights, _allow_other_attributes=True, _outputs=["scored"])
        return score, indices

    def read(self, weights: ir.Value, scored: ir.Value, **_: Any) -> None:
        found = Router.producing(weights)
        node = scored.producer()
        assert node is not None
        scale = float(found.attributes["scale"])
        require(
            found.has_no_score and found.attributes["normalize"] == 0 and found.expert_scale is None and scale > 0.0,
            "the weights already have a score, or are normalised or scaled",
        )
        require(
            scale == 1.0 or (found.ranks_its_input and found.selection_bias is None),
            "the weights are scaled, and what is ranked is more than the input",
        )
        require(not found.has_groups, "the chosen come from a group mask, whose fill is no logit")
        if self.root == "Softmax":
            require(
                is_last_axis(integer(node, "axis", -1), weights), "the softmax does not run over the chosen experts"
            )
        require_only_consumers(weights, node)

    def rewrite(self, op: Any, weights: ir.Value, **matched: Any) -> tuple[ir.Value, ir.Value]:
        self.read(weights=weights, **matched)
        found = Router.producing(weights)
        bias_on = "score" if found.selection_bias is None else "logits"
        logits = _scaled(op, found) if found.attributes["scale"] != 1.0 else found.logits
        return found.grow(
            op, self.title, logits=logits, score=self.score, score_after_topk=1, bias_on=bias_on, scale=1.0
        )


def _scaled(op: Any, found: Router) -> ir.Value:
    """The logits in float32 times the scale, which changes no ranking."""
    logits = found.logits
    if logits.dtype != ir.DataType.FLOAT:
        logits = op.Cast(logits, to=ir.DataType.FLOAT)
    factor = float32_initializer(op, "scale", np.array(found.attributes["scale"], np.float32))
    scaled: ir.Value = op.Mul(logits, factor)
    for value in (logits, scaled):
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), found.logits.shape
    return scaled


class SoftmaxAfterTopK(_ScoreAfterTopK):
    """Softmax(weights(FusedRouter(x))) -> FusedRouter(x, score = softmax, score_after_topk = 1).

    While x itself is ranked and weighs, without a group mask. A scale above 0 of the weights goes before the choice,
    where it changes no ranking.
    """

    title = "softmax-after-topk"
    root = "Softmax"
    score = "softmax"


class SigmoidAfterTopK(_ScoreAfterTopK):
    """Sigmoid(weights(FusedRouter(x))) -> FusedRouter(x, score = sigmoid, score_after_topk = 1).

    While x itself is ranked and weighs, without a group mask. A scale above 0 of the weights goes before the choice,
    where it changes no ranking.
    """

    title = "sigmoid-after-topk"
    root = "Sigmoid"
    score = "sigmoid"


SCORE_AFTER_TOPK_RULES = (SoftmaxAfterTopK(), SigmoidAfterTopK())
