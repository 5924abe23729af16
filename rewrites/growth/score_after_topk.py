"""f(weights(FusedRouter(x))) -> FusedRouter(x, score = f, score_after_topk = 1), for f a score over the chosen."""

from __future__ import annotations

from typing import Any, ClassVar

import onnx_ir as ir

from ort_moe.rewrites.router_node import Router
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
        require(
            found.has_no_score and found.has_raw_weights,
            "the weights already have a score, or are normalised or scaled",
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
        return found.grow(op, self.title, score=self.score, score_after_topk=1, bias_on=bias_on)


class SoftmaxAfterTopK(_ScoreAfterTopK):
    """Softmax(weights(FusedRouter(x))) -> FusedRouter(x, score = softmax, score_after_topk = 1).

    While x itself is ranked and weighs, without a group mask.
    """

    title = "softmax-after-topk"
    root = "Softmax"
    score = "softmax"


class SigmoidAfterTopK(_ScoreAfterTopK):
    """Sigmoid(weights(FusedRouter(x))) -> FusedRouter(x, score = sigmoid, score_after_topk = 1).

    While x itself is ranked and weighs, without a group mask.
    """

    title = "sigmoid-after-topk"
    root = "Sigmoid"
    score = "sigmoid"


SCORE_AFTER_TOPK_RULES = (SoftmaxAfterTopK(), SigmoidAfterTopK())
