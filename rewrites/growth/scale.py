"""weights(FusedRouter(x)) * c -> FusedRouter(x, scale = c), also where c scales the scores before the choice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.router_node import Router
from ort_moe.rewrites.rule import Mismatch, Refusal, RouterRule, require, require_only_consumers, router
from ort_moe.rewrites.values import SCORES, producer, scalar_beside, through

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""Normal numbers of float32: a product of factors outside loses what the factors, one after the other, keep."""


class Scale(RouterRule):
    """Mul(w, c) -> FusedRouter(scale * c).

    For a finite constant c and w the weights of a FusedRouter.
    """

    title = "scale"
    root = "Mul"
    commutes = True

    def pattern(self, op: Any, logits: Any, factor: Any) -> Any:
        weights, indices = router(op, logits)
        return op.Mul(weights, factor, _outputs=["scaled"]), indices

    def read(self, weights: ir.Value, factor: ir.Value, scaled: ir.Value, **_: Any) -> float:
        return self._scale(weights, scaled, scalar_beside(factor, weights), f"'{factor.name}'")

    def rewrite(self, op: Any, weights: ir.Value, **matched: Any) -> tuple[ir.Value, ir.Value]:
        return Router.producing(weights).grow(op, self.title, scale=self.read(weights=weights, **matched))

    def _scale(self, weights: ir.Value, scaled: ir.Value, factor: float | None, name: str) -> float:
        found = Router.producing(weights)
        node = scaled.producer()
        assert node is not None
        if factor is None or not math.isfinite(factor):
            raise Refusal(f"the factor {name} is not one finite constant")
        require_only_consumers(weights, node)
        return _held(float(found.attributes["scale"]) * factor, "scale")


class ScaleByQuotient(Scale):
    """Div(w, c) -> FusedRouter(scale / c).

    For a constant c other than 0.
    """

    root = "Div"
    commutes = False

    def pattern(self, op: Any, logits: Any, factor: Any) -> Any:
        weights, indices = router(op, logits)
        return op.Div(weights, factor, _outputs=["scaled"]), indices

    def read(self, weights: ir.Value, factor: ir.Value, scaled: ir.Value, **_: Any) -> float:
        divisor = scalar_beside(factor, weights)
        reciprocal = 1.0 / divisor if divisor else None
        return self._scale(weights, scaled, reciprocal, f"1 / '{factor.name}'")


class ScaleOfScores(RouterRule):
    """FusedRouter(Mul(s, c)) -> FusedRouter(s, scale = c).

    For a constant c above 0 and s a score, before a bias and a group mask: the factor changes no ranking. Of weights
    that are divided by their sum it scales what is added to the sum alone.
    """

    title = "scale"
    root = "FusedRouter"
    commutes = True

    def pattern(self, op: Any, scores: Any, factor: Any) -> Any:
        return router(op, op.Mul(scores, factor))

    def read(self, weights: ir.Value, scores: ir.Value, factor: ir.Value, **_: Any) -> dict[str, Any]:
        found, number = Router.producing(weights), scalar_beside(factor, scores)
        if producer(through(scores, {"Cast", "Slice"}), *SCORES) is None:
            raise Mismatch
        require(found.ranks_its_input, "the FusedRouter already has a score or a soft cap")
        require(
            found.selection_bias is None and not found.has_groups,
            "the factor also scales the score to which a bias is added, or that a group mask fills",
        )
        if number is None or not _SMALLEST <= number <= _LARGEST:
            raise Refusal(f"the factor '{factor.name}' is not one finite constant above 0")
        changed = ("normalize_eps", "normalize_min") if found.attributes["normalize"] else ("scale",)
        by = 1.0 / number if found.attributes["normalize"] else number
        return {name: _held(float(found.attributes[name]) * by, name) for name in changed}

    def rewrite(
        self, op: Any, weights: ir.Value, scores: ir.Value, factor: ir.Value, **matched: Any
    ) -> tuple[ir.Value, ir.Value]:
        changes = self.read(weights=weights, scores=scores, factor=factor, **matched)
        return Router.producing(weights).grow(op, self.title, logits=scores, **changes)


def _held(number: float, what: str) -> float:
    """The number in float32, which must hold it."""
    require(
        number == 0.0 or math.isinf(number) or _SMALLEST <= abs(number) <= _LARGEST,
        f"the {what.replace('normalize_', '')} would become {number:.3g}, which float32 cannot hold",
    )
    return float(np.float32(number))


SCALE_RULES = (Scale(), ScaleByQuotient())
SCALE_OF_SCORES_RULES = (ScaleOfScores(),)
