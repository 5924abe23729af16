"""FusedRouter(s + bias) -> FusedRouter(s, bias), where nothing reads the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.router_node import Router, float32_initializer
from ort_moe.rewrites.rule import Mismatch, RouterRule, require, router
from ort_moe.rewrites.values import SCORES, Array, dim, producer, rank, through, vector


class BiasForChoice(RouterRule):
    """FusedRouter(Add(s, bias)) -> FusedRouter(s, bias).

    For s a score and a constant bias over the experts, where only the indices are read: what weighs the chosen is
    computed otherwise, and the bias is for the choice.
    """

    title = "bias-for-choice"
    root = "FusedRouter"
    commutes = True

    def pattern(self, op: Any, scores: Any, bias: Any) -> Any:
        return router(op, op.Add(scores, bias))

    def read(self, weights: ir.Value, scores: ir.Value, bias: ir.Value, **_: Any) -> Array:
        found = Router.producing(weights)
        if weights.uses() or weights.is_graph_output() or not found.ranks_its_input or found.selection_bias is not None:
            raise Mismatch
        array = vector(bias, found.experts)
        if rank(scores) != rank(found.logits) or dim(scores, -1) != found.experts:
            raise Mismatch  # the bias repeats the scores, so that they are not what is ranked
        if producer(through(scores, {"Cast", "Slice"}), *SCORES) is None or array is None:
            raise Mismatch
        require(not np.isnan(array).any(), f"the added '{bias.name}' holds NaN, which runtimes rank as they like")
        return array

    def rewrite(
        self, op: Any, weights: ir.Value, scores: ir.Value, bias: ir.Value, **matched: Any
    ) -> tuple[ir.Value, ir.Value]:
        array = self.read(weights=weights, scores=scores, bias=bias, **matched)
        vector_value = float32_initializer(op, f"{bias.name}_float32", array)
        return Router.producing(weights).grow(
            op, self.title, logits=scores, selection_bias=vector_value, weights_from="scores"
        )


UNREAD_RULES = (BiasForChoice(),)
