"""weights(FusedRouter(x)) * f(indices) -> FusedRouter(x, expert_scale = f), one number per expert."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.router_node import Router, float32_initializer
from ort_moe.rewrites.rule import Mismatch, Refusal, RouterRule, require, require_only_consumers, router
from ort_moe.rewrites.tabulate import tabulate
from ort_moe.rewrites.values import Array, constant, filling, is_same_shape_if_as_many, scalar_beside

_BOUNDED_SCORES = ("softmax", "sigmoid", "sparse_mixer")
"""Scores that are finite for every row that has no NaN."""


class _PerExpert(RouterRule):
    def factors(self, weights: ir.Value, per_expert: ir.Value, table: Array | None, result: ir.Value) -> Array:
        """The factor of each expert, in float32, with what the FusedRouter has already.

        Args:
            weights: Of the FusedRouter.
            per_expert: What is made of its indices.
            table: What this is for each expert.
            result: What takes the place of the weights.

        Raises:
            Refusal: There is no such factor.
        """
        found, node = Router.producing(weights), result.producer()
        assert node is not None
        if table is None:
            raise Refusal(f"'{per_expert.name}' is not made of the indices of this FusedRouter and constants alone")
        require(
            is_same_shape_if_as_many(per_expert.shape, weights.shape),
            f"'{per_expert.name}' has not the shape of the weights",
        )
        require_only_consumers(weights, node)
        factors = table.astype(np.float32)
        if found.expert_scale is not None:
            before = constant(found.expert_scale)
            if before is None:
                raise Refusal("the weights already have a scale per expert, which is no constant")
            factors = factors * before.astype(np.float32).reshape(-1)
        require(bool(np.isfinite(factors).all()), f"the factors '{per_expert.name}' are not all finite")
        return factors

    def grown(self, op: Any, weights: ir.Value, per_expert: ir.Value, factors: Array) -> tuple[ir.Value, ir.Value]:
        """The FusedRouter with the factors."""
        scale = float32_initializer(op, f"{per_expert.name}_per_expert", factors)
        return Router.producing(weights).grow(op, self.title, expert_scale=scale)


class ExpertScale(_PerExpert):
    """Mul(w, f(indices)) -> FusedRouter(expert_scale = f).

    For f(indices) of the shape of w and made of the indices and constants alone: gathered from a constant of one number
    per expert, or told by comparisons. Factors of several such steps multiply.
    """

    title = "expert-scale"
    root = "Mul"
    commutes = True

    def pattern(self, op: Any, logits: Any, factor: Any) -> Any:
        weights, indices = router(op, logits)
        return op.Mul(weights, factor, _outputs=["scaled"]), indices

    def read(self, weights: ir.Value, factor: ir.Value, scaled: ir.Value, **_: Any) -> Array:
        if constant(factor) is not None:
            raise Mismatch  # one factor for all, which Scale reads
        found = Router.producing(weights)
        return self.factors(weights, factor, tabulate(factor, found.indices, found.experts), scaled)

    def rewrite(self, op: Any, weights: ir.Value, factor: ir.Value, **matched: Any) -> tuple[ir.Value, ir.Value]:
        return self.grown(op, weights, factor, self.read(weights=weights, factor=factor, **matched))


class _Skip(_PerExpert):
    title = "skip-experts"
    root = "Where"
    skips: ClassVar[bool]
    """Whether the condition holds for the experts that are skipped."""

    def read(self, weights: ir.Value, fill: ir.Value, condition: ir.Value, masked: ir.Value, **_: Any) -> Array:
        number = scalar_beside(fill, weights)
        if number is None and is_same_shape_if_as_many(fill.shape, weights.shape):
            number = filling(fill)
        require(number == 0.0, f"the weights of skipped experts become {number}, expected 0")
        found = Router.producing(weights)
        require(found.attributes["score"] in _BOUNDED_SCORES, "the weights may be infinite, which times 0 is no 0")
        holds = tabulate(condition, found.indices, found.experts)
        kept = None if holds is None else holds.astype(bool) ^ self.skips
        return self.factors(weights, condition, kept, masked)

    def rewrite(self, op: Any, weights: ir.Value, condition: ir.Value, **matched: Any) -> tuple[ir.Value, ir.Value]:
        factors = self.read(weights=weights, condition=condition, **matched)
        return self.grown(op, weights, condition, factors)


class SkipExperts(_Skip):
    """Where(p(indices), 0, w) -> FusedRouter(expert_scale = 0 where p, else 1).

    How a choice that runs no expert is written: its index is beyond those of the experts. For a condition made of the
    indices and constants alone, and a score that is finite.
    """

    skips = True

    def pattern(self, op: Any, condition: Any, fill: Any, logits: Any) -> Any:
        weights, indices = router(op, logits)
        return op.Where(condition, fill, weights, _outputs=["masked"]), indices


class KeepExperts(_Skip):
    """Where(p(indices), w, 0) -> FusedRouter(expert_scale = 1 where p, else 0).

    The same, told of those that run.
    """

    skips = False

    def pattern(self, op: Any, condition: Any, fill: Any, logits: Any) -> Any:
        weights, indices = router(op, logits)
        return op.Where(condition, weights, fill, _outputs=["masked"]), indices


PER_EXPERT_RULES = (ExpertScale(), SkipExperts(), KeepExperts())
